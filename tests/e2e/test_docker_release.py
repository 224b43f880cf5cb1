"""A release on a real docker engine with the real model: up, a changed rule, a bad image, back again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
from cli_support import ROOT
from release_support import free_ports
from supply_cases import make_key

from benchmarks.image import registry
from benchmarks.traffic import Traffic

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
RALBUILD = [sys.executable, "-m", "ralbuild.cli.main"]
CONFIG = ROOT / "tests" / "e2e" / "guardrails.yaml"
QUESTION = "What does a compliance audit check? Answer in one sentence."

REQUESTS = 500
"""Of clients while a model is swapped in place; `benchmarks.story` has as many while two stand beside each other."""
BROKEN = "ralbuild-test/broken"
CHANGED = "<b>company</b>"
"""What the second image's answers hold and the first one's do not."""

pytestmark = [pytest.mark.real_model, pytest.mark.docker, pytest.mark.long]


def ralbuild(folder: Path, *arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [*RALBUILD, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout.strip() if code == 0 else done.stderr


@dataclass(frozen=True)
class Site:
    folder: Path
    ports: list[int]
    """Of the clients, of blue and of green."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images that differ in one bold term, in one layout, so that layers are shared."""
    folder = tmp_path_factory.mktemp("images")
    # Images of its own: other tests remove theirs from the same engine by their id.
    config = f"# tests of releases\n{CONFIG.read_text()}"
    one, two = folder / "one.yaml", folder / "two.yaml"
    one.write_text(config)
    two.write_text(config.replace('"audit"]', '"audit", "company"]'))
    for name, file in (("one", one), ("two", two)):
        ralbuild(
            folder,
            "image",
            "--model",
            MODEL,
            "--config",
            file,
            "--output",
            f"oci:{name}",
            "--tag",
            "m:1",
            "--quiet",
        )
    for name in ("sign", "other"):
        make_key(folder, name)
    for name in ("one", "two"):
        ralbuild(folder, "sign", f"oci:{name}", "--key", "sign.key")
    shutil.copytree(folder / "one", folder / "damaged", copy_function=os.link)
    manifest = json.loads((folder / "one" / "index.json").read_text())["manifests"][0]["digest"]
    blob = folder / "damaged" / "blobs" / manifest.replace(":", "/")
    digest = json.loads(blob.read_text())["config"]["digest"]
    flip(folder / "damaged" / "blobs" / digest.replace(":", "/"))
    return folder


def flip(path: Path) -> None:
    """Change one bit; other names of the file keep what it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def init(images: Path, folder: Path, ports: list[int], watch: int) -> None:
    write_rules(images, 1, "")
    ralbuild(
        images, "release", "init", "--site", folder, "--listen", f"127.0.0.1:{ports[0]}",
        "--ports", f"{ports[1]},{ports[2]}", "--drain", 60, "--watch", watch,
        "--runtime-rules", "rules.json", "--rules-key", "sign.pub",
    )  # fmt: skip


def containers(folder: Path) -> list[Any]:
    filters = {"label": f"io.ralbuild.release.site={folder}"}
    return docker.from_env().containers.list(all=True, filters=filters)


def running(folder: Path) -> list[Any]:
    return [box for box in containers(folder) if box.status == "running"]


@pytest.fixture(scope="module")
def site(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site on which the first image serves. A test that changes this has to be the last one."""
    found = Site(tmp_path_factory.mktemp("s"), free_ports(3))
    init(images, found.folder, found.ports, watch=2)
    plan = json.loads(
        ralbuild(images, "release", "up", "oci:one", "--site", found.folder, "--dry-run", "--json")
    )
    assert (plan["colour"], plan["old"], plan["mode"]) == ("blue", "", "blue-green")
    assert ralbuild(images, "release", "up", "oci:one", "--site", found.folder, "--quiet") == "blue serves"
    yield found
    ralbuild(images, "release", "proxy", "stop", "--site", found.folder)
    boxes, engine = containers(found.folder), docker.from_env()
    # Those that were made of another image go before it.
    names = [*(f"{BROKEN}:{what}" for what in ("env", "label")), *{box.image.id for box in boxes}]
    for box in boxes:
        box.remove(force=True)
    for name in names:
        with contextlib.suppress(docker.errors.ImageNotFound):
            engine.images.remove(name, force=True)


