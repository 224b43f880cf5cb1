"""Releases with the real HAProxy and nginx; the servers are stand-ins that run as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from release_support import Load, World, world

from ralbuild.errors import GateError, HostError, RolledBackError, UsageError
from ralbuild.release.journal import Journal
from ralbuild.release.machine import BLUE_GREEN, IN_PLACE
from ralbuild.release.planning import Wishes, plan_rollback, plan_up

PROBES = """
golden:
  - {name: hello, prompt: "Say hello.", max_tokens: 8, text: "You said: Say hello."}
guardrails:
  - {name: project, prompt: "Tell me of Bluebird", absent: ["bluebird"], present: ["[project]"]}
latency: {first_text: 0.8}
"""


@pytest.fixture
def probes(tmp_path: Path) -> Path:
    path = tmp_path / "probes.yaml"
    path.write_text(PROBES)
    return path


def assert_moved_at_once(load: Load, switched: tuple[float, float], old: str, new: str) -> None:
    """No request that began after the switch was answered by the old colour, nor before it by the new one."""
    before, after = switched
    assert {colour for began, _, colour in load.answers if began > after} == {new}
    assert {colour for _, ended, colour in load.answers if ended < before} == {old}


def test_two_switches_and_a_cold_rollback_lose_no_request(tmp_path: Path, probes: Path) -> None:
    with world(tmp_path) as w:
        w.up(w.host.add_image("a"), probes=probes)
        with Load(w.port) as load:
            time.sleep(0.5)
            w.up(w.host.add_image("b"), probes=probes)
            assert len(w.host.running()) == 1
            w.up(w.host.add_image("c"), probes=probes)
            plan = plan_rollback(w.site, w.host, w.proxy, Wishes(probes=probes))
            assert plan.new.bundle == "sha256:b"
            release = w.release(Journal.begin(w.site.folder, plan))
            release.run()
            load.wait_for(500)
        assert load.failures == []
        assert w.site.state.active == "green"
        assert w.site.state.colours["green"].bundle == "sha256:b"
        print(f"{len(load.answers)} requests over three switches, 0 failed")


def test_requests_that_begin_after_the_switch_reach_the_new_colour_only(tmp_path: Path) -> None:
    with world(tmp_path, watch_seconds=2) as w:
        w.up(w.host.add_image("a"))
        with Load(w.port) as load:
            time.sleep(0.5)
            release = w.begin(w.host.add_image("b"))
            times = []

            class Timed:
                def __getattr__(self, name: str) -> object:
                    return getattr(w.proxy, name)

                def activate(self, colour: str) -> None:
                    begin = time.monotonic()
                    w.proxy.activate(colour)
                    times.append((begin, time.monotonic()))

            object.__setattr__(release, "proxy", Timed())
            release.run()
        assert load.failures == []
        assert_moved_at_once(load, times[0], "blue", "green")


def test_in_place_loses_no_request_and_never_runs_two_servers(tmp_path: Path, probes: Path) -> None:
    with world(tmp_path, on_crash="503") as w:
        w.up(w.host.add_image("a"), probes=probes)
        with Load(w.port) as load:
            time.sleep(0.3)
            release = w.begin(w.host.add_image("b"), mode="in-place", probes=probes)
            most = 0
            start = w.host.start

            def counted(launch: object) -> None:
                nonlocal most
                most = max(most, len(w.host.running()))
                start(launch)

            w.host.start = counted  # type: ignore[method-assign]
            release.run()
            time.sleep(0.3)
        assert load.failures == []
        assert most == 0
        assert w.site.state.active == "green"
        longest = max(ended - began for began, ended, _ in load.answers)
        print(f"{len(load.answers)} requests, the longest took {longest:.1f} s")


@pytest.mark.parametrize("mode", ["blue-green", "in-place"])
@pytest.mark.parametrize(
    ("fault", "needle"),
    [
        ("tokens", "golden hello: differs at character 4"),
        ("leak", "guardrail project: the answer holds absent[0]"),
        ("never-ready", "not ready after"),
        ("exits", "ended with status 81"),
        ("bundle", "runs the bundle sha256:other, needs sha256:b"),
        ("no-done", "without [DONE]"),
        ("slow", "needs 0.8 s"),
    ],
)
def test_a_bad_image_gets_no_traffic_and_leaves_no_container(
    tmp_path: Path, probes: Path, fault: str, needle: str, mode: str
) -> None:
    on_crash = "503" if mode == "in-place" else "old"
    with world(tmp_path, on_crash=on_crash) as w:
        w.up(w.host.add_image("a"), probes=probes)
        (old,) = w.host.running()
        with Load(w.port) as load, pytest.raises(GateError) as caught:
            w.up(w.host.add_image("b", FAULT=fault), mode=mode, probes=probes, ready_seconds=2)
        assert needle in str(caught.value)
        assert caught.value.exit_code == 8
        assert load.failures == []
        assert {colour for _, _, colour in load.answers} == {"blue"}
        assert w.host.running() == [old]
        assert list(w.site.state.colours) == ["blue"]
        assert w.proxy.active() == "blue"


def test_a_colour_that_dies_after_the_switch_is_rolled_back(tmp_path: Path) -> None:
    with world(tmp_path, watch_seconds=20) as w:
        w.up(w.host.add_image("a"))
        (old,) = w.host.running()
        release = w.begin(w.host.add_image("b"))
        activate = w.proxy.activate
        assert activate

        class Deadly:
            def __getattr__(self, name: str) -> object:
                return getattr(w.proxy, name)

            def hold(self, held: bool) -> None:
                w.proxy.hold(held)
                if w.proxy.active() == "green":
                    w.host.kill(release.plan.new.container)

        object.__setattr__(release, "proxy", Deadly())
        with pytest.raises(RolledBackError, match="ended with status") as caught:
            release.run()
        assert caught.value.exit_code == 9
        assert w.proxy.active() == w.site.state.active == "blue"
        assert w.host.running() == [old]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from release_support import ProcessHost, World
from ralbuild.release.journal import Journal
from ralbuild.release.site import Site
w = World(Site.open(Path({site!r})), ProcessHost(Path({host!r})))
write = Journal.write
def deadly(self, step, state, note=""):
    write(self, step, state, note)
    if (step, state) == ({step!r}, {state!r}):
        os.kill(os.getpid(), signal.SIGKILL)
Journal.write = deadly
w.begin(w.host.add_image("b"), mode={mode!r}).run()
"""


