"""The first tables.

The audit refuses to be changed: on SQLite by triggers; on PostgreSQL the portal's role lacks the right.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.String(24)
_EVENT_KEY = sa.String(32)


def upgrade() -> None:
    """Make them."""
    _make_tables_of_records()
    _make_tables_of_decisions()
    _make_tables_of_people()
    op.bulk_insert(
        sa.table("counters", sa.column("name", sa.String), sa.column("value", sa.BigInteger)),
        [{"name": "decisions", "value": 1}, {"name": "audit", "value": 0}],
    )
    _let_the_audit_only_grow(op.get_bind().dialect.name)


def _let_the_audit_only_grow(engine: str) -> None:
    if engine == "postgresql":
        op.execute(
            "CREATE FUNCTION audit_refuses() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the audit is only ever added to'; END $$"
        )
    for what in ("UPDATE", "DELETE", "TRUNCATE") if engine == "postgresql" else ("UPDATE", "DELETE"):
        does = (
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_refuses()"
            if engine == "postgresql"
            else "BEGIN SELECT RAISE(ABORT, 'the audit is only ever added to'); END"
        )
        op.execute(f"CREATE TRIGGER audit_no_{what.lower()} BEFORE {what} ON audit {does}")


def _make_tables_of_records() -> None:
    op.create_table(
        "records",
        sa.Column("record_id", sa.String(64), nullable=False),
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("event_key", _EVENT_KEY),
        sa.Column("transition", sa.Text(), nullable=False),
        sa.Column("observed_at", _TIME, nullable=False),
        sa.Column("received_at", _TIME, nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("record_id", name="pk_records"),
    )
    op.create_index("ix_records_event_key_observed_at", "records", ["event_key", "observed_at"])
    op.create_table(
        "vms",
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("stream_id", sa.Text()),
        sa.Column("observed_at", _TIME),
        sa.Column("body", sa.Text()),
        sa.PrimaryKeyConstraint("vm_key", name="pk_vms"),
    )
    op.create_table(
        "streams",
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("vm_key", "stream_id", name="pk_streams"),
    )
    op.create_table(
        "event_vms",
        sa.Column("event_key", _EVENT_KEY, nullable=False),
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("stream_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("event_key", "vm_key", "stream_id", name="pk_event_vms"),
    )
    op.create_index("ix_event_vms_vm_key", "event_vms", ["vm_key"])
    op.create_table(
        "events",
        sa.Column("event_key", _EVENT_KEY, nullable=False),
        sa.Column("state", sa.Text()),
        sa.Column("is_open", sa.Boolean()),
        sa.Column("first_observed_at", _TIME),
        sa.Column("groups", sa.Text()),
        sa.Column("body", sa.Text()),
        sa.PrimaryKeyConstraint("event_key", name="pk_events"),
    )
    op.create_index("ix_events_is_open_first_observed_at", "events", ["is_open", "first_observed_at"])
    op.create_index("ix_events_first_observed_at_event_key", "events", ["first_observed_at", "event_key"])


def _make_tables_of_decisions() -> None:
    op.create_table(
        "agents",
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("process", sa.String(32), nullable=False),
        sa.Column("asked_at", _TIME, nullable=False),
        sa.Column("received_index", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("vm_key", "process", name="pk_agents"),
    )
    op.create_table(
        "verdicts",
        sa.Column("verdict_id", sa.String(36), nullable=False),
        sa.Column("event_key", _EVENT_KEY, nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("made_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("withdrawn_at", _TIME),
        sa.PrimaryKeyConstraint("verdict_id", name="pk_verdicts"),
    )
    op.create_index("ix_verdicts_event_key", "verdicts", ["event_key"])
    op.create_table(
        "decisions",
        sa.Column("decision_index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("vm_key", sa.Text(), nullable=False),
        sa.Column("event_key", _EVENT_KEY),
        sa.Column("verdict_id", sa.String(36)),
        sa.Column("jti", sa.Text(), nullable=False),
        sa.Column("iss", sa.Text(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("jws", sa.Text(), nullable=False),
        sa.Column("jws_sha256", sa.String(64), nullable=False),
        sa.Column("expires_at_seconds", sa.BigInteger(), nullable=False),
        sa.Column("made_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["verdict_id"], ["verdicts.verdict_id"], name="fk_decisions_verdict_id"),
        sa.PrimaryKeyConstraint("decision_index", name="pk_decisions"),
        sa.UniqueConstraint("jws_sha256", name="uq_decisions_jws_sha256"),
    )
    op.create_index("ix_decisions_vm_key_decision_index", "decisions", ["vm_key", "decision_index"])
    op.create_index("ix_decisions_event_key", "decisions", ["event_key"])


def _make_tables_of_people() -> None:
    op.create_table(
        "users",
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text()),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("made_at", _TIME, nullable=False),
        sa.Column("disabled_at", _TIME),
        sa.PrimaryKeyConstraint("user_name", name="pk_users"),
    )
    op.create_table(
        "sessions",
        sa.Column("session_sha256", sa.String(64), nullable=False),
        sa.Column("user_name", sa.Text(), nullable=False),
        sa.Column("csrf_token", sa.Text(), nullable=False),
        sa.Column("made_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["user_name"], ["users.user_name"], name="fk_sessions_user_name"),
        sa.PrimaryKeyConstraint("session_sha256", name="pk_sessions"),
    )
    op.create_table(
        "audit",
        sa.Column("entry", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("previous_hash", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("entry", name="pk_audit"),
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.create_table(
        "properties",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.Text()),
        sa.PrimaryKeyConstraint("name", name="pk_properties"),
    )
