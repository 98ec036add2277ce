"""A real agent in which every metric has a value, and its metrics as series of a promtool test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from portal_stub import PortalStub
from prometheus_client.parser import text_string_to_metric_families

from bridge.testing import EventSpec, Simulator
from bridge.testing.http_peer import HttpPeer

PREFIX = "scheduled_events_bridge_"
_VM = "vm_0"
_DAY_SECONDS = 86_400.0
_WAIT_SECONDS = 30.0
_RULE = '[[approval.rules]]\nname = "freeze"\nevent_types = ["Freeze"]\naction = "approve"\n'

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class Scrape:
    """One response of /metrics at the monotonic time *at*."""

    at: float
    values: dict[Key, float]
    counters: frozenset[str]

    def of(self, name: str, **labels: str) -> float | None:
        """Return the value of one series of the agent, or None without this series."""
        return self.values.get((PREFIX + name, tuple(sorted(labels.items()))))

    def sum(self, name: str) -> float:
        """Return the sum of every series of the agent called *name*."""
        return sum(value for (found, _), value in self.values.items() if found == PREFIX + name)


class BusyAgent:
    """The agent as a process, with a simulated Azure, a portal, and a webhook."""

    def __init__(self, directory: Path, env: Mapping[str, str], azure: Simulator, peer: HttpPeer) -> None:
        self._directory, self._azure, self.peer = directory, azure, peer
        self._env = {**env, "STATE_DIRECTORY": str(directory / "state")}
        self._config, self._log = directory / "config.toml", directory / "err.log"

    def configure(self, name: str, text: str = "") -> None:
        """Write the configuration with the sink *name* and the tables *text*."""
        self._config.write_text(
            f'[imds]\nendpoint = "{self._azure.endpoints[_VM]}"\npoll_interval_seconds = 0.2\n'
            f'[status]\nlisten = "127.0.0.1:0"\n[[sinks]]\ntype = "webhook"\nname = "{name}"\n'
            f'url = "http://{self.peer.address.authority}/hook"\n{text}\n'
        )

    def start(self) -> None:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self._command("run"), stdout=subprocess.DEVNULL, stderr=log, env=self._env, cwd=self._directory
            )
        self._wait(lambda: '"listen":' in self._log.read_text())
        line = next(line for line in self._log.read_text().splitlines() if '"listen":' in line)
        self._url = f"http://{json.loads(line)['listen']}/metrics"

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def call(self, *arguments: str) -> None:
        """Run another command."""
        command = self._command(*arguments)
        subprocess.run(command, check=True, capture_output=True, env=self._env, timeout=_WAIT_SECONDS)

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "bridge", *arguments, "--config", str(self._config)]

    def announce(self, event_type: str) -> None:
        self._azure.world.add_event(EventSpec(event_type=event_type, resources=(_VM,), notice_seconds=_DAY_SECONDS))

    def scrape(self) -> Scrape:
        with urllib.request.urlopen(self._url, timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [(family, sample) for family in families for sample in family.samples]
        return Scrape(
            at=time.monotonic(),
            values={(each.name, tuple(sorted(each.labels.items()))): float(each.value) for _, each in samples},
            counters=frozenset(each.name for family, each in samples if family.type in ("counter", "histogram")),
        )

    def wait_for(self, is_so: Callable[[Scrape], object]) -> None:
        """Wait until *is_so* is true for a scrape."""
        self._wait(lambda: is_so(self.scrape()))

    def _wait(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not is_so():
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)


def busy_scrapes(directory: Path, env: Mapping[str, str]) -> tuple[Scrape, Scrape]:
    """Return two scrapes of an agent that delivers, fails, approves, and keeps records of a sink that was removed."""
    with PortalStub(directory / "portal") as portal, _running(directory, env) as agent:
        agent.configure("sre", _RULE + portal.toml(wait_seconds=1))
        agent.reload()
        agent.wait_for(lambda scrape: scrape.of("sink_configured", sink="old") == 0)
        agent.peer.accept()
        agent.wait_for(lambda scrape: scrape.of("sink_delivered_total", sink="sre"))
        agent.wait_for(lambda scrape: scrape.of("approval_channel_up"))
        _have_trouble(agent)
        early = agent.scrape()
        agent.peer.accept()
        agent.call("outbox", "retry", "--sink", "sre")
        agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="sre") == 0)
        _have_trouble(agent)
        # An age that grows with the clock needs time between two scrapes.
        time.sleep(1.0)
        return early, agent.scrape()


@contextmanager
def _running(directory: Path, env: Mapping[str, str]) -> Iterator[BusyAgent]:
    """Start an agent whose only sink, "old", has a pending record."""
    with Simulator(vms=[_VM, "vm_1"], rate_limit=False) as azure, HttpPeer() as peer:
        agent = BusyAgent(directory, env, azure, peer)
        agent.configure("old")
        peer.refuse_for_now()
        agent.start()
        try:
            agent.announce("Reboot")
            agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="old"))
            yield agent
        finally:
            agent.process.kill()
            agent.process.wait()


def _have_trouble(agent: BusyAgent) -> None:
    """Park a record, approve an event, and let the webhook refuse the credentials."""
    approvals = agent.scrape().sum("approvals_total")
    agent.peer.refuse_for_good()
    agent.announce("Redeploy")
    agent.wait_for(lambda scrape: scrape.of("sink_parked_records", sink="sre"))
    agent.peer.accept()
    agent.announce("Freeze")
    agent.wait_for(lambda scrape: scrape.sum("approvals_total") > approvals)
    agent.wait_for(lambda scrape: scrape.of("sink_pending_records", sink="sre") == 0)
    agent.peer.say(401)
    agent.announce("Terminate")
    agent.wait_for(lambda scrape: scrape.of("sink_needs_attention", sink="sre"))


def series_of(scrapes: tuple[Scrape, Scrape], *, minutes: int) -> list[str]:
    """Return lines of YAML that extrapolate every value between *scrapes* for *minutes*."""
    early, late = scrapes
    seconds = late.at - early.at
    lines = [f"- {{series: 'up{_shown(())}', values: '1x{minutes}'}}"]
    for (name, labels), value in sorted(late.values.items()):
        rate = (value - early.values.get((name, labels), value)) / seconds
        # A gauge counts as an age if it grew with the clock. Any other gauge keeps its last value.
        is_age = name.endswith("_seconds") and abs(rate - 1.0) < 0.25
        slope = rate * 60 if name in late.counters or is_age else 0.0
        lines.append(f"- {{series: '{name}{_shown(labels)}', values: '{value:.3f}+{slope:.3f}x{minutes}'}}")
    return lines


def _shown(labels: tuple[tuple[str, str], ...]) -> str:
    """Return *labels* and the labels of Prometheus in PromQL syntax."""
    target = (("instance", "vm-0"), ("job", "scheduled-events-bridge"))
    return "{" + ", ".join(f'{name}="{value}"' for name, value in sorted((*labels, *target))) + "}"
