"""`decide --all`: from one file of records, a decision for every VM of an event; and `--to`, which sends decisions.

Each VM is decided for by what its own newest record says, since the digest is of the event as that VM saw it. An
approval goes to the VMs that see the event Scheduled. A hold goes to every VM of the resource group that the file
knows, because the rules of a VM that heard nothing go on, and any one VM can approve for all (PROTOCOL.md, section 8).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
import requests

from bridge.approval.credentials import credential_of
from bridge.approval.signing import sign_decision
from bridge.cli.decide import EventNotFound, what
from bridge.cli.portal_options import remote_of
from bridge.cli.terminal import counted
from bridge.clock import format_time, utc_now
from bridge.errors import BridgeError, DeadlineExceeded
from bridge.events.event import ScheduledEvent, VmIdentity, normal_name
from bridge.events.record import Transition, TransitionRecord, Verdict, decode_record
from bridge.http.failures import is_loopback, root_cause
from bridge.http.session import DeadlineSession
from bridge.text import EXCERPT_CHARACTERS, one_line

#: The transitions that say what an event is now; those of approvals may carry it as it was.
_OF_THE_EVENT = frozenset(
    {
        Transition.SCHEDULED,
        Transition.UPDATED,
        Transition.STARTED,
        Transition.COMPLETED,
        Transition.CANCELED,
        Transition.ENDED,
    }
)
_SUCCESS = range(200, 300)
#: What a portal takes in one request; 100 of the longest decisions are less than 1 MiB.
_MOST_IN_A_REQUEST = 100
_SEND_SECONDS = 10.0


class SendingFailed(BridgeError):
    """The portal did not take the decisions."""


class Addressee(msgspec.Struct, frozen=True, kw_only=True):
    """A VM, and the event as it saw it last."""

    vm: VmIdentity
    event: ScheduledEvent | None
    """None: it told of no such event, or that is over for it."""


def decide_for_all(
    content: bytes,
    *,
    event_id: str | None,
    key: Path,
    kid: str,
    approver: str,
    decision: str,
    reason: str | None,
    valid_seconds: float,
) -> list[str]:
    """Return a signed decision for every VM that it takes, and say on standard error what each consents to.

    *content* has records of any number of VMs, as JSON or as CloudEvents, one a line.
    """
    records = _records(content)
    event_id = _only_event(records, event_id)
    addressees = [_addressee(each, event_id) for each in _by_vm(records).values()]
    seen = [each.event for each in addressees if each.event is not None]
    if not seen:
        raise EventNotFound(f"The event {event_id!r} is over for every VM of the file.")
    chosen = _held(addressees) if decision == Verdict.HOLD.value else _approving(addressees)
    if not chosen:
        raise EventNotFound(f"The event {event_id!r} is Scheduled for no VM of the file, so nobody can approve it.")
    now = utc_now()
    until = format_time(now + timedelta(seconds=valid_seconds))
    tokens = []
    for each in chosen:
        event = each.event or seen[-1]
        tokens.append(
            sign_decision(
                key,
                kid=kid,
                approver=approver,
                vm_id=each.vm.vm_id or "",
                event=event,
                decision=decision,
                now=now,
                valid_seconds=valid_seconds,
                reason=reason,
            )
        )
        _say(f"{decision} until {until}, for VM {each.vm.vm_id}: {what(event)}")
    _say_who_is_left_out(seen[-1], addressees)
    return tokens


# Who it is for.


def _by_vm(records: Iterable[TransitionRecord]) -> Mapping[str, list[TransitionRecord]]:
    """Return the records of each VM's newest stream, in their order."""
    streams: dict[tuple[str, str], list[TransitionRecord]] = {}
    for record in records:
        streams.setdefault(((record.vm.vm_id or "").lower(), record.stream_id), []).append(record)
    newest: dict[str, list[TransitionRecord]] = {}
    for (vm_id, _), found in streams.items():
        found.sort(key=lambda each: each.sequence)
        if vm_id not in newest or found[-1].observed_at > newest[vm_id][-1].observed_at:
            newest[vm_id] = found
    return newest


def _addressee(records: Sequence[TransitionRecord], event_id: str) -> Addressee:
    of_the_event = [
        each
        for each in records
        if each.transition in _OF_THE_EVENT and each.event is not None and each.event.event_id == event_id
    ]
    is_there = bool(of_the_event) and not of_the_event[-1].transition.is_ending
    return Addressee(vm=records[-1].vm, event=of_the_event[-1].event if is_there else None)


def _approving(addressees: Iterable[Addressee]) -> list[Addressee]:
    return [each for each in addressees if each.event is not None and each.event.event_status == "Scheduled"]


def _held(addressees: Sequence[Addressee]) -> list[Addressee]:
    """Return the VMs that see the event, and all others of their resource groups."""
    groups = {_group(each.vm) for each in addressees if each.event is not None}
    return [each for each in addressees if each.event is not None or _group(each.vm) in groups - {("", "")}]


