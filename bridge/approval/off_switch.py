"""The off switch, the file ``approvals.disabled``: that it was made or removed becomes a record with the file's owner.

Whoever can write to the state directory can stop all approvals, and let them go on. Both are told by every sink, also
when the agent did not run meanwhile: the outbox remembers which it told last.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.events.event import Incarnation
from bridge.events.record import Approval, Transition, TransitionRecord
from bridge.outbox import meta
from bridge.outbox.approvals import ApprovalRecord, ApprovalResult
from bridge.outbox.locks import DISABLED_FILE
from bridge.outbox.outbox import Outbox

_UNKNOWN = "unknown"


class OffSwitch:
    """The file in the state *directory*, and what *outbox* has told of it; for one thread."""

    def __init__(self, directory: Path, outbox: Outbox) -> None:
        self._file = directory / DISABLED_FILE
        self._outbox = outbox
        self._told: str | None = outbox.read(meta.get, meta.DISABLED_BY).result()

    def check(self, incarnation: Incarnation) -> list[TransitionRecord]:
        """Write a record when the file came or went since the last one, and return it."""
        owner, told = _owner(self._file), self._told or ""
        if bool(owner) == bool(told):
            return []
        if owner:
            who, result = owner, ApprovalResult.DISABLED
            message = (
                f"The file {DISABLED_FILE} was made; its owner is {owner}. No approval is given while it is there."
            )
        else:
            who, result = told, ApprovalResult.ENABLED
            message = f"The file {DISABLED_FILE} is gone; its owner was {told}. Approvals go on."
        outcome = ApprovalRecord(
            transition=Transition.APPROVAL_REFUSED,
            event=None,
            approval=Approval(source=DISABLED_FILE, approvers=(who,), reason=message, result=result.value),
        )
        append = self._outbox.records.append_off_switch
        written = self._outbox.write(append, outcome, owner, incarnation=incarnation).result()
        self._told = owner
        return written


def _owner(file: Path) -> str:
    """Return the name of the owner of *file*, "" when there is none; "unknown" when it cannot be looked for."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return ""
    except OSError:
        return _UNKNOWN
    if os.name != "posix":
        return _UNKNOWN
    import pwd  # noqa: PLC0415 - there is none on Windows

    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"uid {status.st_uid}"
