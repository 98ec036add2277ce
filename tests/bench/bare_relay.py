"""The baseline for the latency of the agent: a minimal relay in one thread.

    python bare_relay.py DOCUMENT_URL WEBHOOK_URL INTERVAL_SECONDS DATABASE

The relay polls, writes each changed document to a SQLite database with the durability of the outbox (WAL and
``synchronous=FULL``, so each commit is an fsync), and sends it to the webhook. The relay waits only for the network and
the disk. Under load, its latency is therefore the latency of the scheduler and the disk.
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
    incarnation = 1  # the incarnation of the empty first document
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
