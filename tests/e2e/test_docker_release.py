"""A release on a real docker engine with the real model: up, a changed rule, a bad image, back again."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from cli_support import ROOT
from release_support import free_ports
from supply_cases import make_key

from benchmarks.traffic import Traffic

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ralbuild"
MODEL = CACHE / "models" / "smollm2-135m-instruct"
RALBUILD = [sys.executable, "-m", "ralbuild.cli.main"]
CONFIG = ROOT / "tests" / "e2e" / "guardrails.yaml"
QUESTION = "What does a compliance audit check? Answer in one sentence."

pytestmark = [pytest.mark.real_model, pytest.mark.docker]


def ralbuild(folder: Path, *arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [*RALBUILD, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout.strip() if code == 0 else done.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images that differ in one bold term, in one layout, so that layers are shared."""
    folder = tmp_path_factory.mktemp("images")
    changed = folder / "changed.yaml"
    changed.write_text(CONFIG.read_text().replace('"audit"]', '"audit", "company"]'))
    for name, config in (("one", CONFIG), ("two", changed)):
        ralbuild(
            folder,
            "image",
            "--model",
            MODEL,
            "--config",
            config,
            "--output",
            f"oci:{name}",
            "--tag",
            "m:1",
            "--quiet",
        )
    for name in ("sign", "other"):
        make_key(folder, name)
    ralbuild(folder, "sign", "oci:one", "--key", "sign.key")
    shutil.copytree(folder / "one", folder / "damaged", copy_function=os.link)
    manifest = json.loads((folder / "one" / "index.json").read_text())["manifests"][0]["digest"]
    blob = folder / "damaged" / "blobs" / manifest.replace(":", "/")
    config = json.loads(blob.read_text())["config"]["digest"]
    flip(folder / "damaged" / "blobs" / config.replace(":", "/"))
    return folder


def flip(path: Path) -> None:
    """Change one bit; other names of the file keep what it was."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


def make_site(images: Path, folder: Path, *options: object) -> int:
    """Set a site up; return the port that clients use."""
    listen, blue, green = free_ports(3)
    ralbuild(
        images, "release", "init", "--site", folder, "--listen", f"127.0.0.1:{listen}",
        "--ports", f"{blue},{green}", "--drain", 60, *options,
    )  # fmt: skip
    return listen


def end_site(folder: Path) -> None:
    pid = int((folder / "haproxy.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    for box in containers(folder):
        box.remove(force=True)


def containers(folder: Path) -> list[Any]:
    filters = {"label": f"io.ralbuild.release.site={folder}"}
    return docker.from_env().containers.list(all=True, filters=filters)


@pytest.fixture
def site(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("s")
    yield folder, make_site(images, folder, "--watch", 2)
    end_site(folder)


@pytest.fixture(scope="module")
def serving(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A site with rules of the serving side on which the first image serves; no test here may change that."""
    folder = tmp_path_factory.mktemp("serving")
    write_rules(images, 1, "")
    rules = ("--runtime-rules", "rules.json", "--rules-key", "sign.pub")
    port = make_site(images, folder, "--watch", 30, *rules)
    ralbuild(images, "release", "up", "oci:one", "--site", folder)
    yield folder, port
    end_site(folder)


def write_rules(images: Path, serial: int, text: str) -> None:
    (images / "runtime-rules.yaml").write_text(f'version: "0.3"\nserial: {serial}\n{text}')
    ralbuild(images, "rules", "compile", "runtime-rules.yaml", "--key", "sign.key", "--out", "rules.json")


def status_of(images: Path, folder: Path) -> dict[str, Any]:
    return json.loads(ralbuild(images, "release", "status", "--site", folder, "--json"))


def traffic(port: int) -> Traffic:
    return Traffic(port, "smollm2-135m-instruct", QUESTION)


def long_texts(clients: Traffic, after: float = 0) -> set[str]:
    return {answer.text for answer in clients.answers if answer.is_long and answer.began > after}


