"""`ralbuild run`: a small image with a Python server in it, started both ways and by an ordinary user."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from base_sources import FACTS, Quiet, make_small_tree, small_sources

from ralbuild.cli.main import main
from ralbuild.contract.places import USER_ID
from ralbuild.digests import DigestCache
from ralbuild.errors import HostError, ImageError
from ralbuild.image import local_run
from ralbuild.image.assemble import assemble_image
from ralbuild.image.base.layers import plan_base
from ralbuild.image.layout import write_layout
from ralbuild.image.local_run import Mode, prepare_tree, read_run_config, run_tree
from ralbuild.image.plan import FileEntry, ImageConfig, ImagePlan, LayerPlan
from ralbuild.image.reader import read_base

HERE = Path(__file__).parent
NOWHERE = DigestCache(None)
MODES: list[Mode] = ["namespace", "direct"]

SERVER = '''\
"""Tells what it sees of itself; ends with 7 on SIGTERM and with 8 on a request to /crash."""
import http.server, json, os, signal, sys
import idna

def attempt(path):
    try:
        with open(path, "w"):
            os.unlink(path)
        return "written"
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)

def look(path):
    if not path:
        return None
    with open(path) as file:
        return [file.read(), attempt(os.path.dirname(path) + "/y"), sorted(os.listdir(os.path.dirname(path)))]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/crash":
            os._exit(8)
        if self.path == "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
        root = os.environ.get("RAL_ROOT", "")
        facts = {
            "argv": sys.argv[1:], "uid": os.getuid(), "gid": os.getgid(), "pid": os.getpid(),
            "env": dict(os.environ), "cwd": os.getcwd(), "idna": idna.__file__, "os": os.__file__,
            "capabilities": [status[name].strip() for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")],
            "no_new_privs": status["NoNewPrivs"].strip(), "groups": os.getgroups(),
            "write_root": attempt("/etc/ral-test"), "write_app": attempt(root + "/opt/ral/app/x"),
            "write_tmp": attempt(os.environ["HOME"] + "/x"),
            "root": sorted(os.listdir("/")), "tmp": os.listdir("/tmp"), "dev": sorted(os.listdir("/dev")),
            "folder": look(os.environ.get("LOOK", "")),
            "random": len(open("/dev/urandom", "rb").read(8)),
        }
        data = json.dumps(facts).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

def stop(*_):
    print("asked to stop", flush=True)
    os._exit(7)

signal.signal(signal.SIGTERM, stop)
address = (os.environ["RAL_HOST"], int(os.environ["RAL_PORT"]))
http.server.HTTPServer(address, Handler).serve_forever()
'''


def write_image(
    folder: Path, layers: tuple[LayerPlan, ...], config: ImageConfig, base: Path | None = None
) -> Path:
    plan = ImagePlan(read_base(base) if base else None, layers, config)
    write_layout(folder, assemble_image(plan), "", NOWHERE, None, lambda _: None)
    return folder


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base with a server on top."""
    folder = tmp_path_factory.mktemp("image")
    make_small_tree(folder / "tree")
    plan = plan_base(folder / "tree", "cpu", small_sources().lock, FACTS)
    write_layout(folder / "base", assemble_image(plan), "", NOWHERE, None, lambda _: None)
    app = LayerPlan("app", "small", (FileEntry("opt/ral/app/server.py", SERVER.encode()),), ("opt/ral/app",))
    config = ImageConfig(entrypoint=("/usr/bin/python3.11", "/opt/ral/app/server.py"), cmd=("--word", "a b"))
    return write_image(folder / "layout", (app,), config, folder / "base")


@pytest.fixture(scope="module")
def tree(layout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield prepare_tree(layout, Quiet())


@pytest.fixture
def config(layout: Path) -> dict[str, Any]:
    return read_run_config(layout)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str = "/", process: subprocess.Popen[bytes] | None = None) -> Any:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                return json.load(answer)
        except ConnectionRefusedError as error:
            raise AssertionError("unreachable") from error
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or time.monotonic() > deadline:
                raise
            assert process is None or process.poll() is None, "the program ended"
            time.sleep(0.05)


