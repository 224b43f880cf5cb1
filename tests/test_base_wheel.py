"""Unpacking wheels: what pip would put on the import path, every byte checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from wheel_factory import make_wheel, record_digest

from ralbuild.errors import ImageError
from ralbuild.image.base.prune import keeps
from ralbuild.image.base.wheel import unpack_wheel


def keep_all(_: str) -> bool:
    return True


def leave(_: Path) -> None:
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_import_path_gets_what_pip_puts_there(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        "demo",
        {
            "demo/__init__.py": b"x = 1\n",
            "demo/data/table.bin": bytes(range(256)) * 5000,
            "demo-1.0.data/purelib/pure.py": b"p = 1\n",
            "demo-1.0.data/platlib/plat/mod.py": b"q = 1\n",
            "demo-1.0.data/scripts/tool": b"#!python\n",
            "demo-1.0.data/data/share/doc.txt": b"text",
            "demo-1.0.dist-info/licenses/LICENSE": b"free",
        },
    )
    unpack_wheel(wheel, tmp_path / "ours", keep_all, leave)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--target", tmp_path / "pips", wheel], check=True)
    theirs = contents(tmp_path / "pips")
    # pip notes that it was the installer, and puts scripts and data files into folders of their own.
    for name in (
        "bin/tool",
        "share/doc.txt",
        *(f"demo-1.0.dist-info/{n}" for n in ("INSTALLER", "REQUESTED")),
    ):
        theirs.pop(name)
    theirs.pop("demo-1.0.dist-info/direct_url.json", None)
    ours = contents(tmp_path / "ours")
    ours.pop("demo-1.0.dist-info/RECORD")
    theirs.pop("demo-1.0.dist-info/RECORD")
    assert ours == theirs


def test_modes_are_set_whatever_the_umask(tmp_path: Path) -> None:
    files = {"demo/__init__.py": b"", "demo/helper": b"\x7fELF", "demo/lib.so": b"no ELF"}
    wheel = make_wheel(tmp_path, "demo", files, executable=tuple(files))
    script = (
        "import os, sys; os.umask(0o077); from pathlib import Path; "
        "from ralbuild.image.base.wheel import unpack_wheel; "
        "unpack_wheel(Path(sys.argv[1]), Path(sys.argv[2]), lambda _: True, lambda _: None)"
    )
    subprocess.run([sys.executable, "-c", script, wheel, tmp_path / "out"], check=True)
    modes = {name: (tmp_path / "out" / name).stat().st_mode & 0o777 for name in files}
    assert modes == {"demo/__init__.py": 0o644, "demo/helper": 0o755, "demo/lib.so": 0o644}


def test_only_shared_libraries_are_finished(tmp_path: Path) -> None:
    names = (
        "demo/a.so",
        "demo/b.cpython-311-x86_64-linux-gnu.so",
        "demo/libc.so.6.0.1",
        "demo/so.py",
        "demo/x.so.txt",
    )
    wheel = make_wheel(tmp_path, "demo", dict.fromkeys(names, b"data"))
    seen: list[str] = []
    unpack_wheel(wheel, tmp_path / "out", keep_all, lambda path: seen.append(path.name))
    assert seen == ["a.so", "b.cpython-311-x86_64-linux-gnu.so", "libc.so.6.0.1"]


def test_a_file_that_is_not_kept_is_not_written(tmp_path: Path) -> None:
    files = {
        "numpy/core.py": b"",
        "numpy/tests/test_a.py": b"",
        "numpy/x.pyi": b"",
        "numpy/_core/lib/libm.a": b"",
    }
    unpack_wheel(make_wheel(tmp_path, "numpy", files), tmp_path / "out", keeps("numpy"), leave)
    names = {name for name in contents(tmp_path / "out") if name.startswith("numpy/")}
    assert names == {"numpy/core.py"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"demo/a.py": record_digest(b"other")}, "RECORD says sha256="),
        ({"demo/a.py": None}, "is not in the wheel's RECORD"),
        ({"demo/gone.py": record_digest(b"")}, "RECORD lists files that are not there, such as demo/gone.py"),
        ({"demo/a.py": ""}, "is not in the wheel's RECORD"),
    ],
    ids=["changed", "unlisted", "missing", "without a digest"],
)
def test_a_wheel_that_is_not_what_its_record_says_is_refused(
    tmp_path: Path, record: dict[str, str | None], message: str
) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo/a.py": b"a = 1\n"}, record=record)
    with pytest.raises(ImageError) as caught:
        unpack_wheel(wheel, tmp_path / "out", keep_all, leave)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["../out.py", "demo/../../out.py", "/etc/out.py", "demo//out.py", "./demo.py", "demo\\out.py"],
)
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: str) -> None:
    wheel = make_wheel(tmp_path, "demo", {path: b"bad"})
    with pytest.raises(ImageError, match="leads out"):
        unpack_wheel(wheel, tmp_path / "in" / "out", keep_all, leave)
    assert not list(tmp_path.rglob("out.py"))


def test_a_purelib_path_that_leads_out_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo-1.0.data/purelib/../../../x.py": b"bad"})
    with pytest.raises(ImageError, match="leads out"):
        unpack_wheel(wheel, tmp_path / "out", keep_all, leave)


def test_two_wheels_with_the_same_file_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_wheel(tmp_path / name, name, {"shared.py": b""})
    unpack_wheel(next((tmp_path / "one").glob("*.whl")), tmp_path / "out", keep_all, leave)
    with pytest.raises(ImageError, match="same file"):
        unpack_wheel(next((tmp_path / "two").glob("*.whl")), tmp_path / "out", keep_all, leave)


@pytest.mark.parametrize("data", [b"", b"not a zip", b"PK\x03\x04 cut"], ids=["empty", "text", "cut"])
def test_what_is_no_wheel_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "demo-1.0-py3-none-any.whl"
    path.write_bytes(data)
    with pytest.raises(ImageError, match="not a wheel"):
        unpack_wheel(path, tmp_path / "out", keep_all, leave)


def test_a_flipped_byte_in_the_zip_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "demo", {"demo/a.py": b"alpha = 1\n"})
    data = bytearray(wheel.read_bytes())
    data[data.index(b"alpha")] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ImageError):
        unpack_wheel(wheel, tmp_path / "out", keep_all, leave)
