"""The base's file tree, from real Debian packages and a few wheels: what is in it, and that it is reproducible."""

from __future__ import annotations

import json
import os
import re
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from base_sources import FACTS, image_digest, make_small_tree, small_sources

from ralbuild.contract.places import PACKAGES_DIR
from ralbuild.contract.tarball import STICKY_DIR_MODE
from ralbuild.image.base.layers import plan_base
from ralbuild.image.base.recipe import DROPPED_MODULES
from ralbuild.image.plan import DirEntry
from ralbuild.image.treepython import python_command, python_home

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tree"
    make_small_tree(folder)
    return folder


def python(tree: Path, code: str, **env: str) -> str:
    environment = {
        "PYTHONHOME": python_home(tree),
        "PYTHONPATH": f"{tree}{PACKAGES_DIR}",
        "LANG": "C.UTF-8",
        **env,
    }
    command = [*python_command(tree), "-B", "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(tree: Path) -> list[Path]:
    return [path for path in sorted(tree.rglob("*")) if not path.is_symlink() and not path.is_dir()]


def test_another_folder_umask_zone_hash_seed_and_cpu_count_give_the_same_digest(
    tree: Path, tmp_path: Path
) -> None:
    script = f"umask 077; exec {sys.executable} {HERE / 'base_sources.py'} {tmp_path / 'a longer/way/to/it'}"
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C", "LANG": "C"}
    one_cpu = min(os.sched_getaffinity(0))
    command = ["taskset", "--cpu-list", str(one_cpu), "sh", "-c", script]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert other.stdout == image_digest(tree)


def test_nothing_of_the_building_machine_is_in_it(tree: Path) -> None:
    needles = [str(tree).encode(), str(tree.parent.parent).encode()]
    found = [path for path in files(tree) if any(needle in path.read_bytes() for needle in needles)]
    assert found == []


def test_only_three_programs_and_no_set_id_file(tree: Path) -> None:
    programs = {
        path.name for folder in ("bin", "sbin", "usr/bin", "usr/sbin") for path in (tree / folder).iterdir()
    }
    assert programs == {"dash", "python3", "python3.11", "sh"}
    modes = {path: path.stat().st_mode for path in tree.rglob("*") if not path.is_symlink()}
    assert not [path for path, mode in modes.items() if mode & (stat.S_ISUID | stat.S_ISGID)]
    assert all(stat.S_ISREG(mode) or stat.S_ISDIR(mode) for mode in modes.values())


@pytest.mark.parametrize("name", ["apt", "dpkg", "gcc", "perl", "pip", "triton", "setuptools", "ensurepip"])
def test_no_tool_to_install_or_compile_is_in_it(tree: Path, name: str) -> None:
    places = ("usr/bin", "usr/lib", "usr/lib/python3.11", PACKAGES_DIR.lstrip("/"), "etc")
    assert not [place for place in places if (tree / place / name).exists()]


def test_every_link_leads_to_something_inside(tree: Path) -> None:
    links = [path for path in tree.rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        target = os.readlink(link)
        assert not target.startswith("/"), link
        assert link.resolve().is_relative_to(tree.resolve()), link
        assert link.resolve().exists(), link


def test_every_library_finds_its_libraries_inside(tree: Path) -> None:
    """The loader itself lists what each library needs; nothing may be missing or come from this machine."""
    loader, *options, _ = python_command(tree)
    libraries = [
        path for path in files(tree) if path.read_bytes()[:4] == b"\x7fELF" and b".so" in os.fsencode(path)
    ]
    assert len(libraries) > 50
    for path in libraries:
        if path.name.startswith(("ld-linux", "libc.so")):
            continue
        done = subprocess.run([loader, *options, "--list", path], capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            assert "not found" not in line, f"{path}: {line}"
            if "=>" in line:
                assert line.split("=>")[1].strip().startswith(str(tree)), f"{path}: {line}"


def test_every_module_of_the_standard_library_imports_but_the_dropped(tree: Path) -> None:
    code = (
        "import sys, importlib, json; bad = {}\n"
        "for name in sorted(sys.stdlib_module_names):\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError as error: bad[name] = str(error)\n"
        "json.dump(bad, sys.__stdout__)"
    )
    bad = set(json.loads(python(tree, code).splitlines()[-1]))
    # Windows, macOS and Android; Debian's own splits (tkinter, distutils' siblings, gdbm); whole folders we drop.
    elsewhere = {"_msi", "_overlapped", "_scproxy", "_winapi", "msilib", "msvcrt", "nt", "winreg", "winsound"}
    debian = {"_gdbm", "_tkinter", "tkinter", "turtle", "turtledemo", "idlelib", "_bootsubprocess"}
    folders = {"ensurepip", "lib2to3", "pydoc_data"}
    needing = {"crypt", "curses", "sqlite3"}
    assert bad - elsewhere - debian == folders | needing | (DROPPED_MODULES & sys.stdlib_module_names)


def test_tls_trusts_what_debian_trusts(tree: Path) -> None:
    bundle = tree / "etc/ssl/certs/ca-certificates.crt"
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours.load_verify_locations(bundle)
    archive = small_sources().archives["ca-certificates"]
    listing = subprocess.run(
        ["dpkg-deb", "--contents", archive], capture_output=True, text=True, check=True
    ).stdout
    expected = len(re.findall(r"/mozilla/.*\.crt$", listing, re.MULTILINE))
    assert len(ours.get_ca_certs()) == expected > 100
    code = "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'])"
    assert python(tree, code, SSL_CERT_FILE=str(bundle)) == f"{expected}\n"


def test_the_user_the_locale_and_the_zones_are_known(tree: Path) -> None:
    assert "ral:x:65532:65532:ral:/tmp:" in (tree / "etc/passwd").read_text()
    assert "ral:x:65532:" in (tree / "etc/group").read_text()
    code = (
        "import zoneinfo, datetime, sys\n"
        "at = datetime.datetime(2026, 7, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin'))\n"
        "print(at.utcoffset(), sys.stdout.encoding, sys.getfilesystemencoding())"
    )
    found = python(tree, code, PYTHONTZPATH=str(tree / "usr/share/zoneinfo"))
    assert found == "2:00:00 utf-8 utf-8\n"
    assert (tree / "etc/localtime").read_bytes() == (tree / "usr/share/zoneinfo/Etc/UTC").read_bytes()


def test_the_shell_runs(tree: Path) -> None:
    loader, *options, _ = python_command(tree)
    command = [loader, *options, tree / "bin/sh", "-euc", "echo $((6 * 7))"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "42\n"


def test_bytecode_is_used_and_names_the_path_in_the_image(tree: Path) -> None:
    code = (
        "import idna.core, marshal\n"
        "data = open(idna.core.__cached__, 'rb').read()\n"
        "print(idna.core.__cached__, marshal.loads(data[16:]).co_filename, data[4:8].hex())"
    )
    cached, filename, flags = python(tree, code).split()
    assert cached == f"{tree}{PACKAGES_DIR}/idna/__pycache__/core.cpython-311.pyc"
    assert filename == f"{PACKAGES_DIR}/idna/core.py"
    assert flags == "01000000"  # PEP 552: hash-based, unchecked


def test_temporary_folders_are_open_to_all(tree: Path) -> None:
    system = plan_base(tree, "cpu", small_sources().lock, FACTS).layers[0]
    modes = {entry.path: entry.mode for entry in system.entries if isinstance(entry, DirEntry)}
    assert (modes["tmp"], modes["var/tmp"]) == (STICKY_DIR_MODE, STICKY_DIR_MODE)
    assert {"dev", "proc", "sys", "run"} <= modes.keys()


def test_scanners_find_every_package_and_its_licence(tree: Path) -> None:
    names = {package.name for package in small_sources().debian}
    records = {path.name: path.read_text() for path in (tree / "var/lib/dpkg/status.d").iterdir()}
    assert records.keys() == names
    for package in small_sources().debian:
        assert f"Package: {package.name}\n" in records[package.name]
        assert f"Version: {package.version}\n" in records[package.name]
        assert (tree / "usr/share/doc" / package.name / "copyright").is_file(), package.name
    wheels = {path.name for path in (tree / PACKAGES_DIR.lstrip("/")).glob("*.dist-info")}
    assert len(wheels) == len(small_sources().wheels)


def test_the_list_of_packages_says_exactly_what_went_in(tree: Path) -> None:
    value = json.loads((tree / "opt/ral/base.json").read_bytes())
    assert {(item["name"], item["version"], item["sha256"]) for item in value["debian"]} == {
        (item.name, item.version, item.sha256) for item in small_sources().debian
    }
    assert {item["file"] for item in value["wheels"]} == {
        path.name for path in small_sources().wheels.values()
    }
