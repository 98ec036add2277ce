"""`run`: the agent from start to stop, and the reload of its configuration.

SIGTERM, SIGINT, and Ctrl-Break stop the agent. SIGHUP reloads the configuration. The signals are in
`bridge.cli.signals`.

The main thread touches no file while the agent runs. Python handles signals on this thread, and an access to a file
server that does not respond never returns, so a stop would have no effect. The main thread waits for the stop and feeds
the service manager's watchdog. Periodic tasks and reloads have their own thread. The configuration is read on another
thread, because the end of a FIFO may never come.
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

from bridge.agent.agent import Agent
from bridge.cli.second_agent import refuse_second_agent
from bridge.cli.signals import RunSignals
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
_SECOND_AGENT_ADVICE = (
    "Use `status` for that agent, with sudo if it is the service's agent. Or start this agent as well, with "
    "--allow-second-agent."
)


def run_agent(settings: Settings, config: Path | None, *, allow_second_agent: bool = False) -> None:
    """Run the agent of *settings*, read from the file *config*, until a signal stops it.

    Raises StateDirectoryError if another agent watches this VM, unless *allow_second_agent*.
    """
    signals = RunSignals()
    directory = state_directory(settings, os.environ)
    if not allow_second_agent:
        refuse_second_agent(settings, directory, advice=_SECOND_AGENT_ADVICE)
    agent = Agent(settings, directory)
    signals.wake(agent.turn)
    stop = signals.stop
    began_to_stop_at = math.inf
    try:
        agent.start(stop.is_set)
        _spare_what_stays()
        turning = run_daemon("turns", _turn, agent, config, stop, signals.reload_wanted)
        agent.feed_watchdog()
        while not stop.wait(min(agent.feed_within_seconds or _LONGEST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)):
            agent.feed_watchdog()
        began_to_stop_at = time.monotonic()
        if wait_for([turning], _LAST_TURN_SECONDS).done:
            turning.result()  # raises what ended it
    finally:
        agent.stop(spent_seconds=max(time.monotonic() - began_to_stop_at, 0.0))
        signals.ignore()


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
    gc.enable()


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
