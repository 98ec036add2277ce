"""A real Alertmanager (Debian: prometheus-alertmanager): alerts fire, are refreshed, resolve, and it says so."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.sink import DeliveryFailed, Transition, format_time, parse_time
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import sample_event, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        PROGRAM is None, reason="Alertmanager is not installed: apt-get install prometheus-alertmanager"
    ),
]

PATIENCE_SECONDS = 20.0
#: group_wait and group_interval are as short as can be, so that a test need not wait half a minute.
CONFIGURATION = """
route: {receiver: us, group_by: [alertname, event_id], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}
receivers: [{name: us, webhook_configs: [{url: "http://%s/notify", send_resolved: true}]}]
"""


def eventually(question: Callable[[], Any]) -> Any:
    """Return the first true answer to *question*."""
    pause, deadline = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, "it did not come"
        pause.wait(0.05)
    return answer


class Alertmanager:
    """The running program, and whom it notifies."""

    def __init__(self, url: str, notified: HttpPeer) -> None:
        self.url = url
        self._notified = notified

    def alerts(self, event_id: str) -> list[dict[str, Any]]:
        """Return the alerts of *event_id* that it shows: those that fire."""
        answer = requests.get(f"{self.url}/api/v2/alerts", params={"filter": f'event_id="{event_id}"'}, timeout=10)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
        return found

    def notifications(self, event_id: str) -> list[str]:
        """Return the state in each notification of *event_id*: firing or resolved."""
        bodies = [json.loads(request.body) for request in self._notified.requests]
        return [body["status"] for body in bodies if body["commonLabels"].get("event_id") == event_id]


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    directory: Path = tmp_path_factory.mktemp("alertmanager")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with HttpPeer() as notified, (directory / "log").open("wb") as log:
        (directory / "config.yml").write_text(CONFIGURATION % notified.address.authority)
        command = [
            str(PROGRAM),
            f"--config.file={directory / 'config.yml'}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                eventually(lambda: is_up(url))
                yield Alertmanager(url, notified)
            finally:
                process.terminate()


def is_up(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.fixture
def sink(alertmanager: Alertmanager) -> Iterator[Any]:
    made: list[WebhookSink] = []

    def make(*, ahead: timedelta = timedelta(0), path: str = "") -> WebhookSink:
        config = WebhookConfig(url=alertmanager.url + path, format="alertmanager")
        made.append(WebhookSink(config, now=lambda: datetime.now(timezone.utc) + ahead))
        return made[-1]

    yield make
    for each in made:
        each.close()


def record(event_id: str, transition: Transition, **fields: Any) -> Any:
    event = {"event_id": event_id, "not_before": datetime.now(timezone.utc) + timedelta(minutes=15)}
    event.update(fields.pop("event", {}))
    observed_at = format_time(datetime.now(timezone.utc))
    return sample_record(transition=transition, event=sample_event(**event), observed_at=observed_at, **fields)


@pytest.mark.parametrize("transition", [Transition.COMPLETED, Transition.CANCELED, Transition.ENDED])
def test_an_alert_fires_and_resolves(alertmanager: Alertmanager, sink: Any, transition: Transition) -> None:
    event_id = f"life-{transition.value}"
    each = sink(path="/" if transition is Transition.ENDED else "")
    each.check()
    each.send([record(event_id, Transition.SCHEDULED)])
    (alert,) = eventually(lambda: alertmanager.alerts(event_id))
    assert alert["status"]["state"] in {"active", "unprocessed"}
    eventually(lambda: "firing" in alertmanager.notifications(event_id))
    each.send([record(event_id, transition)])
    eventually(lambda: not alertmanager.alerts(event_id))
    eventually(lambda: "resolved" in alertmanager.notifications(event_id))


def test_an_update_refreshes_the_same_alert(alertmanager: Alertmanager, sink: Any) -> None:
    each = sink()
    each.send([record("refreshed", Transition.SCHEDULED)])
    later = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(hours=3)
    each.send([record("refreshed", Transition.UPDATED, event={"not_before": later})])
    each.send([record("refreshed", Transition.STARTED, event={"not_before": None, "event_status": "Started"})])
    (alert,) = alertmanager.alerts("refreshed")
    assert parse_time(alert["endsAt"]) == later + timedelta(hours=24)
    assert alert["annotations"]["transition"] == "started"
    each.send([record("refreshed", Transition.COMPLETED)])
    assert alertmanager.alerts("refreshed") == []


def test_a_reboot_that_turns_out_a_freeze_leaves_one_alert_and_then_none(alertmanager: Alertmanager, sink: Any) -> None:
    each = sink()
    each.send([record("turns", Transition.SCHEDULED, event={"event_type": "Reboot"})])
    changed = {"previous": {"event_type": "Reboot"}, "changed": ("event_type",)}
    each.send([record("turns", Transition.UPDATED, **changed)])
    assert [alert["labels"]["event_type"] for alert in alertmanager.alerts("turns")] == ["Freeze"]
    each.send([record("turns", Transition.COMPLETED)])
    assert alertmanager.alerts("turns") == []


@pytest.mark.parametrize("seconds", [-90, -1, 1, 90])
def test_an_end_counts_though_the_clocks_differ(alertmanager: Alertmanager, sink: Any, seconds: int) -> None:
    event_id = f"clock{seconds}"
    ahead = timedelta(seconds=seconds)
    sink(ahead=ahead).send([record(event_id, Transition.SCHEDULED)])
    assert alertmanager.alerts(event_id)
    another = sink(ahead=ahead)  # the agent was restarted, and knows nothing of clocks
    end = record(event_id, Transition.COMPLETED)
    try:
        another.send([end])
    except DeliveryFailed:
        assert seconds > 1
        assert alertmanager.alerts(event_id)  # a 200, and yet it took the end for a refresh
        another.send([end])
    assert alertmanager.alerts(event_id) == []


def test_what_it_refuses_would_be_parked(alertmanager: Alertmanager) -> None:
    answer = requests.post(f"{alertmanager.url}/api/v2/alerts", json=[{"labels": {}}], timeout=10)
    assert answer.status_code == 400
