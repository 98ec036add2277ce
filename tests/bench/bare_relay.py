"""What the way of a change through the agent is compared with: the bare minimum of it, in one thread.

    python bare_relay.py DOCUMENT_URL WEBHOOK_URL INTERVAL_SECONDS DATABASE

It polls; a document that has changed goes into a SQLite database as durably as into the outbox (WAL,
``synchronous=FULL``: a commit is an fsync), and then to the webhook. No thread wakes another, no process waits for
anything but the network and the disk, so what it takes beside other work is what the scheduler and the disk take.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import time

import requests


def main() -> None:
    """Relay until killed."""
    document_url, webhook_url, interval, database = sys.argv[1:]
    interval_seconds = float(interval)
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE documents (incarnation INTEGER PRIMARY KEY, body TEXT NOT NULL)")
    never = threading.Event()
    due = time.monotonic()
    incarnation = 1  # of the first document, which is empty
    with requests.Session() as session:
        session.trust_env = False
        while True:
            document = json.loads(session.get(document_url, headers={"Metadata": "true"}, timeout=5).content)
            if document["DocumentIncarnation"] != incarnation:
                incarnation = document["DocumentIncarnation"]
                body = json.dumps({"incarnation": incarnation, **document})
                connection.execute("INSERT INTO documents VALUES (?, ?)", (incarnation, body))
                session.post(webhook_url, data=body.encode(), timeout=5).raise_for_status()
            due += interval_seconds
            never.wait(max(due - time.monotonic(), 0))


if __name__ == "__main__":
    main()
