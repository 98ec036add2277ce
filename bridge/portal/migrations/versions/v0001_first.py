"""Creates the first tables.

Triggers prevent changes to audit entries. Before a later step changes a released table, replace `create_all` in this
step with explicit definitions.
"""

from __future__ import annotations

from alembic import op

from bridge.portal.schema import counters, metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, the counters, and the triggers."""
    metadata.create_all(op.get_bind())
    op.bulk_insert(counters, [{"name": "decisions", "value": 1}, {"name": "audit", "value": 0}])
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    if is_postgresql:
        op.execute(
            "CREATE FUNCTION audit_refuses() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'audit entries cannot be changed or deleted'; END $$"
        )
        action = "FOR EACH STATEMENT EXECUTE FUNCTION audit_refuses()"
    else:
        action = "BEGIN SELECT RAISE(ABORT, 'audit entries cannot be changed or deleted'); END"
        # A REPLACE deletes the old row without a DELETE trigger.
        exists = "EXISTS (SELECT 1 FROM audit WHERE entry = NEW.entry OR rowid = NEW.rowid)"
        op.execute(f"CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN {exists} {action}")
    for operation in ("UPDATE", "DELETE", *(["TRUNCATE"] if is_postgresql else [])):
        op.execute(f"CREATE TRIGGER audit_no_{operation.lower()} BEFORE {operation} ON audit {action}")
