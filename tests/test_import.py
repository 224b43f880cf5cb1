"""`ralbuild import`: a small GGUF file, written by the gguf library, to a folder that verify accepts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from model_factory import tokenizer_json

from ralbuild.cli.main import main
from ralbuild.weights import convert

HIDDEN, HEADS, INNER = 64, 4, 96


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer in 8-bit blocks, with a byte-level vocabulary."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    path = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    writer = GGUFWriter(path, "llama")
    vocab = tokenizer_json()["model"]["vocab"]
    words = sorted(vocab, key=vocab.__getitem__)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3 if number < 3 else 1 for number in range(len(words))])
    writer.add_token_merges(tokenizer_json()["model"]["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(3)
    shapes = {
        "token_embd.weight": (len(words), HIDDEN), "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN, HIDDEN), "blk.0.attn_v.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN), "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN), "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }  # fmt: skip
    for name, shape in shapes.items():
        data = rng.normal(0, 0.1, shape).astype(np.float32)
        packed = quants.quantize(data, GGMLQuantizationType.Q8_0)
        writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_verified_folder(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert main(["import", "--gguf", str(gguf), "--out", str(out), "--quiet"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip() == str(out)
    assert main(["verify", "--model", str(out), "--quiet", "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert manifest["model_type"] == "llama"
    assert manifest["dtype"] == "BF16"
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("content", "code"), [(b"", 3), (b"GGUF\x03\x00\x00\x00" + bytes(64), 3), (b"\x80\x04]q", 3), (None, 3)]
)
def test_what_is_no_gguf_file_is_one_error_and_leaves_nothing(
    content: bytes | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    if content is not None:
        file.write_bytes(content)
    before = sorted(tmp_path.iterdir())
    assert main(["import", "--gguf", str(file), "--out", str(tmp_path / "out"), "--quiet"]) == code
    err = capsys.readouterr().err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_an_existing_folder_is_not_touched(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert main(["import", "--gguf", str(gguf), "--out", str(tmp_path / "out"), "--quiet"]) == 2


RUN = "import sys; sys.path[0:0] = {path!r}; from ralbuild.cli.main import main; sys.exit(main(sys.argv[1:]))"


def start_import(gguf: Path, out: Path) -> subprocess.Popen[bytes]:
    program = RUN.format(path=[entry for entry in sys.path if entry])
    command = [sys.executable, "-c", program, "import", "--quiet", "--gguf", str(gguf), "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_conversion_that_is_ended_leaves_no_folder_and_no_worker(
    number: signal.Signals, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = start_import(gguf, tmp_path / "out")
    wait_until(lambda: bool(children(importing.pid)))
    [worker] = children(importing.pid)
    wait_until(lambda: b"bound_worker" in Path(f"/proc/{worker}/cmdline").read_bytes())
    wait_until(lambda: b"libtorch" in Path(f"/proc/{worker}/maps").read_bytes())  # it is at work
    importing.send_signal(number)
    err = importing.communicate()[1]
    wait_until(lambda: not running(worker))
    if number == signal.SIGTERM:
        assert importing.returncode == 130
        assert b"Traceback" not in err
        assert list(tmp_path.iterdir()) == []
        return
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".")
    monkeypatch.setattr(convert, "run_worker", lambda *_: pytest.fail("the next one"))
    with pytest.raises(pytest.fail.Exception, match="the next one"):
        main(["import", "--gguf", str(gguf), "--out", str(tmp_path / "two"), "--quiet"])
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_goes_on_beside_it_is_left_alone(tmp_path: Path) -> None:
    with convert._scratch(tmp_path) as one:
        (one / "made").mkdir()
        with convert._scratch(tmp_path) as two:
            assert one != two
            assert (one / "made").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_error_and_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    """On a small disk of its own, in a namespace of its own: the weights do not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = RUN.format(path=[entry for entry in sys.path if entry])
    script = (
        'mount -t tmpfs -o "size=$1k" tmpfs "$2" || exit 99; '
        '"$3" -c "$4" import --quiet --gguf "$5" --out "$2/out"; code=$?; ls -A "$2"; exit $code'
    )
    words = ["56", str(disk), sys.executable, program, str(gguf)]
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert done.stderr.count("error:") == 1
    assert "no space left on device" in done.stderr


def test_a_name_that_is_too_long_is_known_before_the_conversion(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "run_worker", lambda *_: pytest.fail("the model was converted"))
    assert main(["import", "--gguf", str(gguf), "--out", str(tmp_path / ("x" * 300)), "--quiet"]) == 7
    assert list(tmp_path.iterdir()) == []
