"""5,000 agents on one portal process: memory, idle CPU, how soon one is told, a hundred, and all; a restart and a stop.

Everybody is told twice: once by five thousand decisions that were signed elsewhere, once by one hold on an event, whose
resource group has five thousand VMs.

The portal is a process of its own. The agents are connections of this one that say what an agent says, and read what
comes; their cost is not the portal's. With BENCH=short there are 1,000.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest

uvloop = pytest.importorskip("uvloop", reason="the extra [portal] is not installed")
resource = pytest.importorskip("resource", reason="the figures are those of Linux")

from fleet_records import fleet_record  # noqa: E402
from portal_kit import AGENT_TOKEN, BATCH, batch, portal_table  # noqa: E402
from private_ca import PrivateCa  # noqa: E402
from signed_decisions import sign_decision  # noqa: E402

from bridge.approval.digest import digest  # noqa: E402
from bridge.approval.signing import generate_key  # noqa: E402
from bridge.portal.fleet import key_of_event_id  # noqa: E402

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

#: What an agent asks for by default.
WAIT_SECONDS = 30
SINGLE_WAKES = 100
IDLE_SECONDS = 20
_EVENT = fleet_record(0).event


def vm_id_of(number):
    return str(uuid.UUID(int=number + 1))


class Portal:
    """The portal as a process."""

    def __init__(self, directory, env, *, tls):
        self.pair = generate_key(directory / "ops.key")
        self.ca = PrivateCa(directory / "ca") if tls else None
        server, people = {}, {"proxy_header": "X-User", "proxy_addresses": ["127.0.0.1"], "proxy_role": "approver"}
        if self.ca is not None:
            files = self.ca.issue("localhost")
            server = {"cert_file": str(files.cert_file), "key_file": str(files.key_file)}
        own = generate_key(directory / "portal.key")
        signing = {"kid": "portal", "private_key_file": str(own.private_key_file)}
        table = portal_table(directory, server=server, people=people, signing=signing)
        lines = []
        for name, inner in table.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in inner.items())]
        key = {"kid": "ops", "approver": "ada", "public_key_file": str(self.pair.public_key_file)}
        lines += ["[[keys]]", *(f"{name} = {json.dumps(value)}" for name, value in key.items())]
        self.config = directory / "portal.toml"
        self.config.write_text("\n".join(lines), encoding="utf-8")
        self._log = directory / "log"
        # As in the unit and the image, so that freed memory returns to the system.
        self._env = {**env, "PYTHONMALLOC": "malloc", "MALLOC_TRIM_THRESHOLD_": "131072"}
        self.port = 0
        self.process = None

    def start(self):
        if self.port:  # the same address after a restart
            text = re.sub(
                r'listen = "127.0.0.1:0"', f'listen = "127.0.0.1:{self.port}"', self.config.read_text(), count=1
            )
            self.config.write_text(text, encoding="utf-8")
        with self._log.open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "bridge", "portal", "--config", str(self.config), "--log-format", "text"]
            self.process = subprocess.Popen(command, env=self._env, stderr=log)
        until = time.monotonic() + 30
        while not (found := re.search(r"url=https?://127.0.0.1:(\d+)", self._log.read_text())):
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)
        self.port = int(found[1])

    def stop(self):
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self._log.read_text()
        return time.monotonic() - began

    @property
    def rss_mb(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) * 1024 / 1e6

    @property
    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def request(self, method, path, body=b"", **headers):
        """Ask as a person whom the proxy has let in, and return the answer."""
        host = f"127.0.0.1:{self.port}"
        if self.ca is None:
            connection, scheme = http.client.HTTPConnection(host, timeout=60), "http"
        else:
            tls = ssl.create_default_context(cafile=str(self.ca.ca_file))
            connection, scheme = http.client.HTTPSConnection(host, timeout=60, context=tls), "https"
        shown = {"X-User": "ann", "Origin": f"{scheme}://{host}"}
        connection.request(method, path, body, {**shown, **{name.replace("_", "-"): headers[name] for name in headers}})
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        assert 200 <= answer.status < 300, (answer.status, found[:300])
        return found

    def tell_of(self, vms):
        """Have the portal know of as many *vms*, of which a hundred have an event; return its key and its digest."""
        names = tuple(f"vm_{number}" for number in range(100))
        as_agent = {"Authorization": f"Bearer {AGENT_TOKEN}", "Content_Type": BATCH}
        for start in range(0, vms, 500):
            records = []
            for number in range(start, min(start + 500, vms)):
                event_id = "held" if number < 100 else f"another-{number % 50}"
                resources = names if number < 100 else (f"vm_{number}",)
                record = fleet_record(number, event_id=event_id, resources=resources)
                vm = msgspec.structs.replace(record.vm, vm_id=vm_id_of(number))
                records.append(msgspec.structs.replace(record, vm=vm))
            self.request("POST", "/api/v1/records", batch(records), **as_agent)
        page = self.request("GET", "/").decode()
        self.csrf = re.search(r'name="csrf" value="([^"]+)"', page)[1]
        event = fleet_record(0, event_id="held", resources=names).event
        return key_of_event_id("held"), digest(event)

    def hold(self, key, event_digest):
        """Hold the event, as a person does by a click."""
        body = json.dumps({"verdict": "hold", "digest": event_digest, "reason": "not now"}).encode()
        headers = {"Content_Type": "application/json", "X_CSRF_Token": self.csrf}
        return json.loads(self.request("POST", f"/api/v1/events/{key}/verdicts", body, **headers))

    def tokens(self, numbers):
        now = datetime.now(timezone.utc)
        return [
            sign_decision(
                self.pair.private_key_file,
                kid="ops",
                approver="ada",
                vm_id=vm_id_of(number),
                event=_EVENT,
                decision="hold",
                now=now,
                valid_seconds=3600,
                jti=str(uuid.uuid4()),
            )
            for number in numbers
        ]


class Agents:
    """Connections that poll as agents do."""

    def __init__(self, count, portal):
        self.count = count
        self.portal = portal
        self.told_at = {}
        self.indexes = dict.fromkeys(range(count), 0)
        self.held = set()
        self._tls = None
        if portal.ca is not None:
            self._tls = ssl.create_default_context(cafile=str(portal.ca.ca_file))
        self._tasks = []
        self._writers = set()

    def start(self, spread_seconds):
        for number in range(self.count):
            delay = spread_seconds * number / self.count
            self._tasks.append(asyncio.create_task(self._follow(number, delay)))

    async def _follow(self, number, delay):
        await asyncio.sleep(delay)
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.portal.port, ssl=self._tls)
            except OSError:
                await asyncio.sleep(1)
                continue
            self._writers.add(writer)
            try:
                while True:
                    await self._poll(number, reader, writer)
            except (OSError, EOFError, ValueError):
                self.held.discard(number)
            finally:
                self._writers.discard(writer)
                writer.transport.abort()  # a goodbye under TLS would take its time
            await asyncio.sleep(1)

    async def _poll(self, number, reader, writer):
        index = self.indexes[number]
        writer.write(
            f"GET /api/v1/vms/{vm_id_of(number)}/decisions?index={index}&wait={WAIT_SECONDS} HTTP/1.1\r\n"
            f"Host: portal\r\nAuthorization: Bearer {AGENT_TOKEN}\r\nAccept: application/json\r\n\r\n".encode()
        )
        if index:
            self.held.add(number)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        body = json.loads(await reader.readexactly(length))
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(head)
        if body["decisions"]:
            self.told_at[number] = time.perf_counter()
        self.indexes[number] = body["index"]
        if b"connection: close" in head.lower():
            raise EOFError

    async def all_held(self, seconds=120):
        until = time.monotonic() + seconds
        while len(self.held) < self.count:
            assert time.monotonic() < until, f"{len(self.held)} of {self.count} are held"
            await asyncio.sleep(0.05)

    async def told(self, numbers, began):
        """Wait until all of *numbers* are told; return after how many seconds each was."""
        until = time.monotonic() + 60
        while not all(self.told_at.get(number, 0) > began for number in numbers):
            assert time.monotonic() < until, "not all were told"
            await asyncio.sleep(0.002)
        return sorted(self.told_at[number] - began for number in numbers)

    async def vanish(self):
        """End every connection by a reset."""
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await self.end()

    async def end(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(1)  # until every socket is closed


async def bring(portal, tokens):
    """POST *tokens* as whoever decides does."""
    tls = None if portal.ca is None else ssl.create_default_context(cafile=str(portal.ca.ca_file))
    reader, writer = await asyncio.open_connection("127.0.0.1", portal.port, ssl=tls)
    body = json.dumps({"decisions": tokens}).encode()
    head = (
        f"POST /api/v1/decisions HTTP/1.1\r\nHost: portal\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


async def measured(portal, count, figure, chart, name):
    agents = Agents(count, portal)
    agents.start(spread_seconds=count / 500)
    try:
        await agents.all_held()
        idle, rss = await resting(portal)
        figure(f"portal, {count} polls held, {name}: RSS {rss:.0f} MB, idle {100 * idle:.1f} % of a core")
        p50, p99 = await told_one_by_one(portal, agents)
        figure(f"portal, {name}: decision brought to agent told: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
        hundred = await told_of(portal, agents, range(100))
        cpu = portal.cpu_seconds
        everybody = await told_of(portal, agents, range(count))
        cpu = portal.cpu_seconds - cpu
        figure(
            f"portal, {name}: last of 100 told after {hundred:.2f} s, of {count} after {everybody:.2f} s "
            f"({cpu:.2f} s of CPU)"
        )
        held = await told_by_a_hold(portal, agents)
        figure(f"portal, {name}: last of {count} told {held:.2f} s after one hold on an event of 100 VMs")
        peak = portal.rss_mb
        stopped, back = await restarted(portal, agents)
        figure(f"portal, {name}: stop {stopped:.1f} s with all held, all back {back:.1f} s after it; RSS {peak:.0f} MB")
        if count == 5_000:
            label = {"plain": "without TLS", "tls": "with TLS"}[name]
            chart("portal-memory", label, **{"connected": rss, "after 10,000 decisions": peak})
            chart("portal-decision", f"one agent, {label}", p50=p50 * 1e3, p99=p99 * 1e3)
            chart("portal-fleet", "one hold for all VMs", **{label: held})
            chart("portal-fleet", "5,000 signed decisions", **{label: everybody})
            chart("portal-fleet", "all connected again after a restart", **{label: back})
    finally:
        await agents.end()
    assert idle <= 0.10
    assert p50 <= 0.1
    assert p99 <= 0.5
    assert hundred <= 1.0
    assert cpu <= 3.0
    assert everybody <= 3.0
    assert held <= 3.0
    assert stopped <= 5.0
    assert back <= 60.0
    return max(rss, peak)


async def resting(portal):
    """Return the portal's share of a core while nothing happens, and its memory after that."""
    await asyncio.sleep(2)
    cpu = portal.cpu_seconds
    await asyncio.sleep(IDLE_SECONDS)
    return (portal.cpu_seconds - cpu) / IDLE_SECONDS, portal.rss_mb


