"""A file server that does not respond: the agent continues to poll, and stops in time."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import preload
import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void look(const char *path) {
    const char *under = getenv("HANG_UNDER");
    if (path && under && strncmp(path, under, strlen(under)) == 0)
        while (access(getenv("HANG_WHILE"), F_OK) == 0) usleep(10000);
}
#define STAT(NAME) int NAME(const char *path, void *found) { \
    look(path); return ((int (*)(const char *, void *))dlsym(RTLD_NEXT, #NAME))(path, found); }
#define STATAT(NAME) int NAME(int at, const char *path, void *found, int flags) { look(path); \
    return ((int (*)(int, const char *, void *, int))dlsym(RTLD_NEXT, #NAME))(at, path, found, flags); }
#define OPEN(NAME) int NAME(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
    look(path); return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #NAME))(path, flags, mode); }
STAT(stat) STAT(lstat) STAT(stat64) STAT(lstat64) STATAT(fstatat) STATAT(fstatat64) OPEN(open) OPEN(open64)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return a library that blocks each file access while another file exists."""
    if sys.platform != "linux":
        pytest.skip("The library that simulates a hung file server requires Linux.")
    return preload.built(tmp_path_factory, SHIM)


@pytest.fixture
def server(tmp_path):
    """A directory on the file server."""
    directory = tmp_path / "server"
    directory.mkdir()
    return directory


@pytest.fixture
def manager(agent, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        agent.env |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1500000"}
        yield listener


def start(agent, library, server):
    """Start the agent as a new process, because a forked process does not load the library."""
    hang = server.parent / "gone"
    env = agent.env | {"LD_PRELOAD": str(library), "HANG_UNDER": str(server), "HANG_WHILE": str(hang)}
    with agent.out.open("ab") as out, agent.err.open("ab") as err:
        command = agent.command("run", "--config", agent.config)
        agent.process = subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=agent.directory)
    agent.wait_for(lambda: "The agent is running" in agent.log)
    return hang


def watchdog_messages(manager, seconds):
    """Return the number of watchdog messages in the next *seconds*."""
    manager.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while manager.recv(4096):
            pass
    manager.settimeout(20)
    found, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        found += manager.recv(4096) == b"WATCHDOG=1"
    return found


def stops_in_time(agent):
    began_at = time.monotonic()
    agent.process.send_signal(signal.SIGTERM)
    agent.process.wait(30)
    return time.monotonic() - began_at < 12


def test_agent_polls_and_stops_while_the_state_directory_hangs(agent, imds, library, server, manager):
    imds.body = json.dumps({"DocumentIncarnation": 1, "Events": []}).encode()
    agent.state = server / "state"
    agent.configure(imds.url)
    agent.config.write_text("stop_grace_seconds = 1.0\n" + agent.config.read_text())
    hang = start(agent, library, server)
    hang.touch()
    time.sleep(1.5)  # The agent checks the directory once per second.
    assert watchdog_messages(manager, 2) >= 2
    imds.wait_for_polls(3)
    assert stops_in_time(agent)


def test_agent_polls_and_stops_while_a_secret_file_hangs_during_a_reload(agent, imds, library, server, manager):
    imds.body = json.dumps({"DocumentIncarnation": 1, "Events": []}).encode()
    agent.configure(imds.url)
    hang = start(agent, library, server)
    secret = server / "url"
    secret.write_text("http://127.0.0.1:9/\n")
    secret.chmod(0o600)
    agent.configure(imds.url, f'[[sinks]]\ntype = "webhook"\nurl_file = "{secret}"\n[labels]\nteam = "b"\n')
    hang.touch()
    agent.process.send_signal(signal.SIGHUP)
    assert watchdog_messages(manager, 2) >= 2
    hang.unlink()
    agent.wait_for(lambda: "was reloaded" in agent.log)
    hang.touch()
    agent.process.send_signal(signal.SIGHUP)
    imds.wait_for_polls(3)
    assert stops_in_time(agent)
    assert agent.process.returncode == 0
