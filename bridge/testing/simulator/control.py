"""Implements the control endpoint, which reads and changes a running simulator.

All bodies are JSON.

    GET    /control                         the whole state
    GET    /control/events                  the events in the document
    POST   /control/events                  add an event; the keys are those of a scenario's `add`
    POST   /control/events/ID/start         also complete, cancel, approve, and update with the fields to change
    GET    /control/faults                  the queued faults
    POST   /control/faults                  queue a fault; the keys are those of a scenario's `fault`, with "kind"
    DELETE /control/faults                  remove all faults, or the faults of ?target=...
    POST   /control/incarnation             {"to": 1}
    GET    /control/approvals               the approvals with their VM and time
    GET    /control/requests                the requests with their VM, time, and status
    GET    /control/attestation/root        the root certificate for attested documents; also /intermediate

If a change fails, the response is 400 (invalid body), 404 (unknown path or event), or 409 (wrong status of the event).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from bridge.config.mistakes import Problems
from bridge.config.toml import convert
from bridge.errors import ScenarioError
from bridge.testing.simulator.errors import UnknownEvent, WrongRequest, WrongState
from bridge.testing.simulator.events import EventChanges, EventSpec, changes_in
from bridge.testing.simulator.faults import TARGETS, Fault
from bridge.testing.simulator.imds_api import Answer, Request
from bridge.testing.simulator.scenario_file import placed
from bridge.testing.simulator.world import World
from bridge.text import nearest

CONTROL_PATH = "/control"
_StructT = TypeVar("_StructT", bound=msgspec.Struct)


class _Incarnation(msgspec.Struct, frozen=True):
    to: Annotated[int, msgspec.Meta(ge=0)] = 1


@dataclass(frozen=True, kw_only=True)
class RequestSeen:
    """One request to the metadata service."""

    at: datetime
    monotonic_seconds: float
    vm: str
    method: str
    path: str
    api_version: str
    status: int
    """The response's status, or 0 without a response."""
    fault: str | None = None


class Control:
    """Responds to the requests under /control."""

    def __init__(
        self,
        world: World,
        *,
        machines: Callable[[], list[dict[str, str]]],
        requests: Callable[[], Iterable[RequestSeen]],
        certificates: Callable[[], Mapping[str, bytes]],
    ) -> None:
        self._world = world
        self._machines = machines
        self._requests = requests
        self._certificates = certificates
        self._routes: dict[tuple[str, str], Callable[[Request], Answer]] = {
            ("GET", ""): self._state,
            ("GET", "events"): lambda _: _json(self._events()),
            ("POST", "events"): self._add_event,
            ("GET", "faults"): lambda _: _json(world.faults.waiting()),
            ("POST", "faults"): self._add_fault,
            ("DELETE", "faults"): self._clear_faults,
            ("POST", "incarnation"): self._reset_incarnation,
            ("GET", "approvals"): lambda _: _json(world.approvals),
            ("GET", "requests"): lambda _: _json(self._requests()),
            ("GET", "attestation/root"): lambda _: self._certificate("root"),
            ("GET", "attestation/intermediate"): lambda _: self._certificate("intermediate"),
        }

    def answer(self, request: Request) -> Answer:
        """Return the response to *request*."""
        if "origin" in request.headers:
            # A web page in a local browser must not control the simulator.
            return _json({"error": "The simulator refuses requests from web pages."}, status=403)
        try:
            return self._route(request)
        except UnknownEvent as exc:
            return _json({"error": str(exc)}, status=404)
        except WrongState as exc:
            return _json({"error": str(exc)}, status=409)
        except (WrongRequest, ScenarioError) as exc:
            return _json({"error": str(exc), "mistakes": str(exc).splitlines()}, status=400)

    def _route(self, request: Request) -> Answer:
        path = request.path[len(CONTROL_PATH) :].strip("/")
        if path.startswith("events/"):
            return self._tell_event(request, path.split("/")[1:])
        route = self._routes.get((request.method, path))
        if route is not None:
            return route(request)
        known = {known for _, known in self._routes}
        message = f"{request.method} /control/{path} does not exist.{nearest(path, known)}"
        return _json({"error": f"{message} Known: {', '.join(sorted(known))}."}, status=404)

    def _state(self, _request: Request) -> Answer:
        world = self._world
        return _json(
            {
                "seconds": world.seconds(),
                "speed": world.speed,
                "is_finished": world.is_finished,
                "incarnation": world.incarnation,
                "vms": self._machines(),
                "events": self._events(),
                "faults": world.faults.waiting(),
            }
        )

    def _add_event(self, request: Request) -> Answer:
        values = _body(request)
        spec = _converted(values, EventSpec)
        event_id = self._world.add_event(placed(spec, self._world.vm_names))
        return _json({"event_id": event_id}, status=201)

    def _tell_event(self, request: Request, parts: list[str]) -> Answer:
        world = self._world
        verbs: dict[str, Callable[[str], None]] = {
            "start": world.start,
            "complete": world.complete,
            "cancel": world.cancel,
            "approve": lambda event_id: world.approve([event_id], vm="control"),
            "update": lambda event_id: self._update(event_id, request),
        }
        event_id, verb = parts[0], "/".join(parts[1:])
        if verb not in verbs or request.method != "POST":
            message = f"{request.method} on an event with {verb!r} does not exist.{nearest(verb, verbs)}"
            return _json({"error": f"{message} POST one of: {', '.join(sorted(verbs))}."}, status=404)
        verbs[verb](event_id)
        return _json({"event_id": event_id, "done": verb, "incarnation": world.incarnation})

    def _update(self, event_id: str, request: Request) -> None:
        values = _body(request)
        changes = changes_in(_converted(values, EventChanges), values)
        if not changes:
            raise WrongRequest("An update changes at least one field, for example notice_seconds or duration_seconds.")
        self._world.update(event_id, **changes)

    def _add_fault(self, request: Request) -> Answer:
        fault = _converted(_body(request), Fault)
        self._world.set_fault(fault)
        return _json(fault, status=201)

    def _clear_faults(self, request: Request) -> Answer:
        target = request.query.get("target", "all")
        if target not in TARGETS:
            raise WrongRequest(f"Unknown target {target!r}.{nearest(target, TARGETS)} Known: {', '.join(TARGETS)}.")
        self._world.clear_faults(target)
        return _json({"cleared": target})

    def _reset_incarnation(self, request: Request) -> Answer:
        to = _converted(_body(request), _Incarnation).to
        self._world.reset_incarnation(to)
        return _json({"incarnation": to})

    def _certificate(self, name: str) -> Answer:
        return Answer(body=self._certificates()[name], content_type="application/x-pem-file")

    def _events(self) -> list[dict[str, Any]]:
        return [
            {
                "event_id": event.event_id,
                "event_type": event.spec.event_type,
                "status": event.status,
                "resources": event.resources,
                "not_before": self._world.wall_clock(event.not_before_seconds),
                "is_approved": event.is_approved,
            }
            for event in self._world.events()
        ]


def _body(request: Request) -> dict[str, Any]:
    if not request.body:
        return {}
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError) as exc:
        raise WrongRequest(f"The body is not valid JSON: {exc}.") from exc
    if not isinstance(value, dict):
        raise WrongRequest("The body must be a JSON object.")
    return value


def _converted(values: dict[str, Any], struct: type[_StructT]) -> _StructT:
    problems = Problems()
    made = convert(values, struct, "", problems)
    if made is None:
        raise WrongRequest("\n".join(problems.sentences))
    return made


def _json(value: object, *, status: int = 200) -> Answer:
    return Answer(status=status, body=msgspec.json.encode(value) + b"\n")
