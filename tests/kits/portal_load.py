"""The portal as a process under load: held polls of thousands of agents, and decisions.

The agents are connections of this process that send and read what an agent sends and reads. Their cost is not part of
the cost of the portal.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import secrets
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from fleet_records import fleet_record
from portal_kit import AGENT_TOKEN, BATCH, batch, portal_table
from private_ca import PrivateCa
from signed_decisions import sign_decision

from bridge.approval.digest import digest
from bridge.approval.signing import generate_key
from bridge.backoff import full_jitter
from bridge.clock import REAL_CLOCK
from bridge.portal.agent_tokens import AgentTokens
from bridge.portal.fleet import key_of_event_id
from bridge.portal.requests import FORM

#: The wait that an agent requests by default.
WAIT_SECONDS = 30
_SUBSCRIPTION = "8d10da13-8125-4ba9-a717-bf7490507b3d"
_EVENT = fleet_record(0).event


def vm_id_of(number: int) -> str:
    """Return the vmId of the agent with that number."""
    return str(uuid.UUID(int=number + 1))


class PortalUnderLoad:
    """A portal process in *directory*. Each agent has its own attested token if *is_attested*."""

    def __init__(
        self, directory: Path, env: dict[str, str], *, tls: bool = False, is_attested: bool = False, **tables: Any
    ) -> None:
        self.pair = generate_key(directory / "ops.key")
        self.ca = PrivateCa(directory / "ca") if tls else None
        tables["people"] = {"proxy_header": "X-User", "proxy_addresses": ["127.0.0.1"], "proxy_role": "approver"}
        if self.ca is not None:
            files = self.ca.issue("localhost")
            files.key_file.chmod(0o600)
            tables["server"] = {"cert_file": str(files.cert_file), "key_file": str(files.key_file)}
        self._tokens: AgentTokens | None = None
        if is_attested:
            secret = secrets.token_hex(20)
            (directory / "secret").write_text(f"{secret}\n", encoding="utf-8")
            (directory / "secret").chmod(0o600)
            self._tokens = AgentTokens(lambda: [secret], clock=REAL_CLOCK)
            attested = {"subscriptions": [_SUBSCRIPTION], "secret_file": str(directory / "secret")}
            tables["agents"] = {"attested": attested}
        own = generate_key(directory / "portal.key")
        signing = {"kid": "portal", "private_key_file": str(own.private_key_file)}
        self.config = directory / "portal.toml"
        self.config.write_text(self._toml(portal_table(directory, signing=signing, **tables)), encoding="utf-8")
        self._log = directory / "log"
        self._env = env
        self.port = 0
        self.csrf = ""
        self._process: subprocess.Popen[bytes] | None = None

    def _toml(self, table: dict[str, Any]) -> str:
        def lines(name: str, values: dict[str, Any]) -> list[str]:
            plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
            inner = {key: value for key, value in values.items() if isinstance(value, dict)}
            below = [line for key, value in inner.items() for line in lines(f"{name}.{key}", value)]
            return [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in plain.items()), *below]

        key = {"kid": "ops", "approver": "ada", "public_key_file": str(self.pair.public_key_file)}
        of_key = ["[[keys]]", *(f"{name} = {json.dumps(value)}" for name, value in key.items())]
        return "\n".join([*(line for name, inner in table.items() for line in lines(name, inner)), *of_key])

    def start(self) -> None:
        """Start the process. After a restart, it has the same address."""
        if self.port:
            text = re.sub(
                r'listen = "127.0.0.1:0"', f'listen = "127.0.0.1:{self.port}"', self.config.read_text(), count=1
            )
            self.config.write_text(text, encoding="utf-8")
        with self._log.open("w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "bridge", "portal", "--config", str(self.config), "--log-format", "text"]
            self._process = subprocess.Popen(command, env=self._env, stderr=log)
        until = time.monotonic() + 30
        while not (found := re.search(r"url=https?://127.0.0.1:(\d+)", self._log.read_text())):
            assert time.monotonic() < until, self._log.read_text()
            time.sleep(0.05)
        self.port = int(found[1])

    def stop(self) -> float:
        """Stop the process as a signal does. Return the seconds that this took."""
        assert self._process is not None
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(60) == 0, self._log.read_text()
        return time.monotonic() - began

    def kill(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def rss_mb(self) -> float:
        """Return the resident memory."""
        return self._memory_mb("VmRSS")

    @property
    def peak_mb(self) -> float:
        """Return the largest resident memory so far."""
        return self._memory_mb("VmHWM")

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time of the process."""
        assert self._process is not None
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _memory_mb(self, name: str) -> float:
        assert self._process is not None
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        [kilobytes] = re.findall(rf"{name}:\s+(\d+)", text)
        return int(kilobytes) * 1024 / 1e6

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
        """Send a request as a user whom the proxy has authenticated, and return the body of the response."""
        host = f"127.0.0.1:{self.port}"
        connection: http.client.HTTPConnection
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

    def token_of(self, number: int) -> str:
        """Return the token of an agent."""
        return self._tokens.new(vm_id_of(number)) if self._tokens else AGENT_TOKEN

    def report_fleet(self, vms: int) -> tuple[str, str]:
        """Report *vms* VMs, of which a hundred have one event. Return the key and the digest of the event."""
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
        key = key_of_event_id("held")
        page = self.request("GET", f"/events/{key}").decode()
        [self.csrf, *_] = re.findall(r'name="csrf" value="([^"]+)"', page)
        event = fleet_record(0, event_id="held", resources=names).event
        assert event is not None
        return key, digest(event)

    def report_wave(self, *, events: int, vms: int) -> str:
        """Report a wave of *events* events to *vms* VMs. Return the path of its confirmation page."""
        records = []
        for number in range(vms):
            resources = tuple(f"vm_{vm}" for vm in range(number % events, vms, events))
            record = fleet_record(number, event_id=f"wave-{number % events}", resources=resources)
            vm = msgspec.structs.replace(
                record.vm, vm_id=vm_id_of(number), resource_group=f"rg-{number % events}", location="westeurope"
            )
            records.append(msgspec.structs.replace(record, vm=vm))
        as_agent = {"Authorization": f"Bearer {AGENT_TOKEN}", "Content_Type": BATCH}
        self.request("POST", "/api/v1/records", batch(records), **as_agent)
        return "/decide?wave=Freeze|westeurope|2026-11-20T11"

    def confirm(self, path: str, verdict: str) -> None:
        """Load the confirmation page at *path*, and submit its form."""
        page = self.request("GET", path).decode()
        fields = dict(re.findall(r'<input type="hidden" name="(csrf|event)" value="([^"]+)"', page))
        body = urlencode({**fields, "verdict": verdict, "reason": "not now"}).encode()
        self.request("POST", "/decide", body, Content_Type=FORM)

    def hold(self, key: str, event_digest: str) -> None:
        """Hold the event as a person does with the button of the page."""
        body = json.dumps({"verdict": "hold", "digest": event_digest, "reason": "not now"}).encode()
        headers = {"Content_Type": "application/json", "X_CSRF_Token": self.csrf}
        self.request("POST", f"/api/v1/events/{key}/verdicts", body, **headers)

    def decisions(self, numbers: Iterable[int]) -> list[str]:
        """Return a decision that was signed elsewhere for each of the agents *numbers*."""
        now = datetime.now(timezone.utc)
        assert _EVENT is not None
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

    async def post_decisions(self, tokens: list[str]) -> None:
        """POST decisions that were signed elsewhere."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls_of_client())
        body = json.dumps({"decisions": tokens}).encode()
        head = (
            f"POST /api/v1/decisions HTTP/1.1\r\nHost: portal\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]

    async def post_records(
        self, bodies: Sequence[bytes], *, within_seconds: float, token: str = AGENT_TOKEN
    ) -> list[tuple[int, float, float]]:
        """POST each of *bodies* over its own connection, at a steady rate.

        Return the status, and the times of the request and of the response.
        """
        began = time.monotonic()
        answers: list[tuple[int, float, float]] = []

        async def post(number: int, body: bytes) -> None:
            await asyncio.sleep(began + within_seconds * number / len(bodies) - time.monotonic())
            sent_at = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = (
                f"POST /api/v1/records HTTP/1.1\r\nHost: portal\r\nAuthorization: Bearer {token}\r\n"
                f"Content-Type: {BATCH}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.read()
            writer.close()
            answers.append((int(answer[9:12]), sent_at, time.monotonic()))

        await asyncio.gather(*(post(*each) for each in enumerate(bodies)))
        return answers

    def tls_of_client(self) -> ssl.SSLContext | None:
        """Return the TLS context of a client, or None without TLS."""
        return None if self.ca is None else ssl.create_default_context(cafile=str(self.ca.ca_file))


class PollingAgents:
    """Connections that poll as agents do, from the agent *first*. After a failure, each waits as long as an agent."""

    def __init__(self, count: int, portal: PortalUnderLoad, *, first: int = 0) -> None:
        self.count = count
        self._first = first
        self.portal = portal
        self.received_at: dict[int, float] = {}
        self.held: set[int] = set()
        self._indexes = dict.fromkeys(range(count), 0)
        self._tls = portal.tls_of_client()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: set[asyncio.StreamWriter] = set()

    def start(self, spread_seconds: float) -> None:
        """Start all agents within *spread_seconds*."""
        for number in range(self.count):
            delay = spread_seconds * number / self.count
            self._tasks.append(asyncio.create_task(self._follow(number, delay)))

    async def _follow(self, number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        authorization, failures = f"Bearer {self.portal.token_of(self._first + number)}", 0
        while True:
            writer = None
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.portal.port, ssl=self._tls)
                self._writers.add(writer)
                while True:
                    await self._poll(number, authorization, reader, writer)
                    failures = 0
            except (OSError, EOFError, ValueError):
                self.held.discard(number)
                failures += 1
            finally:
                if writer is not None:
                    self._writers.discard(writer)
                    writer.transport.abort()  # a clean end of TLS would take time
            await asyncio.sleep(full_jitter(failures, base_seconds=1.0, cap_seconds=60.0, random=random.random))

    async def _poll(
        self, number: int, authorization: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        index = self._indexes[number]
        writer.write(
            f"GET /api/v1/vms/{vm_id_of(self._first + number)}/decisions?index={index}&wait={WAIT_SECONDS} HTTP/1.1\r\n"
            f"Host: portal\r\nAuthorization: {authorization}\r\nAccept: application/json\r\n\r\n".encode()
        )
        if index:
            self.held.add(number)
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = re.findall(rb"content-length: (\d+)", head)
        body = json.loads(await reader.readexactly(int(length)))
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(head)
        if body["decisions"]:
            self.received_at[number] = time.perf_counter()
        self._indexes[number] = body["index"]
        if b"connection: close" in head.lower():
            raise EOFError

    async def all_held(self, seconds: float = 120) -> None:
        """Wait until the portal holds a poll of each agent."""
        until = time.monotonic() + seconds
        while len(self.held) < self.count:
            assert time.monotonic() < until, f"{len(self.held)} of {self.count} are held"
            await asyncio.sleep(0.05)

    async def received(self, numbers: Iterable[int], began: float) -> list[float]:
        """Wait until all of *numbers* have a decision. Return the sorted seconds since *began*."""
        numbers, until = list(numbers), time.monotonic() + 60
        while not all(self.received_at.get(number, 0) > began for number in numbers):
            assert time.monotonic() < until, "not every agent received its decision"
            await asyncio.sleep(0.002)
        return sorted(self.received_at[number] - began for number in numbers)

    async def vanish(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        await self.end()

    async def end(self) -> None:
        """Stop all agents."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(1)  # until every socket is closed
