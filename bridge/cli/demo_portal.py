"""Implements `demo --portal`: a simulated IMDS, three agents, and a portal in one process.

The agents send records to the portal and poll it for decisions. When the user approves an event in the browser, an
agent posts the approval to the simulated IMDS. All servers listen on loopback addresses. Pressing Ctrl-C ends the demo
and deletes its files.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from bridge import logs
from bridge.agent.agent import Agent
from bridge.approval.signing import generate_key
from bridge.cli.signals import set_by_signals
from bridge.config.loader import Settings, read
from bridge.errors import BridgeError
from bridge.portal.command import add_user
from bridge.portal.serve import Portal
from bridge.portal.settings import load
from bridge.testing import EventSpec, Simulator

VMS = ("web-0", "web-1", "web-2")
#: The first event affects all VMs, because they share a host. The second event affects one VM.
EVENTS = (
    EventSpec(event_type="Freeze", resources=VMS, duration_seconds=5, impact_seconds=20, approval_delay_seconds=2),
    EventSpec(event_type="Reboot", resources=VMS[:1], impact_seconds=20, approval_delay_seconds=2),
)
_NAME = "ann"
_KID = "portal"
_PORTAL = """\
server.listen = "127.0.0.1:0"
operator.listen = "127.0.0.1:0"
database.file = '{directory}/portal.db'
agents.token_file = '{directory}/token'
signing = {{kid = "{kid}", approver = "{kid}", private_key_file = '{key}'}}
"""
_TICK_SECONDS = 0.1
_UP_SECONDS = 30.0
#: The pause after all events have ended and before the next events are announced.
_QUIET_SECONDS = 20.0


def run_portal_demo(directory: Path) -> None:
    """Run the demo in *directory* until a stop signal arrives. Then raise KeyboardInterrupt."""
    logs.configure(level=logging.WARNING)
    stop = set_by_signals()
    with ExitStack() as stack:
        simulator = stack.enter_context(Simulator(vms=VMS, rate_limit=False))
        url, password = stack.enter_context(_portal(directory))
        agents = [Agent(_settings(directory, simulator.endpoints[vm], f"{url}/api/v1"), directory / vm) for vm in VMS]
        for agent in agents:
            stack.callback(agent.stop)
            agent.start()
        click.echo(
            f"Simulated: Azure, and three VMs. Real: their agents, and the portal at\n\n  {url}\n\n"
            f"Sign in as {_NAME} with the password {password}, approve an event, and watch it until its end.\n"
            "Ctrl-C ends the demo. Nothing is left behind."
        )
        _play(simulator, agents, stop)
    raise KeyboardInterrupt


def _play(simulator: Simulator, agents: list[Agent], stop: threading.Event) -> None:
    """Announce the events repeatedly until *stop* is set."""
    quiet_since = -_QUIET_SECONDS
    while not stop.wait(_TICK_SECONDS):
        for agent in agents:
            agent.run_due()
        if simulator.world.events():
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since >= _QUIET_SECONDS:
            for spec in EVENTS:
                simulator.world.add_event(spec)


@contextmanager
def _portal(directory: Path) -> Iterator[tuple[str, str]]:
    """Run a portal, and yield its URL and the approver's password."""
    pair = generate_key(directory / f"{_KID}.key")
    (directory / "token").write_text(secrets.token_urlsafe(32), encoding="utf-8")
    (directory / "token").chmod(0o600)
    config = directory / "portal.toml"
    config.write_text(_PORTAL.format(directory=directory, key=pair.private_key_file, kid=_KID), encoding="utf-8")
    password = secrets.token_urlsafe(9)
    add_user(config, _NAME, password=password, role="approver", scope=())
    portal = Portal(load(config))
    thread = threading.Thread(target=portal.run, name="portal", daemon=True)
    thread.start()
    try:
        if not portal.is_up.wait(_UP_SECONDS) or portal.address is None:
            raise BridgeError(f"The portal did not start within {_UP_SECONDS:g} s. Run the demo again.")
        yield f"http://127.0.0.1:{portal.address[1]}", password
    finally:
        portal.stop()
        thread.join()


def _settings(directory: Path, endpoint: str, url: str) -> Settings:
    token = str(directory / "token")
    key = {"kid": _KID, "approver": _KID, "public_key_file": str(directory / f"{_KID}.key.pub")}
    return read(
        {
            "imds": {"endpoint": endpoint},
            "status": {"listen": ""},
            "stop_grace_seconds": 1.0,
            "sinks": [{"type": "webhook", "scope": "all", "url": f"{url}/records", "bearer_token_file": token}],
            "approval": {"remote": {"url": url, "token_file": token, "keys": [key]}},
        }
    )