@contextlib.contextmanager
def running(
    tree: Path, config: dict[str, Any], mode: Mode, log: Path, **more: Any
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    with log.open("wb") as output:
        process = run_tree(tree, config, port, Quiet(), mode=mode, output=output, **more)
        try:
            yield process, port
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("mode", MODES)
def test_the_program_gets_the_images_settings_and_nothing_of_this_machine(
    mode: Mode, tree: Path, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("PYTHONSTARTUP", "/x")
    with running(tree, config, mode, tmp_path / "log") as (process, port):
        facts = ask(port, process=process)
    assert facts["argv"] == ["--word", "a b"]
    env = facts["env"]
    assert (env["RAL_HOST"], env["RAL_PORT"], env["HF_HUB_OFFLINE"]) == ("127.0.0.1", str(port), "1")
    allowed = {item.partition("=")[0] for item in config["Env"]} | {"RAL_HOST", "RAL_PORT"}
    assert env.keys() - allowed == ({"RAL_ROOT", "PYTHONHOME"} if mode == "direct" else set())
    assert facts["cwd"] == "/tmp"


@pytest.mark.parametrize("mode", MODES)
def test_the_program_has_no_rights_and_cannot_get_any(
    mode: Mode, tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, mode, tmp_path / "log") as (process, port):
        facts = ask(port, process=process)
    assert {int(value, 16) for value in facts["capabilities"]} == {0}
    assert facts["no_new_privs"] == "1"


def test_in_a_namespace_it_sees_the_image_and_nothing_else(
    tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, "namespace", tmp_path / "log") as (process, port):
        facts = ask(port, process=process)
    assert facts["root"] == sorted(path.name for path in tree.iterdir())
    assert (facts["uid"], facts["gid"], facts["pid"], facts["groups"]) == (USER_ID, USER_ID, 1, [])
    assert facts["idna"] == "/opt/ral/packages/idna/__init__.py"
    assert facts["tmp"] == []
    assert facts["random"] == 8
    assert {"null", "zero", "urandom", "shm"} <= set(facts["dev"])
    assert not {"sda", "vda", "mem", "kmsg", "mapper"} & set(facts["dev"])


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_is_seen_where_a_variable_says_and_follows_a_file_that_is_replaced(
    mode: Mode, tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "my rules"
    folder.mkdir()
    for place in (tmp_path.parent, tmp_path, folder):
        place.chmod(0o755)  # the program is another user when root starts it
    (folder / "file").write_text("first")
    given = {"folders": {"/run/ral/x": folder}, "env": {"LOOK": "/run/ral/x/file"}}
    with running(tree, config, mode, tmp_path / "log", **given) as (process, port):
        seen = ask(port, process=process)["folder"]
        (folder / "next").write_text("second")
        (folder / "next").rename(folder / "file")
        later = ask(port, process=process)
    assert (seen[0], later["folder"][0]) == ("first", "second")
    if mode == "namespace":
        assert later["env"]["LOOK"] == "/run/ral/x/file"
        assert seen[1:] == ["OSError 30", ["file"]]  # EROFS


def test_in_a_namespace_it_writes_to_tmp_alone(tree: Path, config: dict[str, Any], tmp_path: Path) -> None:
    with running(tree, config, "namespace", tmp_path / "log") as (process, port):
        facts = ask(port, process=process)
    assert facts["write_tmp"] == "written"
    assert facts["write_root"].startswith("OSError 30")  # EROFS
    assert facts["write_app"].startswith("OSError 30")


def test_without_a_namespace_it_runs_on_the_images_files(
    tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, "direct", tmp_path / "log") as (process, port):
        facts = ask(port, process=process)
        maps = Path(f"/proc/{facts['pid']}/maps").read_text()
    assert facts["env"]["RAL_ROOT"] == str(tree)
    assert facts["idna"] == f"{tree}/opt/ral/packages/idna/__init__.py"
    assert facts["os"] == f"{tree}/usr/lib/python3.11/os.py"
    libraries = {line.split()[-1] for line in maps.splitlines() if ".so" in line}
    assert len(libraries) > 3
    # Not a single library of this machine: the files are shared with the layers, so their names may be either.
    assert not [path for path in libraries if not path.startswith(str(tree))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 7), (signal.SIGINT, None)], ids=["SIGTERM", "SIGINT"]
)
def test_signals_reach_the_program_and_its_status_comes_back(
    mode: Mode, number: signal.Signals, status: int | None, tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, mode, tmp_path / "log") as (process, port):
        ask(port, process=process)
        process.send_signal(number)
        found = process.wait(30)
    text = (tmp_path / "log").read_text()
    if status is None:
        assert "KeyboardInterrupt" in text
        assert found in (1, 130, -signal.SIGINT)
    else:
        assert (found, text) == (status, "asked to stop\n")


@pytest.mark.parametrize("mode", MODES)
def test_a_crash_and_a_kill_are_told_apart(
    mode: Mode, tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, mode, tmp_path / "log") as (process, port):
        ask(port, process=process)
        with pytest.raises(OSError):
            ask(port, "/crash")
        assert process.wait(30) == 8
    if mode == "direct":
        with running(tree, config, mode, tmp_path / "log") as (process, port):
            ask(port, process=process)
            with pytest.raises(OSError):
                ask(port, "/die")
            assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("mode", MODES)
def test_killing_the_starter_takes_the_program_with_it(
    mode: Mode, tree: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree, config, mode, tmp_path / "log") as (process, port):
        ask(port, process=process)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)):
                    return
            time.sleep(0.05)
    raise AssertionError("the program still listens")


