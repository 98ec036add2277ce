"""An agent that dies while it reads a damaged outbox: the next one reads it again, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import outbox_kit
import pytest
from damage_kit import assert_totals_hold, checkpoint, damage, set_aside

from bridge.outbox.reader import OutboxFile

COUNT = 400
GARBAGE = "write(size // 2 // page * page, garbage(page))"
#: Where the agent dies, as a line that makes it so.
DEATHS = {
    "before the rename": "database.set_aside = die",
    "after the rename": "leaf_pages.open_damaged = storage.open_damaged = die",
    "in the middle of the copy": "recovery.copy_decisions = die",
    "after the commit": "salvage_note.end = die",
}
PROGRAM = """
import os, runpy, sys
from pathlib import Path
from bridge.outbox import database, leaf_pages, recovery, salvage_note, storage
kit = runpy.run_path(sys.argv[1])["OutboxKit"](Path(sys.argv[2]))
def die(*_, **__):
    os._exit(9)
{death}
kit.open()
"""


def die(kit, death):
    """Let an agent start on the directory of *kit* that dies at *death*."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(death=DEATHS[death]), str(Path(outbox_kit.__file__)), str(kit.directory)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 9, done.stderr


def damaged(kit):
    """Leave a damaged outbox with pending records behind; return how many can be read of it."""
    outbox = kit.open()
    kit.fill(outbox, COUNT, size=300)
    checkpoint(outbox)
    assert outbox.close(20)
    damage(kit, GARBAGE)
    return COUNT - 20


@pytest.mark.parametrize("death", DEATHS)
def test_what_can_be_read_is_kept_wherever_the_agent_dies(kit, death):
    least = damaged(kit)
    die(kit, death)
    outbox = kit.open()
    due = kit.due(outbox)
    assert len(due) >= least
    assert len({record.id for record in OutboxFile(kit.directory).records()}) == len(due)
    assert_totals_hold(outbox, kit)
    assert len(set_aside(kit)) == 1
    assert not (kit.directory / "salvage.json").exists()


def test_agents_that_die_one_after_the_other_lose_nothing(kit):
    least = damaged(kit)
    for death in ("after the rename", "in the middle of the copy", "in the middle of the copy", "after the rename"):
        die(kit, death)
    assert len(kit.due(kit.open())) >= least
    assert len(set_aside(kit)) == 1


def test_a_file_that_was_read_once_is_not_read_again(kit):
    damaged(kit)
    outbox = kit.open()
    due = kit.due(outbox)
    kit.settle(outbox, "a", *due)
    kit.settle(outbox, "b", *due)
    assert outbox.close(20)
    damage(kit, "write(0, garbage(page))")
    die(kit, "in the middle of the copy")
    outbox = kit.open()
    assert len(set_aside(kit)) == 2
    assert kit.due(outbox) == [], "what was delivered since is owed to nobody again"


def test_a_note_that_is_cut_off_costs_no_record(kit):
    least = damaged(kit)
    die(kit, "after the rename")
    (kit.directory / "salvage.json").write_bytes(b"[")
    assert len(kit.due(kit.open())) >= least
