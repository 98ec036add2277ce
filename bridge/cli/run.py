"""`run`: the agent from start to stop, with what signals ask of it.

SIGTERM, SIGINT and Ctrl-Break stop it in order; SIGHUP reads the configuration again. That is done on a thread of its
own, because a FIFO or a file server that hangs may never come to the file's end, and a stop must not wait for it.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from pathlib import Path

from bridge.agent.agent import Agent
from bridge.cli.signals import STOP_SIGNALS, SignalEvents
from bridge.config.loader import Settings, find_config, load, state_directory
from bridge.errors import BridgeError, ConfigurationError
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

_STOP_TICK_SECONDS = 0.05
#: The polls, the sinks and the approver do not wait for it, but the tasks that are done now and then do.
_READ_SECONDS = 3.0
_TRY_AGAIN_SECONDS = 10.0


def run_agent(settings: Settings, config: Path | None) -> None:
    """Run the agent of *settings*, read from the file *config*, until a signal stops it."""
    stop, reload_wanted, signals = threading.Event(), threading.Event(), SignalEvents()
    if hasattr(signal, "SIGHUP"):
        signals.set_on(signal.SIGHUP, reload_wanted)
    for number in STOP_SIGNALS:
        # Opening the outbox may wait for a lock, and nothing is there yet that would have to be stopped.
        signal.signal(number, lambda *_: sys.exit(0))
    agent = Agent(settings, state_directory(settings, os.environ))
    if hasattr(signal, "SIGHUP"):
        signals.set_on(signal.SIGHUP, reload_wanted, agent.turn)
        if reload_wanted.is_set():  # it came during the start
            agent.turn.set()
    for number in STOP_SIGNALS:
        signals.set_on(number, stop, agent.turn)
    try:
        agent.start(stop.is_set)
        _spare_what_stays()
        again_at = math.inf
        while agent.wait_for_turn(stop):
            agent.run_due()
            if reload_wanted.is_set() or time.monotonic() >= again_at:
                reload_wanted.clear()
                is_done = reload_configuration(agent, config, stop.is_set)
                again_at = math.inf if is_done else time.monotonic() + _TRY_AGAIN_SECONDS
    finally:
        agent.stop()
        # The interpreter's own end takes a moment, in which a second signal would read as a crash.
        for name in ("SIGHUP", *(number.name for number in STOP_SIGNALS)):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def _spare_what_stays() -> None:
    """Leave what the start made out of every later collection: a full one would hold a record up for 20 ms and more."""
    gc.collect()
    gc.freeze()


def reload_configuration(agent: Agent, config: Path | None, stop: Callable[[], bool]) -> bool:
    """Put the file as it is now in force; one that is wrong or cannot be read is logged, and changes nothing.

    Return False when there is no thread to be had for it: then it is to be tried again.
    """
    try:
        settings = _read_in_time(config, stop)
        if settings is None:
            return True
    except (BridgeError, OSError) as error:
        for mistake in error.mistakes if isinstance(error, ConfigurationError) else (str(error),):
            logger.error("The new configuration is wrong; nothing was changed. %s", mistake)  # noqa: TRY400
        agent.refused_configuration()
        return True
    except RuntimeError as error:  # can't start new thread
        logger.error("The configuration cannot be read again yet: %s. It is tried again.", error)  # noqa: TRY400
        agent.refused_configuration()
        return False
    try:
        agent.reload(settings, stop)
    except (BridgeError, OSError) as error:
        logger.error(  # noqa: TRY400  # the sentence says it all
            "The new configuration is not in force as a whole: %s Mend that and send SIGHUP again, or restart.", error
        )
        agent.refused_configuration()
    except RuntimeError as error:
        logger.exception("The new configuration is not in force as a whole: %s. It is tried again.", error)  # noqa: TRY401  # in the sentence
        agent.refused_configuration()
        return False
    return True


def _read_in_time(config: Path | None, stop: Callable[[], bool]) -> Settings | None:
    """Return the settings of the file as it is now, or None once *stop* returns True."""
    reading = run_daemon("configuration", _read_again, config)
    give_up_at = time.monotonic() + _READ_SECONDS
    while not wait_for([reading], _STOP_TICK_SECONDS).done:
        if stop():
            return None
        if time.monotonic() >= give_up_at:
            raise ConfigurationError(
                f"It could not be read to its end within {_READ_SECONDS:g} s. Put a plain file there that can be read, "
                "and send SIGHUP again."
            )
    return reading.result()


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
