"""The agent's settings, with their defaults and checks.

The string below each field documents the setting, and `documented` returns these strings. `bridge.sink.SinkConfig`
defines the keys that all ``[[sinks]]`` tables share.

This module does not import `requests`, because the import would slow down commands such as `status`.
"""

from __future__ import annotations

import ipaddress
import re
from contextlib import suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from bridge.config.approval import ApprovalSettings
from bridge.config.telemetry import PushSettings, TelemetrySettings
from bridge.config.toml import LONGEST_SECONDS, Check, check_url
from bridge.events.event import VmIdentity, check_spelling

if TYPE_CHECKING:
    from bridge.sink import AttestedTokens, Sink, SinkConfig

#: The versions in Microsoft's "Azure Metadata Service: Scheduled Events for Linux VMs". Later versions are accepted.
API_VERSIONS = (
    *("2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"),
    "2024-07-09",
)

_HIGHEST_PORT = 65535


def _endpoint(value: str) -> None:
    wanted = 'a URL of scheme and host, such as "http://169.254.169.254"'
    parts = check_url(value, wanted)
    if parts.scheme != "http" or parts.path.strip("/"):
        raise ValueError(wanted, " The agent adds the path itself.")


def _api_version(value: str) -> None:
    with suppress(ValueError):
        if value == "auto" or date.fromisoformat(value).isoformat() == value >= API_VERSIONS[0]:
            return
    raise ValueError(f"one of auto, {', '.join(API_VERSIONS)}, or a later date as YYYY-MM-DD")


def _listen(value: str) -> None:
    host, _, port = value.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) <= _HIGHEST_PORT
    if value and not (is_port and _is_address(host)):
        hint = " The host is an address or localhost, and the port is a number from 0 to 65535."
        if value.startswith(":"):
            hint = f' To listen on every address, write "0.0.0.0{value}".'
        raise ValueError('"host:port", such as "127.0.0.1:9464" or "[::1]:9464", or "" for none', hint)


def _is_address(host: str) -> bool:
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        return host == "localhost" or is_bracketed == (ipaddress.ip_address(host.strip("[]")).version == 6)  # noqa: PLR2004
    except ValueError:
        return False


def _heartbeat(value: float) -> None:
    if 0 < value < 1:
        raise ValueError("0 for none, or at least 1")


_Duration = Annotated[float, Meta(gt=0, le=LONGEST_SECONDS)]
_DurationOrZero = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
_PollInterval = Annotated[float, Meta(ge=0.2, le=LONGEST_SECONDS)]
_Bytes = Annotated[int, Meta(ge=1_048_576, le=2**60)]
_PendingBytes = Annotated[int, Meta(ge=65_536, le=2**60)]
_Text = Annotated[str, Meta(min_length=1)]


class ImdsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[imds]``: the Instance Metadata Service of Azure."""

    endpoint: Annotated[str, Check(_endpoint)] = "http://169.254.169.254"
    """Scheme and host of the metadata service. The agent never uses a proxy for these requests."""
    api_version: Annotated[str, Check(_api_version)] = "auto"
    """The version of the Scheduled Events document. auto: 2024-07-09 if the metadata service supports it, else
    2020-07-01. Every version since 2017-03-01 is supported."""
    poll_interval_seconds: _PollInterval = 1.0
    """Seconds between two polls, at least 0.2, because all processes of a VM share five requests per second."""
    timeout_seconds: _Duration = 5.0
    """Wall-clock deadline of one request, in seconds."""
    first_timeout_seconds: _Duration = 150.0
    """Deadline of a poll, in seconds, if IMDS sent no good response in the last 24 hours. The poll then turns on
    Scheduled Events, which can take two minutes."""


class VmSettings(VmIdentity, frozen=True, kw_only=True):
    """``[vm]``: settings that override the VM identity in the instance document."""

    def __post_init__(self) -> None:
        """Raise ValueError if a text is empty."""
        for name in self.__struct_fields__:
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty. Write a value, or remove the key.")


class StateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[state]``: the outbox on disk."""

    directory: _Text | None = None
    """The directory of the outbox. The default is $STATE_DIRECTORY, else /var/lib/scheduled-events-bridge for root and
    the service, or else the user's state home. On Windows, the default is
    %ProgramData%\\scheduled-events-bridge\\state. The variable $SCHEDULED_EVENTS_BRIDGE_STATE_DIRECTORY overrides this
    key."""
    max_bytes: _Bytes = 268_435_456
    """Maximum size of the outbox files in bytes: at least 1 MiB, by default 256 MiB. On a small volume, it is lower."""
    max_pending_bytes: _PendingBytes = 33_554_432
    """Maximum size of the pending and parked records in memory, in bytes: at least 64 KiB, by default 32 MiB. A record
    counts once, even if several sinks need it. At the limit, the agent removes parked records first, then the oldest
    pending records, and urgent records last."""
    keep_delivered_seconds: _DurationOrZero = 604_800.0
    """How long the `events` command shows delivered records, in seconds. The default is 7 days."""


