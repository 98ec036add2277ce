"""HTTP requests and small tools of drive.sh for a VM that has Python but no curl."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


def status_of(url: str) -> int:
    """Return the HTTP status of a page, or 0 without a response."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def announce(enough: str, url: str) -> None:
    """Announce one event, and ten more per second until the file *enough* exists. Print their IDs."""
    while True:
        body = json.dumps({"event_type": "Freeze", "event_source": "Platform"}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
            said = json.load(answer)
        event_id = said.get("EventId") or said["event_id"]
        sys.stdout.write(f"{event_id}\n")
        sys.stdout.flush()
        if Path(enough).exists():
            return
        time.sleep(0.1)


def lost(announced: str, records: str) -> str:
    """Return the number of announced events without a record and the number of gaps in the sequence."""
    wanted = set(Path(announced).read_text().split())
    told = [json.loads(line) for line in Path(records).read_text().splitlines()]
    numbers = {int(record["sequence"]) for record in told}
    missing = wanted - {record["event"]["event_id"] for record in told}
    return f"{len(wanted)} announced, {len(missing)} lost, {max(numbers) - min(numbers) + 1 - len(numbers)} gaps"


def without_library(library: str, path: str) -> None:
    """Remove a library from a requirements file."""
    text = Path(path).read_text()
    shorter = re.sub(rf"(?m)^{library}==.*\\\n(    --hash.*\n)+", "", text)
    assert shorter != text
    Path(path).write_text(shorter)


def reasons(url: str) -> str:
    """Return the reasons why the agent at *url* is not ready, without their numbers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            report = json.load(answer)
    except urllib.error.HTTPError as error:
        report = json.load(error)
    except OSError:
        return "no response"
    return " ".join(re.sub("[0-9]+", "N", reason) for reason in report["reasons"])


class Refusal(BaseHTTPRequestHandler):
    """Refuses the credentials of every request."""

    def do_POST(self) -> None:
        """Respond with 401."""
        self.send_error(401)


def make_older(seconds: str, *paths: str) -> None:
    """Add *seconds* to the age of the undelivered records in the outbox files *paths*."""
    older = "json_set(rest, '$.aged_from', json_extract(rest, '$.aged_from') - ?)"
    for path in paths:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE deliveries SET rest = {older}", [seconds])


if __name__ == "__main__":
    if sys.argv[1] == "--announce":
        announce(*sys.argv[2:])
    elif sys.argv[1] == "--lost":
        sys.stdout.write(f"{lost(*sys.argv[2:])}\n")
    elif sys.argv[1] == "--without-library":
        without_library(*sys.argv[2:])
    elif sys.argv[1] == "--reasons":
        sys.stdout.write(f"{reasons(sys.argv[2])}\n")
    elif sys.argv[1] == "--refuse":
        HTTPServer(("127.0.0.1", int(sys.argv[2])), Refusal).serve_forever()
    elif sys.argv[1] == "--make-older":
        make_older(*sys.argv[2:])
    else:
        sys.stdout.write(f"{status_of(sys.argv[1])}\n")
