"""The disk hangs when the agent starts, and the outbox is not there: polls begin all the same, and nothing is lost."""

import json
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import preload
import pytest
from damage_kit import checkpoint, damage
from outbox_kit import OutboxKit

from bridge.events.event import VmIdentity
from bridge.outbox.locks import DirectoryLock
from bridge.outbox.reader import OutboxFile

#: Every file below a path hangs when it is opened, while there is a file; a look at it alone does not. While there is
#: another one, whatever is synced takes long.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void hang(const char *path) {
    const char *below = getenv("HANG_BELOW");
    if (below && strncmp(path, below, strlen(below)) == 0)
        while (access(getenv("HANG_WHILE"), F_OK) == 0) usleep(10000);
}
#define OPEN(name) \
int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    hang(path); \
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name))(path, flags, mode); \
}
OPEN(open)
OPEN(open64)
#define SYNC(name) \
int name(int file) { \
    const char *slow = getenv("SLOW_WHILE"); \
    if (slow && access(slow, F_OK) == 0) usleep(1200000); \
    return ((int (*)(int))dlsym(RTLD_NEXT, #name))(file); \
}
SYNC(fsync)
SYNC(fdatasync)
"""
VM = (200, b'{"name": "vm_0", "vmId": "AAAA"}')


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    """Return a library under which opening a file hangs while another file is there."""
    return preload.built(tmp_path_factory, SHIM)


@pytest.fixture
def kit(agent):
    kit = OutboxKit(agent.state)
    yield kit
    kit.close()


class Disk:
    """The state directory of *agent*, which hangs on demand."""

    def __init__(self, agent, shim):
        self._hang, self._slow = agent.directory / "hang", agent.directory / "slow"
        agent.env = {
            **agent.env,
            "LD_PRELOAD": str(shim),
            "HANG_WHILE": str(self._hang),
            "SLOW_WHILE": str(self._slow),
            "HANG_BELOW": str(agent.state),
        }

    def freeze(self):
        self._hang.touch()

    def slow_down(self):
        self._slow.touch()

    def thaw(self):
        self._hang.unlink(missing_ok=True)

    def heal(self):
        self.thaw()
        self._slow.unlink(missing_ok=True)


@pytest.fixture
def disk(agent, shim):
    disk = Disk(agent, shim)
    yield disk
    disk.heal()


class Manager:
    """A service manager, which remembers what it is told."""

    def __init__(self, path):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0)
        self._heard = []

    @property
    def heard(self):
        with suppress(BlockingIOError):
            while True:
                self._heard.append(self._socket.recv(4096).decode())
        return self._heard

    @property
    def is_ready(self):
        return any("READY=1" in message for message in self.heard)

    def close(self):
        self._socket.close()


@pytest.fixture
def manager(agent):
    """Return whom the agent tells how it does."""
    manager = Manager(agent.directory / "notify")
    agent.env = {**agent.env, "NOTIFY_SOCKET": str(agent.directory / "notify")}
    yield manager
    manager.close()


def start(agent):
    """Start the agent as a process of its own: what is loaded before it counts from its beginning on."""
    with agent.out.open("ab") as stdout, agent.err.open("ab") as stderr:
        command = agent.command("run", "--config", agent.config)
        agent.process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=agent.env, cwd=agent.directory)


def event(event_id, event_type="Freeze", status="Scheduled", vm="vm_0", **fields):
    return {"EventId": event_id, "EventStatus": status, "EventType": event_type, "Resources": [vm], **fields}


def document(incarnation, *events):
    return {"DocumentIncarnation": incarnation, "Events": list(events)}


def told(agent):
    return [(record["event"]["event_id"], record["transition"], record["evidence"]) for record in agent.records]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def page(port, name):
    try:
        with urlopen(f"http://127.0.0.1:{port}/{name}", timeout=10) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def before(agent, imds, disk):  # noqa: ARG001  # there before the agent looks
    """An agent that has told of E-1 and E-2, and was stopped."""
    imds.identity = VM
    imds.body = json.dumps(document(1)).encode()
    agent.configure(imds.url, '[[sinks]]\ntype = "stdout"\nscope = "mine"\n')
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(2, event("E-1"), event("E-2")))
    agent.wait_for(lambda: len(agent.records) == 2)
    assert agent.stop() == 0
    return agent


def test_what_happens_while_the_disk_hangs_at_the_start_is_told_and_stored_once(before, imds, disk, manager):
    agent = before
    port = free_port()
    agent.config.write_text(agent.config.read_text().replace('listen = ""', f'listen = "127.0.0.1:{port}"'))
    disk.freeze()
    imds.body = json.dumps(
        document(
            4, event("E-1"), event("E-2", status="Started"), event("P-1", "Preempt"), event("P-2", "Preempt", vm="x")
        )
    ).encode()
    start(agent)
    agent.wait_for(lambda: len(agent.records) == 3)
    imds.show(document(5, event("E-1"), event("P-1", "Preempt"), event("E-3", status="Started")))
    imds.show(document(6, event("E-1"), event("P-1", "Preempt")))
    agent.wait_for(lambda: len(agent.records) == 5)
    # What the first document showed may have been told before; what is urgent, or came later, is told.
    now = [("P-1", "scheduled", "observed"), ("E-3", "started", "observed"), ("E-3", "completed", "observed")]
    assert told(agent)[2:] == now
    (status, ready), healthy = page(port, "readyz"), page(port, "healthz")
    assert (status, ready["state_in_memory"], healthy[0]) == (503, True, 200)
    assert any("still being loaded" in reason for reason in ready["reasons"])
    assert "The agent is running" not in agent.log.split("The outbox is being loaded", 1)[1]
    agent.wait_for(lambda: manager.heard)
    assert not manager.is_ready
    assert "EXTEND_TIMEOUT_USEC=" in manager.heard[-1]
    disk.thaw()
    agent.wait_for(lambda: len(agent.records) == 7)
    assert told(agent)[5:] == [("E-2", "started", "observed"), ("E-2", "completed", "observed")]
    agent.wait_for(lambda: manager.is_ready)
    agent.wait_for(lambda: page(port, "readyz")[0] == 200)
    imds.show(document(7, event("E-1"), event("P-1", "Preempt"), event("E-4")))
    agent.wait_for(lambda: len(agent.records) == 8)
    assert agent.stop() == 0
    assert len({record["id"] for record in agent.records}) == 8
    stored = OutboxFile(agent.state).records()
    assert {record.id for record in stored} >= {record["id"] for record in agent.records}
    assert [record.sequence for record in stored] == list(range(1, len(stored) + 1))
    code, listed, _ = agent.call("outbox", "list", "--json", "--config", agent.config)
    assert (code, listed) == (0, "")


def test_a_stop_comes_in_time_while_the_disk_hangs_at_the_start(before, imds, disk):
    agent = before
    disk.freeze()
    start(agent)
    imds.wait_for_polls(2)
    began = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - began < 10 + 1  # the grace, and a second
    assert "was not loaded yet" in agent.log
    assert "Traceback" not in agent.log
    disk.thaw()
    agent.start()
    imds.show(document(3, event("E-1"), event("E-2"), event("E-3")))
    agent.wait_for(lambda: len(agent.records) == 3)
    assert agent.stop() == 0


def test_a_state_directory_that_is_moved_away_while_the_disk_hangs_is_made_anew(before, imds, disk):
    agent = before
    disk.freeze()
    start(agent)
    imds.wait_for_polls(2)
    agent.state.rename(agent.directory / "away")
    disk.thaw()
    agent.wait_for(lambda: "The outbox is loaded now" in agent.log)
    imds.show(document(3, event("E-1"), event("E-2"), event("E-3")))
    agent.wait_for(lambda: ("E-3", "scheduled", "observed") in told(agent))
    assert agent.stop() == 0


def test_an_agent_that_finds_another_one_once_the_disk_answers_ends_with_73(before, imds, disk):
    agent = before
    lock = DirectoryLock(agent.state)
    disk.freeze()
    start(agent)
    imds.wait_for_polls(2)
    disk.thaw()
    assert agent.process.wait(20) == 73
    lock.release()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_nothing_waits_for_long_for_a_disk_that_stays_away(before, imds, disk, manager):
    agent = before
    disk.freeze()
    imds.body = json.dumps(document(2, event("E-1"), event("E-2"))).encode()
    start(agent)
    imds.wait_for_polls(1)
    began = time.monotonic()
    agent.wait_for(lambda: manager.heard and len(agent.records) == 4, timeout_seconds=60)
    assert 20 < time.monotonic() - began < 45
    agent.wait_for(lambda: manager.is_ready)
    assert len({record["id"] for record in agent.records}) == 2  # the incarnation is as it was: so are the ids
    imds.show(document(3, event("E-1")))
    agent.wait_for(lambda: len(agent.records) == 5)
    disk.thaw()
    agent.wait_for(lambda: "is loaded now" in agent.log)
    imds.show(document(4, event("E-1"), event("E-3")))
    agent.wait_for(lambda: len(agent.records) == 6)
    assert agent.stop() == 0
    stored = [(record.event.event_id, record.transition.value) for record in OutboxFile(agent.state).records()]
    assert stored == [(each, "scheduled") for each in ("E-1", "E-2")] + [("E-2", "ended"), ("E-3", "scheduled")]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_polls_go_on_while_a_large_damaged_outbox_is_salvaged_at_the_start(agent, imds, kit):
    imds.identity = VM
    imds.body = json.dumps(document(1)).encode()
    agent.configure(imds.url, '[[sinks]]\ntype = "stdout"\nscope = "mine"\n')
    outbox = kit.open(sinks=("gone",), max_bytes=256 * 1024 * 1024)
    outbox.identify(VmIdentity(name="vm_0", vm_id="AAAA")).result()
    kit.fill(outbox, 40_000, size=1500)
    checkpoint(outbox, forget=True)
    outbox.close()
    damage(kit, "write(size // 2 // page * page, garbage(page))")
    began = time.monotonic()
    start(agent)
    imds.wait_for_polls(1)
    print(f"\nbench: first poll {time.monotonic() - began:.1f} s after the start")  # noqa: T201
    longest, last = 0.0, time.monotonic()
    imds.body = json.dumps(document(2, event("P-1", "Preempt"))).encode()
    while "is loaded now" not in agent.log:
        imds.wait_for_polls(1)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
        assert last - began < 200
    print(f"bench: loaded after {time.monotonic() - began:.1f} s, longest gap between polls {longest:.1f} s")  # noqa: T201
    assert longest < 3
    imds.show(document(3, event("P-1", "Preempt"), event("E-1")))
    agent.wait_for(lambda: len(agent.records) == 2)
    assert [each[:2] for each in told(agent)] == [("P-1", "scheduled"), ("E-1", "scheduled")]
    assert agent.stop() == 0
    assert len(OutboxFile(agent.state).records()) > 39_000


@pytest.mark.long
@pytest.mark.timeout(180)
def test_of_thousands_of_events_seen_while_the_disk_hangs_none_ends_twice(before, imds, disk):
    agent = before
    disk.freeze()
    imds.body = json.dumps(document(4, event("E-1"), event("E-2"), event("P-1", "Preempt"))).encode()
    start(agent)
    agent.wait_for(lambda: len(agent.records) == 3)
    imds.show(document(5, event("E-1"), event("E-2", status="Started"), event("P-1", "Preempt")))
    agent.wait_for(lambda: ("E-2", "started", "observed") in told(agent))
    for incarnation in (6, 7, 8):
        others = (event(f"N-{incarnation}-{number}", vm="vm_9") for number in range(900))
        imds.show(document(incarnation, event("E-1"), event("P-1", "Preempt"), *others))
    agent.wait_for(lambda: ("E-2", "completed", "observed") in told(agent))
    disk.thaw()
    agent.wait_for(lambda: "The outbox is loaded now" in agent.log)
    imds.show(document(9, event("E-1"), event("E-9")))
    agent.wait_for(lambda: ("E-9", "scheduled", "observed") in told(agent))
    assert agent.stop() == 0
    assert [each for each in told(agent) if each[0] == "E-2"][1:] == [
        ("E-2", "scheduled", "observed"),
        ("E-2", "started", "observed"),
        ("E-2", "completed", "observed"),
    ]
    assert len({record["id"] for record in agent.records}) == len(agent.records)


def show_much(agent, imds):
    """Show what waits for the outbox, what is told at once, and what comes and goes; return what was told meanwhile."""
    first = document(4, event("E-1"), event("E-2", status="Started"), event("P-1", "Preempt"))
    imds.body = json.dumps(first).encode()
    start(agent)
    agent.wait_for(lambda: len(agent.records) == 3)
    now = [("P-1", "scheduled", "observed")]
    for number in range(4):
        at = 5 + 2 * number
        imds.show(document(at, event("E-1"), event("P-1", "Preempt"), event(f"N-{number}", status="Started")))
        imds.show(document(at + 1, event("E-1"), event("P-1", "Preempt")))
        now += [(f"N-{number}", "started", "observed"), (f"N-{number}", "completed", "observed")]
    agent.wait_for(lambda: len(agent.records) == 2 + len(now))
    assert told(agent)[2:] == now
    return now


def test_polls_go_on_while_a_slow_disk_takes_what_was_seen(before, imds, disk):
    agent = before
    disk.freeze()
    show_much(agent, imds)
    disk.slow_down()
    disk.thaw()
    longest, last = 0.0, time.monotonic()
    while len(agent.records) < 13:
        imds.wait_for_polls(1)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < 5  # a commit or two; each document by itself took ten of them
    assert told(agent)[11:] == [("E-2", "started", "observed"), ("E-2", "completed", "observed")]
    disk.heal()
    assert agent.stop() == 0


@pytest.mark.parametrize("moment", ["The outbox is being loaded", "The outbox is loaded now"])
def test_a_stop_while_a_slow_disk_takes_what_was_seen_stores_it(before, imds, disk, moment):
    """The load is over, and the handover begins or is under way."""
    agent = before
    agent.config.write_text("stop_grace_seconds = 20\n" + agent.config.read_text())
    disk.freeze()
    now = show_much(agent, imds)
    disk.slow_down()
    disk.thaw()
    if moment not in agent.log:
        agent.wait_for(lambda: moment in agent.log)
    else:
        files = Path(f"/proc/{agent.process.pid}/fd")
        agent.wait_for(lambda: any(each.readlink().name == "outbox.db" for each in files.iterdir()))
    assert agent.stop(timeout_seconds=40) == 0
    assert "Traceback" not in agent.log
    assert "was not loaded yet" not in agent.log
    known = [(each.event.event_id, each.transition.value) for each in OutboxFile(agent.state).records()]
    assert sorted(known[2:]) == sorted([each[:2] for each in now] + [("E-2", "started"), ("E-2", "completed")])
    disk.heal()
    agent.start()
    imds.show(document(20, event("E-1"), event("P-1", "Preempt"), event("E-9")))
    agent.wait_for(lambda: ("E-9", "scheduled", "observed") in told(agent))
    assert agent.stop() == 0
    assert len({record["id"] for record in agent.records}) == len(agent.records) == 2 + len(now) + 2 + 1


def test_who_this_vm_is_is_not_forgotten_once_the_outbox_is_there(before, imds, disk):
    agent = before
    disk.freeze()
    imds.body = json.dumps(document(4, event("E-1"), event("E-2"), event("P-1", "Preempt"))).encode()
    start(agent)
    agent.wait_for(lambda: len(agent.records) == 3)
    imds.identity = (429, b"")
    disk.thaw()
    agent.wait_for(lambda: "The outbox is loaded now" in agent.log)
    imds.show(document(5, event("E-1"), event("E-2"), event("P-1", "Preempt"), event("E-5")))
    agent.wait_for(lambda: ("E-5", "scheduled", "observed") in told(agent))
    assert agent.stop() == 0
    assert told(agent)[2:] == [("P-1", "scheduled", "observed"), ("E-5", "scheduled", "observed")]
    assert agent.records[-1]["vm"]["vm_id"] == "AAAA"


def test_a_stop_between_the_load_and_the_handover_stores_what_was_seen(before, imds, disk):
    """A sink that hangs keeps the handover waiting; the outbox is there meanwhile."""
    agent = before
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hook = f'[[sinks]]\ntype = "webhook"\nname = "silent"\nurl = "http://127.0.0.1:{silent.getsockname()[1]}/"\n'
        agent.config.write_text(agent.config.read_text() + hook)
        disk.freeze()
        imds.body = json.dumps(document(4, event("E-1"), event("E-2"), event("P-1", "Preempt"))).encode()
        start(agent)
        agent.wait_for(lambda: len(agent.records) == 3)
        imds.show(document(5, event("E-1"), event("E-2")), polls=5)
        disk.thaw()
        files = Path(f"/proc/{agent.process.pid}/fd")
        agent.wait_for(lambda: any(each.readlink().name == "outbox.db" for each in files.iterdir()))
        time.sleep(0.5)  # for the rest of the load, of which nothing shows outside
        assert agent.stop() == 0
    known = [(each.event.event_id, each.transition.value) for each in OutboxFile(agent.state).records()]
    assert ("P-1", "scheduled") in known, agent.log
    assert "Traceback" not in agent.log
