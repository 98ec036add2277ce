"""The baseline for the agent's poll: `requests.Session.get` and `json.loads` at a fixed interval.

    python bare_loop.py URL INTERVAL_SECONDS

The loop is as cheap as possible. It uses one session with keep-alive, and does not search the environment for proxies
or a .netrc. This search would double the time.
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
