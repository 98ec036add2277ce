"""Implements the `command` sink, which runs a program for each record.

Use this sink to run a program that drains the VM before an event and restores it afterward. The program runs without a
shell. It receives the record as JSON on standard input and the record's main fields in environment variables. The exit
code determines what happens to the record:

- 0: The record is delivered.
- 75 (EX_TEMPFAIL of sysexits.h): The agent reruns the program later, until the record reaches `max_age_seconds`.
- Any other exit code: The record is parked. An operator can resend a parked record with `outbox retry`.
- No exit before the deadline: The agent kills the program and its process group, and parks the record.

A failed drain might be half complete, so the agent does not rerun a failed program until someone runs `outbox retry`.
However, if the agent was killed while the program was running, or if SIGTERM, SIGINT, or SIGHUP ended the program, the
agent reruns the program with the same `SCHEDULED_EVENT_ID`.

The sink runs one program at a time, so other records must wait. To avoid delaying urgent events, configure a separate
`[[sinks]]` table for them.

The program's standard output is discarded. `outbox list` shows the end of its standard error as the reason for a
failure, so the program must not write secrets to standard error.

The program inherits the agent's environment variables, except those that contain secrets: the variables that `*_env`
keys name, and credentials such as AZURE_CLIENT_SECRET (`bridge.config.secret_keys.CREDENTIAL_VARIABLES`). To remove
more variables, use `unset_environment`. To pass a variable even though it contains a secret, use `pass_environment`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from bridge.sink import (
    ENVIRONMENT_PREFIX,
    PASSING_ERRORS,
    DeliveryFailed,
    DeliveryRejected,
    Ending,
    Finished,
    Runner,
    Sink,
    SinkConfig,
    TransitionRecord,
    encode,
    environment_of,
    find_program,
)

#: The limit for the reason of a failure. The message contains the end of standard error.
_MOST_MESSAGE_CHARACTERS = 256
_TRY_AGAIN = 75
#: When a service manager stops the agent, it also sends these signals to the agent's programs.
_STOPPED_FROM_OUTSIDE = frozenset({-signal.SIGTERM, -signal.SIGINT, -getattr(signal, "SIGHUP", signal.SIGTERM)})


class CommandConfig(SinkConfig, frozen=True, kw_only=True):
    """The settings of the sink type `command`."""

    command: tuple[str, ...]
    """The program and its arguments. The program is an absolute path or a name in PATH, and runs without a shell."""
    timeout_seconds: float = 600.0
    """The deadline of the program in seconds. Time in which the VM is frozen does not count. At the deadline, the agent
    kills the process group of the program and parks the record."""
    max_age_seconds: float | None = 900.0
    """The maximum age of a record in seconds. Older records expire, and the program does not run for them."""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables for the program, in addition to SCHEDULED_EVENT_*."""
    unset_environment: tuple[str, ...] = ()
    """Environment variables of the agent to remove. The agent also removes the variables named by `*_env` keys, and the
    variables with secrets for credentials, such as AZURE_CLIENT_SECRET."""
    pass_environment: tuple[str, ...] = ()
    """Environment variables to pass to the program even though they contain secrets."""
    directory: str | None = None
    """The program's working directory. Default: the agent's working directory."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ValueError('command is empty. Set a program, such as command = ["/path/to/program", "argument"].')
        program = self.command[0]
        if os.path.dirname(program) and not os.path.isabs(program):  # noqa: PTH117, PTH120 - Path drops a leading ./
            raise ValueError(f"command is the relative path {program!r}. Set an absolute path, or a name in PATH.")
        if self.max_batch != 1:
            raise ValueError(f"max_batch is {self.max_batch}, but a command runs for one record. Remove max_batch.")
        for name in self.environment:
            if not name or "=" in name or name.startswith(ENVIRONMENT_PREFIX):
                raise ValueError(
                    f"environment sets {name!r}. A name must not contain '=' or begin with {ENVIRONMENT_PREFIX}."
                )


class CommandSink(Sink):
    """Runs a program for each record."""

    Config: ClassVar[type[SinkConfig]] = CommandConfig
    send_test_by_name_only: ClassVar[bool] = True
    config: CommandConfig

    @classmethod
    def current_state_only(cls, config: CommandConfig) -> bool:
        """Return True, because a program must not drain a VM for an event that has ended."""
        del config
        return True

    @classmethod
    def withholding(cls, config: CommandConfig, variables: frozenset[str]) -> CommandConfig:
        """Return a copy of *config* that unsets *variables*, except those to pass."""
        unset = dict.fromkeys([*config.unset_environment, *sorted(variables.difference(config.pass_environment))])
        return msgspec.structs.replace(config, unset_environment=tuple(unset))

    def __init__(self, config: CommandConfig) -> None:
        super().__init__(config)
        self._name = os.path.basename(config.command[0])  # noqa: PTH119 - Path("C:\\x").name differs by system
        self._runner = Runner()

    def send(self, batch: Sequence[TransitionRecord]) -> None:
        """Run the program for the record in *batch*. Raise an exception unless the exit code is 0."""
        (record,) = batch
        try:
            finished = self._runner.run(
                self.config.command,
                deadline_seconds=self.config.timeout_seconds,
                stdin=encode(record) + b"\n",
                environment={**self.config.environment, **environment_of(record)},
                without=self.config.unset_environment,
                directory=self.config.directory,
            )
        except OSError as error:
            raise self._not_started(error) from error
        self._raise_unless_delivered(finished)

    @classmethod
    def shown_by_check(cls, config: CommandConfig) -> str:
        """Return the result of `check`, which does not run the program."""
        del config
        return "The program exists. The check did not run the program."

    def check(self) -> None:
        """Raise DeliveryFailed if the program or its working directory is missing."""
        directory = self.config.directory
        if directory is not None and not Path(directory).is_dir():
            raise DeliveryFailed(f"The directory {directory} does not exist. Create it, or change `directory`.")
        if find_program(self.config.command[0], self.config.environment) is None:
            program = self.config.command[0]
            raise DeliveryFailed(
                f"The program {program!r} does not exist or is not executable. Install it, or change `command`.",
                needs_attention=True,
            )

    def close(self) -> None:
        """Kill the running program and its process group, and do not start any more programs."""
        self._runner.close()

    def _raise_unless_delivered(self, finished: Finished) -> None:
        code = finished.exit_code
        if finished.ending is Ending.CLOSED:
            raise DeliveryFailed(f"{self._name} was killed, because the agent closed the sink.")
        if finished.ending is Ending.DEADLINE:
            how = "was killed with its process group" if code is not None else "cannot be killed"
            text = f"{self._name} did not end within {self.config.timeout_seconds:g} s and {how}"
            raise DeliveryRejected(_message(text, finished))
        if code == 0:
            return
        if code == _TRY_AGAIN:
            raise DeliveryFailed(_message(f"{self._name} requested a retry (exit code 75)", finished))
        if code is None or code > 0:
            raise DeliveryRejected(_message(f"{self._name} failed with exit code {code}", finished))
        if code in _STOPPED_FROM_OUTSIDE:
            raise DeliveryFailed(_message(f"{self._name} was stopped by {_signal_name(-code)}", finished))
        raise DeliveryRejected(_message(f"{self._name} was killed by {_signal_name(-code)}", finished))

    def _not_started(self, error: OSError) -> DeliveryFailed:
        if error.errno in PASSING_ERRORS:
            return DeliveryFailed(f"{self._name} cannot start now: {error.strerror}.")
        return DeliveryFailed(
            f"{self.config.command[0]} cannot be started: {error.strerror or error}. Check the program, the "
            "interpreter in its first line (#!/bin/sh), and `directory`.",
            needs_attention=True,
        )


def _message(text: str, finished: Finished) -> str:
    output = finished.error_output
    room = _MOST_MESSAGE_CHARACTERS - len(text) - 2
    return f"{text}: {output[-room:]}" if output and room > 0 else f"{text}."


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