def write_rules(images: Path, serial: int, text: str) -> None:
    (images / "runtime-rules.yaml").write_text(f'version: "0.3"\nserial: {serial}\n{text}')
    ralbuild(images, "rules", "compile", "runtime-rules.yaml", "--key", "sign.key", "--out", "rules.json")


def status_of(images: Path, folder: Path) -> dict[str, Any]:
    return json.loads(ralbuild(images, "release", "status", "--site", folder, "--json"))


def traffic(port: int) -> Traffic:
    # The release under test has the same two cores.
    return Traffic(port, "smollm2-135m-instruct", QUESTION, pause=1)


def long_texts(clients: Traffic, after: float = 0) -> set[str]:
    return {answer.text for answer in clients.answers if answer.is_long and answer.began > after}


def next_long_texts(clients: Traffic) -> set[str]:
    """Wait for long answers that begin from now on."""
    now = time.monotonic()
    while not (found := long_texts(clients, after=now)):
        clients.wait_after(now)
        assert time.monotonic() < now + 120, clients.failures
        time.sleep(0.1)
    return found


def test_a_changed_rule_is_released_and_taken_back_without_a_failed_request(images: Path, site: Site) -> None:
    folder, port = site.folder, site.ports[0]
    golden = images / "golden.yaml"
    golden.unlink(missing_ok=True)
    ralbuild(images, "probe", "--url", f"http://127.0.0.1:{port}", "--record", golden, "--prompt", QUESTION)
    with traffic(port) as clients:
        # The recorded answer is the old rule's: with it as gate, the changed rule may not pass.
        said = ralbuild(images, "release", "up", "oci:two", "--site", folder, "--probes", golden, code=8)
        assert "golden golden-1" in said
        assert not any(CHANGED in text for text in long_texts(clients))
        assert ralbuild(images, "release", "up", "oci:two", "--site", folder) == "green serves"
        assert all(CHANGED in text for text in next_long_texts(clients))
        assert ralbuild(images, "release", "rollback", "--site", folder, "--probes", golden) == "blue serves"
        assert not any(CHANGED in text for text in next_long_texts(clients))
    assert clients.failures == []
    status = status_of(images, folder)
    assert status["active"] == status["proxy"]["sends_to"] == "blue"
    assert [row["status"] for row in status["colours"]] == ["running", "exited"]
    print(f"{len(clients.answers)} requests, 0 failed, the longest took {clients.longest:.1f} s")


def broken(image: str, change: str) -> str:
    """Return the name of an image that differs from ``image`` in one line of its config."""
    engine = docker.from_env()
    box = engine.containers.create(image)
    kind = change.split()[0].lower()
    box.commit(BROKEN, kind, changes=[change])
    box.remove()
    return f"docker:{BROKEN}:{kind}"


def test_the_image_is_what_a_tool_of_others_wants_of_it(site: Site, tmp_path: Path) -> None:
    (box,) = running(site.folder)
    config = Path(__file__).with_name("structure.yaml")
    tool = Path(sys.executable).with_name("container-structure-test")

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [tool, "test", "--image", box.image.id, "--config", path]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = run(config)
    assert done.returncode == 0, done.stdout
    planted = tmp_path / "structure.yaml"
    plain = config.read_text()
    planted.write_text(
        plain.replace('user: "65532:65532"', "user: root").replace(
            "shouldExist: false", "shouldExist: true", 1
        )
    )
    failed = run(planted)
    assert failed.returncode != 0
    assert re.search(r"Failures: +2\b", failed.stdout)


