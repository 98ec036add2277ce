"""Reads the TOML of a scenario and says everything that is wrong with it at once.

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
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from bridge.errors import ScenarioError
from bridge.testing.events import read_changes, read_event
from bridge.testing.faults import TARGETS, read_fault
from bridge.testing.steps import (
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
from bridge.testing.table import Table, one_of, shown
from bridge.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


def parse_steps(text: str, *, name: str) -> tuple[str, float, tuple[Step, ...]]:
    """Return the description, the demo speed and the steps of *text*, steps in the order of their times.

    Raises ScenarioError with every mistake, one a line, each with the number of its step.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ScenarioError(f"Scenario {name!r} is no TOML: {exc}.") from exc
    mistakes: list[str] = []
    table = Table(values, where=f"scenario {name!r}", mistakes=mistakes)
    description, demo_speed = table.text("description"), table.number("demo_speed", 1.0, minimum=0.001)
    steps = _read_steps(table, name)
    table.refuse_unknown()
    if mistakes:
        raise ScenarioError("\n".join(mistakes))
    return description, demo_speed, steps


def _read_steps(table: Table, name: str) -> tuple[Step, ...]:
    raw = table.get("steps")
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        table.say(f"steps = {shown(raw)} must be written as [[steps]] tables.")
        return ()
    steps: list[Step] = []
    for number, item in enumerate(raw, start=1):
        step_table = Table(item, where=f"scenario {name!r}, step {number}", mistakes=table.mistakes)
        step = _read_step(step_table, item)
        if step is not None:
            steps.append(step)
    steps.sort(key=lambda step: step.at_seconds)
    _check_names(table, steps)
    return tuple(steps)


def _read_step(table: Table, item: Mapping[str, Any]) -> Step | None:
    if "at" not in table:
        table.say("at is missing: the second of scenario time at which the step happens.")
    at = table.number("at", 0.0)
    verbs = [verb for verb in _READERS if verb in item]
    if len(verbs) != 1:
        table.say(_wrong_verbs(verbs, item))
        return None
    step = _READERS[verbs[0]](table, at)
    table.refuse_unknown()
    return step


def _wrong_verbs(verbs: list[str], item: Mapping[str, Any]) -> str:
    if verbs:
        return f"a step has exactly one verb, this one has {', '.join(verbs)}; make a step of each."
    hint = "".join(nearest(key, _READERS) for key in item)
    return f"a step has exactly one verb, this one has none.{hint} {one_of(_READERS)}"


def _read_add(table: Table, at: float) -> Step:
    name = table.text("add")
    spec = read_event(table)
    for resource in spec.resources or ():
        if resource != EVERY_VM and "{" in resource.replace(ONE_VM, ""):
            table.say(f"resources: {resource!r} is not understood; write a name, {ONE_VM}, or {EVERY_VM} alone.")
    return Add(at_seconds=at, name=name, spec=spec)


def _read_told(verb: Literal["start", "complete", "cancel", "approve"], table: Table, at: float) -> Step:
    return Tell(at_seconds=at, verb=verb, name=table.text(verb))


def _read_update(table: Table, at: float) -> Step:
    return Update(at_seconds=at, name=table.text("update"), changes=read_changes(table))


def _read_fault(table: Table, at: float) -> Step:
    return SetFault(at_seconds=at, fault=read_fault(table, kind_key="fault"))


def _read_clear(table: Table, at: float) -> Step:
    return ClearFaults(at_seconds=at, target=table.choice("clear_faults", "all", TARGETS))


def _read_reset(table: Table, at: float) -> Step:
    return ResetIncarnation(at_seconds=at, to=table.whole("reset_incarnation", 1))


def _read_document(table: Table, at: float) -> Step:
    return ReplaceDocument(at_seconds=at, text=table.text("document"))


_READERS: dict[str, Callable[[Table, float], Step]] = {
    "add": _read_add,
    "start": partial(_read_told, "start"),
    "complete": partial(_read_told, "complete"),
    "cancel": partial(_read_told, "cancel"),
    "approve": partial(_read_told, "approve"),
    "update": _read_update,
    "fault": _read_fault,
    "clear_faults": _read_clear,
    "reset_incarnation": _read_reset,
    "document": _read_document,
}


def _check_names(table: Table, steps: list[Step]) -> None:
    added: set[str] = set()
    for step in steps:
        if isinstance(step, Add) and step.name in added:
            table.say(f"two events are called {step.name!r}; each needs a name of its own.")
        elif isinstance(step, Add):
            added.add(step.name)
        elif isinstance(step, (Tell, Update)) and step.name not in added:
            table.say(f"no earlier step adds the event {step.name!r}.{nearest(step.name, added)}")
