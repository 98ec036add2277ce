"""The checks of a configuration on this machine: files, variables, programs, the state directory. Nothing is changed.

What is wrong is a `Problem`: `run` starts without most of it and tries again, because a token may come later than the
agent, but the author of a configuration wants to know all of it now. What is allowed but seldom meant is a warning.
Everything is seen as the user who asks, and the agent may run as another: root is told how to ask as that user.
"""

from __future__ import annotations

import getpass
import os
import shlex
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bridge.approval.credentials import SecretCredential
from bridge.approval.files import agent_user, unsafe_files
from bridge.cli.terminal import this_command
from bridge.config.approval import RemoteSettings
from bridge.config.loader import Settings, SinkSettings
from bridge.config.odd_values import odd_texts, unknown_events
from bridge.config.open_urls import looks_secret
from bridge.config.quoting import is_secret_name
from bridge.config.secret_keys import readable_secrets
from bridge.config.settings import TopSettings
from bridge.config.trusted_keys import unusable_keys
from bridge.delivery.sender import Sender
from bridge.errors import CredentialFailed, SecretUnavailable
from bridge.events.record import Transition
from bridge.http.failures import is_loopback
from bridge.system.run_and_kill import find_program
from bridge.system.secrets import Secret

if sys.platform != "win32":
    import pwd

_LOCAL_SECONDS = 30.0
_AUTHORITIES, _CERTIFICATE, _KEY = "ca_file", "client_cert_file", "client_key_file"
#: Files that are no secrets: only their first line counts for `Secret`, but they must be there and hold something.
PEM_KEYS = frozenset({_AUTHORITIES, _CERTIFICATE, _KEY})
_APPROVALS = frozenset({Transition.APPROVED.value, Transition.APPROVAL_REFUSED.value, Transition.APPROVAL_FAILED.value})
_HEARTBEAT, _TEST = Transition.HEARTBEAT.value, Transition.TEST.value
#: They sound like a secret and are none.
_HARMLESS_HEADERS = frozenset({"idempotency-key", "content-key", "authority", "x-authority"})


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong on this machine; *where* is a sink's name, or what else it is about."""

    where: str
    message: str
    sink: str | None = None


def who() -> str:
    """Return the name of the user who runs the check."""
    if sys.platform == "win32":
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def local_problems(settings: Settings, directory: Path) -> list[Problem]:
    """Return everything that is wrong on this machine, without a word to any other."""
    problems = [Problem(where="State", message=message) for message in _state(directory)]
    for sink in settings.sinks:
        problems += [Problem(where=f"Sink {sink.name}", message=message, sink=sink.name) for message in _sink(sink)]
    if settings.approval is not None:
        for rule in settings.approval.rules:
            problems += [Problem(where=f"Rule {rule.name}", message=message) for message in _program(rule.command)]
        problems += [Problem(where="Approvals", message=message) for message in _files(settings, directory)]
        if settings.approval.remote is not None:
            problems += [Problem(where="Portal", message=message) for message in _portal(settings.approval.remote)]
    return problems


# The state directory.


def _state(directory: Path) -> Iterator[str]:
    path = directory.absolute()
    try:
        there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    except StopIteration:  # a drive that does not exist
        yield f"The state directory {path} cannot be made: there is no {path.anchor}."
        return
    may_write = os.access(there, os.W_OK | os.X_OK)
    if not os.path.isdir(there):  # noqa: PTH112  # False, too, where it may not be seen
        yield f"The state directory {path} cannot be made or read: {there} is no directory {who()} can see."
    elif there != path and not may_write:
        yield f"The state directory {path} cannot be made: {who()} may not write to {there}. `run` would end with 73."
    elif not may_write:
        yield f"{who()} may not write to the state directory {path}: the agent could not save its outbox."


# Sinks.


def _sink(sink: SinkSettings) -> Iterator[str]:
    config = sink.config
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    yield from unusable_files(values)
    if sink.sink_class.send_test_by_name_only:  # it runs a program, so its own check looks at this machine alone
        yield from _own_check(sink)


