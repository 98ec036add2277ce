"""Defines the database tables for SQLite and PostgreSQL.

Times are stored as UTC text (`bridge.clock.format_time`), which sorts in chronological order. A value has its own
column only if a query needs it. All other values are in the JSON column `body`.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, MetaData, String, Table, Text, UniqueConstraint

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
#: The channel of PostgreSQL's notifications about new decisions.
CHANNEL = "portal_decisions"

#: The original text of every received record. The rows never change.
records = Table(
    "records",
    metadata,
    Column("record_id", String(64), primary_key=True),
    Column("vm_key", Text, nullable=False),
    Column("stream_id", Text, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("event_key", String(32)),
    Column("transition", Text, nullable=False),
    Column("observed_at", String(24), nullable=False),
    Column("received_at", String(24), nullable=False),
    Column("body", Text, nullable=False),
    Index(None, "event_key", "observed_at"),
)

#: A row is a `bridge.portal.fleet.VmState`.
vms = Table(
    "vms",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("name", Text),
    Column("observed_at", String(24)),
    Column("body", Text),
)

#: The time at which the first record of each stream arrived.
streams = Table(
    "streams",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("stream_id", Text, primary_key=True),
    Column("first_received_at", String(24), nullable=False),
)

#: The newest record of each event from each VM (`bridge.portal.fleet.View`).
event_vms = Table(
    "event_vms",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("vm_key", Text, primary_key=True),
    Column("body", Text, nullable=False),
    Index(None, "vm_key"),
)

#: The state of each event, derived from `event_vms` and `vms` (`bridge.portal.fleet.EventState`).
events = Table(
    "events",
    metadata,
    Column("event_key", String(32), primary_key=True),
    Column("state", Text),
    Column("is_open", Boolean(create_constraint=False)),
    Column("first_observed_at", String(24)),
    Column("groups", Text),
    Column("body", Text),
    Index(None, "is_open", "first_observed_at"),
    Index(None, "first_observed_at", "event_key"),
)

#: The agents that poll at each process. With SQLite, this table is empty, because only one process exists.
agents = Table(
    "agents",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("process", String(32), primary_key=True),
    Column("asked_at", String(24), nullable=False),
    Column("received_index", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
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
    Column("jti", Text, nullable=False),
    Column("iss", Text, nullable=False),
    Column("decision", Text, nullable=False),
    Column("jws", Text, nullable=False),
    Column("jws_sha256", String(64), nullable=False),
    Column("expires_at_seconds", BigInteger, nullable=False),
    Column("made_at", String(24), nullable=False),
    UniqueConstraint("jws_sha256"),
    Index(None, "vm_key", "decision_index"),
    Index(None, "event_key"),
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

#: The primary key of a session is the SHA-256 of its ID.
sessions = Table(
    "sessions",
    metadata,
    Column("session_sha256", String(64), primary_key=True),
    Column("person_key", Text, ForeignKey("users.person_key"), nullable=False),
    Column("csrf_token", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("expires_at", String(24), nullable=False),
)

#: The audit. Each row contains the hash of the previous row. Rows are never changed or deleted.
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