def test_an_image_is_unpacked_once(layout: Path, tree: Path) -> None:
    before = tree.stat().st_ino
    assert prepare_tree(layout, Quiet()) == tree
    assert tree.stat().st_ino == before


def rules_image(folder: Path) -> Path:
    layers = (
        LayerPlan("base", "weights", (FileEntry("models/w", b"weights"),), ("models",)),
        LayerPlan("rules", "small", (FileEntry("opt/ral/rules", b"rules"),), ("opt/ral",)),
    )
    return write_image(folder, layers, ImageConfig())


def write_over(path: Path, data: bytes = b"evil!") -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def put_another(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"rules")


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: write_over(tree / "opt/ral/rules"),
        lambda tree: put_another(tree / "opt/ral/rules"),
        lambda tree: (tree / "opt/ral/rules").unlink(),
        lambda tree: shutil.rmtree(tree / "opt"),
        shutil.rmtree,
        lambda tree: tree.with_name(f"{tree.name}.complete").unlink(),
        lambda tree: [path.unlink() for path in tree.parent.glob("layers/*/entries.json")],
    ],
)
def test_a_small_layer_that_was_changed_in_the_cache_is_made_again(
    change: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = rules_image(tmp_path / "layout")
    tree = prepare_tree(layout, Quiet())
    change(tree)
    assert prepare_tree(layout, Quiet()) == tree
    assert (tree / "opt/ral/rules").read_bytes() == b"rules"
    assert (tree / "models/w").read_bytes() == b"weights"
    again = tree.stat().st_ino
    assert prepare_tree(layout, Quiet()) == tree
    assert tree.stat().st_ino == again


def test_settings_too_long_for_a_program_are_an_error(tree: Path) -> None:
    config = {"Entrypoint": ["/usr/bin/python3.11"], "Env": ["A=" + "x" * 3_000_000]}
    with pytest.raises(ImageError, match="too long"):
        run_tree(tree, config, 1, Quiet(), mode="direct")


def test_the_way_that_was_chosen_is_said(tree: Path, config: dict[str, Any], tmp_path: Path) -> None:
    said = {}
    for mode in ("auto", "direct"):
        report = Quiet()
        with (tmp_path / "log").open("wb") as output:
            process = run_tree(tree, config, free_port(), report, mode=mode, output=output)
        process.kill()
        process.wait()
        said[mode] = report.notes
    assert said == {
        "auto": ["running in a namespace: read-only root, no capabilities, this machine's network"],
        "direct": [
            "running with the image's own loader, not in a namespace: this machine's files are in reach"
        ],
    }


TO_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""Changes the user id and takes every capability, yet leaves this process's files readable."""
TO_USER_WITHOUT_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "sh", "-euc"),
    # One is left, for the change of user id; the next one is refused.
    'echo 1 > /proc/sys/user/max_user_namespaces; exec "$@"',
    *("-", *TO_USER),
)


def run_as(prefix: tuple[str, ...], script: str) -> list[Any]:
    """Run Python code as an ordinary user; return what its last line of output says."""
    command = [*prefix, sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parent}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


