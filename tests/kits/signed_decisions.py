"""Signs one decision with a key file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.approval.signing import DecisionSigner


def sign_decision(private_key_file: str | Path, *, kid: str, approver: str, **values: Any) -> str:
    """Return a token; *values* are the arguments of `DecisionSigner.sign`."""
    return DecisionSigner(private_key_file, kid=kid, approver=approver).sign(
        values.pop("vm_id"), values.pop("event"), values.pop("decision"), **values
    )
