"""What the tests of the outbox get."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.outbox_kit import OutboxKit

# By path: the directories of tests are no packages.
_KIT = runpy.run_path(str(Path(__file__).parents[1] / "outbox_kit.py"))


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[OutboxKit]:
    """Return a kit for an outbox in a directory of its own."""
    kit: OutboxKit = _KIT["OutboxKit"](tmp_path / "state")
    yield kit
    kit.close()