def _group(vm: VmIdentity) -> tuple[str, str]:
    return (vm.subscription_id or "").lower(), (vm.resource_group or "").lower()


def _say_who_is_left_out(event: ScheduledEvent, addressees: Iterable[Addressee]) -> None:
    known = {normal_name(each.vm.name) for each in addressees if each.vm.name is not None}
    missing = [name for name in event.resources or () if normal_name(name) not in known]
    if missing:
        _say(f"No decision for {', '.join(missing)}, of which the file has no record.")


def _say(text: str) -> None:
    click.echo(one_line(text), err=True)


# The file.


def _records(content: bytes) -> list[TransitionRecord]:
    found = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = decode_record(_without_envelope(line))
        except (ValueError, msgspec.MsgspecError) as error:
            raise EventNotFound(
                f"Line {number} of the file is no transition record ({error}). Give records of many VMs, one a line: "
                "what the portal exports, or the lines of each VM's `events --json` in one file."
            ) from error
        if record.vm.vm_id is not None:
            found.append(record)
    return found


def _without_envelope(line: bytes) -> bytes:
    """Return the record in *line*, which may be a CloudEvent around it."""
    value: Any = msgspec.json.decode(line)
    is_cloudevent = isinstance(value, dict) and "specversion" in value and "data" in value
    return msgspec.json.encode(value["data"]) if is_cloudevent else line


def _only_event(records: Iterable[TransitionRecord], event_id: str | None) -> str:
    events = (each.event for each in records if each.transition in _OF_THE_EVENT)
    found = list(dict.fromkeys(each.event_id for each in events if each is not None and each.event_id is not None))
    has = f"It has: {', '.join(map(one_line, found)) or 'none with an EventId'}."
    if event_id is None and len(found) != 1:
        raise EventNotFound(f"The file has {counted(len(found), 'event')}; name one with --event-id. {has}")
    if event_id is not None and event_id not in found:
        raise EventNotFound(f"The file has no event {event_id!r}. {has}")
    return found[0] if event_id is None else event_id


# The portal.


def send_decisions(tokens: Sequence[str], *, url: str, options: Mapping[str, object]) -> None:
    """Give *tokens* to the portal at *url*, which carries what it did not sign; raise SendingFailed.

    *options* are keys of ``[approval.remote]``: how it knows who asks, and which authorities to trust.
    """
    remote = remote_of({"url": url, **options})
    is_local = is_loopback(urlsplit(url).hostname or "")
    with closing(credential_of(remote)) as credential, closing(DeadlineSession()) as session:
        bearer = credential.bearer()
        refused: list[str] = []
        for start in range(0, len(tokens), _MOST_IN_A_REQUEST):
            part = tokens[start : start + _MOST_IN_A_REQUEST]
            answer = _post(session, remote.url.rstrip("/"), part, bearer, ca_file=remote.ca_file, is_local=is_local)
            refused += _refused(answer)
    if refused:
        what = f"{counted(len(refused), 'decision')} of {len(tokens)}"
        raise SendingFailed(f"The portal at {remote.url} refused {what}; the first: {refused[0]}")
    click.echo(f"{counted(len(tokens), 'decision')} given to {remote.url}.", err=True)


def _post(
    session: DeadlineSession,
    url: str,
    tokens: Sequence[str],
    bearer: str | None,
    *,
    ca_file: str | None,
    is_local: bool,
) -> bytes:
    headers = {"Content-Type": "application/json"}
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    try:
        response = session.request(
            "POST",
            f"{url}/decisions",
            data=json.dumps({"decisions": list(tokens)}),
            headers=headers,
            deadline_seconds=_SEND_SECONDS,
            verify=ca_file or True,
            proxies={} if is_local else requests.utils.get_environ_proxies(url),
        )
    except DeadlineExceeded as error:
        raise SendingFailed(f"The portal at {url} did not answer within {_SEND_SECONDS:g} s.") from error
    except (requests.RequestException, OSError) as error:
        cause = one_line(str(root_cause(error)), EXCERPT_CHARACTERS).rstrip(".")
        raise SendingFailed(f"The portal at {url} cannot be reached: {cause}.") from error
    if response.status_code not in _SUCCESS:
        said = one_line(response.text, EXCERPT_CHARACTERS)
        raise SendingFailed(f"The portal at {url} answered {response.status_code}{f': {said}' if said else '.'}")
    return response.content


class _Answer(msgspec.Struct):
    """What a portal may answer: beside each decision that it refuses, why."""

    decisions: list[dict[str, Any]] = []


def _refused(answer: bytes) -> list[str]:
    """Return why each refused decision of *answer* was, in a line; a portal need not answer anything."""
    try:
        found = msgspec.json.decode(answer, type=_Answer).decisions
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return []
    reasons = [each for each in found if "refused" in each]
    return [one_line(f"{each['refused']}: {each.get('message', '')}", EXCERPT_CHARACTERS) for each in reasons]
