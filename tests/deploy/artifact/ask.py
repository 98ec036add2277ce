"""What drive.sh asks and tells on a VM that has Python and no curl."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def status_of(url: str) -> int:
    """Return the HTTP status of a page, 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def announce(enough: str, url: str) -> None:
    """Announce events, ten a second, until the file *enough* is there, and print their ids."""
    while not Path(enough).exists():
        body = json.dumps({"event_type": "Freeze", "event_source": "Platform"}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
            said = json.load(answer)
        event_id = said.get("EventId") or said["event_id"]
        sys.stdout.write(f"{event_id}\n")
        sys.stdout.flush()
        time.sleep(0.1)


def lost(announced: str, records: str) -> str:
    """Return how many announced events have no record, and how many numbers of the stream are missing."""
    wanted = set(Path(announced).read_text().split())
    told = [json.loads(line) for line in Path(records).read_text().splitlines()]
    numbers = {int(record["sequence"]) for record in told}
    missing = wanted - {record["event"]["event_id"] for record in told}
    return f"{len(wanted)} announced, {len(missing)} lost, {max(numbers) - min(numbers) + 1 - len(numbers)} gaps"


def without_library(library: str, path: str) -> None:
    """Take a library out of a requirements file."""
    text = Path(path).read_text()
    shorter = re.sub(rf"(?m)^{library}==.*\\\n(    --hash.*\n)+", "", text)
    assert shorter != text
    Path(path).write_text(shorter)


if __name__ == "__main__":
    if sys.argv[1] == "--announce":
        announce(*sys.argv[2:])
    elif sys.argv[1] == "--lost":
        sys.stdout.write(f"{lost(*sys.argv[2:])}\n")
    elif sys.argv[1] == "--without-library":
        without_library(*sys.argv[2:])
    else:
        sys.stdout.write(f"{status_of(sys.argv[1])}\n")
