"""A hostile kernel file gets nothing and spoils nothing; an honest one is not disturbed.

Each file does its deed while it is imported and then says so; the error that the builder reports
shows what became of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path
from threading import Event

import pytest
from compile_support import ARTICLE_KERNEL, HARMLESS, PINS, compiled, kernel_file, specs, toolchain

from ralbuild.compile.gate import inspect
from ralbuild.compile.launch import Compiled, run_worker
from ralbuild.compile.spec import KernelSpec
from ralbuild.errors import CompileError


def compile_(spec: KernelSpec, timeout: float = 60) -> Compiled:
    return run_worker(spec, "sm_80", toolchain(), stop=Event(), timeout=timeout)


def outcomes(*deeds: str) -> list[str]:
    """Import a file that evaluates each deed; return what each gave, or the name of its error."""
    head = (
        "import ctypes, os, socket\n"
        f"def attempt(deed):\n    try:\n        return repr(eval(deed))\n"
        "    except Exception as error:\n        return type(error).__name__\n"
        f"raise RuntimeError('|'.join(attempt(deed) for deed in {list(deeds)!r}))"
    )
    with pytest.raises(CompileError) as caught:
        compile_(kernel_file(HARMLESS, head))
    return caught.value.problems[0].message.split("RuntimeError: ")[1].split("|")


PROTECTIONS = {
    "network namespace",
    "process namespace",
    "own user id",
    "process limit (it still runs as root)",
    "file access rules (Landlock)",
    "system call filter (seccomp)",
}


def lacks(name: str) -> bool:
    """Tell whether this host withholds a protection; then a test can only show that the build says so."""
    assert name in PROTECTIONS
    return name in compiled("html_enhancer").missing


def test_what_this_host_withholds_is_named_and_nothing_else() -> None:
    """util-linux's `unshare` says whether namespaces can be had here, as root or by a user namespace."""
    assert set(compiled("html_enhancer").missing) <= PROTECTIONS
    options = ["-n", "-p", "-i", "-f"] if os.geteuid() == 0 else ["-U", "-n", "-p", "-i", "-f"]
    can = subprocess.run(["unshare", *options, "true"], check=False).returncode == 0
    assert can != lacks("network namespace")
    assert can != lacks("process namespace")


def test_files_outside_the_toolchain_cannot_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "config.json"
    secret.write_text("secret")
    paths = [str(secret), "/etc/passwd", "/proc/self/environ", str(ARTICLE_KERNEL)]
    found = outcomes(f"os.listdir({str(Path.home())!r})", *(f"open({path!r}).read()" for path in paths))
    assert found == ["PermissionError"] * 5 or lacks("file access rules (Landlock)")


def test_nothing_can_be_written_outside_the_private_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    paths = [Path.home() / "planted", tmp_path / "planted", Path("/tmp/planted")]
    deeds = [f"open({str(path)!r}, 'w')" for path in paths]
    found = outcomes(*deeds, "open(os.path.expanduser('~/x'), 'w').write('here')")
    assert found == ["PermissionError"] * 3 + ["4"] or lacks("file access rules (Landlock)")
    assert not any(path.exists() for path in paths) or lacks("file access rules (Landlock)")


def test_no_socket_of_any_kind_can_be_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = outcomes(
            f"socket.create_connection(('127.0.0.1', {port}))",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        )
    assert found == ["PermissionError"] * 4 or lacks("system call filter (seccomp)")


def test_other_processes_are_out_of_reach_and_privileges_stay_lost() -> None:
    new_user_namespace, no_new_privileges = 0x10000000, 39
    found = outcomes(
        f"os.kill({os.getpid()}, 0)",
        f"ctypes.CDLL(None).unshare({new_user_namespace})",
        f"ctypes.CDLL(None).prctl({no_new_privileges}, 0, 0, 0, 0)",
        f"os.setuid({0 if os.geteuid() == 0 else 12345})",
    )
    assert found[0] == "ProcessLookupError" or lacks("process namespace")
    assert found[1:] == ["-1", "1", "PermissionError"] or lacks("system call filter (seccomp)")


def test_the_environment_is_a_fixed_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_TOKEN", "secret")
    assert outcomes("'REGISTRY_TOKEN' in os.environ", "os.environ['TRITON_DISABLE_LINE_INFO']") == [
        "False",
        "'1'",
    ]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which workers get their private ones."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_fork_bomb_is_contained_and_ended(scratch: Path) -> None:
    head = (
        "import os\nfirst = os.getpid()\nwhile True:\n    try:\n        os.fork()\n"
        "    except OSError:\n        if os.getpid() == first: raise"
    )
    assert not lacks("process limit (it still runs as root)"), "the bomb would hit this machine"
    with pytest.raises(CompileError, match=r"transformers/k\.py:\d+: .*BlockingIOError"):
        compile_(kernel_file(HARMLESS, head))
    assert processes_in(scratch) == []


