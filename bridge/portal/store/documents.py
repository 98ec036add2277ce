"""The attested documents that were accepted in the last minutes, as rows of `properties`.

A stolen document must not get a token a second time, also from another process of the portal or after a restart.
"""

from __future__ import annotations

import hashlib

from sqlalchemy import Connection, delete

from bridge.portal.schema import properties
from bridge.portal.store.database import insert

_PREFIX = "document:"
_LONGEST_NAME = 32


def take_document(connection: Connection, vm_id: str, nonce: str, *, at: str, until: str) -> bool:
    """Return True, and remember it *until* then, when no document of *vm_id* with *nonce* was taken before."""
    is_over = properties.c.name.startswith(_PREFIX, autoescape=True) & (properties.c.value <= at)
    connection.execute(delete(properties).where(is_over))
    digest = hashlib.sha256(f"{vm_id} {nonce}".encode()).hexdigest()
    name = f"{_PREFIX}{digest}"[:_LONGEST_NAME]
    new = insert(connection, properties).values(name=name, value=until).on_conflict_do_nothing()
    # Not by its rowcount, which PostgreSQL's driver leaves at -1.
    return connection.execute(new.returning(properties.c.name)).first() is not None
