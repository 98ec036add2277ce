import sys
from pathlib import Path

import pytest

from bridge.system.boot import boot_id, has_booted, seconds_since_boot


def test_boot_id_is_read_from_the_kernel(tmp_path):
    path = tmp_path / "boot_id"
    path.write_text("5a2f2d2e-0000-4d7c-9f5d-2d1d8a4c9d11\n")
    assert boot_id(path) == "5a2f2d2e-0000-4d7c-9f5d-2d1d8a4c9d11"


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux how long it is up")
def test_uptime_is_read_from_the_kernel():
    up = float(Path("/proc/uptime").read_text().split()[0])
    assert up - 1 < seconds_since_boot() < up + 5


@pytest.mark.parametrize(
    ("before", "now", "booted"),
    [
        ("a", "b", True),
        ("a", "a", False),
        (None, "a", False),
        ("", "a", False),
        ("a", "", False),
        ("time:1000", "time:1119", False),
        ("time:1000", "time:881", False),
        ("time:1000", "time:1121", True),
    ],
)
def test_new_boot_is_detected_by_boot_id_or_boot_time(before, now, booted):
    assert has_booted(before, now) is booted
