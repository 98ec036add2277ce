"""A portal in a thread of the test, on free ports, with its own database, and requests to it."""

from __future__ import annotations

import functools
import json
import re
import secrets
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import requests
from fleet_records import vm_id_of

from bridge.clock import REAL_CLOCK, Clock
from bridge.events.event import encode
from bridge.events.record import TransitionRecord
from bridge.portal.http_limits import REQUEST_SECONDS
from bridge.portal.serve import Portal
from bridge.portal.settings import read
from bridge.portal.store.database import Store
from bridge.testing import Simulator
from sinks.cloudevent import cloud_event_bytes

AGENT_TOKEN = "agents-token-1"  # of a test
READER_TOKEN = "readers-token-1"  # of a test
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
_UP_SECONDS = 30.0
_STOP_SECONDS = 20.0


def portal_table(directory: Path, **tables: Any) -> dict[str, Any]:
    """Write the tokens, and return the configuration of a portal in *directory*, merged with *tables*."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, token in (("agents", AGENT_TOKEN), ("readers", READER_TOKEN)):
        (directory / name).write_text(f"{token}\n", encoding="utf-8")
        (directory / name).chmod(0o600)
    whole: dict[str, Any] = {
        "server": {"listen": "127.0.0.1:0"},
        "operator": {"listen": "127.0.0.1:0"},
        "database": {"file": str(directory / "portal.db")},
        "agents": {"token_file": str(directory / "agents")},
        "readers": {"token_file": str(directory / "readers")},
    }
    if "url" in tables.get("database", {}):
        del whole["database"]
    for name, table in tables.items():
        whole[name] = table if isinstance(table, list) else {**whole.get(name, {}), **table}
    return whole


def portal_config(directory: Path, **tables: Any) -> Path:
    """Write the configuration of a portal with its state below *directory*, and return the file."""
    lines: list[str] = []
    for name, table in portal_table(directory / "state", **tables).items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = directory / "portal.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def attested_table(azure: Simulator, directory: Path) -> dict[str, Any]:
    """Write a new secret and the root certificates of *azure*, and return the table `agents.attested`."""
    (directory / "secret").write_text(f"{secrets.token_hex(20)}\n", encoding="utf-8")
    (directory / "secret").chmod(0o600)
    (directory / "roots.pem").write_bytes(azure.attestation.root_pem)
    return {
        "subscriptions": [azure.machines[0].subscription_id],
        "secret_file": str(directory / "secret"),
        "roots_file": str(directory / "roots.pem"),
        "intermediates_urls": [f"{azure.endpoint}/control/attestation"],
    }


@functools.cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "portal.db"
        store = Store.of_file(path)
        store.migrate()
        store.write(
            lambda connection: connection.exec_driver_sql("DELETE FROM properties")
        )  # each database gets its own epoch
        store.close()
        return path.read_bytes()


class RunningPortal:
    """A portal from `start` to `stop`; a context manager does both."""

    def __init__(
        self,
        directory: Path,
        *,
        clock: Clock = REAL_CLOCK,
        request_seconds: float = REQUEST_SECONDS,
        vm_limits: dict[str, Any] | None = None,
        **tables: Any,
    ) -> None:
        self._settings = read(portal_table(directory, **tables, limits=vm_limits or {}))
        self._more: dict[str, Any] = {"clock": clock, "request_seconds": request_seconds}
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self.portal = Portal(self._settings, **self._more)

    def start(self) -> RunningPortal:
        """Start the portal, and wait until it listens."""
        self._make_database()
        self.portal = Portal(self._settings, **self._more)
        self._thread = threading.Thread(target=self._run, args=(self.portal,), name="portal", daemon=True)
        self._thread.start()
        if not self.portal.is_up.wait(_UP_SECONDS):
            raise AssertionError(f"the portal did not start: {self._failed!r}")
        return self

    def _make_database(self) -> None:
        """Copy a migrated, empty SQLite database, which takes a tenth of the time of a first start."""
        if self._settings.database.file is not None and not Path(self._settings.database.file).exists():
            path = Path(self._settings.database.file)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(_empty_database())

    def stop(self) -> None:
        """Stop the portal as a signal does."""
        self.portal.stop()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
            assert not self._thread.is_alive(), "the portal did not stop"
            self._thread = None

    def _run(self, portal: Portal) -> None:
        try:
            portal.run()
        except BaseException as error:  # noqa: BLE001  # the top of a thread; `start` shows it
            self._failed = error

    def __enter__(self) -> RunningPortal:  # noqa: PYI034  # Self came with Python 3.11
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Return the value for `approval.remote.url`."""
        assert self.portal.address is not None
        return f"http://127.0.0.1:{self.portal.address[1]}/api/v1"

    @property
    def operator_url(self) -> str:
        """Return the URL of the operator listener."""
        assert self.portal.operator_address is not None
        return f"http://127.0.0.1:{self.portal.operator_address[1]}"

    def post(
        self, body: bytes, *, content_type: str = STRUCTURED, token: str | None = AGENT_TOKEN, **headers: str
    ) -> requests.Response:
        """POST *body* as records. An underscore in a header name becomes a hyphen."""
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        return requests.post(
            f"{self.url}/records", data=body, headers={"Content-Type": content_type, **shown, **more}, timeout=20
        )

    def send(self, *records: TransitionRecord) -> None:
        """POST *records* as one batch, and check for status 204."""
        answer = self.post(batch(records), content_type=BATCH)
        assert answer.status_code == 204, answer.text

    def get(self, path: str, *, token: str | None = READER_TOKEN, **query: str) -> requests.Response:
        """GET *path* as a reader."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return requests.get(f"{self.url}{path}", params=query, headers=headers, timeout=20)

    def metrics(self) -> str:
        """Return the page of metrics."""
        return requests.get(f"{self.operator_url}/metrics", timeout=20).text

    def held_polls(self) -> int:
        """Return the number of polls that the portal holds."""
        [found] = re.findall(r"^scheduled_events_portal_held_polls (\S+)$", self.metrics(), re.MULTILINE)
        return int(float(found))


def poll(
    url: str, vm: int = 0, *, index: int = 0, wait: float = 1, token: str = AGENT_TOKEN, **says: Any
) -> dict[str, Any]:
    """Poll *url* for decisions as the agent of *vm*, which reports *says*."""
    headers = {"Authorization": f"Bearer {token}"}
    if says:
        headers["Scheduled-Events-Agent"] = json.dumps(says)
    answer = requests.get(
        f"{url}/vms/{vm_id_of(vm)}/decisions?index={index}&wait={wait}", headers=headers, timeout=wait + 30
    )
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def batch(records: Iterable[TransitionRecord]) -> bytes:
    """Return *records* as the body of a batch."""
    return b"[" + b",".join(map(cloud_event_bytes, records)) + b"]"


def binary_headers(record: TransitionRecord) -> dict[str, str]:
    """Return the headers of *record* as a CloudEvent in binary mode; its body is the record."""
    attributes = msgspec.json.decode(cloud_event_bytes(record))
    return {f"ce_{name}": attributes[name] for name in ("specversion", "id", "source", "type")}


def body_of(record: TransitionRecord) -> bytes:
    """Return *record* as the body of a CloudEvent in binary mode."""
    return encode(record)
