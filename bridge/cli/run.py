"""Implements `run`, which starts, stops, and reloads the agent (SIGHUP).

The main thread waits for a stop signal and notifies the service manager's watchdog. A second thread runs the periodic
tasks and reloads the configuration. While the agent is running, the main thread does not open any files, because an
unresponsive file server could then prevent the agent from stopping.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from pathlib import Path
from urllib.parse import urlsplit

from bridge import logs
from bridge.agent.agent import Agent
from bridge.cli.signals import RELOAD_SIGNALS, STOP_SIGNALS, SignalEvents, ignore_signals
from bridge.config.loader import Settings, find_config, load, service_directory, state_directory
from bridge.config.secret_keys import readable_secrets
from bridge.errors import BridgeError, ConfigurationError, StateDirectoryError
from bridge.http.failures import is_loopback
from bridge.outbox.lock import is_locked
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

#: On Windows, a signal does not interrupt the main thread while it waits.
_LONGEST_WAIT_SECONDS = 1.0 if os.name == "nt" else 60.0
#: When the agent stops, it waits at most this long for a reload to finish.
_LAST_TURN_SECONDS = 1.0


def run_agent(settings: Settings, *, log_format: str, log_level: str, allow_second_agent: bool) -> None:
    """Run the agent until a signal stops it.

    Raises StateDirectoryError (exit code 73) if the state directory cannot be locked, or if the system service already
    runs an agent on this VM and *allow_second_agent* is false.
    """
    logs.configure(form=log_format, level=log_level.upper())
    signals, stop, reload_wanted = SignalEvents(), threading.Event(), threading.Event()
    signals.set_on(RELOAD_SIGNALS, reload_wanted)
    directory = state_directory(settings, os.environ)
    if not allow_second_agent:
        _refuse_second_agent(settings, directory)
    agent = Agent(settings, directory)
    signals.set_on(RELOAD_SIGNALS, reload_wanted, agent.turn)
    signals.set_on(STOP_SIGNALS, stop, agent.turn)
    began_to_stop_at = math.inf
    try:
        agent.start(stop.is_set)
        turns = run_daemon("turns", _run_turns, agent, settings.file, stop, reload_wanted)
        agent.feed_watchdog()
        while not stop.wait(min(agent.notifier.feed_within_seconds or _LONGEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)):
            agent.feed_watchdog()
        began_to_stop_at = time.monotonic()
        if wait_for([turns], _LAST_TURN_SECONDS).done:
            turns.result()  # raises the error that ended the thread
    finally:
        agent.stop(spent_seconds=max(time.monotonic() - began_to_stop_at, 0.0))
        ignore_signals()


def _refuse_second_agent(settings: Settings, directory: Path) -> None:
    """Raise StateDirectoryError if the system service already runs an agent on this VM."""
    service = service_directory()
    # An IMDS endpoint on loopback is a simulator of another VM.
    if directory.absolute() == service or is_loopback(urlsplit(settings.imds.endpoint).hostname or ""):
        return
    if is_locked(service) is not False:  # None: this user cannot check the lock
        raise StateDirectoryError(
            f"The service's agent already watches this VM, with the state directory {service}. Two agents would send "
            "every record twice. Use `status` for the service's agent, with sudo. To start this agent as well, use "
            "--allow-second-agent."
        )


def _run_turns(agent: Agent, config: Path | None, stop: threading.Event, reload_wanted: threading.Event) -> None:
    """Run periodic tasks and reloads until *stop* is set."""
    try:
        while agent.wait_for_turn(stop):
            agent.run_due()
            if not gc.isenabled():
                _freeze_start_objects()  # a second after the start, because this would delay the first poll by 20 ms
            if reload_wanted.is_set():
                reload_wanted.clear()
                reload_configuration(agent, config, stop.is_set)
    finally:
        stop.set()


def _freeze_start_objects() -> None:
    """Exclude existing objects from garbage collection, so that later collections are short."""
    gc.collect()
    gc.freeze()
    gc.enable()


def reload_configuration(agent: Agent, config: Path | None, stop: Callable[[], bool]) -> None:
    """Reload the configuration. If it is invalid, log each error and keep the old one."""
    try:
        settings = _read_again(config)
        warnings = readable_secrets(settings.secret_files)
    except (BridgeError, OSError) as error:
        for mistake in error.mistakes if isinstance(error, ConfigurationError) else (str(error),):
            logger.error("The new configuration is invalid. Nothing was changed. %s", mistake)  # noqa: TRY400
        agent.metrics.reloaded(is_right=False)
        return
    try:
        agent.reload(settings, stop)
    except (BridgeError, OSError, RuntimeError) as error:  # RuntimeError: no thread can start
        logger.exception(
            "Only a part of the new configuration is in effect: %s. Fix the problem and send SIGHUP again, or restart.",
            str(error).rstrip("."),
        )
        agent.metrics.reloaded(is_right=False)
    for sentence in warnings:
        logger.warning("%s", sentence)


def _read_again(config: Path | None) -> Settings:
    path = find_config(config, os.environ)
    if path is not None and path.exists() and not path.is_file():  # reading a pipe might never end
        raise ConfigurationError(f"{path} is not a regular file, so it cannot be read again. Restart the agent.")
    settings = load(path, os.environ)
    if path is not None and not path.read_bytes().strip():
        raise ConfigurationError(f"The configuration {path} is empty. To run with the defaults, restart the agent.")
    return settings