def test_a_changed_rule_is_released_and_taken_back_without_a_failed_request(images: Path, site) -> None:
    folder, port = site
    plan = json.loads(ralbuild(images, "release", "up", "oci:one", "--site", folder, "--dry-run", "--json"))
    assert (plan["colour"], plan["old"], plan["mode"]) == ("blue", "", "blue-green")
    assert ralbuild(images, "release", "up", "oci:one", "--site", folder, "--quiet") == "blue serves"
    golden = images / "golden.yaml"
    golden.unlink(missing_ok=True)
    ralbuild(images, "probe", "--url", f"http://127.0.0.1:{port}", "--record", golden, "--prompt", QUESTION)
    with traffic(port) as clients:
        # The recorded answer is the old rule's: with it as gate, the changed rule may not pass.
        said = ralbuild(images, "release", "up", "oci:two", "--site", folder, "--probes", golden, code=8)
        assert "golden golden-1" in said
        assert ralbuild(images, "release", "up", "oci:two", "--site", folder) == "green serves"
        switched = time.monotonic()
        clients.wait_after(switched)
        assert ralbuild(images, "release", "rollback", "--site", folder, "--probes", golden) == "blue serves"
        back = time.monotonic()
        clients.wait_after(back)
    assert clients.failures == []
    (old, new) = sorted(long_texts(clients), key=lambda text: "<b>company</b>" in text)
    assert "<b>company</b>" in new
    assert long_texts(clients, after=back) <= {old}
    status = status_of(images, folder)
    assert status["active"] == status["proxy"]["sends_to"] == "blue"
    assert [row["status"] for row in status["colours"]] == ["running", "exited"]
    print(f"{len(clients.answers)} requests, 0 failed, the longest took {clients.longest:.1f} s")


def test_in_place_two_switches_and_a_rollback_fail_no_request(images: Path, site) -> None:
    folder, port = site
    in_place = ("--site", folder, "--mode", "in-place")
    ralbuild(images, "release", "up", "oci:one", "--site", folder)
    with traffic(port) as clients:
        for image, colour in (("oci:two", "green"), ("oci:one", "blue")):
            assert ralbuild(images, "release", "up", image, *in_place) == f"{colour} serves"
            clients.wait_after(time.monotonic())
            assert [box.status for box in containers(folder)].count("running") == 1
        assert ralbuild(images, "release", "rollback", *in_place) == "green serves"
        back = time.monotonic()
        clients.wait_after(back)
    assert clients.failures == []
    assert all("<b>company</b>" in text for text in long_texts(clients, after=back))
    print(f"{len(clients.answers)} requests, 0 failed, the longest wait was {clients.longest:.1f} s")


def broken(image: str, change: str) -> str:
    """Return the name of an image that differs from ``image`` in one line of its config."""
    engine = docker.from_env()
    box = engine.containers.create(image)
    name = f"broken-{change.split()[0].lower()}"
    box.commit(name, "1", changes=[change])
    box.remove()
    return f"docker:{name}:1"


def test_each_kind_of_bad_image_is_refused_with_no_traffic_moved(images: Path, serving) -> None:
    folder, port = serving
    (old,) = containers(folder)
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
    assert not any("<b>company</b>" in text for text in long_texts(clients))


def test_a_colour_that_is_killed_after_the_switch_is_rolled_back(images: Path, serving) -> None:
    folder, port = serving
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
        back = time.monotonic()
        assert release.returncode == 9, said
        clients.wait_after(back)
    # At most what was in flight, one request of each client, while the old colour is there to take over.
    assert len(clients.failures) <= 4, clients.failures
    assert "ended with status" in said
    assert all("<b>company</b>" not in text for text in long_texts(clients, after=back))
    assert status_of(images, folder)["active"] == "blue"
    assert len(containers(folder)) == 1


def test_rules_of_the_serving_side_are_published_to_what_serves(images: Path, serving) -> None:
    folder, port = serving
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
