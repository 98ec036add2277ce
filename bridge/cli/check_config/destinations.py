"""`check-config --connect`: tries IMDS, the portal, and the destination of every sink at once, without writing.

The Scheduled Events document is requested only if an agent is running: the first request turns the feature on for the
VM, and a reboot that a user requests may then wait for minutes. The portal gets the first request of an agent, which
changes nothing there and acknowledges nothing (PROTOCOL.md, section 3).
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
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.events.event import VmIdentity
from bridge.imds.client import attested_document, attested_tokens, client_of
from bridge.sink import Sink
from bridge.system.threads import run_daemon

#: Added to the deadline of a trial for the name lookup, which no socket deadline covers.
_GRACE_SECONDS = 3.0
_MOST_SECONDS = 30.0
_PORTAL_SECONDS = 9
_ASKED_AGAIN = " It is asked again."


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one destination."""

    name: str
    message: str
    is_failed: bool


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    limit_seconds: float
    attempt: Callable[[], str]
    """Return the message of a success, or raise the failure."""


def try_destinations(settings: Settings, *, is_running: bool, broken: Collection[str]) -> Iterator[Tried]:
    """Yield the results in the order of the configuration. Sinks whose `Sink NAME` is in *broken* are not tried."""
    identity: Future[VmIdentity | None] = Future()
    imds_seconds = settings.imds.timeout_seconds * (2 if is_running else 1)
    trials = [_Trial(name="IMDS", limit_seconds=imds_seconds, attempt=lambda: _imds(settings, identity, is_running))]
    remote = None if settings.approval is None else settings.approval.remote
    if remote is not None:
        limit = imds_seconds + _PORTAL_SECONDS + 1.0 + (TOKEN_DEADLINE_SECONDS if remote.credential else 0.0)
        trials.append(_Trial(name="Portal", limit_seconds=limit, attempt=lambda: _portal(settings, remote, identity)))
    trials += [_trial_of(sink, settings.imds, is_broken=f"Sink {sink.name}" in broken) for sink in settings.sinks]
    begun = [(trial, run_daemon(f"check:{trial.name}", trial.attempt)) for trial in trials]
    for trial, outcome in begun:
        yield _end(trial, outcome)


def _end(trial: _Trial, outcome: Future[str]) -> Tried:
    try:
        error = outcome.exception(trial.limit_seconds + _GRACE_SECONDS)
    except FutureTimeout:
        seconds = trial.limit_seconds + _GRACE_SECONDS
        message = f"No answer within {seconds:g} s. Check whether this machine can resolve its name."
        return Tried(name=trial.name, message=message, is_failed=True)
    if error is not None:
        return Tried(name=trial.name, message=str(error) or type(error).__name__, is_failed=True)
    return Tried(name=trial.name, message=outcome.result(), is_failed=False)


def _imds(settings: Settings, identity: Future[VmIdentity | None], is_running: bool) -> str:  # noqa: FBT001
    try:
        with closing(client_of(settings.imds, at_most_seconds=settings.imds.timeout_seconds)) as imds:
            vm = imds.identity()
            identity.set_result(vm)
            reached = f"reached; this VM is {vm.name or vm.vm_id}"
            if not is_running:
                return f"{reached}. Scheduled Events were not requested, because the first request turns them on."
            return f"{reached}, with {counted(len(imds.scheduled_events().events), 'scheduled event')}."
    except BridgeError as error:
        advice = (
            " On Azure, it must be reachable without a proxy, and a container may need the host's network. "
            "Outside Azure, imds.endpoint can name a simulator."
        )
        said = str(error).removesuffix(_ASKED_AGAIN)
        raise BridgeError(said + ("" if said.endswith((".", "?", "!")) else ".") + advice) from error
    finally:
        if not identity.done():
            identity.set_result(None)


def _portal(settings: Settings, remote: RemoteSettings, identity: Future[VmIdentity | None]) -> str:
    found = None if settings.vm.vm_id is not None else identity.result()
    vm_id = settings.vm.vm_id or (None if found is None else found.vm_id)
    if vm_id is None:
        raise BridgeError("It was not tried: IMDS returned no vmId for this VM, and vm.vm_id is not set.")
    quick = msgspec.structs.replace(remote, wait_seconds=1)
    document = partial(attested_document, settings.imds)
    with closing(PortalClient(quick, document=document, grace_seconds=_PORTAL_SECONDS)) as client:
        answer = client.poll(vm_id, index=0)
    return f"reached; {counted(len(answer.decisions), 'decision')} for this VM."


def _trial_of(sink: SinkSettings, imds: ImdsSettings, *, is_broken: bool) -> _Trial:
    seconds = min(sink.config.timeout_seconds, _MOST_SECONDS)
    reason = _untried(sink, is_broken=is_broken)
    return _Trial(
        name=sink.name,
        limit_seconds=seconds,
        attempt=(lambda: _checked(sink, seconds, imds)) if reason is None else (lambda: reason),
    )


def _untried(sink: SinkSettings, *, is_broken: bool) -> str | None:
    """Return why *sink* is not tried, or None."""
    if is_broken:
        return "not tried because of the problem above."
    if sink.sink_class.check is Sink.check:
        return f"cannot be tried without writing to it; `send-test {sink.name}` sends a record."
    return None


def _checked(sink: SinkSettings, seconds: float, imds: ImdsSettings) -> str:
    attested = attested_tokens(partial(attested_document, imds))
    sender = Sender(sink.build, name=sink.name, timeout_seconds=seconds, attested=attested)
    try:
        sender.check()
    finally:
        sender.close()
    return sink.sink_class.shown_by_check(sink.config)
