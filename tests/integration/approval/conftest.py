"""The approvers of most tests: one with the keys of two people, and one with a portal and rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from approver_kit import ANNE, BORIS, ApproverKit

from bridge.config.approval import ApprovalSettings, KeySettings, RemoteSettings, RuleSettings


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[ApproverKit]:
    """Return an approver that trusts the keys of two people."""
    made = ApproverKit(tmp_path)
    made.trust(("k1", ANNE), ("k2", BORIS))
    made.start()
    made.wait(10)
    yield made
    made.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ApproverKit]]:
    """Return a function that starts a kit with a portal, with or without a rule that approves everything."""
    made = ApproverKit(tmp_path)

    def start(*rules: RuleSettings, required: int = 1) -> ApproverKit:
        keys = tuple(
            KeySettings(kid=kid, approver=approver, public_key_file=f"{made.key(kid)}.pub")
            for kid, approver in (("k1", ANNE), ("k2", BORIS))
        )
        remote = RemoteSettings(url="https://portal.invalid", keys=keys, required_approvals=required)
        made.settings = ApprovalSettings(rules=rules, remote=remote)
        made.start()
        made.wait(10)
        return made

    yield start
    made.close()
