"""Resolving and downloading Debian packages as an ordinary user, from a repository made here."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from ralbuild.errors import HostError
from ralbuild.image.base.apt import PrivateApt


def make_package(folder: Path, name: str, depends: str = "", version: str = "1:2.0-1") -> Path:
    root = folder / f"src-{name}"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "usr/share").mkdir(parents=True)
    (root / f"usr/share/{name}").write_text(name)
    fields = {
        "Package": name,
        "Version": version,
        "Architecture": "amd64",
        "Maintainer": "a test",
        "Description": "x",
    }
    if depends:
        fields["Depends"] = depends
    (root / "DEBIAN/control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    target = folder / f"{name}.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", root, target], check=True, capture_output=True
    )
    return target


def write_index(folder: Path) -> None:
    """Write ``Packages`` as deb822 describes it."""
    stanzas = []
    for path in sorted(folder.glob("*.deb")):
        control = subprocess.run(
            ["dpkg-deb", "--field", path], check=True, capture_output=True, text=True
        ).stdout
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        stanzas.append(f"{control}Filename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(stanzas))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is apt's only source, and trusted."""
    folder = tmp_path / "repository"
    folder.mkdir()
    make_package(folder, "alpha", depends="beta (>= 1), gamma | delta")
    make_package(folder, "beta")
    make_package(folder, "gamma", version="3")
    make_package(folder, "unrelated")
    write_index(folder)
    use_source(tmp_path, monkeypatch, f"deb [trusted=yes] file:{folder} ./")
    return folder


def use_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "sources.list").write_text(line + "\n")
    config = tmp_path / "host-apt.conf"
    config.write_text(
        f'Dir::Etc::sourcelist "{tmp_path}/sources.list";\nDir::Etc::sourceparts "/dev/null";\n'
        f'APT::Update::Post-Invoke {{ "touch {tmp_path}/hook-ran"; }};\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(config))


def test_the_closure_is_resolved_and_downloaded_with_exact_versions(repository: Path, tmp_path: Path) -> None:
    apt = PrivateApt(tmp_path / "apt")
    packages = apt.resolve(["alpha"])
    assert [(item.name, item.version) for item in packages] == [
        ("alpha", "1:2.0-1"),
        ("beta", "1:2.0-1"),
        ("gamma", "3"),
    ]
    for item in packages:
        data = (repository / f"{item.name}.deb").read_bytes()
        assert (item.size, item.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    paths = apt.download(packages)
    assert {name: path.read_bytes() for name, path in paths.items()} == {
        item.name: (repository / f"{item.name}.deb").read_bytes() for item in packages
    }


def test_what_was_downloaded_is_still_resolved_and_not_fetched_again(
    repository: Path, tmp_path: Path
) -> None:
    apt = PrivateApt(tmp_path / "apt")
    first = apt.resolve(["alpha"])
    paths = apt.download(first)
    for path in repository.glob("*.deb"):
        path.unlink()
    assert apt.resolve(["alpha"]) == first
    assert apt.download(first) == paths


def test_the_machine_is_left_alone(repository: Path, tmp_path: Path) -> None:
    assert repository.is_dir()
    watched = [Path("/var/lib/dpkg/status"), Path("/var/lib/apt/lists"), Path("/var/cache/apt")]
    before = [path.stat().st_mtime_ns for path in watched if path.exists()]
    apt = PrivateApt(tmp_path / "apt")
    apt.download(apt.resolve(["alpha"]))
    assert [path.stat().st_mtime_ns for path in watched if path.exists()] == before
    assert not (tmp_path / "hook-ran").exists()


def test_a_package_that_is_not_what_the_list_says_is_refused(repository: Path, tmp_path: Path) -> None:
    apt = PrivateApt(tmp_path / "apt")
    packages = apt.resolve(["beta"])
    path = repository / "beta.deb"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(HostError):
        apt.download(packages)


def test_a_changed_archive_in_the_cache_is_replaced(repository: Path, tmp_path: Path) -> None:
    apt = PrivateApt(tmp_path / "apt")
    packages = apt.resolve(["beta"])
    path = apt.download(packages)["beta"]
    path.write_bytes(bytes(path.stat().st_size))
    assert apt.download(packages)["beta"].read_bytes() == (repository / "beta.deb").read_bytes()


def test_an_unsigned_source_is_refused(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_source(tmp_path, monkeypatch, f"deb file:{repository} ./")
    with pytest.raises(HostError) as caught:
        PrivateApt(tmp_path / "apt").resolve(["alpha"])
    assert "apt-get update" in str(caught.value)


def test_an_unknown_package_is_named_with_a_hint(repository: Path, tmp_path: Path) -> None:
    assert repository.is_dir()
    with pytest.raises(HostError) as caught:
        PrivateApt(tmp_path / "apt").resolve(["alpha", "no-such-thing"])
    assert "no-such-thing" in str(caught.value)
    assert "apt sources" in caught.value.problems[0].hint


def test_lists_are_fetched_again_when_asked(repository: Path, tmp_path: Path) -> None:
    apt = PrivateApt(tmp_path / "apt")
    apt.resolve(["beta"])
    (repository / "beta.deb").unlink()
    (repository / "src-beta").rename(repository / "old")
    make_package(repository, "beta", version="9")
    write_index(repository)
    assert apt.resolve(["beta"])[0].version == "1:2.0-1"
    apt.update()
    assert apt.resolve(["beta"])[0].version == "9"


def test_a_machine_without_apt_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError) as caught:
        PrivateApt(tmp_path / "apt").resolve(["dash"])
    assert "--base" in caught.value.problems[0].hint
