"""`run`: the agent from start to stop, with what signals ask of it.

SIGTERM, SIGINT and Ctrl-Break stop it in order; SIGHUP reads the configuration again.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from bridge.agent.agent import Agent
from bridge.cli.signals import STOP_SIGNALS, SignalEvents
from bridge.config.loader import Settings, find_config, load, state_directory
from bridge.errors import BridgeError, ConfigurationError

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0


def run_agent(settings: Settings, config: Path | None) -> None:
    """Run the agent of *settings*, read from the file *config*, until a signal stops it."""
    stop, reload_wanted, signals = threading.Event(), threading.Event(), SignalEvents()
    if hasattr(signal, "SIGHUP"):
        signals.set_on(signal.SIGHUP, reload_wanted)
    for number in STOP_SIGNALS:
        # Opening the outbox may wait for a lock, and nothing is there yet that would have to be stopped.
        signal.signal(number, lambda *_: sys.exit(0))
    agent = Agent(settings, state_directory(settings, os.environ))
    for number in STOP_SIGNALS:
        signals.set_on(number, stop)
    try:
        agent.start(stop.is_set)
        while not stop.wait(_TICK_SECONDS):
            agent.run_due()
            if reload_wanted.is_set():
                reload_wanted.clear()
                reload_configuration(agent, config, stop.is_set)
    finally:
        agent.stop()
        # The interpreter's own end takes a moment, in which a second signal would read as a crash.
        for name in ("SIGHUP", *(number.name for number in STOP_SIGNALS)):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def reload_configuration(agent: Agent, config: Path | None, stop: Callable[[], bool]) -> None:
    """Put the file as it is now in force; one that is wrong or cannot be read is logged, and changes nothing."""
    try:
        settings = _read_again(config)
    except (BridgeError, OSError) as error:
        for mistake in error.mistakes if isinstance(error, ConfigurationError) else (str(error),):
            logger.error("The new configuration is wrong; nothing was changed. %s", mistake)  # noqa: TRY400
        agent.refused_configuration()
        return
    try:
        agent.reload(settings, stop)
    except (BridgeError, OSError) as error:
        logger.error(  # noqa: TRY400  # the sentence says it all
            "The new configuration is not in force as a whole: %s Mend that and send SIGHUP again, or restart.", error
        )
        agent.refused_configuration()


def _read_again(config: Path | None) -> Settings:
    """Return the settings of the file as it is now; raise ConfigurationError for one that is just being written."""
    path = find_config(config, os.environ)
    if path is None or not path.is_file():
        return load(path)  # which says what is wrong with a file that is not there
    before = path.read_bytes()
    settings = load(path)
    if not before.strip():
        raise ConfigurationError(f"The configuration {path} is empty. Restart the agent if it shall run on defaults.")
    if path.read_bytes() != before:
        raise ConfigurationError(f"The configuration {path} was written to while it was read. Send SIGHUP again.")
    return settings
