"""The downtime of a reboot, from the stamp on disk."""

import pytest

from bridge.impact.downtime import Stamp, downtime_after, read_stamp, stamp_stop, write_stamp

NOW = {"current_boot_id": "b", "now": 1060.0, "seconds_since_boot": 20.0, "is_ephemeral": False}


def test_downtime_has_a_part_before_and_after_the_start_of_the_kernel():
    found = downtime_after(Stamp(at=1000.0, boot_id="a"), **NOW)
    assert found is not None
    assert (found.booted_at - found.last_alive_at, found.agent_at - found.booted_at) == (40.0, 20.0)


@pytest.mark.parametrize(
    ("stamp", "fields"),
    [
        (None, {}),
        (Stamp(at=1000.0, boot_id="b"), {}),
        (Stamp(at=1000.0, boot_id="a"), {"is_ephemeral": True}),
        (Stamp(at=2000.0, boot_id="a"), {}),
    ],
    ids=["no stamp", "same boot", "temporary directory", "clock set back"],
)
def test_downtime_is_unknown(stamp, fields):
    assert downtime_after(stamp, **{**NOW, **fields}) is None


def test_stamp_is_replaced_in_place(tmp_path):
    for stamp in (Stamp(at=1.0, boot_id="a" * 36), Stamp(at=2.5, boot_id="b")):
        write_stamp(tmp_path, stamp)
        assert read_stamp(tmp_path) == stamp
    stamp_stop(tmp_path, is_near=False)
    assert read_stamp(tmp_path) is None


@pytest.mark.parametrize(("state", "is_kept"), [("stopping", True), ("running", False)])
def test_stop_near_an_event_keeps_the_stamp_only_if_the_vm_shuts_down(tmp_path, monkeypatch, state, is_kept):
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\necho {state}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_stamp(tmp_path, Stamp(at=1.0, boot_id="a"))
    stamp_stop(tmp_path, is_near=True)
    stamp = read_stamp(tmp_path)
    assert (stamp is not None and stamp.at > 1.0) is is_kept


def test_damaged_stamp_counts_as_missing(tmp_path):
    (tmp_path / "last-sign-of-life").write_bytes(b"\0" * 128)
    assert read_stamp(tmp_path) is None
