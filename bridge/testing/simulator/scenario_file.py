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
from functools import partial
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


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    description: str = ""
    demo_speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e9)] = 1.0
    """The recommended speed for a demo, at which the scenario takes a few seconds."""


class Scenario(_Header, frozen=True, kw_only=True):
    """A list of steps in the order of their times."""

    name: str
    steps: tuple[Step, ...] = ()

    def play(self, world: World) -> None:
        """Schedule every step in *world*, relative to the current time."""
        start = world.seconds()
        ids: dict[str, str] = {}
        for step in self.steps:
            world.schedule(start + step.at_seconds, partial(step.apply, world, ids))


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


def parse_scenario(text: str, *, name: str) -> Scenario:
    """Return the scenario in the TOML *text*.

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
    return Scenario(name=name, steps=steps, **msgspec.structs.asdict(header))


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
    (verb,) = verbs
    made: Any = convert(table, _STRUCTS[verb], path, problems)
    if made is None:
        return None
    value = getattr(made, verb)
    if verb == "fault":
        fault = Fault(kind=value, **{name: getattr(made, name) for name in FaultDetails.__struct_fields__})
        return Step(at_seconds=made.at, apply=lambda world, _ids: world.set_fault(fault))
    if verb == "reset_incarnation":
        return Step(at_seconds=made.at, apply=lambda world, _ids: world.reset_incarnation(value))
    if verb == "add":
        _check_resources(made.resources or (), path, problems)
        return Step(at_seconds=made.at, adds=value, apply=partial(_add, made))
    changes = changes_in(made, table) if verb == "update" else {}
    if verb == "update" and not changes:
        problems.quote(path, "an update changes at least one field, for example notice_seconds or duration_seconds.")
    act: Callable[[World, str], object] = _EVENT_VERBS.get(verb) or partial(World.update, **changes)
    return Step(at_seconds=made.at, uses=value, apply=lambda world, ids: act(world, _event_id(ids, value)))


def _add(added: _Add, world: World, ids: dict[str, str]) -> None:
    ids[added.add] = world.add_event(placed(added, world.vm_names))


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
