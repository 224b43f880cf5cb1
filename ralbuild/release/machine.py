"""The release itself: named steps in a fixed order, each of which may run twice, and the way back.

A release that is killed between two steps goes on (`resume`) or goes back (`undo`) from its journal.
The switch is one command to the proxy, after what it does was written down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from ralbuild.config.probes import ProbeSuite, load_probes
from ralbuild.engine import Launch
from ralbuild.errors import GateError, HostError, RalError, RolledBackError
from ralbuild.release.containers import COLOUR_LABEL, SITE_LABEL, ContainerHost
from ralbuild.release.journal import Journal, Plan
from ralbuild.release.preflight import free_room
from ralbuild.release.probe import KINDS, Prober
from ralbuild.release.proxy import Proxy
from ralbuild.release.runtime_rules import container_settings, why_not_in_force
from ralbuild.release.service_client import NoAnswerError, ServiceClient
from ralbuild.release.site import Deployed, Site
from ralbuild.report import Report

BLUE_GREEN = ("start", "ready", "gate", "warm", "switch", "watch", "drain", "retire")
IN_PLACE = ("park", "empty", "free", "start", "ready", "gate", "warm", "switch", "watch", "retire")
WARM_REQUESTS = 3
POLL_SECONDS = 0.2
FREE_SECONDS = 60.0
SEEN_SECONDS = 10.0
SETTLE_SECONDS = 0.3
"""A request that the proxy let through just before it was told otherwise is at its server by then."""


class _StepError(Exception):
    """A step came to nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Release:
    """One release under way; `run` ends with the new image serving, or with the old one and an error."""

    site: Site
    journal: Journal
    host: ContainerHost
    proxy: Proxy
    report: Report

    @property
    def plan(self) -> Plan:
        """What was decided before it began."""
        return self.journal.plan

    def run(self) -> None:
        """Do the steps that are not done yet.

        Raises:
            GateError: the new image was not good enough; the old one serves.
            RolledBackError: it failed after the switch; the old one serves again.
        """
        steps = BLUE_GREEN if self.plan.mode == "blue-green" else IN_PLACE
        for step in steps:
            if step in self.journal.done:
                continue
            self.journal.write(step, "begin")
            try:
                with self.report.stage(step) as stage:
                    stage.summary = getattr(self, f"_{step}")()
            except (_StepError, NoAnswerError, RalError) as error:
                self._fail(step, str(error))
            self.journal.write(step, "done")
        self.journal.close()

    def undo(self) -> str:
        """Go back to the old image, whatever was done; return what serves."""
        self._restore()
        self.journal.write("undo", "done")
        self.journal.close()
        return self.plan.old or "nothing"

    def _fail(self, step: str, reason: str) -> None:
        self.journal.write(step, "failed", reason)
        switched = "switch" in self.journal.done
        self.report.note(f"{step} failed: {reason}; going back")
        self._restore()
        self.journal.close()
        place = f"release: {step}"
        serving = f"{self.plan.old} still serves" if self.plan.old else "nothing serves, as before"
        if switched:
            raise RolledBackError(reason, place=place, hint=f"rolled back: {serving}") from None
        raise GateError(reason, place=place, hint=serving) from None

    # Forward

    def _park(self) -> str:
        self.proxy.hold(True)
        return "requests wait"

    def _empty(self) -> str:
        return f"{self._drain_colour(self.plan.old)}; {self._stop_old()}"

    def _free(self) -> str:
        """Wait until memory is really free: a container that has stopped may still hold some."""
        target = (self.host.find(self.plan.new.image) or {}).get("io.ralbuild.target", "cpu")
        deadline = time.monotonic() + FREE_SECONDS
        while (room := free_room(target)).free < self.plan.new.needs:
            if time.monotonic() > deadline:
                needs = self.plan.new.needs >> 20
                raise _StepError(f"{room.free >> 20} MiB of {room.kind} are free, the image needs {needs}")
            time.sleep(POLL_SECONDS)
        return f"{room.free >> 20} MiB of {room.kind} free"

    def _start(self) -> str:
        plan, settings = self.plan, self.site.settings
        status, _ = self.host.status(plan.new.container)
        if plan.action == "rollback" and status != "missing":
            if status != "running":
                self.host.start_again(plan.new.container)
            return f"{plan.new.container}, which was there already"
        if (before := self.site.state.colours.get(plan.colour)) is not None:
            self.host.remove(before.container)
        labels = self.host.find(plan.new.image) or {}
        env, folders = container_settings(self.site)
        self.host.start(
            Launch(
                plan.new.container,
                plan.new.image,
                settings.port(plan.colour),
                {SITE_LABEL: str(self.site.folder), COLOUR_LABEL: plan.colour},
                settings.drain_seconds,
                gpus=labels.get("io.ralbuild.target") == "cuda",
                env=env,
                folders=folders,
            )
        )
        self.site.save(self.site.state.with_colour(plan.colour, plan.new))
        return f"{plan.new.container} on port {settings.port(plan.colour)}"

    def _ready(self) -> str:
        return self._wait_ready(self.plan.colour, self.plan.new)

    def _gate(self) -> str:
        client = self._client(self.plan.colour)
        suite = load_probes(Path(self.plan.probes)) if self.plan.probes else ProbeSuite()
        count = 0
        for result in Prober(client, suite, self.plan.new.bundle).run(KINDS):
            self.report.step(f"{result.kind} {result.name}: {result.message}")
            if not result.ok:
                raise _StepError(f"{result.kind} {result.name}: {result.message}")
            count += 1
        if reason := why_not_in_force(self.site, self.plan.colour):
            raise _StepError(reason)
        return f"{count} probes passed"

    def _warm(self) -> str:
        prober = Prober(self._client(self.plan.colour), ProbeSuite())
        for _ in range(WARM_REQUESTS):
            for result in prober.run(("smoke",)):
                if not result.ok:
                    raise _StepError(f"{result.name}: {result.message}")
        return f"{WARM_REQUESTS} rounds"

    def _switch(self) -> str:
        plan = self.plan
        self._wait_seen(plan.colour)
        self.site.save(replace(self.site.state, active=plan.colour))
        self.proxy.activate(plan.colour)
        self.proxy.hold(False)
        self.host.keep(plan.new.container)
        return f"requests go to {plan.colour}"

    def _watch(self) -> str:
        """Look at the new colour for a while: alive, ready, and no more failed answers than a few."""
        client = self._client(self.plan.colour)
        failed_before, all_before = self.proxy.errors(self.plan.colour)
        deadline = time.monotonic() + self.site.settings.watch_seconds
        misses = 0
        while time.monotonic() < deadline:
            status, code = self.host.status(self.plan.new.container)
            if status != "running":
                raise _StepError(f"the new container has ended with status {code}")
            ready, said = client.ready()
            misses = 0 if ready else misses + 1
            if misses >= 3:
                raise _StepError(f"the new container is no longer ready: {said}")
            failed, total = self.proxy.errors(self.plan.colour)
            bad, seen = failed - failed_before, total - all_before
            if bad > 2 and bad > seen // 20:
                raise _StepError(f"{bad} of {seen} answers failed")
            time.sleep(POLL_SECONDS)
        return f"{self.site.settings.watch_seconds} s"

    def _drain(self) -> str:
        return self._drain_colour(self.plan.old)

    def _retire(self) -> str:
        if not self.plan.old or (self.plan.keep_warm and self.plan.mode == "blue-green"):
            return "kept warm" if self.plan.old else "nothing to retire"
        return self._stop_old()

    # Back

    def _restore(self) -> None:
        """Let the old image serve and take the new one away; may run twice, from any step.

        Raises:
            HostError: when the old image does not come back: nothing serves.
        """
        plan = self.plan
        old = self.site.state.colours.get(plan.old)
        if old is not None and self.host.status(old.container)[0] != "running":
            if plan.mode == "in-place":
                self.proxy.hold(True)
                self._drain_colour(plan.colour)
                self.host.stop(plan.new.container, self.site.settings.drain_seconds)
            try:
                self.host.start_again(old.container)
                self._wait_ready(plan.old, old)
                self._wait_seen(plan.old)
            except (_StepError, RalError) as error:
                hint = "mend the machine, then run `ralbuild release undo`: the journal is kept"
                raise HostError(
                    f"the old image does not start: {error}", place="release", hint=hint
                ) from None
        self.site.save(replace(self.site.state, active=plan.old))
        self.proxy.activate(plan.old)
        self.proxy.hold(False)
        self._drain_colour(plan.colour)
        if plan.action == "rollback":  # its image was there before
            self.host.stop(plan.new.container, self.site.settings.drain_seconds)
            return
        self.host.remove(plan.new.container)
        self.site.save(self.site.state.with_colour(plan.colour, None))

    # Both

    def _client(self, colour: str) -> ServiceClient:
        return ServiceClient("127.0.0.1", self.site.settings.port(colour), timeout=120.0)

    def _wait_ready(self, colour: str, deployed: Deployed) -> str:
        client = self._client(colour)
        began = time.monotonic()
        while True:
            status, code = self.host.status(deployed.container)
            if status != "running":
                said = self.host.logs(deployed.container).splitlines()[-1:]
                raise _StepError(f"the container has ended with status {code}: {''.join(said)[:200]}")
            ready, said_ready = client.ready()
            if ready:
                return f"after {time.monotonic() - began:.1f} s"
            if time.monotonic() - began > self.plan.ready_seconds:
                raise _StepError(f"not ready after {self.plan.ready_seconds} s: {said_ready}")
            time.sleep(POLL_SECONDS)

    def _wait_seen(self, colour: str) -> None:
        deadline = time.monotonic() + SEEN_SECONDS
        while not self.proxy.sees(colour):
            if time.monotonic() > deadline:
                raise _StepError(f"the proxy does not see that {colour} is up")
            time.sleep(POLL_SECONDS / 4)

    def _drain_colour(self, colour: str) -> str:
        if not colour:
            return "nothing to drain"
        client = self._client(colour)
        began = time.monotonic()
        deadline = began + self.site.settings.drain_seconds
        time.sleep(SETTLE_SECONDS)
        busy = self._busy(client, colour)
        while busy and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            busy = self._busy(client, colour)
        took = time.monotonic() - began
        return (
            f"{colour} idle after {took:.1f} s" if not busy else f"{busy} requests of {colour} are cut short"
        )

    def _busy(self, client: ServiceClient, colour: str) -> int:
        return max(self.proxy.sessions(colour), client.in_flight())

    def _stop_old(self) -> str:
        old = self.site.state.colours.get(self.plan.old)
        if old is None:
            return "no old container"
        self.host.stop(old.container, self.site.settings.drain_seconds + 30)
        return f"{old.container} stopped"
