"""A portal as a process that can be killed. It is forked from a process with all imports, so it starts quickly."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from portal_kit import portal_table

from bridge.portal.serve import Portal
from bridge.portal.settings import read

_UP_SECONDS = 60.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["bridge.portal.serve", "bridge.portal.store.postgresql"])


class PortalProcess:
    """A portal of *tables* in *directory* that can be started and killed repeatedly."""

    def __init__(self, directory: Path, tables: dict[str, Any]) -> None:
        self._table = portal_table(directory, **tables)
        self._process: Any = None
        self.url = self.operator_url = ""

    def start(self) -> None:
        """Start the portal on a free port, and wait until it listens."""
        receiver, sender = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_serve, args=(self._table, sender), daemon=True)
        self._process.start()
        sender.close()
        assert receiver.poll(_UP_SECONDS), "the portal did not start"
        port, operator_port = receiver.recv()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.operator_url = f"http://127.0.0.1:{operator_port}"
        receiver.close()

    def signal(self, number: int) -> None:
        """Send a signal to the portal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the portal with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
            self._process = None


def _serve(table: dict[str, Any], up: Connection) -> None:
    portal = Portal(read(table))

    def tell() -> None:
        portal.is_up.wait()
        assert portal.address is not None
        assert portal.operator_address is not None
        up.send((portal.address[1], portal.operator_address[1]))
        up.close()

    threading.Thread(target=tell, daemon=True).start()
    portal.run()
