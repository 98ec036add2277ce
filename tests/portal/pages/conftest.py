"""The portal that most tests of the pages use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from page_kit import Office


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    """A portal with an event of two VMs and one agent that would follow an approval."""
    from fleet_records import fleet_record  # noqa: PLC0415  # needs the extra
    from page_kit import ABLE, Office  # noqa: PLC0415  # needs the extra

    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        office.poll(0, **ABLE)
        yield office
