"""`send-test`: a record of transition `test`, sent straight to each sink; the outbox is not touched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial

import click

from bridge.cli.stderr import say
from bridge.clock import format_time, utc_now
from bridge.config.loader import Settings, SinkSettings
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.events.event import ScheduledEvent, VmIdentity
from bridge.events.record import Evidence, Transition, TransitionRecord, record_id, transition_key
from bridge.imds.client import attested_document, attested_tokens, client_of
from bridge.sink import AttestedTokens

_IDENTITY_SECONDS = 2.0


def send_test(settings: Settings, names: Sequence[str]) -> bool:
    """Send a test record straight to the sinks called *names*, or to all but those that run a program.

    Prints what came of each, and returns whether every one took it.
    """
    by_name = {sink.name: sink for sink in settings.sinks}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise click.UsageError(f"No sink is called {unknown[0]!r}. Configured: {', '.join(by_name)}.")
    chosen = [by_name[name] for name in names] or [
        sink for sink in settings.sinks if not sink.sink_class.send_test_by_name_only
    ]
    for sink in settings.sinks:
        if sink not in chosen and not names:
            say(f"{sink.name}: left out, it runs a program; name it to run that.")
    record = _test_record(settings)
    attested = attested_tokens(partial(attested_document, settings.imds))
    problems = [(sink.name, _send(sink, record, attested)) for sink in chosen]
    for name, problem in problems:
        say(f"{name}: {problem or 'delivered'}")
    return all(problem is None for _, problem in problems)


def _send(sink: SinkSettings, record: TransitionRecord, attested: AttestedTokens) -> str | None:
    """Send *record* to *sink*; return what was wrong, or None."""
    timeout_seconds = sink.config.timeout_seconds
    sender = Sender(sink.build, name=sink.name, timeout_seconds=timeout_seconds, attested=attested)
    try:
        sender.send([record])
    except Exception as error:  # noqa: BLE001  # anything a sink raises is an answer to the person who asked
        return str(error) or type(error).__name__
    finally:
        sender.close()
    return None


def _found_identity(settings: Settings) -> VmIdentity:
    """Return who this VM is, as far as IMDS says so quickly: a test away from Azure works as well."""
    try:
        with closing(client_of(settings.imds, at_most_seconds=_IDENTITY_SECONDS)) as imds:
            return imds.identity()
    except BridgeError:
        return VmIdentity()


def _test_record(settings: Settings) -> TransitionRecord:
    now = utc_now()
    vm = _found_identity(settings).with_overrides(settings.vm)
    name = vm.name or "this-vm"
    event = ScheduledEvent(
        event_id=f"TEST-{now:%Y%m%dT%H%M%S.%fZ}",
        event_type="Freeze",
        event_status="Scheduled",
        resource_type="VirtualMachine",
        resources=(name,),
        not_before=(now + timedelta(minutes=15)).replace(microsecond=0),
        not_before_raw=None,
        description="A test of this sink. Nothing happens to the virtual machine.",
        event_source="User",
        duration_seconds=0,
    )
    return TransitionRecord(
        id=record_id(vm_key=name, event_key=event.key, transition=Transition.TEST, event=event, n=0),
        transition_key=transition_key(event.key, Transition.TEST, event, n=0),
        stream_id="00000000-0000-0000-0000-000000000000",
        sequence=0,
        transition=Transition.TEST,
        evidence=Evidence.OBSERVED,
        observed_at=format_time(now),
        incarnation=None,
        previous_incarnation=None,
        event=event,
        previous=None,
        changed=(),
        notice_seconds=900.0,
        affects_this_vm=True,
        vm=vm,
        labels=dict(settings.labels),
    )
