"""What the launcher refuses: one clear line, its own exit status, and nothing served."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_fixtures import Image, make_image, make_model, refused, running

from ralbuild.contract import places
from ralbuild.contract.bundle import Engine, Kernel, PatchStep, SelfTest
from ralbuild.contract.manifest import PackedWeights, WeightEntry
from ralbuild.digests import DigestCache, LayerFile, scan_layer
from ralbuild.runtime.errors import HostUnfitError, ModelMismatchError
from ralbuild.runtime.host import available_memory, usable_cpus
from ralbuild.runtime.listening import bind
from ralbuild.runtime.log import log_event
from ralbuild.runtime.preflight import choose_hashed, hash_weights
from ralbuild.runtime.settings import read_settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def image(model: Path, tmp_path: Path) -> Image:
    return make_image(tmp_path / "root", model)


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def expect(image: Image, status: int, *words: str, env: dict[str, str] | None = None) -> None:
    found, log = refused(image, env)
    assert found == status, log
    assert "Traceback" not in log
    last = log.splitlines()[-1]
    assert last.partition(" ")[2].startswith(f"refused exit={status} error=")
    for word in words:
        assert word in last


def test_a_changed_bundle_is_refused(image: Image) -> None:
    digest = image.digest
    image.rewrite(model="other")
    expect(image, 80, "bundle.json", digest, "rules are immutable", env={"RAL_BUNDLE_SHA256": digest})


@pytest.mark.parametrize("name", ["manifest", "transducer", "bans", "vocab"])
def test_a_flipped_byte_in_an_object_is_refused(image: Image, name: str) -> None:
    path = image.path(places.OBJECTS_DIR) / getattr(image.bundle, name).sha256
    flip(path)
    expect(image, 80, path.name, "sha256")


def test_a_missing_object_is_refused(image: Image) -> None:
    (image.path(places.OBJECTS_DIR) / image.bundle.bans.sha256).unlink()
    expect(image, 80, image.bundle.bans.sha256, "No such file")


def test_a_shorter_object_is_refused(image: Image) -> None:
    path = image.path(places.OBJECTS_DIR) / image.bundle.vocab.sha256
    path.write_bytes(path.read_bytes()[:-1])
    expect(image, 80, "bytes, found")


def test_a_changed_config_is_refused(image: Image) -> None:
    flip(image.path(places.CONFIG_FILE))
    expect(image, 80, "ral-config.yaml", "not the config that was compiled")


def test_a_bundle_that_is_not_json_is_refused(image: Image) -> None:
    image.path(places.BUNDLE_FILE).write_text("{")
    expect(image, 80, "not JSON", env={"RAL_BUNDLE_SHA256": ""})


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_model_file_is_refused(image: Image, name: str) -> None:
    flip(image.path(places.MODEL_DIR) / name)
    expect(image, 81, name, "needs sha256")


def test_a_truncated_weight_file_is_refused(image: Image) -> None:
    path = image.path(places.MODEL_DIR) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    expect(image, 81, "model.safetensors", "bytes, found")


def test_a_flipped_weight_byte_is_found_when_all_is_verified(image: Image) -> None:
    flip(image.path(places.MODEL_DIR) / "model.safetensors")
    expect(image, 81, "model.safetensors", "needs sha256")


def test_the_log_says_how_weights_were_checked(image: Image) -> None:
    flip(image.path(places.MODEL_DIR) / "model.safetensors")
    with running(image, {"RAL_VERIFY": "off"}) as runtime:
        assert "weights=off hashed=0" in runtime.log


@pytest.mark.parametrize(
    ("verify", "size", "how"),
    [
        ("", 2 << 30, "full"),
        ("", (2 << 30) + 1, "sampled"),
        ("off", 1, "off"),
        ("full", 1 << 50, "full"),
        ("sampled", 1, "sampled"),
    ],
)
def test_large_weights_are_hashed_in_full_only_on_request(verify: str, size: int, how: str) -> None:
    assert read_settings({"RAL_VERIFY": verify}).verification(size) == how


def packed(number: int, size: int) -> PackedWeights:
    return PackedWeights(f"{number:064x}", (WeightEntry(f"{number}.safetensors", size),))


def test_sampling_hashes_at_least_one_file_and_over_time_every_file() -> None:
    large = [packed(number, 5 << 30) for number in range(3)]
    drawn = [choose_hashed(large, "sampled") for _ in range(200)]
    assert {len(names) for names in drawn} == {1}
    assert frozenset().union(*drawn) == {item.sha256 for item in large}
    small = [packed(number, 1 << 29) for number in range(6)]
    assert len(choose_hashed(small, "sampled")) == 4
    assert choose_hashed(small, "full") == {item.sha256 for item in small}
    assert choose_hashed(small, "off") == frozenset()


@pytest.mark.parametrize("shared", [1, 3])
def test_weights_are_held_to_the_layers_that_the_builder_hashed(tmp_path: Path, shared: int) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(os.urandom(5000 + number))
    layers = []
    for at in range(0, 3, shared):
        group = [LayerFile(path, path.name) for path in paths[at : at + shared]]
        digest = scan_layer(group, DigestCache(None), 0)[0].layer_sha256
        entries = tuple(WeightEntry(item.name, item.path.stat().st_size) for item in group)
        layers.append(PackedWeights(digest, entries))
    checked: Any = SimpleNamespace(manifest=SimpleNamespace(weights=tuple(layers)), weights=tuple(paths))
    chosen = choose_hashed(layers, "full")
    hash_weights(checked, chosen)
    flip(paths[1])
    with pytest.raises(ModelMismatchError) as caught:
        hash_weights(checked, chosen)
    assert caught.value.place == ", ".join(map(str, paths if shared == 3 else paths[1:2]))
    hash_weights(checked, chosen - {layers[1 // shared].sha256})


@pytest.mark.parametrize(
    ("folder", "name", "status"),
    [
        (places.OBJECTS_DIR, "0" * 64, 80),
        (places.RAL_DIR + "/bundle", "transformer.py", 80),
        (places.MODEL_DIR, "modeling_custom.py", 81),
        (places.MODEL_DIR, "model-00002.safetensors", 81),
    ],
)
def test_an_added_file_is_refused(image: Image, folder: str, name: str, status: int) -> None:
    (image.path(folder) / name).write_text("x")
    expect(image, status, name, "was added after the build")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("chat_template.jinja", b"caf\xe9 {{ messages }}", "not UTF-8"),
        ("chat_template.jinja", b"{% for %}", "not a chat template"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
    ],
)
def test_a_text_file_that_is_not_what_its_name_says_is_refused(
    model: Path, tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(data)
    expect(make_image(tmp_path / "root", tmp_path / "model"), 81, words)


def test_weights_that_do_not_fit_into_memory_are_refused(image: Image) -> None:
    image.rewrite(engine=Engine(8, 512, "float32"))
    expect(image, 82, "one text of 512 tokens needs", env={"RAL_KV_BYTES": "1000"})


def test_a_folded_step_that_disagrees_with_the_oracle_is_refused(image: Image) -> None:
    image.rewrite(self_tests=(SelfTest(0, (50, 60), "00ff"),))
    expect(image, 83, "self_tests[0]", "needs 00ff")


def test_a_port_in_use_is_refused(image: Image) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        expect(image, 84, "Address already in use", env={"RAL_PORT": port})


def test_a_bundle_for_another_target_is_refused(image: Image) -> None:
    image.rewrite(target="cuda")
    expect(image, 84, "cuda")


def test_an_unknown_step_is_refused_with_the_reason(image: Image) -> None:
    image.rewrite(patch=(*image.bundle.patch, PatchStep("grammar", "slots")))
    expect(image, 85, "grammar", "no CPU implementation")


def test_a_user_kernel_is_refused_with_the_reason(image: Image) -> None:
    kernel = Kernel("mine", "mine_kernel", "0" * 64, True, 4, {}, (), ())
    image.rewrite(kernels=(kernel,), patch=(*image.bundle.patch, PatchStep("mine", "1")))
    expect(image, 85, "mine", "user kernel")


def test_a_sampler_whose_noise_would_differ_is_refused(image: Image) -> None:
    kernel = Kernel("sample", "sample", "0" * 64, False, 4, {"BLOCK": 512, "CANDIDATES": 256}, (), ())
    image.rewrite(kernels=(kernel,))
    expect(image, 85, "blocks of 512 ids")


@pytest.mark.parametrize(
    "name", ["RAL_PORT", "RAL_THREADS", "RAL_QUEUE", "RAL_KV_BYTES", "RAL_DRAIN_SECONDS"]
)
@pytest.mark.parametrize("value", ["-1", "x", "1e3", "٣", "99999999999999999999"])
def test_a_variable_without_meaning_is_refused(name: str, value: str) -> None:
    read = bind if name == "RAL_PORT" else read_settings  # the port is taken before anything else is read
    with pytest.raises(HostUnfitError, match=name):
        read({name: value})


def test_the_start_line_names_graph_and_bundle_and_the_self_test_passes(model: Path, tmp_path: Path) -> None:
    from runtime_fixtures import Rules, token_bytes

    tokens = (50, 51, 52, 53, 54)
    text = b"".join(token_bytes(model)[token] for token in tokens)
    expected = text.replace(text[1:3], b"<b>" + text[1:3] + b"</b>")
    rules = Rules(bold=text[1:3].decode())
    image = make_image(tmp_path / "root", model, (rules,), self_tests=[SelfTest(0, tokens, expected.hex())])
    with running(image) as runtime:
        (line,) = [line for line in runtime.log.splitlines() if "RAL patch applied" in line]
        before, _, bundle = line.partition(" bundle=")
        assert bundle == f"sha256:{image.digest}"
        assert int(before.partition("Z RAL patch applied to graph_id=0x")[2], 16) > 0


def test_a_llama_starts_without_transformers_and_without_torchs_shape_rules() -> None:
    code = (
        "import sys; from ralbuild.runtime.model.lean import META_KERNELS, import_torch; import_torch()\n"
        "import ralbuild.runtime.engine, ralbuild.runtime.model.weights, ralbuild.runtime.model.graph\n"
        "print(*sorted({'transformers', 'sympy', 'torch._dynamo', META_KERNELS} & set(sys.modules)))\n"
        "import importlib; importlib.import_module(META_KERNELS); import torch\n"
        "print(torch.nn.Linear(4, 3, device='meta')(torch.empty(2, 4, device='meta')).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\ntorch.Size([2, 3])\n"


def test_limits_of_the_control_group_are_kept(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert usable_cpus(tmp_path) >= 1
    assert available_memory(tmp_path, meminfo) == 8000 * 1024
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert usable_cpus(tmp_path) == 1
    assert available_memory(tmp_path, meminfo) == 4096000 - 4000000 + 100000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, meminfo) == 8000 * 1024


@pytest.mark.parametrize(
    ("value", "shown"), [("a b", '"a b"'), ('q"', '"q\\""'), ("x\ny", '"x\\x0ay"'), (1.5, "1.500")]
)
def test_a_log_value_stays_on_its_line(capsys: pytest.CaptureFixture[str], value: Any, shown: str) -> None:
    log_event("event", key=value)
    moment, _, rest = capsys.readouterr().err.partition(" ")
    assert rest == f"event key={shown}\n"
    assert abs(datetime.fromisoformat(moment) - datetime.now(UTC)) < timedelta(minutes=1)


def test_nothing_mounted_is_refused_and_names_the_image_of_the_weights(image: Image) -> None:
    shutil.rmtree(image.path(places.MODEL_DIR))
    image.path(places.MODEL_DIR).mkdir()
    digest = f"sha256:{'ab' * 32}"
    expect(image, 81, "holds no weights", digest, env={"RAL_WEIGHTS_IMAGE": digest})
