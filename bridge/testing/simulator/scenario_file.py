"""Reads the TOML of a scenario, and names every mistake in it at once.

A file has a description, the speed at which a demo should play it (`demo_speed`), and `[[steps]]`. A step has a time
(`at`, in seconds of scenario time) and exactly one verb:

    add = "NAME"           announce an event; NAME is what other steps call it; further keys as in `EventSpec`
    start, complete, cancel, approve = "NAME"
    update = "NAME"        change event_type, description, event_source, notice_seconds, impact_seconds,
                           duration_seconds, resources or extra
    fault = "KIND"         queue a fault; further keys as in `Fault`
    clear_faults = "TARGET"
    reset_incarnation = N
    document = "JSON"      serve this text as the document; "" goes back to the events

In resources and descriptions `{vm}` is the simulator's first VM; in resources `{vms}` alone is every VM.
`impact_seconds = inf` leaves a started event in the document until a step completes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec

from bridge.config.mistakes import Problems
from bridge.config.toml import convert
from bridge.errors import ScenarioError
from bridge.testing.simulator.events import EventChanges, EventSpec, Seconds, changes_in, read_event
from bridge.testing.simulator.faults import Fault, FaultDetails, Kind, Target
from bridge.testing.simulator.steps import (
    EVERY_VM,
    ONE_VM,
    Add,
    ClearFaults,
    ReplaceDocument,
    ResetIncarnation,
    SetFault,
    Step,
    Tell,
    Update,
)
from bridge.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    description: str = ""
    demo_speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e9)] = 1.0


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    at: Seconds

    def step(self) -> Step:
        raise NotImplementedError


class _Start(_Step, frozen=True, kw_only=True):
    start: str

    def step(self) -> Step:
        return Tell(at_seconds=self.at, verb="start", name=self.start)


class _Complete(_Step, frozen=True, kw_only=True):
    complete: str

    def step(self) -> Step:
        return Tell(at_seconds=self.at, verb="complete", name=self.complete)


class _Cancel(_Step, frozen=True, kw_only=True):
    cancel: str

    def step(self) -> Step:
        return Tell(at_seconds=self.at, verb="cancel", name=self.cancel)


class _Approve(_Step, frozen=True, kw_only=True):
    approve: str

    def step(self) -> Step:
        return Tell(at_seconds=self.at, verb="approve", name=self.approve)


class _Fault(FaultDetails, frozen=True, kw_only=True):
    at: Seconds
    fault: Kind

    def step(self) -> Step:
        details = {name: getattr(self, name) for name in FaultDetails.__struct_fields__}
        return SetFault(at_seconds=self.at, fault=Fault(kind=self.fault, **details))


class _ClearFaults(_Step, frozen=True, kw_only=True):
    clear_faults: Target

    def step(self) -> Step:
        return ClearFaults(at_seconds=self.at, target=self.clear_faults)


class _ResetIncarnation(_Step, frozen=True, kw_only=True):
    reset_incarnation: Annotated[int, msgspec.Meta(ge=0)]

    def step(self) -> Step:
        return ResetIncarnation(at_seconds=self.at, to=self.reset_incarnation)


class _Document(_Step, frozen=True, kw_only=True):
    document: str

    def step(self) -> Step:
        return ReplaceDocument(at_seconds=self.at, text=self.document)


class _Add(EventSpec, frozen=True, kw_only=True):
    at: Seconds
    add: str

    def step(self) -> Step:
        spec = EventSpec(**{name: getattr(self, name) for name in EventSpec.__struct_fields__})
        return Add(at_seconds=self.at, name=self.add, spec=spec)


class _Update(EventChanges, frozen=True, kw_only=True):
    at: Seconds
    update: str


_PLAIN: dict[str, type[_Step | _Fault]] = {
    "start": _Start,
    "complete": _Complete,
    "cancel": _Cancel,
    "approve": _Approve,
    "fault": _Fault,
    "clear_faults": _ClearFaults,
    "reset_incarnation": _ResetIncarnation,
    "document": _Document,
}
_VERBS = ("add", "update", *_PLAIN)


def parse_steps(text: str, *, name: str) -> tuple[str, float, tuple[Step, ...]]:
    """Return the description, the demo speed and the steps of *text*, steps in the order of their times.

    Raises ScenarioError with every mistake, one a line, each with its place.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ScenarioError(f"Scenario {name!r} is no TOML: {exc}.") from exc
    problems = Problems()
    problems.whose = f"scenario {name!r}"
    steps = _read_steps(values.pop("steps", []), problems)
    header = convert(values, _Header, "", problems)
    if header is None or problems.sentences:
        raise ScenarioError("\n".join(problems.sentences))
    return header.description, header.demo_speed, steps


def _read_steps(tables: object, problems: Problems) -> tuple[Step, ...]:
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        problems.wrong("steps", tables, "a list of tables. Write each as [[steps]] and its keys below")
        return ()
    read = [(path := f"steps[{number}]", _read_step(each, path, problems)) for number, each in enumerate(tables)]
    steps = sorted(((path, step) for path, step in read if step is not None), key=lambda each: each[1].at_seconds)
    _check_names(steps, problems)
    return tuple(step for _, step in steps)


def _read_step(table: Mapping[str, Any], path: str, problems: Problems) -> Step | None:
    verbs = [verb for verb in _VERBS if verb in table]
    if len(verbs) != 1:
        problems.quote(path, _wrong_verbs(verbs, table))
        return None
    if verbs[0] == "add":
        added = read_event(table, _Add, path, problems)
        if added is None:
            return None
        _check_resources(added.resources or (), path, problems)
        return added.step()
    if verbs[0] == "update":
        return _read_update(table, path, problems)
    made = convert(table, _PLAIN[verbs[0]], path, problems)
    return None if made is None else made.step()


def _read_update(table: Mapping[str, Any], path: str, problems: Problems) -> Step | None:
    made = read_event(table, _Update, path, problems)
    if made is None:
        return None
    changes = changes_in(made, table)
    if not changes:
        problems.quote(path, "an update changes at least one field, for example notice_seconds or duration_seconds.")
    return Update(at_seconds=made.at, name=made.update, changes=changes)


def _check_resources(resources: Iterable[str], path: str, problems: Problems) -> None:
    for resource in resources:
        if resource != EVERY_VM and "{" in resource.replace(ONE_VM, ""):
            sentence = f"{resource!r} is not understood. Write a name, {ONE_VM}, or {EVERY_VM} alone."
            problems.quote(f"{path}.resources", sentence)


def _wrong_verbs(verbs: list[str], table: Mapping[str, Any]) -> str:
    if verbs:
        return f"a step has exactly one verb, this one has {', '.join(verbs)}. Make a step of each."
    hint = "".join(nearest(key, _VERBS) for key in table)
    return f"a step has exactly one verb, this one has none.{hint} Known: {', '.join(sorted(_VERBS))}."


def _check_names(steps: Iterable[tuple[str, Step]], problems: Problems) -> None:
    added: set[str] = set()
    for path, step in steps:
        if isinstance(step, Add) and step.name in added:
            problems.quote(f"{path}.add", f"two events are called {step.name!r}. Each needs a name of its own.")
        elif isinstance(step, Add):
            added.add(step.name)
        elif isinstance(step, (Tell, Update)) and step.name not in added:
            problems.quote(path, f"no earlier step adds the event {step.name!r}.{nearest(step.name, added)}")
