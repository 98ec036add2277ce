"""A signer of decisions."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from pathlib import Path

from fleet_records import fleet_record, vm_id_of
from signed_decisions import sign_decision

from bridge.approval.signing import generate_key
from bridge.events.event import ScheduledEvent


class Signer:
    """The signer Ada with the key *kid* in *directory*."""

    def __init__(self, directory: Path, kid: str = "ops") -> None:
        self.kid = kid
        self.pair = generate_key(directory / f"{kid}.key")

    def table(self) -> dict[str, str]:
        """Return the table with which a portal or a VM trusts the key."""
        return {"kid": self.kid, "approver": "ada", "public_key_file": str(self.pair.public_key_file)}

    def sign(
        self,
        vm_id: str | None = None,
        *,
        decision: str = "approve",
        event: ScheduledEvent | None = None,
        now: datetime | None = None,
        valid_seconds: float = 3600,
        reason: str | None = None,
        jti: str | None = None,
    ) -> str:
        """Return a decision for the VM *vm_id* on *event*, by default VM 0 and the event of `fleet_records`."""
        about = event or fleet_record(0).event
        assert about is not None
        return sign_decision(
            self.pair.private_key_file,
            kid=self.kid,
            approver="ada",
            vm_id=vm_id or vm_id_of(0),
            event=about,
            decision=decision,
            now=now or datetime.now(timezone.utc),
            valid_seconds=valid_seconds,
            reason=reason,
            jti=jti or str(uuid.uuid4()),
        )
