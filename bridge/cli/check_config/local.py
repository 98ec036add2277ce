"""Checks files, variables, programs, and the state directory without the network.

The checks do not change anything on the machine. Root can read every file, so checks by root do not show what the agent
can read. If root runs `check-config`, it therefore prints a command that repeats the checks as the agent's user.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bridge.approval.credentials import secret_token
from bridge.approval.files import agent_user, unsafe_files
from bridge.config.approval import ApprovalSettings, RemoteSettings
from bridge.config.loader import Settings, SinkSettings
from bridge.config.masking import has_secret
from bridge.config.secret_keys import readable_secrets
from bridge.config.trusted_keys import unusable_keys
from bridge.errors import CredentialFailed, SecretUnavailable, StateDirectoryError
from bridge.outbox.lock import DirectoryLock, is_locked
from bridge.system.permissions import user_name
from bridge.system.run_and_kill import find_program
from bridge.system.secrets import Secret

if sys.platform != "win32":
    import pwd

#: `load` reports a missing file, and `--connect` uses the certificates.
_PEM_KEYS = frozenset({"ca_file", "client_cert_file", "client_key_file"})
#: Placeholders in the output of `init` that the user must replace.
_ADDRESSES = frozenset({"url", "fully_qualified_namespace"})
_PLACEHOLDER = re.compile(r"\b(NAMESPACE|INSTANCE|RULE|REGION|dcr-ID)\b")
_ENVIRONMENT_HINT = " (This command's environment can differ from the agent's environment.)"


class Problem(NamedTuple):
    """A problem that a check found in *where*, for example in ``Sink sre-alerts``."""

    where: str
    message: str


def local_problems(settings: Settings, directory: Path) -> list[Problem]:
    """Return all problems on this machine. The function sends no network requests."""
    checks = _checks(settings, directory)
    return [Problem(where, message) for where, messages in checks for message in messages]


def _checks(settings: Settings, directory: Path) -> Iterator[tuple[str, Iterator[str]]]:
    yield "State", _state(directory.absolute())
    for sink in settings.sinks:
        yield f"Sink {sink.name}", _sink(sink)
    if settings.push is not None and settings.push.headers_file is not None:
        yield "Telemetry", _secret("headers", file=settings.push.headers_file)
    if settings.approval is not None:
        for rule in settings.approval.rules:
            yield f"Rule {rule.name}", _program(rule.command)
        yield "Approvals", _approval_files(settings.approval, settings.file, directory)
        if settings.approval.remote is not None:
            yield "Portal", _portal(settings.approval.remote)


def warnings(settings: Settings) -> list[str]:
    """Return a warning for each exposed secret, too broad rule, and risky sink setting."""
    found = list(readable_secrets(settings.secret_files))
    rules = () if settings.approval is None else settings.approval.rules
    found += [
        f"Rule {rule.name}: it approves every event, including evictions and deletions. Set event_types, "
        "event_sources, or max_duration_seconds."
        for rule in rules
        if rule.action == "approve" and {rule.event_types, rule.event_sources, rule.max_duration_seconds} == {None}
    ]
    for sink in settings.sinks:
        messages = [*_secret_urls(sink), *sink.sink_class.check_warnings(sink.config)]
        found += [f"Sink {sink.name}: {message}" for message in messages]
    return found


def _secret_urls(sink: SinkSettings) -> Iterator[str]:
    names = sink.config.__struct_fields__
    for name in names:
        value = getattr(sink.config, name)
        if f"{name}_file" in names and isinstance(value, str) and has_secret(value):
            yield (
                f"{name} seems to contain a secret. Every user who can read the configuration can use it. "
                f"Write the URL to a separate file, and name that file with {name}_file instead."
            )


def advice_for_root(directory: Path) -> Iterator[str]:
    """Yield the command that repeats the checks as the owner of *directory*."""
    if sys.platform == "win32":
        return
    try:
        name = pwd.getpwuid(agent_user(directory)).pw_name
    except KeyError:  # the owner has no name, as in a container
        return
    if name != user_name():
        yield (
            f"Root can read every file, but the state directory belongs to {name}. If the agent runs as {name}, check "
            f"as that user: runuser -u {name} -- env STATE_DIRECTORY={shlex.quote(str(directory))} "
            f"{shlex.join(sys.orig_argv)}"
        )


def _state(path: Path) -> Iterator[str]:
    missing = []
    try:
        missing = [each for each in (path, *path.parents) if not each.exists()]
        if is_locked(path) is not True:
            DirectoryLock(path, wait_seconds=0.0).release()
    except StateDirectoryError as error:
        yield f"{error} `run` would exit with 73."
        return
    except OSError as error:
        yield f"{user_name()} cannot open a folder above the state directory {path}: {error.strerror or error}."
        return
    finally:
        with suppress(OSError):
            for each in missing:
                each.rmdir()
    if path.exists() and not os.access(path, os.W_OK | os.X_OK):
        yield f"{user_name()} cannot write to the state directory {path}."


def _sink(sink: SinkSettings) -> Iterator[str]:
    config = sink.config
    for name in config.__struct_fields__:
        key, _, kind = name.rpartition("_")
        value = getattr(config, name)
        if name in _ADDRESSES and isinstance(value, str) and (found := _PLACEHOLDER.search(value)):
            yield f"{name} still contains the placeholder {found[0]} of `init`. Replace it with your own value."
        if not isinstance(value, str) or name in _PEM_KEYS or not key or kind not in {"file", "env"}:
            continue
        yield from _secret(key, **{kind: value})
    if sink.sink_class.send_test_by_name_only:
        yield from _program(getattr(config, "command", None))


def _secret(key: str, *, file: str | None = None, env: str | None = None) -> Iterator[str]:
    try:
        Secret(key=key, file=file, env=env).values()
    except SecretUnavailable as error:
        yield f"{error}{'' if env is None else _ENVIRONMENT_HINT}"


def _program(command: Sequence[str] | None) -> Iterator[str]:
    if command is None or find_program(command[0]) is not None:
        return
    yield f"The program {command[0]!r} is missing or not executable for {user_name()}. Install it, or change `command`."


def _approval_files(approval: ApprovalSettings, file: Path | None, directory: Path) -> Iterator[str]:
    keys = approval.trusted_keys()
    for why in unsafe_files(keys, configuration=file, directory=directory, users={agent_user(directory)}):
        yield f"Nothing is approved. {why}"
    for why in unusable_keys(keys):
        yield f"{why} Its decisions do not count."


def _portal(remote: RemoteSettings) -> Iterator[str]:
    try:
        secret_token(remote)
    except CredentialFailed as error:
        yield f"{error}{'' if remote.token_env is None else _ENVIRONMENT_HINT}"
    yield from _program(remote.command)
