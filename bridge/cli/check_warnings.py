"""What a configuration says that does nothing, that surprises, or that only root can read: allowed, but seldom meant.

Root reads everything, so what root sees proves nothing for an agent that runs as somebody else. Who that is the state
directory tells: its owner. The mode of each named file, and of the folders above it, is judged. What has an access
control list, such as systemd's credentials, is passed over, because there the mode does not say it.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bridge.config.loader import Settings, SinkSettings
from bridge.config.quoting import sounds_secret
from bridge.events.record import Transition
from bridge.http.failures import is_loopback

if sys.platform != "win32":
    import pwd

_APPROVALS = frozenset({Transition.APPROVED.value, Transition.APPROVAL_REFUSED.value, Transition.APPROVAL_FAILED.value})
_HEARTBEAT, _TEST = Transition.HEARTBEAT.value, Transition.TEST.value
#: They sound like a secret and are none.
_HARMLESS_HEADERS = frozenset({"idempotency-key", "content-key", "authority", "x-authority"})

_ACL = "system.posix_acl_access"
_READ, _ENTER = stat.S_IROTH, stat.S_IXOTH
_PORTAL_FILES = ("token_file", "client_cert_file", "client_key_file", "ca_file")


def warnings(settings: Settings) -> list[str]:
    """Return a sentence for each of them that needs no look at this machine."""
    found = [*_about_the_agent(settings), *_about_heartbeats(settings)]
    for sink in settings.sinks:
        found += [f"Sink {sink.name}: {said}" for said in _about_sink(sink, settings)]
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


def _about_sink(sink: SinkSettings, settings: Settings) -> Iterator[str]:
    config = sink.config
    if config.scope == "all":
        yield 'scope = "all" sends events of other VMs too; those send them as well, each once.'
    if config.transitions is not None:
        yield from _about_transitions(set(config.transitions), sink, settings)
    headers = getattr(config, "headers", None)
    for name in headers if isinstance(headers, dict) else ():
        if isinstance(name, str) and name.lower() not in _HARMLESS_HEADERS and sounds_secret(name):
            yield f"headers has {name}, whose value sounds like a secret: it belongs into headers_file, not into here."
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if name.endswith("_file") and isinstance(value, str) and not Path(value).is_absolute():
            yield f"{name} is {value!r}, which depends on where the agent is started. Write the whole path."


def _about_transitions(chosen: set[str], sink: SinkSettings, settings: Settings) -> Iterator[str]:
    beats = sink.config.heartbeat and settings.heartbeat.interval_seconds > 0
    never = {_TEST, _HEARTBEAT} | (set() if settings.approval is not None else _APPROVALS)
    if chosen <= never:
        gets = "heartbeats and tests" if beats else "tests"
        because = "" if settings.approval is not None or not chosen & _APPROVALS else "; there is no [approval] table"
        yield f"transitions names only {', '.join(sorted(chosen))}: it gets {gets}, and never an event{because}."
    elif _HEARTBEAT in chosen and not sink.config.heartbeat:
        yield "transitions names heartbeat, which does nothing by itself: heartbeats come with heartbeat = true."


# Files.


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """The user whose agent it is."""

    name: str
    uid: int
    gids: frozenset[int]

    def may(self, status: os.stat_result, bit: int) -> bool:
        """Return whether *status* grants *bit*, one of the last three of a mode; of three classes only one counts."""
        if self.uid == 0:
            return True
        if status.st_uid == self.uid:
            return bool(status.st_mode & bit << 6)
        return bool(status.st_mode & (bit << 3 if status.st_gid in self.gids else bit))

    def obstacle(self, path: Path) -> Path | None:
        """Return what keeps this user from reading *path*: the file or a folder above it; null when nothing does.

        Null, too, for what is not there: that is wrong for everybody, and said elsewhere.
        """
        whole = Path(os.path.realpath(path))
        for each in (*reversed(whole.parents), whole):
            try:
                status = each.stat()
            except OSError:
                return None
            if not _has_acl(each) and not self.may(status, _READ if each == whole else _ENTER):
                return each
        return None


def agent_reader(directory: Path) -> Reader | None:
    """Return the owner of the state *directory* when root asks and it is somebody else; null when it adds nothing."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return None
    try:
        owner = directory.stat()
    except OSError:
        return None
    return _user(owner.st_uid, owner.st_gid) if owner.st_uid else None


def _user(uid: int, gid: int) -> Reader:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:  # a number without a name, as in a container
        return Reader(name=f"uid {uid}", uid=uid, gids=frozenset({gid}))
    return Reader(name=entry.pw_name, uid=uid, gids=frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid)))


def unreadable_files(settings: Settings, reader: Reader, config: Path | None) -> list[str]:
    """Return a sentence for each file that *settings* name, and for *config* itself, which *reader* could not read."""
    found = []
    for where, key, path in _named(settings, config):
        obstacle = reader.obstacle(path)
        if obstacle is None:
            continue
        what = str(path) if key is None else f"{path} of {key}"
        via = "" if obstacle == Path(os.path.realpath(path)) else f", because that user may not enter {obstacle}"
        found.append(
            f"{where}: the owner of the state directory, {reader.name}, could not read {what}{via}. "
            "An agent that runs as that user needs it: make it readable."
        )
    return found


def _named(settings: Settings, config: Path | None) -> Iterator[tuple[str, str | None, Path]]:
    if config is not None:
        yield "Configuration", None, config
    for sink in settings.sinks:
        for key in sink.config.__struct_fields__:
            value = getattr(sink.config, key)
            if key.endswith("_file") and isinstance(value, str):
                yield f"Sink {sink.name}", key, Path(value)
    remote = None if settings.approval is None else settings.approval.remote
    if remote is None:
        return
    for key in _PORTAL_FILES:
        value = getattr(remote, key)
        if value is not None:
            yield "Portal", key, Path(value)
    for trusted in remote.keys:
        yield "Portal", f"public_key_file ({trusted.kid})", Path(trusted.public_key_file)


def _has_acl(path: Path) -> bool:
    if not hasattr(os, "getxattr"):
        return False
    try:
        os.getxattr(path, _ACL)
    except OSError:  # none, or a file system without such lists
        return False
    return True
