"""`keygen` and `decide`: keys to sign decisions with, and signed decisions.

Both commands are for those who decide, not for a VM: they read no configuration and no outbox. Standard output gets
what a program wants (lines for the configuration, a token); what a person should check goes to standard error.
"""

from __future__ import annotations

import codecs
import json
from datetime import timedelta
from pathlib import Path

import click
import msgspec

from bridge.approval.signing import generate_key, sign_decision
from bridge.clock import format_time, utc_now
from bridge.config.trusted_keys import MAX_NAME_CHARACTERS
from bridge.errors import BridgeError
from bridge.events.event import ScheduledEvent
from bridge.events.record import TransitionRecord, decode_record
from bridge.imds.document import parse_document
from bridge.text import one_line

DEFAULT_KEY_NAME = "decisions.key"


class EventNotFound(BridgeError):
    """A file does not say which event a decision is about; the message says what it has."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An event that a decision can be about, and whose VM told of it."""

    event: ScheduledEvent
    vm_id: str | None = None
    is_over: bool = False


def make_key(private_key_file: Path, *, kid: str | None, approver: str) -> str:
    """Write a key pair and return the lines to paste into a VM's configuration; raise SigningFailed if there is one."""
    kid = kid or private_key_file.stem
    for option, name in (("--kid", kid), ("--approver", approver)):
        if not (1 <= len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and (name.isascii() or name is approver)):
            raise click.UsageError(
                f"{name[:40]!r} is no name that decisions can carry; give a plain one with {option}."
            )
    pair = generate_key(private_key_file)
    public = pair.public_key_file.absolute()
    return "\n".join(
        (
            "# The private key, which you alone can read. Keep it where decisions are signed,",
            "# never on a VM:",
            f"#   {pair.private_key_file.absolute()}",
            "# What goes to every VM is the public key, and this:",
            "[[approval.remote.keys]]",
            f"kid = {_toml(kid)}",
            f"approver = {_toml(approver)}",
            f"public_key_file = {_toml(str(public))}",
        )
    )


def _toml(text: str) -> str:
    """Return *text* as a basic string of TOML, whose escapes JSON's are; DEL alone may not stand as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def decide(
    content: bytes,
    *,
    event_id: str | None,
    vm_id: str | None,
    key: Path,
    kid: str,
    approver: str,
    decision: str,
    reason: str | None,
    valid_seconds: float,
) -> str:
    """Return a signed decision on the event in *content*, and say on standard error what it consents to.

    *content* is a Scheduled Events document, or records as JSON lines, of which the newest of an event counts.
    """
    chosen = find_event(content, event_id)
    addressee = vm_id or chosen.vm_id
    if addressee is None:
        raise click.UsageError("The file does not say which VM the decision is for. Name its vmId with --vm-id.")
    now = utc_now()
    token = sign_decision(
        key,
        kid=kid,
        approver=approver,
        vm_id=addressee,
        event=chosen.event,
        decision=decision,
        now=now,
        valid_seconds=valid_seconds,
        reason=reason,
    )
    until = format_time(now + timedelta(seconds=valid_seconds))
    click.echo(one_line(f"{decision} until {until}, for VM {addressee}: {what(chosen.event)}"), err=True)
    if chosen.is_over or chosen.event.event_status != "Scheduled":
        state = "over" if chosen.is_over else chosen.event.event_status
        click.echo(one_line(f"The event is {state} by this file: an agent that sees the same refuses."), err=True)
    return token


def find_event(content: bytes, event_id: str | None) -> Candidate:
    """Return the event called *event_id* in *content*, or the only one; raise EventNotFound when it is not clear."""
    found = _candidates(content.removeprefix(codecs.BOM_UTF8))
    has = f"It has: {', '.join(map(one_line, found)) or 'none with an EventId'}."
    if event_id is not None and event_id not in found:
        raise EventNotFound(f"The file has no event {event_id!r}. {has}")
    if event_id is None and len(found) != 1:
        raise EventNotFound(f"The file has {len(found)} events; name one with --event-id. {has}")
    return next(iter(found.values())) if event_id is None else found[event_id]


def _candidates(content: bytes) -> dict[str, Candidate]:
    """Return the events of *content* by their EventId."""
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        value = None  # several lines
    if isinstance(value, dict) and "Events" in value:
        return _of_document(content)
    found = {}
    for record in sorted(_records(content), key=lambda each: each.sequence):  # the newest is what counts
        if record.event is not None and record.event.event_id is not None:
            is_over = record.transition.is_ending
            found[record.event.event_id] = Candidate(event=record.event, vm_id=record.vm.vm_id, is_over=is_over)
    return found


def _of_document(content: bytes) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    for event in parse_document(content).events:
        if event.event_id in found:
            raise EventNotFound(f"The document has two events {event.event_id!r}; nobody knows which one is meant.")
        if event.event_id is not None:
            found[event.event_id] = Candidate(event=event)
    return found


def _records(content: bytes) -> list[TransitionRecord]:
    lines = [line for line in content.splitlines() if line.strip()] if b"\n{" in content else [content]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode_record(line))
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EventNotFound(
                f"Line {number} of the file is no transition record ({error}), and the file is no Scheduled Events "
                "document. Give what `events --json` prints, or what the metadata service answers."
            ) from error
    streams = {record.stream_id for record in records}
    if len(streams) > 1:
        raise EventNotFound(f"The file has records of {len(streams)} outboxes, whose order nobody knows. Give one's.")
    return records


def what(event: ScheduledEvent) -> str:
    """Return what a decision on *event* consents to, for a person."""
    when = f"not before {event.not_before_raw}" if event.not_before_raw else "no NotBefore"
    return f"{event.event_type or 'an event'} {event.event_id} of {', '.join(event.resources or ()) or 'no VM'}, {when}"