SCRIPT = """
import json, os, sys
from pathlib import Path
from test_local_run import ask, free_port, Quiet
from ralbuild.image.local_run import prepare_tree, read_run_config, run_tree
layout = Path({layout!r})
report = Quiet()
tree = prepare_tree(layout, report)
port = free_port()
process = run_tree(tree, read_run_config(layout), port, report)
facts = ask(port, process=process)
process.terminate()
print(json.dumps([os.geteuid(), report.notes, facts["uid"], facts["idna"], facts["capabilities"], process.wait(30)]))
"""


def test_an_ordinary_user_gets_a_namespace(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run_as(TO_USER, SCRIPT.format(layout=str(layout)))
    uid, notes, inside_uid, idna, capabilities, status = found
    assert uid == 1000
    assert notes == ["running in a namespace: read-only root, no capabilities, this machine's network"]
    assert (inside_uid, idna, status) == (USER_ID, "/opt/ral/packages/idna/__init__.py", 7)
    assert {int(value, 16) for value in capabilities} == {0}


def test_a_narrow_umask_does_not_lock_the_program_out(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run_as(("sh", "-euc", 'umask 077; exec "$@"', "-"), SCRIPT.format(layout=str(layout)))
    assert found[2] == USER_ID
    assert found[5] == 7


def test_where_namespaces_are_forbidden_the_loader_is_used_and_the_reason_given(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = run_as(TO_USER_WITHOUT_NAMESPACES, SCRIPT.format(layout=str(layout)))
    uid, notes, _, idna, capabilities, status = found
    assert uid == 1000
    assert notes[0].startswith(
        "running with the image's own loader, not in a namespace (the kernel refuses new namespaces"
    )
    assert idna.startswith(str(tmp_path))
    assert status == 7
    permitted, effective, _bounding, inheritable, ambient = (int(value, 16) for value in capabilities)
    assert (permitted, effective, inheritable, ambient) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        ((), "names no program"),
        (("/bin/missing",), "no program /bin/missing"),
        (("missing",), "no program missing"),
    ],
)
def test_an_image_without_its_program_is_an_error(
    entrypoint: tuple[str, ...], message: str, tree: Path
) -> None:
    with pytest.raises(ImageError, match=message):
        run_tree(tree, {"Entrypoint": list(entrypoint)}, 1, Quiet(), mode="namespace")


def test_without_a_namespace_only_python_can_be_started(tree: Path) -> None:
    with pytest.raises(ImageError, match="only Python"):
        run_tree(tree, {"Entrypoint": ["/bin/sh", "-c", "true"]}, 1, Quiet(), mode="direct")


def test_a_shell_script_is_started_in_a_namespace(tree: Path, tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as output:
        config = {"Entrypoint": ["sh", "-euc", "echo from $0; exit 5", "here"], "Env": ["PATH=/usr/bin"]}
        process = run_tree(tree, config, 1, Quiet(), mode="namespace", output=output)
        assert process.wait(60) == 5
    assert (tmp_path / "log").read_text() == "from here\n"


def test_a_layout_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        prepare_tree(tmp_path, Quiet())


def test_a_cache_that_cannot_be_written_is_an_error(
    layout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(HostError):
        prepare_tree(layout, Quiet())


def test_run_hands_the_rules_of_the_serving_side_to_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(local_run, "run_image", lambda *_, **named: given.update(named) or 0)
    base = ["run", "oci:x", "--quiet"]
    assert main([*base, "--rules-folder", str(tmp_path), "--rules-least", "7"]) == 0
    (place,) = given["folders"]
    assert given["folders"][place] == tmp_path
    env = given["env"]
    assert {Path(env[f"RAL_RUNTIME_RULES{end}"]).parent for end in ("", "_KEY")} == {Path(place)}
    assert env["RAL_RUNTIME_RULES_LEAST"] == "7"
    assert main(base) == 0
    assert (given["env"], given["folders"]) == ({}, {})
    for wrong in (
        ["--rules-folder", str(tmp_path / "none")],
        ["--rules-least", "7"],
        ["--rules-least", "-1"],
    ):
        assert main([*base, *wrong]) == 2
        said = capsys.readouterr().err
        assert "is no folder" in said if wrong[0] == "--rules-folder" else "--rules-least" in said