class _Listener(msgspec.Struct, frozen=True, kw_only=True):
    listen: Annotated[str, Check(_listen)] = ""

    @property
    def address(self) -> tuple[str, int] | None:
        """Return the host (IPv6 without brackets) and the port, or None if the listener is off."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None


class StatusSettings(_Listener, frozen=True, kw_only=True):
    """``[status]``: the pages /healthz, /readyz, and /metrics."""

    listen: Annotated[str, Check(_listen)] = "127.0.0.1:9464"
    """Address (or localhost) and port of health and metrics. Port 0 selects a free port and logs it. "" turns the
    pages off. The variable $SCHEDULED_EVENTS_BRIDGE_STATUS_LISTEN overrides this key."""


class ServingSettings(_Listener, frozen=True, kw_only=True):
    """``[serving]``: the health page of this VM for load balancers, `/serving`."""

    listen: Annotated[str, Check(_listen)] = ""
    """Address (or localhost) and port of the page, such as "0.0.0.0:9465". Every Host header is accepted. "" turns the
    page off."""
    event_types: Annotated[tuple[Annotated[str, Check(check_spelling)], ...], Meta(min_length=1)] = (
        *("Reboot", "Redeploy", "Preempt", "Terminate"),
    )
    """The types of events that take this VM out of service, in Azure's spelling."""
    before_seconds: _DurationOrZero = 900.0
    """An event takes the VM out of service this many seconds before NotBefore. Without a NotBefore, the event does so
    immediately."""
    min_duration_seconds: _DurationOrZero = 0.0
    """Minimum expected duration, in seconds, of events that take the VM out. An unknown duration matches."""
    after_seconds: _DurationOrZero = 60.0
    """How long the VM stays out of service, in seconds, after an ending whose evidence is inferred or unknown."""


class HeartbeatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[heartbeat]``: periodic records for the sinks that request them."""

    interval_seconds: Annotated[_DurationOrZero, Check(_heartbeat)] = 0.0
    """Seconds between two heartbeats, at least 1. With 0, the agent sends no heartbeats."""


class SinkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A ``[[sinks]]`` table with its type, its class, and its validated configuration."""

    type_name: str
    sink_class: type[Sink]
    config: SinkConfig

    @property
    def name(self) -> str:
        """Return the name of the sink in logs, metrics, and the outbox."""
        return self.config.name

    def build(self, attested: AttestedTokens | None = None) -> Sink:
        """Return a new instance of the sink. *attested* provides the tokens of an ops portal."""
        sink = self.sink_class(self.config)
        if attested is not None:
            sink.attest_by(attested)
        return sink


class TopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of the file except the sinks."""

    stop_grace_seconds: _DurationOrZero = 10.0
    """How long the sinks continue to send after a stop, in seconds."""
    imds: ImdsSettings = ImdsSettings()
    """The Instance Metadata Service."""
    vm: VmSettings = VmSettings()
    """The identity of this VM. By default, the agent requests it from the metadata service."""
    labels: dict[str, str] = {}
    """Labels, such as a team, that the agent adds to every record."""
    state: StateSettings = StateSettings()
    """The outbox on disk."""
    status: StatusSettings = StatusSettings()
    """Health and metrics."""
    serving: ServingSettings = ServingSettings()
    """A page for load balancers."""
    heartbeat: HeartbeatSettings = HeartbeatSettings()
    """Heartbeat records."""
    telemetry: TelemetrySettings | None = None
    """A push of the agent's own metrics over OTLP. Without this table, the agent pushes nothing."""
    approval: ApprovalSettings | None = None
    """Early approval of events. Without this table, the agent approves nothing."""


class Settings(TopSettings, frozen=True, kw_only=True):
    """A complete configuration without mistakes."""

    sinks: tuple[SinkSettings, ...]
    """The destinations of records, one table each. Default: one sink of type stdout."""
    file: Path | None = None
    """The file that contains these settings, or None for the defaults."""
    push: PushSettings | None = None
    """The settings of ``[telemetry]``, completed from the environment. None if the table is missing."""
    overrides: tuple[tuple[str, str], ...] = ()
    """The keys that the environment overrides, each with its variable."""
    has_default_sinks: bool = False
    """Whether the configuration contains no sink, so that the default sink applies."""
    secret_variables: frozenset[str] = frozenset()
    """The environment variables in `*_env` keys. Programs that the agent starts do not receive them."""
    secret_files: tuple[tuple[str, str], ...] = ()
    """The keys that name a file with a secret, and these files."""


def documented(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text below each field of *struct* and its base classes, on one line each."""
    import ast  # noqa: PLC0415  # only for help and tests
    import inspect  # noqa: PLC0415
    import textwrap  # noqa: PLC0415

    texts: dict[str, str] = {}
    for owner in reversed(struct.__mro__):
        if not issubclass(owner, msgspec.Struct) or owner is msgspec.Struct:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for field, text in pairwise(statements):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                value = text.value if isinstance(text, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[field.target.id] = " ".join(value.value.split())
    return texts
