"""The tables of the portal's database, for SQLite and PostgreSQL alike. The migrations make them; a test compares.

Times are texts in UTC with milliseconds (`bridge.clock.format_time`), which sort as they are. What is only ever read
whole is one JSON text in `body`; what is asked for has a column.
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

#: The row of `properties` that names the history in which numbers of decisions count.
EPOCH = "epoch"
#: The channel of PostgreSQL's notifications about new decisions.
CHANNEL = "portal_decisions"

#: Every record that came, as it came; never changed.
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

#: Every VM that has sent a record (`bridge.portal.fleet.VmState`).
vms = Table(
    "vms",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("name", Text),
    Column("observed_at", String(24)),
    Column("body", Text),
)

#: The first arrival of each stream, which limits the time of the stream.
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

#: The state of each event, which follows from the views and the VMs (`bridge.portal.fleet.EventState`).
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

#: The agents that poll at each process. Unused with SQLite, which has one process.
agents = Table(
    "agents",
    metadata,
    Column("vm_key", Text, primary_key=True),
    Column("process", String(32), primary_key=True),
    Column("asked_at", String(24), nullable=False),
    Column("received_index", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
)

#: The verdicts of people on events.
verdicts = Table(
    "verdicts",
    metadata,
    Column("verdict_id", String(36), primary_key=True),
    Column("event_key", String(32), nullable=False),
    Column("choice", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("user_name", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("expires_at", String(24), nullable=False),
    Column("withdrawn_at", String(24)),
    Index(None, "event_key"),
)

#: Signed decisions, each for one VM, in the order in which agents receive them.
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

users = Table(
    "users",
    metadata,
    Column("user_name", Text, primary_key=True),
    Column("password_hash", Text),
    Column("role", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("disabled_at", String(24)),
)

#: A session is known by the SHA-256 of its id.
sessions = Table(
    "sessions",
    metadata,
    Column("session_sha256", String(64), primary_key=True),
    Column("user_name", Text, ForeignKey("users.user_name"), nullable=False),
    Column("csrf_token", Text, nullable=False),
    Column("made_at", String(24), nullable=False),
    Column("expires_at", String(24), nullable=False),
)

#: Who did what, when and why; each row has the hash of the one before. No row is changed or taken away.
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

#: Numbers that become visible in their order: the row is locked from the moment one is taken until it is committed.
counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

#: Single values of the database itself, such as its epoch, and for some minutes the documents that were taken.
properties = Table(
    "properties",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Text),
)
