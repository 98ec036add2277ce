"""Implements `send-test`, which sends a test record directly, without the outbox."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial

import click
import msgspec

from bridge.cli.terminal import say
from bridge.clock import format_time, utc_now
from bridge.config.loader import Settings, SinkSettings
from bridge.delivery.sender import Sender
from bridge.errors import BridgeError
from bridge.events.event import VmIdentity
from bridge.events.record import Transition, TransitionRecord, record_id, transition_key
from bridge.exit_codes import ExitCode
from bridge.imds.client import ImdsClient, attested_document, attested_tokens
from bridge.sink import AttestedTokens
from bridge.testing.records import sample_event, sample_record

_IDENTITY_SECONDS = 2.0


def send_test(settings: Settings, names: Sequence[str]) -> int:
    """Send a test record to the named sinks, or to all sinks that do not start a program."""
    by_name = {sink.name: sink for sink in settings.sinks}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise click.UsageError(f"Unknown sink {unknown[0]!r}. Configured sinks: {', '.join(by_name)}.")
    chosen = [by_name[name] for name in names]
    for sink in settings.sinks if not names else ():
        if sink.sink_class.send_test_by_name_only:
            say(f"{sink.name}: skipped, because it starts a program. To start the program, name the sink.")
        else:
            chosen.append(sink)
    record = _test_record(settings)
    attested = attested_tokens(partial(attested_document, settings.imds))
    is_delivered = [_send(sink, record, attested) for sink in chosen]
    return ExitCode.OK if all(is_delivered) else ExitCode.FAILED


def _send(sink: SinkSettings, record: TransitionRecord, attested: AttestedTokens) -> bool:
    timeout_seconds = sink.config.timeout_seconds
    problem = ""
    with closing(Sender(partial(sink.build, attested), name=sink.name, timeout_seconds=timeout_seconds)) as sender:
        try:
            sender.send([record])
        except Exception as error:  # noqa: BLE001  # a sink can raise anything
            problem = str(error) or type(error).__name__
    say(f"{sink.name}: {problem or 'delivered'}")
    return not problem


def _identity(settings: Settings) -> VmIdentity:
    try:
        seconds = min(settings.imds.timeout_seconds, _IDENTITY_SECONDS)
        with closing(ImdsClient(msgspec.structs.replace(settings.imds, timeout_seconds=seconds))) as imds:
            return imds.identity()
    except BridgeError:
        return VmIdentity()


def _test_record(settings: Settings) -> TransitionRecord:
    now = utc_now()
    vm = _identity(settings).with_overrides(settings.vm)
    name = vm.name or "this-vm"
    event = sample_event(
        event_id=f"TEST-{now:%Y%m%dT%H%M%S.%fZ}",
        resources=(name,),
        not_before=(now + timedelta(minutes=15)).replace(microsecond=0),
        not_before_raw=None,
        description="A test of this sink. Nothing happens to the virtual machine.",
        event_source="User",
        duration_seconds=0,
    )
    return sample_record(
        0,
        id=record_id(vm_key=name, event_key=event.key, transition=Transition.TEST, event=event, n=0),
        transition_key=transition_key(event.key, Transition.TEST, event, n=0),
        stream_id="00000000-0000-0000-0000-000000000000",
        active_event_ids=None,
        transition=Transition.TEST,
        observed_at=format_time(now),
        incarnation=None,
        previous_incarnation=None,
        event=event,
        notice_seconds=900.0,
        vm=vm,
        labels=dict(settings.labels),
    )