def killed_at(w: World, mode: str, step: str, state: str) -> None:
    tests = str(Path(__file__).parent)
    code = KILLED.format(
        tests=tests, site=str(w.site.folder), host=str(w.host.folder), step=step, state=state, mode=mode
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


class _KilledError(BaseException):
    """Ends a release as SIGKILL would: nothing of it runs afterwards."""


def stopped_at(w: World, mode: str, step: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Journal.write

    def deadly(self: Journal, now: str, what: str, note: str = "") -> None:
        write(self, now, what, note)
        if (now, what) == (step, state):
            raise _KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", deadly)
        with pytest.raises(_KilledError):
            w.begin(w.host.add_image("b"), mode=mode).run()


@pytest.mark.parametrize(("mode", "steps"), [("blue-green", BLUE_GREEN), ("in-place", IN_PLACE)])
def test_a_release_killed_after_any_step_resumes_and_undoes_without_a_lost_request(
    tmp_path: Path, mode: str, steps: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_crash = "503" if mode == "in-place" else "old"
    really = {"park", "start", "switch"}
    with world(tmp_path, on_crash=on_crash, watch_seconds=0, park_seconds=60) as w:
        w.up(w.host.add_image("a", LOAD_SECONDS="0"))
        with Load(w.port) as load:
            for number, step in enumerate(steps):
                for state, way in (("begin", "undo"), ("done", ("resume", "undo")[number % 2])):
                    old = w.site.state.active
                    if step in really and way == "resume":
                        killed_at(w, mode, step, state)
                    else:
                        stopped_at(w, mode, step, state, monkeypatch)
                    with pytest.raises(UsageError, match="interrupted"):
                        w.begin(w.host.add_image("b"), mode=mode)
                    release = w.interrupted()
                    release.run() if way == "resume" else release.undo()
                    expected = release.plan.colour if way == "resume" else old
                    assert (w.site.state.active, w.proxy.active()) == (expected, expected), (step, state, way)
                    assert Journal.read(w.site.folder) is None
        assert load.failures == []
        print(f"{mode}: {len(load.answers)} requests over {2 * len(steps)} killed releases, 0 failed")


def test_a_proxy_that_restarts_or_reloads_keeps_the_colour(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.up(w.host.add_image("a"))
        w.up(w.host.add_image("b"))
        assert w.proxy.active() == "green"
        os.kill(w.proxy.pid(), signal.SIGUSR2)
        time.sleep(1)
        with Load(w.port) as load:
            time.sleep(0.5)
        assert {colour for _, _, colour in load.answers} == {"green"}
        w.proxy.stop()
        deadline = time.monotonic() + 10
        while w.proxy.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        w.proxy.start()
        with Load(w.port) as load:
            time.sleep(0.5)
        assert {colour for _, _, colour in load.answers} == {"green"}
        assert load.failures == []


def test_nginx_switches_without_a_lost_stream_and_refuses_to_hold(tmp_path: Path) -> None:
    with world(tmp_path, proxy="nginx") as w:
        w.up(w.host.add_image("a"))
        with Load(w.port) as load:
            time.sleep(0.5)
            w.up(w.host.add_image("b"))
            with pytest.raises(UsageError, match="cannot hold"):
                plan_up(w.site, w.host, w.proxy, "x", w.host.add_image("c"), Wishes(mode="in-place"))
            time.sleep(0.5)
        # A reload closes idle keep-alive connections, which a client may find closed: not a lost request.
        closed = ("RemoteDisconnected", "ConnectionReset", "BrokenPipe")
        lost = [text for text in load.failures if not any(word in text for word in closed)]
        assert lost == []
        assert load.answers[-1][2] == "green"


def test_the_first_release_that_fails_leaves_nothing(tmp_path: Path, probes: Path) -> None:
    with world(tmp_path) as w:
        with pytest.raises(GateError):
            w.up(w.host.add_image("a", FAULT="leak"), probes=probes)
        assert w.host.running() == []
        assert w.site.state.colours == {}
        assert w.proxy.active() == ""


def test_without_a_release_the_proxy_answers_as_openai_would(tmp_path: Path) -> None:
    import urllib.error
    import urllib.request

    with world(tmp_path) as w, pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{w.port}/v1/models")
    assert caught.value.code == 503
    assert caught.value.headers["retry-after"] == "5"
    assert json.loads(caught.value.read())["error"]["code"] == "no_release"


def test_an_image_that_cannot_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        found = w.host.add_image("a")
        found.labels["io.ralbuild.weights.memory"] = str(1 << 50)
        with pytest.raises(HostError, match="MiB of RAM"):
            w.begin(found)
        assert w.host.running() == []
        assert Journal.read(w.site.folder) is None


def test_an_image_that_fits_only_alone_is_swapped_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path) as w:
        w.up(w.host.add_image("a"))
        monkeypatch.setattr(
            "ralbuild.release.planning.free_room", lambda _: type("R", (), {"free": 0, "kind": "RAM"})
        )
        plan = plan_up(w.site, w.host, w.proxy, "x", w.host.add_image("b"), Wishes())
        assert plan.mode == "in-place"
        with pytest.raises(HostError, match="are free"):
            plan_up(w.site, w.host, w.proxy, "x", w.host.add_image("b"), Wishes(mode="blue-green"))


def test_two_releases_at_once_the_second_is_refused(tmp_path: Path) -> None:
    with (
        world(tmp_path) as w,
        w.site.locked(),
        pytest.raises(UsageError, match="another release"),
        w.site.locked(),
    ):
        pass


def test_a_journal_whose_last_line_was_cut_is_read(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        release = w.begin(w.host.add_image("a"))
        release.journal.write("start", "done")
        path = w.site.folder / "journal.jsonl"
        path.write_bytes(path.read_bytes() + b'{"step": "rea')
        journal = Journal.read(w.site.folder)
        assert journal is not None
        assert journal.done == ["start"]
        path.write_bytes(b"[]\n")
        with pytest.raises(UsageError, match="damaged"):
            Journal.read(w.site.folder)


def test_haproxy_refuses_a_damaged_configuration_with_its_words(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        path = w.site.folder / "haproxy.cfg"
        path.write_text(path.read_text().replace("option abortonclose", "option abortonklose"))
        with pytest.raises(HostError, match="abortonklose"):
            w.proxy.check()
