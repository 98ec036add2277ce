"""A portal poller under test: it passes tokens to a `Desk`, and hours pass at once on its clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from bridge.approval.portal_poller import PortalPoller
from bridge.config.approval import KeySettings
from bridge.testing import ManualClock

VM = "7EF1D8A4-0C2B-4C7E-9A35-1F5F6D1F2B90"
KEYS = (KeySettings(kid="k", approver="portal", public_key_file="/nowhere"),)
HELD_SECONDS = 20
PATIENCE_SECONDS = 15.0
STOP_SECONDS = 1.1


class Desk:
    """Accepts the tokens of the channel."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.fails = 0
        self.changed = threading.Condition()

    def __call__(self, tokens: Sequence[str]) -> None:
        with self.changed:
            if self.fails:
                self.fails -= 1
                self.changed.notify_all()
                raise RuntimeError(f"no room for {tokens[0]}")
            self.tokens.extend(tokens)
            self.changed.notify_all()

    def has(self, *tokens: str) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: set(tokens) <= set(self.tokens), PATIENCE_SECONDS)


class Rest:
    """Replaces waiting: hours pass immediately on *clock*, and each delay is recorded."""

    def __init__(self, clock: ManualClock) -> None:
        self.delays: list[float] = []
        self._clock = clock

    def __call__(self, stop: threading.Event, seconds: float) -> bool:
        self.delays.append(seconds)
        self._clock.advance(seconds)
        return stop.is_set()


def stop_in_time(channel: PortalPoller) -> None:
    channel.stop()
    if channel._thread.ident is not None:
        channel._thread.join(HELD_SECONDS / 2)  # on a busy machine, the thread ends slightly later
    assert not channel._thread.is_alive()


def log_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "bridge.approval.portal_poller"]


def all_log_text(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(logging.Formatter().format(record) for record in caplog.records)
