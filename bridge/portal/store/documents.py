"""Stores recently accepted attested documents to prevent their reuse.

Because the list of documents is in the database, no one can reuse a stolen document after a restart or with another
portal process.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, delete

from bridge.portal.schema import properties
from bridge.portal.store.database import insert

_PREFIX = "document:"
_LONGEST_NAME = 32


def take_document(connection: Connection, vm_id: str, nonce: str, *, at: str, until: str) -> bool:
    """Mark a document as used until the time *until*. Return False if it was already used."""
    is_over = properties.c.name.startswith(_PREFIX, autoescape=True) & (properties.c.value <= at)
    connection.execute(delete(properties).where(is_over))
    digest = hashlib.sha256(f"{vm_id} {nonce}".encode()).hexdigest()
    name = f"{_PREFIX}{digest}"[:_LONGEST_NAME]
    new = insert(connection, properties).values(name=name, value=until).on_conflict_do_nothing()
    # The rowcount cannot be used, because the PostgreSQL driver reports -1.
    return connection.execute(new.returning(properties.c.name)).first() is not None
