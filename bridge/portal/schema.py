"""Defines the database tables for SQLite and PostgreSQL.

Times are stored as UTC text (`bridge.clock.format_time`), which sorts in chronological order. Text columns have no
maximum length, because SQLite ignores such a limit and PostgreSQL does not need one.

A value has its own column only if a query needs it. All other values are stored as JSON in the `body` column. This
column comes last, because SQLite must read all pages of a large value to find the columns after it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, MetaData, Table, Text, UniqueConstraint
from sqlalchemy.types import TypeEngine

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

#: The row of `properties` with the epoch. The numbers of decisions are valid only within one epoch.
EPOCH = "epoch"
#: The PostgreSQL channel for notifications about new decisions.
CHANNEL = "portal_decisions"


def _table(name: str, *parts: Column[Any] | Index | UniqueConstraint) -> Table:
    return Table(name, metadata, *parts)


def _columns(kind: type[TypeEngine[Any]], *names: str, **options: Any) -> list[Column[Any]]:
    return [Column(name, kind, **options) for name in names]


_key = partial(_columns, primary_key=True, autoincrement=False)
_required = partial(_columns, nullable=False)
_optional = partial(_columns, nullable=True)

#: The original text of received records, without heartbeats. The rows never change.
records = _table(
    "records",
    *_key(Text, "record_id", "vm_key"),
    *_required(BigInteger, "sequence", "stored_bytes"),
    *_optional(Text, "event_key"),
    *_required(Text, "transition", "observed_at", "received_at", "body"),
    Index(None, "event_key", "observed_at"),
    Index(None, "vm_key", "received_at"),
    Index(None, "received_at"),
)

#: One row for each VM. The JSON `body` is a `bridge.portal.vm_state.VmState`.
vms = _table(
    "vms",
    *_key(Text, "vm_key"),
    *_optional(Text, "name", "name_key", "resource_group", "subscription", "groups", "search"),
    *_optional(Boolean, "is_conflict"),
    *_optional(Text, "heard_at", "confirmed_until"),
    Column("stored_bytes", BigInteger, nullable=False, server_default="0"),
    *_optional(Text, "body"),
    Index(None, "name", "vm_key"),
    Index(None, "subscription", "resource_group"),
    Index(None, "is_conflict"),
)

#: The VM that owns each name within a subscription and resource group. The first VM that reports a name owns the name.
names = _table("names", *_key(Text, "name_key"), *_required(Text, "vm_key"), Index(None, "vm_key"))

#: The rows of the inventory file. `properties` contains the hash of the file.
inventory = _table("inventory", *_key(Text, "vm_key"), *_required(Text, "name", "groups"), Index(None, "name"))

#: The newest report of an event from each VM (`bridge.portal.fleet.View`).
event_vms = _table(
    "event_vms",
    *_key(Text, "event_key", "vm_key"),
    *_required(Boolean, "is_open", "is_member"),
    *_required(BigInteger, "stored_bytes"),
    *_required(Text, "variant", "received_at", "body"),
    Index(None, "vm_key", "is_open"),
    Index(None, "received_at"),
)

#: The distinct versions of an event that VMs report.
event_variants = _table("event_variants", *_key(Text, "event_key", "variant"), *_required(Text, "body"))

#: One row for each EventId (`bridge.portal.fleet.EventSummary`). The columns other than `body` are for queries.
events = _table(
    "events",
    *_key(Text, "event_key"),
    *_optional(Boolean, "is_open", "is_refused"),
    *_optional(BigInteger, "vm_count", "needed"),
    *_optional(Text, "state", "event_type", "digest", "sole_vm_key", "wave", "search"),
    *_optional(Text, "sort_at", "first_observed_at", "over_at"),
    *_optional(Text, "decision", "decision_digest", "decision_until", "decided_by"),
    *_optional(Text, "body"),
    Index(None, "is_open", "sort_at", "event_key"),
    Index(None, "first_observed_at", "event_key"),
    Index(None, "over_at", "first_observed_at"),
    Index(None, "sole_vm_key", "is_open"),
    Index(None, "wave"),
)

#: The groups of the event's VMs, for scopes and filters: ``resource_group:west``, ``labels.team:payments``,
#: ``region:westeurope``, ``subscription:ID``.
event_groups = _table("event_groups", *_key(Text, "event_key", "name"), Index(None, "name", "event_key"))

#: The agents and the portal process that each agent polled last. A row remains for a day after the agent disconnects.
#: When a process stops, another process takes over its rows.
agents = _table(
    "agents",
    *_key(Text, "vm_key"),
    *_required(BigInteger, "heartbeat", "received_index"),
    *_required(Boolean, "is_connected", "is_attested"),
    *_required(Text, "process", "polled_at", "report"),
    Index(None, "process", "heartbeat"),
)

#: The portal processes. A process increases its heartbeat with each write to `agents`.
processes = _table("processes", *_key(Text, "process"), *_required(BigInteger, "heartbeat"))

verdicts = _table(
    "verdicts",
    *_key(Text, "verdict_id"),
    *_required(Text, "event_key", "choice", "digest", "person_key", "user_name", "reason", "lifts"),
    *_required(Text, "made_at", "expires_at"),
    *_optional(Text, "withdrawn_at"),
    Index(None, "event_key"),
)

#: Signed decisions, in the order in which agents receive them. Each decision is for one VM.
decisions = _table(
    "decisions",
    *_key(BigInteger, "decision_index"),
    *_required(Text, "vm_key", "decision", "jws", "jws_sha256", "made_at"),
    *_required(BigInteger, "expires_at_seconds"),
    *_optional(Text, "event_key"),
    Column("verdict_id", Text, ForeignKey("verdicts.verdict_id")),
    Column("issued_at_seconds", Float, nullable=False, server_default="0"),
    Column("outcomes", Text, nullable=False, server_default=""),
    UniqueConstraint("jws_sha256"),
    Index(None, "vm_key", "decision_index"),
    Index(None, "event_key", "issued_at_seconds"),
)

#: The notifications about events (`bridge.portal.store.notifications`). Rows of ended events are deleted after a day.
notifications = _table(
    "notifications",
    *_key(Text, "notification_id"),
    *_required(Text, "target", "kind", "event_key", "occurrence", "subject", "made_at", "due_at"),
    *_required(BigInteger, "attempts"),
    *_required(Boolean, "is_done"),
    Index(None, "target", "is_done", "due_at"),
    Index(None, "target", "made_at"),
)

#: The key of a person contains the issuer and the subject (`bridge.portal.user_names`).
users = _table(
    "users",
    *_key(Text, "person_key"),
    *_required(Text, "user_name", "grants"),
    *_optional(Text, "password_hash", "disabled_at"),
)

#: The primary key of a session is the SHA-256 of its ID. The key for the refresh token is derived from the ID.
sessions = _table(
    "sessions",
    *_key(Text, "session_sha256"),
    *_required(Text, "expires_at", "idle_expires_at"),
    *_required(Boolean, "is_reduced"),
    *_optional(Text, "refresh_token", "refresh_at"),
    Column("person_key", Text, ForeignKey("users.person_key"), nullable=False),
)

#: The audit entries. Each row contains the hash of the previous row. Rows are never changed or deleted.
audit = _table(
    "audit",
    *_key(BigInteger, "entry"),
    *_required(Text, "at", "actor", "action", "subject", "details", "previous_hash", "hash"),
    Index(None, "actor", "entry"),
    Index(None, "action", "entry"),
    Index(None, "at"),
)

#: The events of each audit entry.
audit_events = _table("audit_events", *_key(Text, "event_key"), *_key(BigInteger, "entry"), Index(None, "entry"))

#: Counters. A transaction locks the row until its commit, so numbers become visible in order.
counters = _table("counters", *_key(Text, "name"), *_required(BigInteger, "value"))

#: Single values, such as the epoch, and the attested documents of the last minutes.
properties = _table("properties", *_key(Text, "name"), *_optional(Text, "value"))
