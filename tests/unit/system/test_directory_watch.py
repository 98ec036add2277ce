"""The signal for what happens in a directory: it comes for what commands do there, not for what the agent writes."""

import os
import shutil
import signal
import sys
import time

import pytest

from bridge.system.directory_watch import DirectoryWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends it")


@pytest.fixture
def state(tmp_path):
    directory = tmp_path / "state"
    directory.mkdir()
    (directory / "nudge").touch()
    return directory


@pytest.fixture
def signals():
    """Return what tells how many signals came since it was last asked, after a moment if there were none."""
    came = []
    before = signal.signal(signal.SIGIO, lambda *_: came.append(1))

    def count():
        give_up_at = time.monotonic() + 0.2
        while not came and time.monotonic() < give_up_at:
            time.sleep(0.01)
        found = len(came)
        came.clear()
        return found

    yield count
    signal.signal(signal.SIGIO, before)


@pytest.fixture
def watch(state, signals):
    assert not signals()
    watch = DirectoryWatch(state)
    assert watch.renew()
    assert watch.is_on
    yield watch
    watch.close()


HAPPENS = {
    "touched": lambda state: os.utime(state / "nudge", follow_symlinks=False),
    "made": lambda state: (state / "approvals.disabled").touch(),
    "deleted": lambda state: (state / "nudge").unlink(),
    "renamed": lambda state: (state / "nudge").rename(state / "other"),
    "all of it deleted": shutil.rmtree,
    "moved": lambda state: state.rename(state.with_name("moved")),
}


@pytest.mark.parametrize("what", HAPPENS)
def test_signal_comes_for(what, watch, state, signals):
    HAPPENS[what](state)
    assert signals()
    assert watch.is_on


def test_no_signal_comes_for_what_is_written_into_a_file_nor_after_the_end(watch, state, signals):
    with (state / "nudge").open("wb") as file:
        file.write(b"as the outbox does")
    (state / "nudge").read_bytes()
    assert not signals()
    watch.close()
    watch.close()
    assert not watch.is_on
    os.utime(state / "nudge")
    assert not signals()


def test_directory_that_stands_in_its_place_is_watched_from_then_on(watch, state, signals):
    assert not watch.renew(), "it is the same one"
    shutil.rmtree(state)
    assert not watch.renew(), "there is none"
    state.mkdir()
    assert signals()
    assert watch.renew()
    (state / "nudge").touch()
    assert signals()


def test_directory_that_cannot_be_watched_leaves_it_off(tmp_path):
    watch = DirectoryWatch(tmp_path / "missing")
    assert not watch.renew()
    assert not watch.is_on
