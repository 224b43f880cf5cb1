"""A site is taken away whole, twice if need be, and nothing else with it; what is refused leaves nothing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from cli_support import ralbuild
from registry_server import serve
from release_support import ProcessHost, World, free_ports, world
from test_cli import image, work  # noqa: F401

from ralbuild.engine import Launch
from ralbuild.errors import ImageError
from ralbuild.release.proxy import proxy_of
from ralbuild.release.removal import Removal, plan_removal, remove
from ralbuild.release.site import Site
from ralbuild.release.source import look, parse_source
from ralbuild.report import make_report


def take_away(w: World, *, images: bool = False) -> Removal:
    found = plan_removal(w.site, w.host, w.proxy, images=images)
    with w.site.locked():
        remove(w.site, w.host, w.proxy, found, make_report("plain", quiet=True))
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


@pytest.mark.parametrize("proxy", ["haproxy", "nginx"])
def test_proxy_containers_of_both_colours_and_files_go_and_nothing_of_others(
    tmp_path: Path, proxy: str
) -> None:
    with world(tmp_path, proxy=proxy) as w:
        w.up(w.host.add_image("a"))
        w.up(w.host.add_image("b"), keep_warm=True)
        (port,) = free_ports(1)
        image = f"sha256:{'a' * 8}"
        w.host.start(Launch("other", image, port, {"io.ralbuild.release.site": "/srv/other"}, 1))
        assert len(w.host.running()) == 3
        before = names(w.site.folder)
        planned = plan_removal(w.site, w.host, w.proxy, images=False)
        assert (names(w.site.folder), len(w.host.running())) == (before, 3), "a plan changes nothing"
        assert take_away(w) == planned
        assert planned.proxy
        assert w.host.running() == ["other"]
        assert not w.proxy.running()
        assert not w.site.folder.exists()
        assert w.host.find(image) is not None, "images stay"


def test_what_is_not_the_site_s_stays_and_images_go_when_asked(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.up(w.host.add_image("a"))
        (w.site.folder / "notes.txt").write_text("mine")
        found = take_away(w, images=True)
        assert found.others == ("notes.txt",)
        assert names(w.site.folder) == {"notes.txt"}
        assert w.host.find(found.images[0]) is None


def test_a_removal_that_was_killed_is_done_again(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.up(w.host.add_image("a"))
        found = plan_removal(w.site, w.host, w.proxy, images=False)

        class KilledError(BaseException):
            pass

        def killed(_: str) -> None:
            raise KilledError

        w.host.remove = killed  # type: ignore[method-assign]
        with pytest.raises(KilledError):
            remove(w.site, w.host, w.proxy, found, make_report("plain", quiet=True))
        del w.host.remove
        again = Site.open(w.site.folder)
        second = plan_removal(again, w.host, proxy_of(again), images=False)
        assert (second.proxy, second.containers) == (False, found.containers)
        take_away(w)
        assert w.host.labelled("io.ralbuild.release.site", str(w.site.folder)) == []
        assert not w.site.folder.exists()


def test_another_program_s_process_is_not_taken_for_the_proxy(tmp_path: Path) -> None:
    with world(tmp_path / "one") as one, world(tmp_path / "two") as two:
        pid = two.site.folder / "haproxy.pid"
        own = pid.read_text()
        pid.write_text((one.site.folder / "haproxy.pid").read_text())
        assert not two.proxy.running()
        pid.write_text(own)


def test_a_site_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    done = ralbuild("release", "remove", "--site", tmp_path / "s", cwd=tmp_path)
    assert (done.code, "no release site is here" in done.out) == (0, True)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_init_leaves_what_was_there(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "deep/er/s"
    if there:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    before = names(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        done = ralbuild("release", "init", "--site", folder, "--listen", address, cwd=tmp_path)
    assert done.code == 7
    assert names(tmp_path) == before


def test_a_refused_init_of_a_site_leaves_its_settings_and_files(tmp_path: Path) -> None:
    folder, (port,) = tmp_path / "s", free_ports(1)
    words = ("release", "init", "--site", folder)
    done = ralbuild(*words, "--listen", f"127.0.0.1:{port}", "--no-start", cwd=tmp_path)
    assert done.code == 0, done.err
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        assert ralbuild(*words, "--listen", address, cwd=tmp_path).code == 7
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class Watched(ProcessHost):
    """An engine that must be given nothing."""

    def load(self, chunks: object) -> str:
        raise AssertionError("loaded")

    pull = load


def test_a_dry_run_reads_the_image_where_it_lies(work: Path) -> None:  # noqa: F811
    image(work, "--tag", "my/model:1", "--output", "oci:out", "--output", "archive:out.tar")
    host = Watched(work / "host")
    config = json.loads((work / "out/index.json").read_text())["manifests"][0]["digest"][7:]
    manifest = json.loads((work / "out/blobs/sha256" / config).read_text())
    labels = json.loads((work / "out/blobs/sha256" / manifest["config"]["digest"][7:]).read_text())
    for source in (f"oci:{work / 'out'}", f"archive:{work / 'out.tar'}"):
        found = look(parse_source(source, ""), host)
        assert found.image == manifest["config"]["digest"]
        assert found.labels == labels["config"]["Labels"]
    with serve() as registry:
        image(work, "--output", f"registry:{registry.host}/my/model:1")
        found = look(parse_source(f"{registry.host}/my/model@sha256:{config}", ""), host)
    assert found.image == manifest["config"]["digest"]
    with pytest.raises(ImageError, match="no such image"):
        look(parse_source("docker:team/m:2", ""), host)
