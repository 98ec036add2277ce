"""Symbolic links and pipes in the state directory: an agent or a command that is root follows none of them."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridge.agent.periodic import FileWatch
from bridge.outbox import locks
from bridge.outbox.outbox import Outbox
from bridge.outbox.reader import OutboxFile

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a link needs rights there, and there are no pipes")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def open_outbox(state: Path) -> Iterator[object]:
    opened: list[Outbox] = []

    def make() -> Outbox:
        opened.append(Outbox(state, max_bytes=2**24, keep_delivered_seconds=3600))
        return opened[-1]

    yield make
    for outbox in opened:
        outbox.close()


def test_a_link_named_nudge_makes_and_touches_nothing_elsewhere(state, open_outbox, tmp_path):
    victim = tmp_path / "victim"
    (state / "nudge").symlink_to(victim)
    open_outbox()
    locks.notify_agent(state)
    assert not victim.exists()
    victim.touch()
    os.utime(victim, (1, 1))
    locks.notify_agent(state)
    assert victim.stat().st_mtime == 1
    assert not locks.is_in_memory(state)


def test_a_pipe_named_nudge_lets_nobody_wait(state, open_outbox):
    os.mkfifo(state / "nudge")
    opening = threading.Thread(target=open_outbox, daemon=True)
    opening.start()
    opening.join(10)
    assert not opening.is_alive()
    locks.notify_agent(state)
    assert locks.is_in_memory(state) is False


def test_a_command_still_wakes_the_agent_by_that_file(state, open_outbox):
    open_outbox()
    woken: list[bool] = []
    os.utime(state / "nudge", (1, 1))
    watch = FileWatch(state / "nudge", lambda: woken.append(True))
    locks.notify_agent(state)
    watch.check()
    assert woken == [True]
    (state / "nudge").unlink()
    locks.notify_agent(state)
    assert (state / "nudge").is_file()


def test_a_link_named_as_the_outbox_is_neither_written_nor_read(state, open_outbox, tmp_path):
    victim = tmp_path / "victim.db"
    with closing(sqlite3.connect(victim)) as connection:
        connection.execute("CREATE TABLE theirs (secret)")
        connection.commit()
    before = victim.read_bytes()
    (state / "outbox.db").symlink_to(victim)
    outbox = open_outbox()
    assert outbox.in_memory
    assert victim.read_bytes() == before
    outbox.tend().result(10)
    assert outbox.in_memory
    (state / "outbox.db").unlink()
    outbox.tend().result(10)
    assert not outbox.in_memory
    assert victim.read_bytes() == before


@pytest.mark.parametrize("content", [None, b""])
def test_a_link_named_as_the_outbox_to_nothing_makes_nothing(state, open_outbox, tmp_path, content):
    victim = tmp_path / "victim.db"
    if content is not None:
        victim.write_bytes(content)
    (state / "outbox.db").symlink_to(victim)
    assert open_outbox().in_memory
    assert (victim.read_bytes() if victim.exists() else None) == content
    assert (state / "outbox.db").is_symlink()


def test_an_outbox_that_is_replaced_by_a_link_while_the_agent_runs_is_not_followed(state, open_outbox, tmp_path):
    outbox = open_outbox()
    moved = tmp_path / "moved.db"
    (state / "outbox.db").rename(moved)
    before = moved.read_bytes()
    (state / "outbox.db").symlink_to(moved)
    outbox.tend().result(10)
    assert not (state / "outbox.db").is_symlink()
    assert moved.read_bytes() == before
    assert not outbox.in_memory


def test_a_command_reads_and_writes_no_outbox_through_a_link(state, open_outbox, tmp_path):
    outbox = open_outbox()
    outbox.close()
    (state / "outbox.db").rename(tmp_path / "theirs.db")
    (state / "outbox.db").symlink_to(tmp_path / "theirs.db")
    with pytest.raises(Exception, match="cannot be opened"):
        OutboxFile(state)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can be mistaken for the agent")
def test_what_root_makes_beside_the_agent_belongs_to_the_agents_user(state):
    os.chown(state, 65534, 65534)
    locks.notify_agent(state)
    assert (state / "nudge").stat().st_uid == 65534
