"""What the agent's poll is compared with: `requests.Session.get` and `json.loads`, once every so many seconds.

    python bare_loop.py URL INTERVAL_SECONDS

The cheapest honest form of it: one session, kept alive, which does not look for proxies or a .netrc in the
environment (a session as it comes does, and takes twice the time).
"""

from __future__ import annotations

import json
import sys
import threading
import time

import requests


def main() -> None:
    """Poll until killed."""
    url, interval_seconds = sys.argv[1], float(sys.argv[2])
    never = threading.Event()
    due = time.monotonic()
    with requests.Session() as session:
        session.trust_env = False
        while True:
            json.loads(session.get(url, headers={"Metadata": "true"}, timeout=5).content)
            due += interval_seconds
            never.wait(max(due - time.monotonic(), 0))


if __name__ == "__main__":
    main()
