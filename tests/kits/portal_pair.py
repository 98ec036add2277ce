"""Two portals on one database, as behind a load balancer, and requests of agents and users to either portal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests
from portal_databases import Database
from portal_kit import AGENT_TOKEN, BATCH, RunningPortal, batch
from portal_users import local_user, session_headers, start_session
from signers import Signer

from bridge.approval.signing import generate_key
from bridge.events.record import TransitionRecord
from bridge.portal.store.users import put_user

PEOPLE = ("ann", "bob")


class Pair:
    """The configuration of both portals with the shared *database*, and sessions of Ann and Bob."""

    def __init__(self, directory: Path, database: Database, *, required: int = 1) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.signer = Signer(directory)
        pair = generate_key(directory / "portal.key")
        self.tables: dict[str, Any] = {
            "database": database.table,
            "keys": [self.signer.table()],
            "people": {"required_approvals": required},
            "signing": {"kid": "p1", "private_key_file": str(pair.private_key_file)},
        }
        store = database.store()
        for name in PEOPLE:
            store.write(put_user, local_user(name))
            start_session(store, name)

    def portal(self, name: str) -> RunningPortal:
        """Return one of the portals, not started."""
        return RunningPortal(self.directory / name, **self.tables)


def send(url: str, records: Sequence[TransitionRecord]) -> requests.Response:
    """Send *records* to the portal at *url*."""
    headers = {"Content-Type": BATCH, "Authorization": f"Bearer {AGENT_TOKEN}"}
    return requests.post(f"{url}/records", data=batch(records), headers=headers, timeout=30)


def bring(url: str, *tokens: str) -> requests.Response:
    """Send decisions that were signed elsewhere to the portal at *url*."""
    return requests.post(f"{url}/decisions", json={"decisions": tokens}, timeout=30)


def say(url: str, name: str, verdict: str, *, key: str, digest: str) -> requests.Response:
    """Submit *verdict* at *url* as *name*, with the shared session."""
    headers = {**session_headers(name), "Origin": url.removesuffix("/api/v1")}
    body = {"verdict": verdict, "digest": digest, "reason": "because"}
    return requests.post(f"{url}/events/{key}/verdicts", json=body, headers=headers, timeout=30)