def unusable_files(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a secret or a certificate that *values*, those of one table by their keys, name cannot be had."""
    named = {name: value for name, value in values.items() if isinstance(value, str)}
    yield from _secrets({name: value for name, value in named.items() if name not in PEM_KEYS})
    yield from _certificates(named)


def _secrets(named: dict[str, str]) -> Iterator[str]:
    for name, value in named.items():
        key, _, kind = name.rpartition("_")
        if not key or kind not in {"file", "env"}:
            continue
        secret = Secret(key=key, file=value) if kind == "file" else Secret(key=key, env=value)
        try:
            secret.values()
        except SecretUnavailable as error:
            yield f"{error}{'' if kind == 'file' else _OTHER_ENVIRONMENT}"


_OTHER_ENVIRONMENT = " (That is in the environment of this command; the agent's may be another.)"


def _certificates(named: dict[str, str]) -> Iterator[str]:
    authorities, certificate, key = (named.get(name) for name in (_AUTHORITIES, _CERTIFICATE, _KEY))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authorities is not None:
        try:
            context.load_verify_locations(cafile=authorities)
        except OSError as error:
            yield f"{_AUTHORITIES}: {authorities} holds no certificates that can be used: {_reason(error)}."
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            pair = certificate if key is None else f"{certificate} and {key}"
            yield f"{_CERTIFICATE}: {pair} hold no certificate with its key: {_reason(error)}."


def _no_passphrase() -> str:
    """Return none, so that OpenSSL does not ask a terminal."""
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is no PEM"
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _own_check(sink: SinkSettings) -> Iterator[str]:
    sender = Sender(sink.build, name=sink.name, timeout_seconds=min(sink.config.timeout_seconds, _LOCAL_SECONDS))
    try:
        sender.check()
    except Exception as error:  # noqa: BLE001  # anything a sink raises is an answer to the person who asked
        yield str(error) or type(error).__name__
    finally:
        sender.close()


# Approvals.


def _program(command: Sequence[str] | None) -> Iterator[str]:
    """Yield why the program of *command* cannot be run."""
    if command is None or find_program(command[0]) is not None:
        return
    program = command[0]
    if os.path.isabs(program):  # noqa: PTH117  # Path drops a leading ./
        if os.path.lexists(program):
            yield f"The program {program} is not executable for {who()}. Make it so, or change `command`."
        else:
            yield f"The program {program} does not exist. Install it, or change `command`."
    else:
        yield f"No program called {program!r} is in the PATH. Install it, or write its whole path."


def _files(settings: Settings, directory: Path) -> Iterator[str]:
    """Yield why nothing may be approved here, and which keys count for nothing; the agent starts with both."""
    keys = () if settings.approval is None else settings.approval.trusted_keys()
    users = {agent_user(directory)}
    for why in unsafe_files(keys, configuration=settings.file, directory=directory, users=users):
        yield f"Nothing is approved. {why}"
    for why in unusable_keys(keys):
        yield f"{why} Its decisions do not count."


def _portal(remote: RemoteSettings) -> Iterator[str]:
    try:
        SecretCredential(file=remote.token_file, env=remote.token_env).bearer()
    except CredentialFailed as error:
        yield f"{error}{'' if remote.token_env is None else _OTHER_ENVIRONMENT}"
    yield from _program(remote.command)
    named = {name: getattr(remote, name) for name in sorted(PEM_KEYS) if getattr(remote, name) is not None}
    yield from _certificates(named)


# What is allowed, but seldom meant.


def warnings(settings: Settings) -> list[str]:
    """Return a sentence for each setting that does nothing or may surprise."""
    found = [*_about_the_agent(settings), *_about_heartbeats(settings), *_about_speaking(settings)]
    found += readable_secrets(settings.secret_files)
    found += [each for name in TopSettings.__struct_fields__ for each in odd_texts({name: getattr(settings, name)})]
    for rule in () if settings.approval is None else settings.approval.rules:
        found += [f"Rule {rule.name}: {message}" for message in unknown_events(rule.event_types, rule.event_sources)]
    for sink in settings.sinks:
        found += [f"Sink {sink.name}: {message}" for message in _about_sink(sink, settings)]
    return found


def _about_the_agent(settings: Settings) -> Iterator[str]:
    directory = settings.state.directory
    if directory is not None and not Path(directory).is_absolute():
        yield (
            f"state.directory is {directory!r}, which depends on where the agent is started: here it is "
            f"{Path(directory).absolute()}. Write the whole path."
        )
    address = settings.status.address
    if address is not None and not is_loopback(address[0]):
        yield (
            f"status.listen is {settings.status.listen!r}: whoever reaches that address can read health and metrics. "
            "There is no password."
        )


def _about_heartbeats(settings: Settings) -> Iterator[str]:
    interval = settings.heartbeat.interval_seconds
    wanting = [sink.name for sink in settings.sinks if sink.config.heartbeat]
    if interval and not wanting:
        yield f"heartbeat.interval_seconds is {interval:g}, but no sink has heartbeat = true: none is ever sent."
    if wanting and not interval:
        yield (
            f"heartbeat = true of {', '.join(wanting)} does nothing: heartbeat.interval_seconds is 0. "
            "Set it, for example to 300."
        )


def _about_speaking(settings: Settings) -> Iterator[str]:
    if settings.sinks and all(sink.config.speak == "first" for sink in settings.sinks):
        yield (
            'speak = "first" in every sink: of an event whose first VM runs no agent nobody tells, because no document '
            'shows the others whether that one told. Keep a sink with speak = "each".'
        )


def _about_sink(sink: SinkSettings, settings: Settings) -> Iterator[str]:
    config = sink.config
    if config.speak == "first" and sink.sink_class.send_test_by_name_only:
        yield 'speak = "first" runs its program on the first VM in Resources alone: the others are not prepared.'
    if config.scope == "all":
        yield 'scope = "all" sends events of other VMs too; those send them as well, each once.'
    yield from sink.sink_class.warnings(config)
    yield from unknown_events(config.event_types, config.event_sources)
    yield from odd_texts(config)
    if config.transitions is not None:
        yield from _about_transitions(set(config.transitions), sink, settings)
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    yield from open_secrets(values)
    for name, value in values.items():
        if name.endswith("_file") and isinstance(value, str) and not Path(value).is_absolute():
            yield f"{name} is {value!r}, which depends on where the agent is started. Write the whole path."


def open_secrets(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each secret that seems to stand in the file itself, among the *values* of one table."""
    headers = values.get("headers")
    for name in headers if isinstance(headers, dict) else ():
        if isinstance(name, str) and name.lower() not in _HARMLESS_HEADERS and is_secret_name(name):
            yield f"headers has {name}, whose value sounds like a secret: it belongs into headers_file, not into here."
    url = values.get("url")
    if "url_file" in values and isinstance(url, str) and looks_secret(url):
        yield (
            "url looks as if it carried a secret: whoever reads this file could send there. Put the whole URL into a "
            "file of its own, and name that with url_file in place of url."
        )


def _about_transitions(chosen: set[str], sink: SinkSettings, settings: Settings) -> Iterator[str]:
    beats = sink.config.heartbeat and settings.heartbeat.interval_seconds > 0
    never = {_TEST, _HEARTBEAT} | (set() if settings.approval is not None else _APPROVALS)
    if chosen <= never:
        gets = "heartbeats and tests" if beats else "tests"
        because = "" if settings.approval is not None or not chosen & _APPROVALS else "; there is no [approval] table"
        yield f"transitions names only {', '.join(sorted(chosen))}: it gets {gets}, and never an event{because}."
    elif _HEARTBEAT in chosen and not sink.config.heartbeat:
        yield "transitions names heartbeat, which does nothing by itself: heartbeats come with heartbeat = true."


def advice_for_root(directory: Path) -> Iterator[str]:
    """Tell root, who can read every file, how to check as the owner of the state *directory*."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return
    try:
        name = pwd.getpwuid(directory.stat().st_uid).pw_name
    except (OSError, KeyError):  # no directory yet, or a user without a name, as in a container
        return
    if name != who():
        yield (
            f"You are root and can read every file, but the state directory belongs to {name}. If the agent runs as "
            f"{name}, check as that user: runuser -u {name} -- {this_command()} {shlex.join(sys.argv[1:])}"
        )
