"""The off switch, the file ``approvals.disabled``: a record reports its creation and its removal with the file's owner.

Every user who can write to the state directory can stop all approvals and allow them again. The outbox stores the last
reported state, so a change while the agent does not run is reported, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.events.event import Incarnation
from bridge.events.record import Approval, Transition, TransitionRecord
from bridge.outbox.approvals import DISABLED_FILE
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import ApprovalRecord, ApprovalResult
from bridge.outbox.state import State

_KEY = "approvals_disabled_by"
_UNKNOWN = "unknown"


class OffSwitch:
    """The file in the state *directory*, and its last state that *outbox* has reported."""

    def __init__(self, directory: Path, outbox: Outbox) -> None:
        self._file = directory / DISABLED_FILE
        self._outbox = outbox

    def check(self, incarnation: Incarnation) -> list[TransitionRecord]:
        """Write a record if the file was created or removed since the last record; return the record."""
        owner, before = _owner(self._file), self._outbox.read(State.get, _KEY)
        if bool(owner) == bool(before):
            return []
        if owner:
            result = ApprovalResult.DISABLED
            message = f"The file {DISABLED_FILE} exists; its owner is {owner}. Nothing is approved until you delete it."
        else:
            result = ApprovalResult.ENABLED
            message = f"The file {DISABLED_FILE} was deleted; its owner was {before}. Approvals are possible again."
        outcome = ApprovalRecord(
            transition=Transition.APPROVAL_REFUSED,
            event=None,
            approval=Approval(
                source=DISABLED_FILE, approvers=(owner or before or "",), reason=message, result=result.value
            ),
        )
        written = self._outbox.append_outcomes([outcome], incarnation=incarnation)
        self._outbox.change(State.put, _KEY, owner or None)
        return written


def _owner(file: Path) -> str:
    """Return the name of the owner of *file*: "" without a file, "unknown" if it cannot be read."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return ""
    except OSError:
        return _UNKNOWN
    if os.name != "posix":
        return _UNKNOWN
    import pwd  # noqa: PLC0415 - not available on Windows

    try:
        return pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        return f"uid {status.st_uid}"