async def told_one_by_one(portal, agents):
    """Return the median and the 99th percentile of how soon one agent is told."""
    single = []
    for number in range(SINGLE_WAKES):
        vm = (number * 37) % agents.count
        token = portal.tokens([vm])
        began = time.perf_counter()
        await bring(portal, token)
        single += await agents.told([vm], began)
    single.sort()
    return statistics.median(single), single[int(len(single) * 0.99)]


async def told_by_a_hold(portal, agents):
    """Return after how many seconds the last of all VMs of the resource group was told of one hold."""
    await agents.all_held()
    event = await asyncio.to_thread(portal.tell_of, agents.count)
    await asyncio.sleep(2)
    began = time.perf_counter()
    holding = asyncio.create_task(asyncio.to_thread(portal.hold, *event))
    seconds = (await agents.told(range(agents.count), began))[-1]
    await holding
    await agents.all_held()
    return seconds


async def restarted(portal, agents):
    """Stop the portal while everybody is held, start it again, and return how long either took; nobody misses a word.

    The last decisions come right before the stop, so that some agents hear of them only after it.
    """
    last = portal.tokens(range(100))
    began = time.perf_counter()
    await bring(portal, last)
    stopped = await asyncio.to_thread(portal.stop)
    agents.held.clear()
    began_again = time.monotonic()
    await asyncio.to_thread(portal.start)
    await agents.all_held()
    back = time.monotonic() - began_again
    await agents.told(range(100), began)
    return stopped, back


