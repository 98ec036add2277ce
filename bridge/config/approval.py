"""The settings of the ``[approval]`` table, with their defaults and checks.

The string below each field documents the setting. A table that can never approve an event is invalid, for example if a
rule can never match or a portal has no keys. If a key file is missing, the agent still starts, reports the missing
file, and ignores decisions signed with the key.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bridge.config.mistakes import Problems
from bridge.config.toml import LONGEST_SECONDS, Check, check_name, check_url, convert
from bridge.config.trusted_keys import TrustedKey, key_mistakes
from bridge.events.event import check_spelling
from bridge.http.failures import is_loopback
from bridge.http.tls_files import tls_file_problems
from bridge.system.scopes import check_scope

_LONGEST_COMMAND_SECONDS = 86_400


def _portal_url(value: str) -> None:
    wanted = '"https://host/path" without user, query and fragment'
    parts = check_url(value, wanted)
    if not value.isascii():
        raise ValueError(wanted)
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        raise ValueError(wanted, " Use plain http only for a loopback address.")


def _program(command: tuple[str, ...]) -> None:
    if os.path.dirname(command[0]) and not os.path.isabs(command[0]):  # noqa: PTH117, PTH120 - Path drops a leading ./
        raise ValueError("a program with its absolute path, or a name in PATH, followed by its arguments")


_Bound = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
_Text = Annotated[str, Meta(min_length=1)]
_NotEmpty = Meta(min_length=1)
_Command = Annotated[tuple[_Text, ...], _NotEmpty, Check(_program)]


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[[approval.rules]]`` table: the rule's conditions, and its action."""

    name: Annotated[str, Check(check_name)]
    """The unique name of the rule in logs and records (`rule:NAME`)."""
    event_types: Annotated[tuple[Annotated[str, Check(check_spelling)], ...], _NotEmpty] | None = None
    """Only events of these types, in Azure's spelling. Default: any."""
    event_sources: Annotated[tuple[Annotated[str, Check(check_spelling)], ...], _NotEmpty] | None = None
    """Only events of these sources, Platform or User. Default: any."""
    min_duration_seconds: _Bound | None = None
    """Only events with at least this expected duration in seconds. An unknown duration never matches a bound."""
    max_duration_seconds: _Bound | None = None
    """Only events with at most this expected duration in seconds. An unknown duration never matches a bound."""
    resources: Literal["only_me", "includes_me", "any"] = "includes_me"
    """only_me: only this VM is affected. includes_me: this VM is affected. any: also events of other VMs."""
    action: Literal["approve", "hold"]
    """approve: approve the event for all of its VMs. hold: later rules on this VM do not approve the event."""
    act: Literal["leader", "each"] = "leader"
    """leader: the first VM in Resources acts, and the other VMs act only if it does not. each: every VM acts."""
    command: _Command | None = None
    """A program with its arguments, such as a drain. It must exit with 0 before the approval. No shell is used."""
    command_timeout_seconds: Annotated[float, Meta(gt=0, le=_LONGEST_COMMAND_SECONDS)] = 600.0
    """Time limit of the command in seconds, at most a day. At the limit, the agent kills it and approves nothing."""
    command_covers_all: bool = False
    """true: the command prepares every VM of the event, so the rule also matches events that name other VMs."""

    def __post_init__(self) -> None:
        """Raise ValueError if no duration can meet both bounds."""
        low, high = self.min_duration_seconds, self.max_duration_seconds
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"min_duration_seconds {low:g} is above max_duration_seconds {high:g}, so no event matches."
            )


class KeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """One ``[[approval.remote.keys]]`` table: a public key and the name of its approver."""

    kid: _Text
    """The unique name of the key in decisions."""
    approver: _Text
    """The name of the signer: the `iss` of the decisions. Two keys with the same approver count as one approver."""
    public_key_file: _Text
    """A file with the public key (Ed25519, PEM) from `keygen`, reread when it changes. If the file is missing, the
    agent runs, but ignores decisions signed with this key."""

    def trusted(self) -> TrustedKey:
        """Return the key that verifies decisions. The first use of the key reads the file."""
        return TrustedKey(kid=self.kid, approver=self.approver, public_key_file=self.public_key_file)


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[approval.remote]``: the ops portal and the trusted keys."""

    url: Annotated[str, Check(_portal_url)]
    """URL of the portal, to which the agent adds `/vms/{vmId}/decisions`. Plain http requires a loopback address."""
    token_file: _Text | None = None
    """A file with the bearer token for the portal, reread when it changes."""
    token_env: _Text | None = None
    """Alternative: an environment variable with the bearer token."""
    credential: Literal["attested"] | None = None
    """Alternative: with attested, the portal issues a token in exchange for Azure's signed document about this VM."""
    entra_scope: Annotated[str, Check(check_scope)] | None = None
    """Alternative: use a token from Entra ID with this scope. The VM's managed identity requests the token."""
    client_cert_file: _Text | None = None
    """Alternative: a PEM file with the client certificate, and with its key unless client_key_file is set."""
    client_key_file: _Text | None = None
    """A PEM file with the unencrypted key of the client certificate."""
    ca_file: _Text | None = None
    """A PEM file with the trusted certificate authorities. Default: those of the Python package certifi."""
    wait_seconds: Annotated[int, Meta(ge=1, le=600)] = 30
    """How long the portal can wait for a new decision before it responds, in seconds. A whole number from 1 to 600."""
    required_approvals: Annotated[int, Meta(ge=1, le=100)] = 1
    """How many approvers must approve an event. The keys must belong to at least this many approvers."""
    command: _Command | None = None
    """A program with its arguments, such as a drain. It must exit with 0 before the agent approves an event for the
    portal. No shell is used."""
    command_timeout_seconds: Annotated[float, Meta(gt=0, le=_LONGEST_COMMAND_SECONDS)] = 600.0
    """Time limit of the command in seconds, at most a day. At the limit, the agent kills it and approves nothing."""
    command_covers_all: bool = False
    """true: the command prepares every VM of the event. The portal then sends an approval only to this VM."""
    keys: tuple[KeySettings, ...] = ()
    """The trusted keys, with one table for each key. At least one key is required."""

    def __post_init__(self) -> None:
        """Raise ValueError with all settings that contradict each other."""
        mistakes = []
        credentials = ("token_file", "token_env", "credential", "entra_scope", "client_cert_file")
        given = [name for name in credentials if getattr(self, name) is not None]
        if len(given) > 1:
            mistakes.append(f"{' and '.join(given)} are both set. Keep the one that the portal requires.")
        if self.client_key_file is not None and self.client_cert_file is None:
            mistakes.append("client_key_file requires client_cert_file.")
        if not self.keys:
            raise ValueError(
                "keys is missing. The agent needs the public key of each approver. `scheduled-events-bridge keygen` "
                "creates a key pair and prints the [[approval.remote.keys]] table."
            )
        approvers = len({key.approver for key in self.keys})
        if self.required_approvals > approvers:
            mistakes.append(
                f"required_approvals is {self.required_approvals}, but the keys belong to {approvers} "
                f"approver{'s' if approvers > 1 else ''}, so nothing would ever be approved."
            )
        if mistakes:
            raise ValueError(" ".join(mistakes))

    def trusted_keys(self) -> tuple[TrustedKey, ...]:
        """Return the keys that verify decisions. Keep the objects, because they cache the files."""
        return tuple(key.trusted() for key in self.keys)


class ApprovalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[approval]``: early approval of events. Without this table, no event is approved."""

    dry_run: bool = False
    """true: the agent performs every step except the request to Azure. The record shows what would have happened."""
    leader_fallback_seconds: Annotated[float, Meta(gt=0, le=86_400)] = 30.0
    """With act = "leader", the k-th VM after the first waits k times this number of seconds before it acts."""
    rules: tuple[RuleSettings, ...] = ()
    """Local rules. The first rule that matches an event applies."""
    remote: RemoteSettings | None = None
    """Signed decisions from an ops portal. Default: no portal."""

    def trusted_keys(self) -> tuple[TrustedKey, ...]:
        """Return the portal's keys. Keep the objects, because they cache the files."""
        return () if self.remote is None else self.remote.trusted_keys()


def read_approval(table: object, mistakes: Problems) -> ApprovalSettings | None:
    """Return the settings of ``[approval]``, or None if the table has mistakes.

    The function adds each mistake to *mistakes*. It also reads the certificate files, so that the agent reports an
    invalid certificate at startup.
    """
    before = len(mistakes)
    settings = convert(table, ApprovalSettings, "approval", mistakes)
    rules = table.get("rules") if isinstance(table, Mapping) else None
    names = [rule.get("name") for rule in rules if isinstance(rule, Mapping)] if isinstance(rules, list) else []
    for name, count in Counter(name for name in names if isinstance(name, str)).items():
        if count > 1:
            mistakes.quote("approval.rules", f"The name {name!r} occurs {count} times. Give each rule a unique name.")
    if settings is None:
        return None
    remote = settings.remote
    if remote is not None:
        for sentence in key_mistakes(remote.trusted_keys()):
            mistakes.quote("approval.remote.keys", sentence)
        found = tls_file_problems(
            ca_file=remote.ca_file, client_cert_file=remote.client_cert_file, client_key_file=remote.client_key_file
        )
        for key, sentence in found:
            mistakes.quote(f"approval.remote.{key}", sentence)
    return settings if len(mistakes) == before else None
