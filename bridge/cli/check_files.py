"""What a configuration needs on this machine: files, variables, programs, a state directory. Nothing is changed.

`run` starts without most of it and tries again, because a token may come later than the agent; whoever writes a
configuration wants to hear it now, and all of it. It is seen as the user who asks: the agent may be another, see
`bridge.check_warnings`.
"""

from __future__ import annotations

import getpass
import os
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bridge.approval.credentials import SecretCredential
from bridge.config.approval import RemoteSettings, RuleSettings
from bridge.config.loader import Settings, SinkSettings
from bridge.delivery.sender import Sender
from bridge.errors import CredentialFailed, DeliveryFailed
from bridge.outbox.database import DATABASE
from bridge.system.process import find_program
from bridge.system.secrets import Secret

if sys.platform != "win32":
    import pwd

_LOCAL_SECONDS = 30.0
_AUTHORITIES, _CERTIFICATE, _KEY = "ca_file", "client_cert_file", "client_key_file"
#: Files that are no secrets: only their first line counts for `Secret`, but they must be there and hold something.
_PEM = frozenset({_AUTHORITIES, _CERTIFICATE, _KEY})


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong on this machine; *where* is a sink's name, or what else it is about."""

    where: str
    said: str
    sink: str | None = None


def who() -> str:
    """Return the name of the user who looks."""
    if sys.platform == "win32":
        return getpass.getuser()
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"


def local_problems(settings: Settings, directory: Path) -> list[Problem]:
    """Return everything that is wrong on this machine, without a word to any other."""
    problems = [Problem(where="State", said=said) for said in _state(directory)]
    for sink in settings.sinks:
        problems += [Problem(where=f"Sink {sink.name}", said=said, sink=sink.name) for said in _sink(sink)]
    if settings.approval is not None:
        for rule in settings.approval.rules:
            problems += [Problem(where=f"Rule {rule.name}", said=said) for said in _rule(rule)]
        if settings.approval.remote is not None:
            problems += [Problem(where="Portal", said=said) for said in _portal(settings.approval.remote)]
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
    if not os.path.isdir(there):  # noqa: PTH112  # False, too, where we may not look
        yield f"The state directory {path} cannot be made or read: {there} is no directory {who()} can see."
    elif there != path and not may_write:
        yield f"The state directory {path} cannot be made: {who()} may not write to {there}. `run` would end with 73."
    elif not may_write:
        yield f"{who()} may not write to the state directory {path}: the agent would work from memory."
    elif (path / DATABASE).exists() and not os.access(path / DATABASE, os.R_OK | os.W_OK):
        yield f"{who()} may not read and write the outbox {path / DATABASE}."


# Sinks.


def _sink(sink: SinkSettings) -> Iterator[str]:
    config = sink.config
    values = {name: getattr(config, name) for name in config.__struct_fields__}
    named = {name: value for name, value in values.items() if isinstance(value, str)}
    yield from _secrets({name: value for name, value in named.items() if name not in _PEM})
    yield from _certificates(named)
    if sink.sink_class.send_test_by_name_only:  # it runs a program, so its own check looks at this machine alone
        yield from _own_check(sink)


def _secrets(named: dict[str, str]) -> Iterator[str]:
    for name, value in named.items():
        key, _, kind = name.rpartition("_")
        if not key or kind not in {"file", "env"}:
            continue
        secret = Secret(key=key, file=value) if kind == "file" else Secret(key=key, env=value)
        try:
            secret.values()
        except DeliveryFailed as error:
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


def _rule(rule: RuleSettings) -> Iterator[str]:
    if rule.command is None or find_program(rule.command[0]) is not None:
        return
    program = rule.command[0]
    if os.path.isabs(program):  # noqa: PTH117  # Path drops a leading ./
        if os.path.lexists(program):
            yield f"The program {program} is not executable for {who()}. Make it so, or change `command`."
        else:
            yield f"The program {program} does not exist. Install it, or change `command`."
    else:
        yield f"No program called {program!r} is in the PATH. Install it, or write its whole path."


def _portal(remote: RemoteSettings) -> Iterator[str]:
    try:
        SecretCredential(file=remote.token_file, env=remote.token_env).bearer()
    except CredentialFailed as error:
        yield f"{error}{'' if remote.token_env is None else _OTHER_ENVIRONMENT}"
    named = {name: getattr(remote, name) for name in sorted(_PEM) if getattr(remote, name) is not None}
    yield from _certificates(named)
