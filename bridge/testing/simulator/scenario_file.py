"""Reads a scenario from a TOML file, and reports all errors in the file at once.

A scenario file contains a `description`, a `demo_speed`, and `[[steps]]`. Each step contains a time (`at`, in seconds
of scenario time) and exactly one verb:

    add = "NAME"           add an event with the keys of `EventSpec`; other steps use NAME
    start, complete, cancel, approve = "NAME"
    update = "NAME"        change event_type, description, event_source, notice_seconds, impact_seconds,
                           duration_seconds, resources, or extra
    fault = "KIND"         queue a fault with the keys of `Fault`
    reset_incarnation = N

In resources and descriptions, `{vm}` stands for the simulator's first VM. In resources, `{vms}` stands for all VMs.
With a large `impact_seconds`, a started event stays in the document until a step completes it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from bridge.config.mistakes import Problems
from bridge.config.toml import convert
from bridge.errors import ScenarioError
from bridge.testing.simulator.errors import SimulatorError
from bridge.testing.simulator.events import EventChanges, EventSpec, Seconds, changes_in
from bridge.testing.simulator.faults import Fault, FaultDetails, Kind
from bridge.testing.simulator.world import World
from bridge.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]


#: The first VM of the simulator, in resources and descriptions.
ONE_VM = "{vm}"
#: All VMs of the simulator, as an entry of resources.
EVERY_VM = "{vms}"


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    description: str = ""
    demo_speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e9)] = 1.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A change to the simulated Azure at a specific time in the scenario."""

    at_seconds: float
    apply: Callable[[World, dict[str, str]], object]
    """Applies the step to a World. The dictionary maps the event names in the scenario to EventIds."""
    adds: str = ""
    """The name of the event that the step adds."""
    uses: str = ""
    """The name of the event that the step changes."""


class _Add(EventSpec, frozen=True, kw_only=True):
    at: Seconds
    add: str


class _Update(EventChanges, frozen=True, kw_only=True):
    at: Seconds
    update: str


class _Fault(FaultDetails, frozen=True, kw_only=True):
    at: Seconds
    fault: Kind


class _Reset(msgspec.Struct, frozen=True, kw_only=True):
    at: Seconds
    reset_incarnation: Annotated[int, msgspec.Meta(ge=0)]


class _OnEvent(msgspec.Struct, frozen=True, kw_only=True):
    at: Seconds
    start: str = ""
    complete: str = ""
    cancel: str = ""
    approve: str = ""


_EVENT_VERBS: dict[str, Callable[[World, str], object]] = {
    "start": World.start,
    "complete": World.complete,
    "cancel": World.cancel,
    "approve": lambda world, event_id: world.approve([event_id], vm="scenario"),
}
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "add": _Add,
    "update": _Update,
    "fault": _Fault,
    "reset_incarnation": _Reset,
    **dict.fromkeys(_EVENT_VERBS, _OnEvent),
}


def placed(spec: EventSpec, vm_names: Sequence[str]) -> EventSpec:
    """Replace the placeholders in *spec* with the names of VMs."""
    description = spec.description.replace(ONE_VM, vm_names[0])
    if spec.resources is None:
        return msgspec.structs.replace(spec, description=description)
    names: list[str] = []
    for resource in spec.resources:
        names.extend(vm_names if resource == EVERY_VM else [resource.replace(ONE_VM, vm_names[0])])
    return msgspec.structs.replace(spec, resources=tuple(names), description=description)


