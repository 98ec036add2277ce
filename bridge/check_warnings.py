"""What a configuration says that does nothing, or that surprises: allowed, but seldom meant. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from bridge.config import Settings, SinkSettings
from bridge.masking import sounds_secret
from bridge.record import Transition

_APPROVALS = frozenset({Transition.APPROVED.value, Transition.APPROVAL_REFUSED.value, Transition.APPROVAL_FAILED.value})
_HEARTBEAT, _TEST = Transition.HEARTBEAT.value, Transition.TEST.value
#: They sound like a secret and are none.
_HARMLESS_HEADERS = frozenset({"idempotency-key", "content-key", "authority", "x-authority"})


def warnings(settings: Settings) -> list[str]:
    """Return a sentence for each of them."""
    found = [*_about_the_agent(settings), *_about_heartbeats(settings)]
    for sink in settings.sinks:
        found += [f"Sink {sink.name}: {said}" for said in _about_sink(sink, settings)]
    return found


def _about_the_agent(settings: Settings) -> Iterator[str]:
    directory = settings.state.directory
    if directory is not None and not Path(directory).is_absolute():
        yield (
            f"state.directory is {directory!r}, which depends on where the agent is started: here it is "
            f"{Path(directory).absolute()}. Write the whole path."
        )
    address = settings.status.address
    if address is not None and not _is_loopback(address[0]):
        yield (
            f"status.listen is {settings.status.listen!r}: whoever reaches that address can read health and metrics. "
            "There is no password."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _about_heartbeats(settings: Settings) -> Iterator[str]:
    interval = settings.heartbeat.interval_seconds
    wanting = [sink.name for sink in settings.sinks if sink.config.heartbeat]
    if interval and not wanting:
        yield f"heartbeat.interval_seconds is {interval:g}, but no sink has heartbeat = true: none is ever sent."
    if wanting and not interval:
        yield (
            f"heartbeat = true of {', '.join(wanting)} does nothing: heartbeat.interval_seconds is 0. "
            "Set it, for example to 300."
        )


def _about_sink(sink: SinkSettings, settings: Settings) -> Iterator[str]:
    config = sink.config
    if config.scope == "all":
        yield 'scope = "all" sends events of other VMs too; those send them as well, each once.'
    if config.transitions is not None:
        yield from _about_transitions(set(config.transitions), sink, settings)
    headers = getattr(config, "headers", None)
    for name in headers if isinstance(headers, dict) else ():
        if isinstance(name, str) and name.lower() not in _HARMLESS_HEADERS and sounds_secret(name):
            yield f"headers has {name}, whose value sounds like a secret: it belongs into headers_file, not into here."
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if name.endswith("_file") and isinstance(value, str) and not Path(value).is_absolute():
            yield f"{name} is {value!r}, which depends on where the agent is started. Write the whole path."


def _about_transitions(chosen: set[str], sink: SinkSettings, settings: Settings) -> Iterator[str]:
    beats = sink.config.heartbeat and settings.heartbeat.interval_seconds > 0
    never = {_TEST, _HEARTBEAT} | (set() if settings.approval is not None else _APPROVALS)
    if chosen <= never:
        gets = "heartbeats and tests" if beats else "tests"
        because = "" if settings.approval is not None or not chosen & _APPROVALS else "; there is no [approval] table"
        yield f"transitions names only {', '.join(sorted(chosen))}: it gets {gets}, and never an event{because}."
    elif _HEARTBEAT in chosen and not sink.config.heartbeat:
        yield "transitions names heartbeat, which does nothing by itself: heartbeats come with heartbeat = true."
