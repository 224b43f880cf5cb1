"""Publishing rules of the serving side to a site: what serves has them in force, or the file before is back."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supply_cases import make_key, ralbuild

from ralbuild.errors import GateError, UsageError
from ralbuild.release import runtime_rules
from ralbuild.release.runtime_rules import container_settings, publish, why_not_in_force
from ralbuild.release.site import Deployed, Site, State


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signed files ``1.json`` to ``3.json`` by serial, and ``forged.json`` by another key."""
    folder = tmp_path_factory.mktemp("rules")
    for name in ("sign", "other"):
        make_key(folder, name)
    for name, serial, key in (("1", 1, "sign"), ("2", 2, "sign"), ("3", 3, "sign"), ("forged", 9, "other")):
        (folder / "r.yaml").write_text(f'version: "0.3"\nserial: {serial}\nstop: [secret]\n')
        done = ralbuild(
            "rules", "compile", "r.yaml", "--key", f"{key}.key", "--out", f"{name}.json", cwd=folder
        )
        assert done.code == 0, done.err
    return folder


class Server(http.server.ThreadingHTTPServer):
    """Says of its rules what it is told to say."""

    said: Any = None


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = self.server.said  # type: ignore[attr-defined]
            data = json.dumps({"runtime_rules": said() if callable(said) else said}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.05,))
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def site(tmp_path: Path, files: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with the first file, whose blue colour is ``server``."""
    monkeypatch.setattr(runtime_rules, "SEEN_SECONDS", 0.5)
    done = ralbuild(
        "release", "init", "--site", tmp_path / "s", "--no-start", "--ports", f"{server.server_address[1]},2",
        "--runtime-rules", "1.json", "--rules-key", "sign.pub", cwd=files,
    )  # fmt: skip
    assert done.code == 0, done.err
    site = Site.open(tmp_path / "s")
    site.save(State("blue", {"blue": Deployed("x", "sha256:x", "sha256:y", "box", 1)}))
    return site


def in_place(site: Site) -> bytes:
    return (site.folder / "rules" / "rules.json").read_bytes()


def test_the_file_is_in_force_when_the_command_returns(site: Site, files: Path, server: Server) -> None:
    polls = []

    def said() -> dict[str, Any]:
        """As a server that has not looked yet, and has another refusal to report."""
        polls.append(1)
        found = runtime_rules.open_signed(files / "2.json", runtime_rules.load_public_key(files / "sign.pub"))
        return {"sha256": found.sha256 if len(polls) > 1 else "old", "refused": "an earlier one"}

    server.said = said
    assert publish(site, files / "2.json").rules.serial == 2
    assert in_place(site) == (files / "2.json").read_bytes()
    assert (site.folder / "rules" / "rules.json").stat().st_mode & 0o777 == 0o644
    env, folders = container_settings(site)
    assert folders == {"/run/ral/rules": str(site.folder / "rules")}
    names = {"RAL_RUNTIME_RULES", "RAL_RUNTIME_RULES_KEY"}
    # A container that starts again takes no older file than when it was made.
    assert env == {name: env[name] for name in names} | {"RAL_RUNTIME_RULES_LEAST": "2"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"sha256": "old", "refused": "is not signed"}, "is not signed"),
        ({"sha256": "old", "refused": None}, "not in force"),
        (None, "started without rules"),
        ("nonsense", "started without rules"),
    ],
)
def test_a_file_that_does_not_come_into_force_is_taken_back(
    site: Site, files: Path, server: Server, said: Any, reason: str
) -> None:
    server.said = said
    with pytest.raises(GateError, match=reason):
        publish(site, files / "2.json")
    assert in_place(site) == (files / "1.json").read_bytes()


def test_the_gate_asks_whether_the_rules_are_in_force(site: Site, files: Path, server: Server) -> None:
    digest = runtime_rules.open_signed(
        files / "1.json", runtime_rules.load_public_key(files / "sign.pub")
    ).sha256
    server.said = {"sha256": digest, "refused": None}
    assert why_not_in_force(site, "blue") == ""
    server.said = None  # an image, or a container, from before there were such rules
    assert "without rules" in why_not_in_force(site, "blue")
    server.said = {"sha256": "old", "refused": "is not signed"}
    assert "is not signed" in why_not_in_force(site, "blue")
    plain = Site(site.folder, replace(site.settings, runtime_rules=False))
    assert why_not_in_force(plain, "blue") == ""


def test_a_server_that_does_not_answer_keeps_its_file(site: Site, files: Path) -> None:
    broken = Site(site.folder, replace(site.settings, blue=1))
    with pytest.raises(GateError):
        publish(broken, files / "2.json")
    assert in_place(site) == (files / "1.json").read_bytes()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda files: files / "forged.json", "is not signed by the key"),
        (lambda files: files / "r.yaml", "not JSON|envelope"),
        (lambda files: files / "none.json", "cannot be read"),
    ],
)
def test_what_is_no_signed_file_is_refused_before_anything_changes(
    site: Site, files: Path, make: Callable[[Path], Path], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        publish(site, make(files))
    assert in_place(site) == (files / "1.json").read_bytes()


def test_an_older_file_is_refused_and_the_same_one_may_come_again(site: Site, files: Path) -> None:
    site.save(State("", {}))
    publish(site, files / "3.json")
    publish(site, files / "3.json")
    with pytest.raises(UsageError, match="serial 2, 3 is in force"):
        publish(site, files / "2.json")
    assert in_place(site) == (files / "3.json").read_bytes()


def test_a_site_without_rules_says_how_to_get_them(tmp_path: Path, files: Path) -> None:
    assert ralbuild("release", "init", "--site", tmp_path / "s", "--no-start", cwd=files).code == 0
    site = Site.open(tmp_path / "s")
    assert container_settings(site) == ({}, {})
    with pytest.raises(UsageError, match="no rules of the serving side"):
        publish(site, files / "1.json")
    done = ralbuild("release", "init", "--site", tmp_path / "t", "--runtime-rules", "1.json", cwd=files)
    assert done.code == 2
    assert "--rules-key" in done.err
    forged = ("--runtime-rules", "forged.json", "--rules-key", "sign.pub")
    assert ralbuild("release", "init", "--site", tmp_path / "t", *forged, cwd=files).code == 2
    assert not (tmp_path / "t").exists()