def parse_steps(text: str, *, name: str) -> tuple[str, float, tuple[Step, ...]]:
    """Return the description, the demo speed, and the steps in *text*.

    The steps are in the order of their times.

    Raises ScenarioError with one line for each error and its position.
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise ScenarioError(f"Scenario {name!r} is not valid TOML: {exc}.") from exc
    problems = Problems()
    problems.whose = f"scenario {name!r}"
    steps = _read_steps(values.pop("steps", []), problems)
    header = convert(values, _Header, "", problems)
    if header is None or problems.sentences:
        raise ScenarioError("\n".join(problems.sentences))
    return header.description, header.demo_speed, steps


def _read_steps(tables: object, problems: Problems) -> tuple[Step, ...]:
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        problems.wrong("steps", tables, "a list of tables. Write each step as [[steps]] with its keys")
        return ()
    read = [(path := f"steps[{number}]", _read_step(each, path, problems)) for number, each in enumerate(tables)]
    steps = sorted(((path, step) for path, step in read if step is not None), key=lambda each: each[1].at_seconds)
    _check_names(steps, problems)
    return tuple(step for _, step in steps)


def _read_step(table: Mapping[str, Any], path: str, problems: Problems) -> Step | None:
    verbs = [verb for verb in _STRUCTS if verb in table]
    if len(verbs) != 1:
        problems.quote(path, _wrong_verbs(verbs, table))
        return None
    made: Any = convert(table, _STRUCTS[verbs[0]], path, problems)
    if isinstance(made, _Add):
        return _add(made, path, problems)
    if isinstance(made, _Update):
        return _update(made, table, path, problems)
    if isinstance(made, _Fault):
        fault = Fault(kind=made.fault, **{name: getattr(made, name) for name in FaultDetails.__struct_fields__})
        return Step(at_seconds=made.at, apply=lambda world, _ids: world.set_fault(fault))
    if isinstance(made, _Reset):
        return Step(at_seconds=made.at, apply=lambda world, _ids: world.reset_incarnation(made.reset_incarnation))
    return None if made is None else _on_event(made, verbs[0])


def _on_event(made: _OnEvent, verb: str) -> Step:
    name: str = getattr(made, verb)
    return Step(at_seconds=made.at, uses=name, apply=lambda world, ids: _EVENT_VERBS[verb](world, _event_id(ids, name)))


def _add(added: _Add, path: str, problems: Problems) -> Step:
    _check_resources(added.resources or (), path, problems)
    spec = EventSpec(**{name: getattr(added, name) for name in EventSpec.__struct_fields__})

    def add(world: World, ids: dict[str, str]) -> None:
        ids[added.add] = world.add_event(placed(spec, world.vm_names))

    return Step(at_seconds=added.at, adds=added.add, apply=add)


def _update(made: _Update, table: Mapping[str, Any], path: str, problems: Problems) -> Step:
    name, changes = made.update, changes_in(made, table)
    if not changes:
        problems.quote(path, "an update changes at least one field, for example notice_seconds or duration_seconds.")
    return Step(at_seconds=made.at, uses=name, apply=lambda world, ids: world.update(_event_id(ids, name), **changes))


def _event_id(ids: Mapping[str, str], name: str) -> str:
    if name not in ids:
        raise SimulatorError(f"the event {name!r} was not added")
    return ids[name]


def _check_resources(resources: Iterable[str], path: str, problems: Problems) -> None:
    for resource in resources:
        if resource != EVERY_VM and "{" in resource.replace(ONE_VM, ""):
            sentence = f"{resource!r} is invalid. Use a name, {ONE_VM}, or only {EVERY_VM}."
            problems.quote(f"{path}.resources", sentence)


def _wrong_verbs(verbs: list[str], table: Mapping[str, Any]) -> str:
    if verbs:
        return f"a step has exactly one verb, but this step has {', '.join(verbs)}. Write one step for each verb."
    hint = "".join(nearest(key, _STRUCTS) for key in table)
    return f"a step has exactly one verb, but this step has none.{hint} Known: {', '.join(sorted(_STRUCTS))}."


def _check_names(steps: Iterable[tuple[str, Step]], problems: Problems) -> None:
    added: set[str] = set()
    for path, step in steps:
        if step.adds in added:
            problems.quote(f"{path}.add", f"two events have the name {step.adds!r}. Give each event a unique name.")
        elif step.adds:
            added.add(step.adds)
        elif step.uses and step.uses not in added:
            problems.quote(path, f"no earlier step adds the event {step.uses!r}.{nearest(step.uses, added)}")