async def told_of(portal, agents, numbers):
    tokens = portal.tokens(numbers)
    await agents.all_held()
    began = time.perf_counter()
    for start in range(0, len(tokens), 1_000):
        await bring(portal, tokens[start : start + 1_000])
    return (await agents.told(numbers, began))[-1]


@pytest.mark.parametrize(("name", "most_mb"), [("plain", 200), ("tls", 320)])
def test_5000_agents_poll(tmp_path, env, figure, is_short, *, chart, name, most_mb):
    count = 1_000 if is_short else 5_000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    portal = Portal(tmp_path, env, tls=name == "tls")
    portal.start()
    try:
        rss = uvloop.run(measured(portal, count, figure, chart, name))
    finally:
        if portal.process.poll() is None:
            portal.process.kill()
            portal.process.wait()
    assert rss <= most_mb


async def vanished(portal, count, seconds):
    """Have *count* polls held, and end each connection by a reset; return the memory then, and *seconds* later."""
    agents = Agents(count, portal)
    agents.start(spread_seconds=count / 500)
    await agents.all_held()
    held = portal.rss_mb
    await agents.vanish()
    await asyncio.sleep(seconds)
    return held, portal.rss_mb


@pytest.mark.parametrize("name", ["plain", "tls"])
def test_clients_that_vanish_do_not_accumulate_memory(tmp_path, env, figure, is_short, name):
    count, seconds = (1_000, 35) if is_short else (5_000, 60)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    portal = Portal(tmp_path, env, tls=name == "tls")
    portal.start()
    try:
        uvloop.run(vanished(portal, 50, 0))  # what the first of all has loaded
        before = portal.rss_mb
        storms = [uvloop.run(vanished(portal, count, seconds)) for _ in range(3)]
    finally:
        portal.process.kill()
        portal.process.wait()
    shown = ", ".join(f"{after:.0f} of {held:.0f}" for held, after in storms)
    figure(f"portal, {name}, {seconds} s after {count} polls reset, three times: {shown} MB; {before:.0f} at first")
    (_, first), *_, (_, last) = storms
    assert last <= 1.1 * first
