"""The ``[approval]`` table: frozen values with their defaults, and the rule for each.

The text under a field is the reference of that setting, as in `bridge.config.settings`. A rule that can never match,
two names for one key and a portal without a signer are mistakes: with each, approvals would only seem to work. What
needs no file is checked when a value is made. A key whose file is gone or holds none is no mistake: the agent starts,
says so, and its decisions do not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from bridge.config.mistakes import Problems
from bridge.config.toml import Check, check_name, convert
from bridge.config.trusted_keys import TrustedKey, key_mistakes
from bridge.events.event import check_event_source, check_event_type
from bridge.http.failures import is_loopback
from bridge.http.tls_files import tls_file_problems
from bridge.system.scopes import check_scope

_LONGEST_SECONDS = 315_360_000
_LONGEST_COMMAND_SECONDS = 86_400


def _portal_url(value: str) -> None:
    wanted = '"https://host/path" without user, query and fragment'
    try:
        parts = urlsplit(value)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or "?" in value or "#" in value:
        raise ValueError(wanted)
    if not (value.isascii() and value.isprintable()) or any(map(str.isspace, value)):
        raise ValueError(wanted)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(wanted, " Plain http goes to a loopback address only: anybody on the way could withhold.")


def _command_mistakes(command: tuple[str, ...] | None) -> Iterator[str]:
    """Yield what keeps *command*, a program and its arguments, from ever being run."""
    if any("\0" in text for text in command or ()):
        yield "command cannot hold a NUL character."
    program = command[0] if command else ""
    if os.path.dirname(program) and not os.path.isabs(program):  # noqa: PTH117, PTH120 - Path drops a leading ./
        yield f"command names {program!r}; write its whole path, or a bare name to be found in PATH."


_Bound = Annotated[float, Meta(ge=0, le=_LONGEST_SECONDS)]
_Text = Annotated[str, Meta(min_length=1)]
_NotEmpty = Meta(min_length=1)


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[[approval.rules]]`` table: which events, and what is done about them."""

    name: Annotated[str, Check(check_name)]
    """What logs and records call it (`rule:NAME`); every rule needs a name of its own."""
    event_types: Annotated[tuple[Annotated[str, Check(check_event_type)], ...], _NotEmpty] | None = None
    """Only events of these types, spelt as Azure does. Default: any."""
    event_sources: Annotated[tuple[Annotated[str, Check(check_event_source)], ...], _NotEmpty] | None = None
    """Only events of these sources, Platform or User. Default: any."""
    min_duration_seconds: _Bound | None = None
    """Only events that are expected to last at least so many seconds; an unknown duration never matches a bound."""
    max_duration_seconds: _Bound | None = None
    """Only events that are expected to last at most so many seconds; an unknown duration never matches a bound."""
    resources: Literal["only_me", "includes_me", "any"] = "includes_me"
    """only_me: this VM alone is affected. includes_me: this VM is. any: also events of other VMs."""
    action: Literal["approve", "hold"]
    """approve: consent for every VM of the event. hold: no rule further down, and none of this VM, approves it."""
    act: Literal["leader", "each"] = "leader"
    """leader: the first VM in Resources acts, the others only if it does not. each: every VM acts at once."""
    command: Annotated[tuple[_Text, ...], _NotEmpty] | None = None
    """A program and its arguments that must exit 0 first, such as a drain; no shell reads them."""
    command_timeout_seconds: Annotated[float, Meta(gt=0, le=_LONGEST_COMMAND_SECONDS)] = 600.0
    """The command is killed, and nothing approved, after so many seconds; at most a day."""
    command_covers_all: bool = False
    """true: the command prepares every VM of the event, so the rule may match events that name other VMs too."""

    def __post_init__(self) -> None:
        """Raise ValueError with everything that could not be meant."""
        low, high = self.min_duration_seconds, self.max_duration_seconds
        mistakes = []
        if low is not None and high is not None and low > high:
            mistakes.append(
                f"min_duration_seconds {low:g} is above max_duration_seconds {high:g}; no event would match."
            )
        if self.command is not None and self.action == "hold":
            mistakes.append('command runs before an approval, and action = "hold" gives none. Take one of them out.')
        if self.command is None and self.command_covers_all:
            mistakes.append("command_covers_all says what a command does, and there is none. Take it out.")
        mistakes += _command_mistakes(self.command)
        if mistakes:
            raise ValueError(" ".join(mistakes))


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[[approval.remote.keys]]`` table: a public key, and who it speaks for."""

    kid: _Text
    """What decisions call the key; every key needs a name of its own."""
    approver: _Text
    """Who signs with it: the `iss` of its decisions. Two keys of one approver are still one approver."""
    public_key_file: _Text
    """The public key (Ed25519, PEM), as `keygen` writes it; read again when it changes. Without it the agent runs, and
    the key's decisions do not count."""

    def trusted(self) -> TrustedKey:
        """Return the key as decisions are checked with it; its file is read on first use."""
        return TrustedKey(kid=self.kid, approver=self.approver, public_key_file=self.public_key_file)


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[approval.remote]``: the ops portal, and whose decisions count."""

    url: Annotated[str, Check(_portal_url)]
    """Where the portal is; `/vms/{vmId}/decisions` is added. https; plain http only to a loopback address."""
    token_file: _Text | None = None
    """A file with the bearer token for the portal; read again when it changes."""
    token_env: _Text | None = None
    """An environment variable with that token."""
    credential: Literal["attested"] | None = None
    """Instead: attested, a token that the portal gives for the document in which Azure says which VM this is."""
    entra_scope: Annotated[str, Check(check_scope)] | None = None
    """Instead: ask Entra ID for a token of this scope, as this VM's managed identity."""
    client_cert_file: _Text | None = None
    """Instead: a PEM file with the client certificate, and its key unless client_key_file is set."""
    client_key_file: _Text | None = None
    """A PEM file with the key of the client certificate, not encrypted."""
    ca_file: _Text | None = None
    """A PEM file of the authorities to trust instead of those that come with requests (certifi)."""
    wait_seconds: Annotated[int, Meta(ge=1, le=600)] = 30
    """How many seconds, a whole number of 1 to 600, the portal may hold a request while nothing is new."""
    required_approvals: Annotated[int, Meta(ge=1, le=100)] = 1
    """How many approvers must say approve; at most as many as the keys have."""
    command: Annotated[tuple[_Text, ...], _NotEmpty] | None = None
    """A program and its arguments that must exit 0 before Azure is told what the portal approved, such as a drain; no
    shell reads them."""
    command_timeout_seconds: Annotated[float, Meta(gt=0, le=_LONGEST_COMMAND_SECONDS)] = 600.0
    """The command is killed, and nothing approved, after so many seconds; at most a day."""
    keys: Annotated[tuple[KeySettings, ...], _NotEmpty]
    """The keys whose decisions count, one table each. Without one nobody could decide."""

    def __post_init__(self) -> None:
        """Raise ValueError with everything that contradicts itself."""
        mistakes = []
        ways = ("token_file", "token_env", "credential", "entra_scope", "client_cert_file")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            mistakes.append(f"{' and '.join(given)} are both set; keep the one that the portal asks for.")
        if self.client_key_file is not None and self.client_cert_file is None:
            mistakes.append("client_key_file needs client_cert_file beside it.")
        approvers = len({key.approver for key in self.keys})
        if self.required_approvals > approvers:
            mistakes.append(
                f"required_approvals is {self.required_approvals}, but the keys are of {approvers} "
                f"approver{'s' if approvers > 1 else ''}, so nothing would ever be approved."
            )
        mistakes += _command_mistakes(self.command)
        if mistakes:
            raise ValueError(" ".join(mistakes))

    def trusted_keys(self) -> tuple[TrustedKey, ...]:
        """Return the keys as decisions are checked with them; keep what this returns, it remembers the files."""
        return tuple(key.trusted() for key in self.keys)


class ApprovalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[approval]``: what may tell Azure to start an event early. Without the table nothing does."""

    dry_run: bool = False
    """true: everything but the request to Azure; the record says what would have been."""
    leader_fallback_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """With act = "leader", the k-th VM after the first waits k times so many seconds before it acts itself."""
    rules: tuple[RuleSettings, ...] = ()
    """Decided on this VM; the first that matches counts."""
    remote: RemoteSettings | None = None
    """Decided elsewhere: signed decisions from an ops portal. Default: none are asked for."""

    def trusted_keys(self) -> tuple[TrustedKey, ...]:
        """Return the keys of the portal's decisions, none without a portal; keep them, they remember their files."""
        return () if self.remote is None else self.remote.trusted_keys()


def read_approval(table: object, mistakes: Problems) -> ApprovalSettings | None:
    """Return the settings of the ``[approval]`` *table*, or None after adding its mistakes to *mistakes*.

    This also reads the certificate files, so that an unusable certificate is found before it is needed.
    """
    before = len(mistakes)
    settings = convert(table, ApprovalSettings, "approval", mistakes)
    if isinstance(table, Mapping):
        _names(table.get("rules"), mistakes)
    if settings is not None and settings.remote is not None:
        for sentence in key_mistakes(settings.remote.trusted_keys()):
            mistakes.quote("approval.remote.keys", sentence)
        remote = settings.remote
        found = tls_file_problems(
            ca_file=remote.ca_file, client_cert_file=remote.client_cert_file, client_key_file=remote.client_key_file
        )
        for key, sentence in found:
            mistakes.quote(f"approval.remote.{key}", sentence)
    return settings if len(mistakes) == before else None


def _names(rules: Any, mistakes: Problems) -> None:
    """Add a mistake for each duplicate name, also of rules that have other mistakes."""
    seen: dict[str, str] = {}
    for number, rule in enumerate(rules if isinstance(rules, list | tuple) else ()):
        name = rule.get("name") if isinstance(rule, Mapping) else None
        path = f"approval.rules[{number}]"
        if isinstance(name, str) and seen.setdefault(name, path) != path:
            mistakes.quote(path, f"{seen[name]} has the same name, {name!r}. Give each rule a unique name.")
