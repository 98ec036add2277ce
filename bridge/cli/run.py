"""`run`: the agent from start to stop, with what signals ask of it.

SIGTERM, SIGINT and Ctrl-Break stop it in order; SIGHUP reads the configuration again.

The main thread touches no file while the agent runs: on a file server that is gone a look at one does not return, and
Python handles signals on that thread alone, so that a stop would never be noticed. It waits for the stop and feeds the
service manager's watchdog. What looks at files, the tasks that are done now and then and a reload, has a thread of its
own, and the configuration is read on yet another, because a FIFO may never come to its end.
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
from bridge.cli.beside import refuse_beside_another
from bridge.cli.signals import STOP_SIGNALS, SignalEvents
from bridge.config.loader import Settings, find_config, load, state_directory
from bridge.config.secret_keys import readable_secrets
from bridge.errors import BridgeError, ConfigurationError
from bridge.system.threads import run_daemon

logger = logging.getLogger(__name__)

_STOP_TICK_SECONDS = 0.05
#: The polls, the sinks and the approver do not wait for it, but the tasks that are done now and then do.
_READ_SECONDS = 3.0
_TRY_AGAIN_SECONDS = 10.0
#: On Windows no signal ends a wait of the main thread.
_LONGEST_WAIT_SECONDS = 1.0 if os.name == "nt" else 60.0
#: What a stop waits for a reload that is under way, which gives up by itself, unless it hangs.
_LAST_TURN_SECONDS = 1.0
_BESIDE = (
    "Look at that one: `status`, with sudo where it is the service's. Or run this one as well, with --beside-another."
)


def run_agent(settings: Settings, config: Path | None, *, beside_another: bool = False) -> None:
    """Run the agent of *settings*, read from the file *config*, until a signal stops it.

    Raises StateDirectoryError where another agent watches this VM, unless it is to run *beside_another*.
    """
    stop, reload_wanted, signals = threading.Event(), threading.Event(), SignalEvents()
    if hasattr(signal, "SIGHUP"):
        signals.set_on(signal.SIGHUP, reload_wanted)
    for number in STOP_SIGNALS:
        # Opening the outbox may wait for a lock, and nothing is there yet that would have to be stopped.
        signal.signal(number, lambda *_: sys.exit(0))
    agent = _agent(settings, beside_another=beside_another)
    if hasattr(signal, "SIGHUP"):
        signals.set_on(signal.SIGHUP, reload_wanted, agent.turn)
        if reload_wanted.is_set():  # it came during the start
            agent.turn.set()
    for number in STOP_SIGNALS:
        signals.set_on(number, stop, agent.turn)
    began_to_stop_at = math.inf
    try:
        agent.start(stop.is_set)
        _spare_what_stays()
        turning = run_daemon("turns", _turn, agent, config, stop, reload_wanted)
        agent.feed_watchdog()
        while not stop.wait(min(agent.feed_within_seconds or _LONGEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)):
            agent.feed_watchdog()
        began_to_stop_at = time.monotonic()
        if wait_for([turning], _LAST_TURN_SECONDS).done:
            turning.result()  # raises what ended it
    finally:
        agent.stop(spent_seconds=max(time.monotonic() - began_to_stop_at, 0.0))
        # The interpreter's own end takes a moment, in which a second signal would read as a crash.
        for name in ("SIGHUP", *(number.name for number in STOP_SIGNALS)):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)


def _agent(settings: Settings, *, beside_another: bool) -> Agent:
    directory = state_directory(settings, os.environ)
    if not beside_another:
        refuse_beside_another(settings, directory, instead=_BESIDE)
    return Agent(settings, directory)


def _turn(agent: Agent, config: Path | None, stop: threading.Event, reload_wanted: threading.Event) -> None:
    """Do what is due now and then, and reload when that is wanted, until *stop* is set; set it at the end."""
    again_at = math.inf
    try:
        while agent.wait_for_turn(stop):
            agent.run_due()
            if reload_wanted.is_set() or time.monotonic() >= again_at:
                reload_wanted.clear()
                is_done = reload_configuration(agent, config, stop.is_set)
                again_at = math.inf if is_done else time.monotonic() + _TRY_AGAIN_SECONDS
    finally:
        stop.set()


def _spare_what_stays() -> None:
    """Leave what the start made out of every later collection: a full one would hold a record up for 20 ms and more."""
    gc.collect()
    gc.freeze()


def reload_configuration(agent: Agent, config: Path | None, stop: Callable[[], bool]) -> bool:
    """Put the file as it is now in force; one that is wrong or cannot be read is logged, and changes nothing.

    Return False when there is no thread to be had for it: then it is to be tried again.
    """
    try:
        found = _read_in_time(config, stop)
        if found is None:
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
    settings, warnings = found
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
    for sentence in warnings:
        logger.warning("%s", sentence)
    return True


def _read_in_time(config: Path | None, stop: Callable[[], bool]) -> tuple[Settings, tuple[str, ...]] | None:
    """Return the settings of the file as it is now and what to warn of, or None once *stop* returns True."""
    reading = run_daemon("configuration", _read_again, config)
    give_up_at = time.monotonic() + _READ_SECONDS
    while not wait_for([reading], _STOP_TICK_SECONDS).done:
        if stop():
            return None
        if time.monotonic() >= give_up_at:
            raise ConfigurationError(
                f"It, or a file with a secret that it names, could not be read to its end within {_READ_SECONDS:g} s. "
                "Put plain files there that can be read, and send SIGHUP again."
            )
    return reading.result()


def _read_again(config: Path | None) -> tuple[Settings, tuple[str, ...]]:
    settings = _whole(config)
    return settings, readable_secrets(settings.secret_files)


def _whole(config: Path | None) -> Settings:
    """Return the settings of the file as it is now; raise ConfigurationError for one that is just being written."""
    path = find_config(config, os.environ)
    if path is None or not path.is_file():
        return load(path, os.environ)  # which says what is wrong with a file that is not there
    before = path.read_bytes()
    settings = load(path, os.environ)
    if not before.strip():
        raise ConfigurationError(f"The configuration {path} is empty. Restart the agent if it shall run on defaults.")
    if path.read_bytes() != before:
        raise ConfigurationError(f"The configuration {path} was written to while it was read. Send SIGHUP again.")
    return settings
