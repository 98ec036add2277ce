"""What the tests of the outbox get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outbox_kit import OutboxKit


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[OutboxKit]:
    """Return a kit for an outbox in a directory of its own."""
    kit = OutboxKit(tmp_path / "state")
    yield kit
    kit.close()
