"""Implements `keygen` and `decide`, which create signing keys and sign decisions.

Approvers run these commands on their own machines, without the agent's configuration or outbox. `keygen` prints the
configuration that VMs need to trust the new key. `decide` prints one signed token per VM to standard output and a
summary to standard error.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import click
import msgspec

from bridge.approval.signing import DecisionSigner, generate_key
from bridge.clock import format_time, utc_now
from bridge.config.trusted_keys import name_mistakes
from bridge.errors import BridgeError
from bridge.events.event import ScheduledEvent, VmIdentity, normal_name
from bridge.events.record import TransitionRecord, Verdict, decode_record
from bridge.imds.document import parse_document
from bridge.text import one_line


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """The last known state of an event on one VM."""

    event: ScheduledEvent
    vm: VmIdentity
    """The VM. The vmId is null if the event comes from a Scheduled Events document."""
    is_over: bool = False

    @property
    def is_scheduled(self) -> bool:
        """Return whether the VM can approve the event."""
        return not self.is_over and self.event.event_status == "Scheduled"


def keygen(private_file: Path, kid: str | None, approver: str) -> None:
    """Create a key pair, and print the configuration for VMs that trust the key."""
    kid = kid or private_file.stem
    for mistake in name_mistakes(kid=kid, approver=approver):
        raise click.UsageError(mistake)
    pair = generate_key(private_file)
    click.echo("# The private key, which only you can read. Keep it where decisions are signed:")
    click.echo(f"#   {pair.private_key_file.absolute()}")
    click.echo("# Every VM gets the public key and these lines:")
    click.echo("[[approval.remote.keys]]")
    click.echo(f"kid = {_toml(kid)}")
    click.echo(f"approver = {_toml(approver)}")
    click.echo(f"public_key_file = {_toml(str(pair.public_key_file.absolute()))}")


def _toml(text: str) -> str:
    # TOML uses the same escapes as JSON, and additionally requires one for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def print_decisions(
    event_file: BinaryIO,
    *,
    event_id: str | None,
    vm_id: str | None,
    for_all: bool,
    key: Path,
    kid: str,
    approver: str,
    decision: str,
    reason: str | None,
    valid_seconds: float,
) -> None:
    """Sign decisions on an event. Print one token per line, and a summary.

    *event_file* contains a Scheduled Events document, or records or CloudEvents in JSON Lines format. If *for_all* is
    false, the file must show the event on only one VM, and *vm_id* can replace the vmId in the file. If *for_all* is
    true, the function signs one hold for each VM on which the event is not over, or one approval for each VM on which
    it is Scheduled.
    """
    if for_all and vm_id is not None:
        raise click.UsageError("Use either --all or --vm-id, not both.")
    found = _sightings(event_file.read().removeprefix(codecs.BOM_UTF8))
    event_id = event_id or _only_event(found)
    of_event = [each for each in found if each.event.event_id == event_id]
    if not of_event:
        raise BridgeError(f"The file has no event {event_id!r}. {_has(found)}")
    chosen = _all_vms(of_event, decision) if for_all else [_one_vm(of_event, vm_id)]
    signer = DecisionSigner(key, kid=kid, approver=approver)
    now = utc_now()
    tokens = [
        signer.sign(each.vm.vm_id or "", each.event, decision, now=now, valid_seconds=valid_seconds, reason=reason)
        for each in chosen
    ]
    _summarize(chosen, decision, until=now + timedelta(seconds=valid_seconds))
    if for_all:
        _report_unknown_vms(of_event)
    for token in tokens:
        click.echo(token)


def _one_vm(sightings: Sequence[Sighting], vm_id: str | None) -> Sighting:
    if len(sightings) > 1:
        raise BridgeError(
            f"The file has records of {len(sightings)} VMs for this event. Use --all, or a file with only one VM."
        )
    vm = sightings[0].vm
    if vm_id is None and vm.vm_id is None:
        raise click.UsageError("The file does not contain the vmId of the VM. Set --vm-id.")
    return sightings[0] if vm_id is None else msgspec.structs.replace(sightings[0], vm=VmIdentity(vm_id=vm_id))


def _all_vms(sightings: Sequence[Sighting], decision: str) -> list[Sighting]:
    wanted = [each for each in sightings if each.vm.vm_id is not None]
    is_hold = decision == Verdict.HOLD.value
    chosen = [each for each in wanted if (not each.is_over if is_hold else each.is_scheduled)]
    if not chosen:
        state = "over for every VM" if is_hold else "not Scheduled for any VM"
        raise BridgeError(f"The event is {state} in the file.")
    return chosen


def _only_event(sightings: Iterable[Sighting]) -> str:
    names = dict.fromkeys(each.event.event_id for each in sightings)
    if len(names) != 1:
        raise BridgeError(f"The file has {len(names)} events. Select an event with --event-id. {_has(sightings)}")
    return next(iter(names)) or ""


def _has(sightings: Iterable[Sighting]) -> str:
    names = dict.fromkeys(one_line(each.event.event_id or "") for each in sightings)
    return f"It has: {', '.join(names) or 'none with an EventId'}."


def _summarize(chosen: Iterable[Sighting], decision: str, *, until: datetime) -> None:
    for each in chosen:
        event = each.event
        when = f"not before {event.not_before_raw}" if event.not_before_raw else "no NotBefore"
        names = ", ".join(event.resources or ()) or "no VM"
        _print(
            f"{decision} until {format_time(until)}, for VM {each.vm.vm_id}: "
            f"{event.event_type or 'an event'} {event.event_id} of {names}, {when}"
        )
        if not each.is_scheduled:
            state = "over" if each.is_over else event.event_status
            _print(f"In the file, the event is {state}. An agent that sees the same state refuses the decision.")


def _report_unknown_vms(sightings: Sequence[Sighting]) -> None:
    known = {normal_name(each.vm.name) for each in sightings if each.vm.name is not None}
    names = dict.fromkeys(name for each in sightings for name in each.event.resources or ())
    missing = [name for name in names if normal_name(name) not in known]
    if missing:
        _print(f"No decision for {', '.join(missing)}: the file has no record of this VM.")


def _print(text: str) -> None:
    click.echo(one_line(text), err=True)


def _sightings(content: bytes) -> list[Sighting]:
    """Return the last known state of each event on each VM."""
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        value = None  # more than one line
    if isinstance(value, dict) and "Events" in value:
        return _of_document(content)
    found: dict[tuple[str | None, str], Sighting] = {}
    newest: dict[str | None, TransitionRecord] = {}
    for record in sorted(_records(content), key=lambda each: (each.stream_id, each.sequence)):
        event = record.event
        newest[record.vm.vm_id] = record
        # Records of approvals can carry an older version of the event.
        if record.transition.is_by_azure and event is not None and event.event_id is not None:
            is_over = record.transition.is_ending
            found[record.vm.vm_id, event.event_id] = Sighting(event=event, vm=record.vm, is_over=is_over)
    return [
        msgspec.structs.replace(each, is_over=each.is_over or _has_ended(event_id, newest[vm_id]))
        for (vm_id, event_id), each in found.items()
    ]


def _has_ended(event_id: str, newest: TransitionRecord) -> bool:
    # The file might lack the last record of an event, but every record lists the active events.
    return newest.active_event_ids is not None and event_id not in newest.active_event_ids


def _of_document(content: bytes) -> list[Sighting]:
    events = [event for event in parse_document(content).events if event.event_id is not None]
    names = [event.event_id for event in events]
    if len(set(names)) < len(names):
        raise BridgeError("The document has two events with the same EventId, so the decision would be ambiguous.")
    return [Sighting(event=event, vm=VmIdentity()) for event in events]


def _records(content: bytes) -> list[TransitionRecord]:
    lines = [line for line in content.splitlines() if line.strip()] if b"\n{" in content else [content]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode_record(_without_envelope(line)))
        except (ValueError, msgspec.MsgspecError) as error:
            raise BridgeError(
                f"Line {number} of the file is not a transition record ({error}), and the file is not a Scheduled "
                "Events document. Use the output of `events --json`, of the portal, or of the metadata service."
            ) from error
    return records


def _without_envelope(line: bytes) -> bytes:
    value: Any = msgspec.json.decode(line)
    is_cloudevent = isinstance(value, dict) and "specversion" in value and "data" in value
    return msgspec.json.encode(value["data"]) if is_cloudevent else line
