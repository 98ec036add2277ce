"""Defines the database tables for SQLite and PostgreSQL.

Times are stored as UTC text (`bridge.clock.format_time`), which sorts in chronological order. A value has its own
column only if a query needs the value. All other values are in the JSON column `body`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

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

#: The original text of every received record. The rows never change.
records = Table(
    "records",
    metadata,
    Column("record_id", String(64), primary_key=True),
    Column("vm_key", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("event_key", String(32)),
    Column("transition", Text, nullable=False),
    Column("observed_at", String(24), nullable=False),
    Column("received_at", String(24), nullable=False),
    Column("body", Text, nullable=False),
    Index(None, "event_key", "observed_at"),
    Index(None, "vm_key", "received_at"),
    Index(None, "received_at"),
)

#: One row for each VM. The JSON `body` is a `bridge.portal.vm_state.VmState`.
vms = Table(
    "vms",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("name", Text),
    Column("name_key", Text),
    Column("resource_group", Text),
    Column("subscription", Text),
    Column("groups", Text),
    Column("search", Text),
    Column("is_conflict", Boolean(create_constraint=False)),
    Column("heard_at", String(24)),
    Column("confirmed_until", String(24)),
    Column("stored_bytes", BigInteger, nullable=False, server_default="0"),
    Column("body", Text),
    Index(None, "name", "vm_key"),
    Index(None, "subscription", "resource_group"),
    Index(None, "is_conflict"),
)

#: The VM that owns each name within a subscription and resource group. The first VM that reports a name owns the name.
names = Table(
    "names",
    metadata,
    Column("name_key", Text, primary_key=True),
    Column("vm_key", Text, nullable=False),
    Index(None, "vm_key"),
)

#: The rows of the inventory file. `properties` contains the hash of the file.
inventory = Table(
    "inventory",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("groups", Text, nullable=False),
    Index(None, "name"),
)

#: The newest report of an event from each VM (`bridge.portal.fleet.View`).
event_vms = Table(
    "event_vms",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("vm_key", Text, primary_key=True),
    Column("variant", String(32), nullable=False),
    Column("is_open", Boolean(create_constraint=False), nullable=False),
    Column("is_member", Boolean(create_constraint=False), nullable=False),
    Column("received_at", String(24), nullable=False),
    Column("body", Text, nullable=False),
    Index(None, "vm_key", "is_open"),
    Index(None, "received_at"),
)

#: The distinct versions of an event that VMs report.
event_variants = Table(
    "event_variants",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("variant", String(32), primary_key=True),
    Column("body", Text, nullable=False),
)

#: One row for each EventId (`bridge.portal.fleet.EventSummary`). The columns other than `body` are for queries.
events = Table(
    "events",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("state", Text),
    Column("is_open", Boolean(create_constraint=False)),
    Column("event_type", Text),
    Column("digest", String(64)),
    Column("sort_at", String(24)),
    Column("first_observed_at", String(24)),
    Column("over_at", String(24)),
    Column("sole_vm_key", Text),
    Column("wave", Text),
    Column("vm_count", BigInteger),
    Column("search", Text),
    Column("decision", Text),
    Column("decision_digest", String(64)),
    Column("decision_until", String(24)),
    Column("decided_by", Text),
    Column("needed", BigInteger),
    Column("is_refused", Boolean(create_constraint=False)),
    Column("body", Text),
    Index(None, "is_open", "sort_at", "event_key"),
    Index(None, "first_observed_at", "event_key"),
    Index(None, "over_at", "first_observed_at"),
    Index(None, "sole_vm_key", "is_open"),
    Index(None, "wave"),
)

#: The groups of the event's VMs, for scopes and filters: ``resource_group:west``, ``labels.team:payments``,
#: ``region:westeurope``, ``subscription:ID``.
event_groups = Table(
    "event_groups",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("name", Text, primary_key=True),
    Index(None, "name", "event_key"),
)

#: The agents of each portal process. A row remains for a day after the agent disconnects. When a process stops, another
#: process takes over its rows.
agents = Table(
    "agents",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("process", String(32), primary_key=True),
    Column("heartbeat", BigInteger, nullable=False),
    Column("polled_at", String(24), nullable=False),
    Column("is_connected", Boolean(create_constraint=False), nullable=False),
    Column("received_index", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    Index(None, "process", "heartbeat"),
)

#: The portal processes. A process increases its heartbeat with each write to `agents`.
processes = Table(
    "processes",
    metadata,
    Column("process", String(32), primary_key=True),
    Column("heartbeat", BigInteger, nullable=False),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("verdict_id", String(36), primary_key=True),
    Column("event_key", String(32), nullable=False),
    Column("choice", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("person_key", Text, nullable=False),
    Column("user_name", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("expires_at", String(24), nullable=False),
    Column("withdrawn_at", String(24)),
    Column("lifts", Text, nullable=False),
    Index(None, "event_key"),
)

#: Signed decisions, in the order in which agents receive them. Each decision is for one VM.
decisions = Table(
    "decisions",
    metadata,
    Column("decision_index", BigInteger, primary_key=True, autoincrement=False),
    Column("vm_key", Text, nullable=False),
    Column("event_key", String(32)),
    Column("verdict_id", String(36), ForeignKey("verdicts.verdict_id")),
    Column("decision", Text, nullable=False),
    Column("jws", Text, nullable=False),
    Column("jws_sha256", String(64), nullable=False),
    Column("expires_at_seconds", BigInteger, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("issued_at_seconds", Float, nullable=False, server_default="0"),
    UniqueConstraint("jws_sha256"),
    Index(None, "vm_key", "decision_index"),
    Index(None, "event_key", "issued_at_seconds"),
)

#: The notifications about events (`bridge.portal.store.notifications`). Rows of ended events are deleted after a day.
notifications = Table(
    "notifications",
    metadata,
    Column("notification_id", String(64), primary_key=True),
    Column("target", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("event_key", String(32), nullable=False),
    Column("occurrence", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("due_at", String(24), nullable=False),
    Column("attempts", BigInteger, nullable=False),
    Column("is_done", Boolean(create_constraint=False), nullable=False),
    Index(None, "target", "is_done", "due_at"),
    Index(None, "target", "made_at"),
)

#: The key of a person contains the issuer and the subject (`bridge.portal.user_names`).
users = Table(
    "users",
    metadata,
    Column("person_key", Text, primary_key=True),
    Column("user_name", Text, nullable=False),
    Column("password_hash", Text),
    Column("grants", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("disabled_at", String(24)),
)

#: The primary key of a session is the SHA-256 of its ID. The key for the refresh token is derived from the ID.
sessions = Table(
    "sessions",
    metadata,
    Column("session_sha256", String(64), primary_key=True),
    Column("person_key", Text, ForeignKey("users.person_key"), nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("expires_at", String(24), nullable=False),
    Column("idle_expires_at", String(24), nullable=False),
    Column("refresh_token", Text),
    Column("refresh_at", String(24)),
    Column("is_reduced", Boolean(create_constraint=False), nullable=False),
)

#: The audit entries. Each row contains the hash of the previous row. Rows are never changed or deleted.
audit = Table(
    "audit",
    metadata,
    Column("entry", BigInteger, primary_key=True, autoincrement=False),
    Column("at", String(24), nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("details", Text, nullable=False),
    Column("previous_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
    Index(None, "actor", "entry"),
    Index(None, "action", "entry"),
    Index(None, "at"),
)

#: The events of each audit entry.
audit_events = Table(
    "audit_events",
    metadata,
    Column("event_key", Text, primary_key=True),
    Column("entry", BigInteger, primary_key=True, autoincrement=False),
    Index(None, "entry"),
)

#: Counters. A transaction locks the row until its commit, so numbers become visible in order.
counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

#: Single values, such as the epoch, and the attested documents of the last minutes.
properties = Table(
    "properties",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Text),
)