def test_a_file_that_sleeps_is_ended_after_the_timeout(scratch: Path) -> None:
    with pytest.raises(CompileError, match="the compile worker took too long"):
        compile_(kernel_file(HARMLESS, "import time\ntime.sleep(1000)"), timeout=2)
    assert processes_in(scratch) == []


def test_a_stopped_build_ends_its_workers(scratch: Path) -> None:
    stop = Event()
    stop.set()
    with pytest.raises(CompileError, match="the compile worker was stopped"):
        run_worker(kernel_file(HARMLESS), "sm_80", toolchain(), stop=stop)
    assert processes_in(scratch) == []


def test_a_child_left_behind_ends_with_its_worker(scratch: Path) -> None:
    head = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)"
    assert compile_(kernel_file(HARMLESS, head)).cubin
    assert processes_in(scratch) == [] or lacks("process namespace")


def processes_in(folder: Path) -> list[str]:
    """Return the processes whose working folder lies below ``folder``: workers and their children."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if link.readlink().is_relative_to(folder):
                found.append(link.parent.name)
    return found


def test_what_a_file_prints_does_not_reach_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    head = 'import os, sys\nprint("{" * 100_000)\nos.write(1, b"\\0" * 1000)\nos.write(2, b"noise")'
    built = compile_(kernel_file('print("in the kernel")\n' + HARMLESS, head))
    spec = kernel_file('print("in the kernel")\n' + HARMLESS, head)
    assert inspect(spec, "sm_80", built.cubin, built.ptx, PINS).symbols == ("k_kernel", "vprintf")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("import os\nos._exit(3)", "ended with status 3 and no answer"),
        ("import ctypes\nctypes.string_at(0)", "was killed by SIGSEGV"),
        ("import os, sys\nos.close(int(sys.argv[1]))\nos._exit(0)", "ended with status 0 and no answer"),
        ("import os, sys\nos.write(int(sys.argv[1]), b'x' * 9)", "gave no usable answer"),
        (
            "import os, sys\nos.write(int(sys.argv[1]), (2).to_bytes(8, 'little') + b'{}')",
            "gave no usable answer",
        ),
        ("raise SystemExit", "transformers/k.py:3: cannot be compiled for sm_80: SystemExit"),
        ("raise KeyboardInterrupt", "transformers/k.py:3: cannot be compiled for sm_80: KeyboardInterrupt"),
    ],
)
def test_a_worker_that_dies_or_lies_is_one_clear_error(head: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_(kernel_file(HARMLESS, head))
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_forged_object_does_not_pass_the_gate() -> None:
    """The file answers for the compiler, with an object of another kernel."""
    forged = (
        "import base64, json, os, sys\n"
        f"cubin = {compiled('html_enhancer').cubin!r}\n"
        "facts = dict(shared=0, num_ctas=1, num_warps=4, global_scratch_size=0, profile_scratch_size=0)\n"
        "answer = dict(ptx='', cubin=base64.b64encode(cubin).decode(), launch=facts, missing=[])\n"
        "body = json.dumps(answer).encode()\n"
        "os.write(int(sys.argv[1]), len(body).to_bytes(8, 'little') + body)"
    )
    spec = kernel_file(HARMLESS, forged)
    built = compile_(spec)
    with pytest.raises(CompileError, match="needs the one kernel 'k_kernel', found html_enhancer_kernel"):
        inspect(spec, "sm_80", built.cubin, built.ptx, PINS)


def test_the_callers_environment_cannot_change_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable alone makes Triton or Python do something else when it is let through."""
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit(9)")
    bundled = toolchain().triton_root / "backends/nvidia/bin/ptxas"
    hostile = {
        "TRITON_PTXAS_PATH": str(bundled),
        "TRITON_PTXAS_BLACKWELL_PATH": str(bundled),
        "TRITON_KERNEL_OVERRIDE": "1",
        "TRITON_OVERRIDE_DIR": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_CACHE_MANAGER": "nothing:Here",
        "TRITON_INTERPRET": "1",
        "TRITON_DISABLE_LINE_INFO": "0",
        "TRITON_LIBDEVICE_PATH": "/nothing",
        "DISABLE_LLVM_OPT": "1",
        "DISABLE_PTXAS_OPT": "1",
        "PTXAS_OPTIONS": "--opt-level 0",
        "LLVM_PASS_PLUGIN_PATH": "/nothing",
        "PYTHONPATH": str(tmp_path),
        "PYTHONHASHSEED": "7",
        "LD_PRELOAD": "/nothing.so",
        "TMPDIR": str(tmp_path),
    }
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    built = compile_(specs()["html_enhancer"])
    monkeypatch.undo()
    assert (built.cubin, built.ptx) == (compiled("html_enhancer").cubin, compiled("html_enhancer").ptx)


def test_no_scratch_folder_is_left(scratch: Path) -> None:
    compile_(kernel_file(HARMLESS))
    with pytest.raises(CompileError):
        compile_(kernel_file(HARMLESS, "raise ValueError"))
    assert list(scratch.iterdir()) == []
