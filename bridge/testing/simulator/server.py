"""Runs the simulator, which acts as the Instance Metadata Service of a VM or a fleet.

Each VM has its own port.

    with Simulator("live-migration", speed=90) as simulator:
        requests.get(simulator.endpoint + "/metadata/scheduledevents?api-version=2020-07-01", ...)

All VMs in a simulator see the same events, like the VMs in an availability set, but each VM has its own identity and
request limit. Every port also serves the control endpoint under /control, without request limits or faults.

By default, the simulator listens only on loopback addresses, because anyone who can connect to it can control it. On a
loopback address, it also rejects requests with a foreign Host header. Otherwise, a web page in a local browser could
control the simulator through DNS rebinding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from bridge.clock import REAL_CLOCK, Clock
from bridge.http.failures import are_loopback_hosts, is_loopback
from bridge.testing.simulator.clock import ManualClock
from bridge.testing.simulator.control import CONTROL_PATH, Control, RequestSeen
from bridge.testing.simulator.errors import SimulatorError, WrongRequest
from bridge.testing.simulator.faults import DOCUMENT_KINDS, Fault
from bridge.testing.simulator.faulty_answers import answer_with_fault, status_of
from bridge.testing.simulator.http_server import Connection, HttpServer
from bridge.testing.simulator.imds_api import ImdsApi, RateLimit, Request, error, target_of, too_many_requests
from bridge.testing.simulator.machines import Machine
from bridge.testing.simulator.scenario import load_scenario
from bridge.testing.simulator.scenario_file import Scenario
from bridge.testing.simulator.world import World

if TYPE_CHECKING:
    from bridge.testing.simulator.attestation import AttestationAuthority

DEFAULT_VM = "simulated-vm"
_REMEMBERED = 10_000
_LARGEST_PORT = 65_535


class Simulator:
    """A simulated metadata service. Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        scenario: Scenario | str | Path | None = None,
        *,
        listen: str = "127.0.0.1:0",
        vms: Sequence[str | Machine] = (DEFAULT_VM,),
        speed: float = 1.0,
        rate_limit: bool = True,
        first_call_seconds: float = 0.0,
        allow_remote: bool = False,
        clock: Clock | ManualClock = REAL_CLOCK,
    ) -> None:
        """Bind one port for each VM.

        If the given port is 0, each VM gets a free port. Otherwise, the ports are consecutive, from that port on.

        *speed* is the number of scenario seconds per real second. *first_call_seconds* delays the first response with
        events, in real seconds. In Azure, this response can take two minutes.
        """
        self.machines = tuple(vm if isinstance(vm, Machine) else Machine(name=vm) for vm in vms)
        if not self.machines:
            raise WrongRequest("A simulator needs at least one VM name.")
        if isinstance(scenario, (str, Path)):
            scenario = load_scenario(scenario)
        self.scenario = scenario
        self.world = World([machine.name for machine in self.machines], clock=clock, speed=speed)
        self._requests: deque[RequestSeen] = deque(maxlen=_REMEMBERED)
        self._requests_lock = threading.Lock()
        self._attestation: AttestationAuthority | None = None
        self._attestation_lock = threading.Lock()
        self._stop = threading.Event()
        self._control = Control(
            self.world,
            machines=self._describe,
            requests=lambda: self.requests,
            certificates=lambda: {
                "root": self.attestation.root_pem,
                "intermediate": self.attestation.intermediate_pem,
            },
        )
        if first_call_seconds > 0:
            self.world.set_fault(Fault(kind="slow", delay_seconds=first_call_seconds, count=1))
        address = parse_listen(listen, allow_remote=allow_remote)
        self._is_local = is_loopback(address[0])
        self._servers = self._bind(address, rate_limit=rate_limit)

    @property
    def requests(self) -> tuple[RequestSeen, ...]:
        """Return the latest requests, oldest first, including requests with a fault."""
        with self._requests_lock:
            return tuple(self._requests)

    @property
    def attestation(self) -> AttestationAuthority:
        """Return the authority that signs the attested documents. The first use creates it."""
        from bridge.testing.simulator.attestation import (  # noqa: PLC0415  # 9 MB, only on use
            INTERMEDIATE_PATH,
            AttestationAuthority,
        )

        with self._attestation_lock:
            if self._attestation is None:
                self._attestation = AttestationAuthority(
                    now=self.world.clock.now, intermediate_url=lambda: self.endpoint + INTERMEDIATE_PATH
                )
            return self._attestation

    @property
    def endpoint(self) -> str:
        """Return ``http://HOST:PORT`` of the first VM."""
        return self._servers[0].endpoint

    @property
    def endpoints(self) -> dict[str, str]:
        """Return the endpoint of each VM by its name."""
        return {machine.name: server.endpoint for machine, server in zip(self.machines, self._servers, strict=True)}

    def start(self) -> None:
        """Start to respond to requests, and start the scenario."""
        self.world.begin()
        if self.scenario is not None:
            self.scenario.play(self.world)
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Close all connections and ports. A second call has no effect."""
        self._stop.set()
        for server in self._servers:
            server.close()

    def __enter__(self) -> Simulator:  # noqa: PYI034 - Python 3.10 has no Self
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind(self, address: tuple[str, int], *, rate_limit: bool) -> tuple[HttpServer, ...]:
        host, port = address
        servers: list[HttpServer] = []
        for number, machine in enumerate(self.machines):
            api = ImdsApi(self.world, machine, document=self._document)
            respond = partial(self._respond, machine, api, RateLimit() if rate_limit else None)
            wanted = port + number if port else 0
            try:
                servers.append(HttpServer((host, wanted), respond, self._stop))
            except (OSError, OverflowError) as exc:
                for server in servers:
                    server.close()
                message = f"The simulator cannot listen on {host}:{wanted}: {exc}. Choose a free port."
                raise SimulatorError(message) from exc
        return tuple(servers)

    def _respond(
        self, machine: Machine, api: ImdsApi, limit: RateLimit | None, connection: Connection, request: Request
    ) -> None:
        if self._is_local and not are_loopback_hosts(connection.headers.get_all("Host", [])):
            connection.write(error(421, "The Host header must be localhost or a loopback address."))
            return
        if request.path == CONTROL_PATH or request.path.startswith(CONTROL_PATH + "/"):
            connection.write(self._control.answer(request))
            return
        self.world.advance()
        is_admitted = limit is None or limit.admits(self.world.clock.monotonic())
        version = request.query.get("api-version", "")
        fault = self.world.faults.take(target_of(request.path), request.method, machine.name, version)
        if fault is not None:
            self._remember(machine, request, status_of(fault), fault.kind)
            kind = fault.kind if fault.kind in DOCUMENT_KINDS else None
            right = partial(api.answer, request, document_kind=kind)
            answer_with_fault(connection, fault, right)
            return
        answer = api.answer(request) if is_admitted else too_many_requests()
        # Store the request before the response is sent, so that a client that has the response can find the request.
        self._remember(machine, request, answer.status, None)
        connection.write(answer)

    def _remember(self, machine: Machine, request: Request, status: int, fault: str | None) -> None:
        seen = RequestSeen(
            at=self.world.clock.now(),
            monotonic_seconds=self.world.clock.monotonic(),
            vm=machine.name,
            method=request.method,
            path=request.path,
            api_version=request.query.get("api-version", ""),
            status=status,
            fault=fault,
        )
        with self._requests_lock:
            self._requests.append(seen)

    def _document(self, machine: Machine, nonce: str, kind: str | None) -> str:
        return self.attestation.document(machine, nonce, kind=kind)

    def _describe(self) -> list[dict[str, str]]:
        endpoints = self.endpoints
        return [
            {"name": vm.name, "vm_id": vm.vm_id, "resource_id": vm.resource_id, "endpoint": endpoints[vm.name]}
            for vm in self.machines
        ]


def parse_listen(listen: str, *, allow_remote: bool) -> tuple[str, int]:
    """Return the host and port in *listen*.

    Raise WrongRequest if *listen* is invalid or not allowed.
    """
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise WrongRequest(f"listen = {listen!r} must be HOST:PORT, for example 127.0.0.1:8169.")
    if not allow_remote and not is_loopback(host):
        raise WrongRequest(
            f"listen = {listen!r} is not a loopback address, and everyone who can connect can control the simulator. "
            "Use 127.0.0.1, or set --allow-remote."
        )
    return host, int(port)