def test_each_kind_of_bad_image_is_refused_with_no_traffic_moved(images: Path, site: Site) -> None:
    folder, port = site.folder, site.ports[0]
    (old,) = running(folder)
    hole = images / "hole.yaml"
    guardrail = f'{{name: company, prompt: "{QUESTION}", max_tokens: 24, absent: ["<b>company</b>"]}}'
    hole.write_text(f"guardrails: [{guardrail}]\n")
    zero = "sha256:" + "0" * 64
    cases: list[tuple[str, tuple[object, ...], str]] = [
        ("oci:two", ("--probes", hole), "guardrail company: the answer holds absent[0]"),
        ("oci:two", ("--ready-timeout", 1), "not ready after 1 s"),
        (broken(old.image.id, f"ENV RAL_BUNDLE_SHA256={zero}"), (), "ended with status 80"),
        (broken(old.image.id, f"LABEL io.ralbuild.bundle={zero}"), (), f"needs {zero}"),
        ("oci:one", ("--key", "other.pub"), "signature"),
        ("oci:damaged", ("--key", "sign.pub"), "nothing was changed"),
    ]
    with traffic(port) as clients:
        for image, options, needle in cases:
            said = ralbuild(images, "release", "up", image, "--site", folder, *options, code=8)
            assert needle in said, (image, options)
            assert [box.id for box in containers(folder)] == [old.id]
            status = status_of(images, folder)
            assert (status["active"], status["proxy"]["sends_to"], status["interrupted"]) == (
                "blue",
                "blue",
                None,
            )
        clients.wait_after(time.monotonic())
    assert clients.failures == []
    assert not any(CHANGED in text for text in long_texts(clients))


def test_a_colour_that_is_killed_after_the_switch_is_rolled_back(images: Path, site: Site) -> None:
    folder, port = site.folder, site.ports[0]
    init(images, folder, site.ports, watch=30)  # it is killed while it is watched
    command = [*RALBUILD, "release", "up", "oci:two", "--site", str(folder)]
    with traffic(port) as clients:
        release = subprocess.Popen(
            command, cwd=images, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while "active be_green" not in (folder / "state.map").read_text():
            assert release.poll() is None
            time.sleep(0.02)
        clients.wait_after(time.monotonic())
        (new,) = [box for box in containers(folder) if box.labels["io.ralbuild.release.colour"] == "green"]
        new.kill()
        _, said = release.communicate(timeout=120)
        assert release.returncode == 9, said
        assert not any(CHANGED in text for text in next_long_texts(clients))
    # At most what was in flight, one request of each client, while the old colour is there to take over.
    assert len(clients.failures) <= 4, clients.failures
    # It is seen by its state or by the answers that it owes, whichever is looked at first.
    assert re.search("ended with status|answers failed", said)
    assert status_of(images, folder)["active"] == "blue"
    assert len(containers(folder)) == 1


def test_rules_of_the_serving_side_are_published_to_what_serves(images: Path, site: Site) -> None:
    folder, port = site.folder, site.ports[0]
    before = traffic(port).ask()
    word = max(re.findall("[A-Za-z]+", re.sub("<[^>]*>", "", before)), key=len)
    write_rules(images, 2, f"redact: [{{text: {word}, with: '***'}}]\n")
    said = ralbuild(images, "release", "rules", "rules.json", "--site", folder)
    assert "1 redact; serial 2" in said
    assert traffic(port).ask() == re.sub(f"(?i){word}", "***", before)
    write_rules(images, 1, "")
    assert "serial 1, 2 is in force" in ralbuild(
        images, "release", "rules", "rules.json", "--site", folder, code=2
    )
    write_rules(images, 3, "")
    ralbuild(images, "release", "rules", "rules.json", "--site", folder)
    assert traffic(port).ask() == before


def test_in_place_two_switches_and_a_rollback_fail_no_request(images: Path, site: Site) -> None:
    """The second image comes from Debian's registry by its digest, with its signature checked there."""
    folder, port = site.folder, site.ports[0]
    options = ("--site", folder, "--mode", "in-place")
    with registry(images, "registry") as host, traffic(port) as clients:
        digest = ralbuild(images, "push", "oci:two", f"registry:{host}/team/m", "--quiet")
        two = (f"{host}/team/m@{digest}", "--key")
        refused = ralbuild(images, "release", "up", *two, "other.pub", *options, code=8)
        assert "signature: none by a key that was given" in refused
        for image, colour in (((*two, "sign.pub"), "green"), (("oci:one",), "blue")):
            assert ralbuild(images, "release", "up", *image, *options) == f"{colour} serves"
            clients.wait_after(time.monotonic())
            assert len(running(folder)) == 1
        assert ralbuild(images, "release", "rollback", *options) == "green serves"
        assert all(CHANGED in text for text in next_long_texts(clients))
        clients.wait_for(REQUESTS)
    assert clients.failures == []
    print(f"{len(clients.answers)} requests, 0 failed, the longest wait was {clients.longest:.1f} s")
