"""Tests the connections to IMDS, the portal, and the sinks (`check-config --connect`).

The tests run in parallel. None of them writes to its destination.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing
from functools import partial

import msgspec

from bridge.approval.credentials import TOKEN_DEADLINE_SECONDS
from bridge.approval.portal_client import PortalClient
from bridge.cli.terminal import counted
from bridge.config.approval import RemoteSettings
from bridge.config.loader import Settings, SinkSettings
from bridge.config.settings import ImdsSettings
from bridge.config.telemetry import PushSettings
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.imds.client import ImdsClient, attested_document, attested_tokens
from bridge.sink import Sink
from bridge.system.threads import run_daemon

#: Additional time for the name lookup, to which no socket deadline applies.
_GRACE_SECONDS = 3.0
_MOST_SECONDS = 30.0
_PORTAL_SECONDS = 9
_STDOUT = "stdout"
_REPEATED = " The agent tries again."


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a connection test for one destination."""

    name: str
    message: str
    is_failed: bool


def try_destinations(settings: Settings, *, is_running: bool, broken: Collection[str]) -> Iterator[Tried]:
    """Yield the result of each connection test. Skip the sinks in *broken*."""
    imds_seconds = settings.imds.timeout_seconds * 2
    imds = partial(_imds, settings, is_running=is_running)
    trials: list[tuple[str, float, Callable[[], str]]] = [("IMDS", imds_seconds, imds)]
    remote = None if settings.approval is None else settings.approval.remote
    if remote is not None:
        limit = imds_seconds + _PORTAL_SECONDS + TOKEN_DEADLINE_SECONDS
        trials.append(("Portal", limit, partial(_portal, settings, remote)))
    if settings.push is not None:
        trials.append(("Telemetry", settings.push.timeout_seconds, partial(_telemetry, settings.push)))
    for sink in settings.sinks:
        seconds = min(sink.config.timeout_seconds, _MOST_SECONDS)
        attempt = partial(_sink, sink, seconds, settings.imds, is_broken=f"Sink {sink.name}" in broken)
        trials.append((sink.name, seconds, attempt))
    begun = [(name, limit, run_daemon(f"check:{name}", attempt)) for name, limit, attempt in trials]
    for name, limit, outcome in begun:
        yield _result(name, outcome, limit + _GRACE_SECONDS)


def _result(name: str, outcome: Future[str], seconds: float) -> Tried:
    try:
        return Tried(name=name, message=outcome.result(seconds), is_failed=False)
    except FutureTimeout:
        message = f"No answer within {seconds:g} s. Check whether this machine can resolve its name."
    except Exception as error:  # noqa: BLE001  # a sink can raise anything
        message = str(error) or type(error).__name__
    return Tried(name=name, message=message, is_failed=True)


def _imds(settings: Settings, *, is_running: bool) -> str:
    # The command does not wait until Scheduled Events are turned on.
    limited = msgspec.structs.replace(settings.imds, first_timeout_seconds=settings.imds.timeout_seconds)
    try:
        with closing(ImdsClient(limited)) as imds:
            vm = imds.identity()
            reached = f"reached; this VM is {vm.name or vm.vm_id}"
            if not is_running:
                return f"{reached}. Scheduled Events were not requested, because the first request turns them on."
            return f"{reached}, with {counted(len(imds.scheduled_events().events), 'scheduled event')}."
    except BridgeError as error:
        advice = (
            " On Azure, it must be reachable without a proxy, and a container might need the host's network. "
            "Outside Azure, imds.endpoint can name a simulator."
        )
        message = str(error).removesuffix(_REPEATED)
        raise BridgeError(message + ("" if message.endswith((".", "?", "!")) else ".") + advice) from error


def _portal(settings: Settings, remote: RemoteSettings) -> str:
    with closing(ImdsClient(settings.imds)) as imds:
        vm_id = settings.vm.vm_id or imds.identity().vm_id
    if vm_id is None:
        raise BridgeError("The portal was not tried, because IMDS returned no vmId and vm.vm_id is not set.")
    quick = msgspec.structs.replace(remote, wait_seconds=1)
    document = partial(attested_document, settings.imds)
    with closing(PortalClient(quick, document=document, grace_seconds=_PORTAL_SECONDS)) as client:
        answer = client.poll(vm_id, index=0)
    return f"reached; {counted(len(answer.decisions), 'decision')} for this VM."


def _telemetry(push: PushSettings) -> str:
    from bridge.metrics.otlp_push import OtlpClient  # noqa: PLC0415  # imports requests

    with closing(OtlpClient(push)) as client:
        client.post(b"", deadline_seconds=push.timeout_seconds)
        return f"{client.shown} accepted an empty request."


def _sink(sink: SinkSettings, seconds: float, imds: ImdsSettings, *, is_broken: bool) -> str:
    if is_broken:
        return "not tried because of the problem above."
    if sink.sink_class.check is Sink.check:
        return f"cannot be tried without writing to it; `send-test {sink.name}` sends a record."
    if sink.type_name == _STDOUT:
        return "not tried: it writes to the agent's standard output."
    attested = attested_tokens(partial(attested_document, imds))
    with closing(Sender(partial(sink.build, attested), name=sink.name, timeout_seconds=seconds)) as sender:
        sender.check()
        return sink.sink_class.shown_by_check(sink.config)
