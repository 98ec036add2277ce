"""Alerts in a real Alertmanager (Debian: prometheus-alertmanager): firing, refresh, resolution, and notifications."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import doc_pages
import pytest
import requests
from closing import closing_each
from waiting import until

from bridge.agent.control_requests import read_status
from bridge.cli.connect import Reader
from bridge.sink import Transition, format_time
from bridge.testing import EventSpec, Simulator
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
#: The minimum of group_wait and group_interval, because the defaults would take half a minute.
CONFIGURATION = """
route: {receiver: us, group_by: [alertname, event_id], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}
receivers: [{name: us, webhook_configs: [{url: "http://%s/notify", send_resolved: true}]}]
"""


class Alertmanager:
    """Alertmanager in *directory*, at one address for all starts, and the receiver of its notifications."""

    def __init__(self, directory, notified):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._directory = directory
        self._notified = notified
        self._process = None
        (directory / "config.yml").write_text(CONFIGURATION % notified.address.authority)

    def start(self):
        """Start Alertmanager, and wait until it is ready."""
        command = [
            str(PROGRAM),
            f"--config.file={self._directory / 'config.yml'}",
            f"--storage.path={self._directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--cluster.listen-address=",
        ]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        until(lambda: is_up(self.url))

    def stop(self):
        """Stop Alertmanager like systemd. It then saves its notifications, but not its alerts."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE_SECONDS)

    def kill(self):
        """Kill Alertmanager with SIGKILL. It then loses the notifications since its last snapshot."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    def delete_data(self):
        """Delete the data of Alertmanager, as in a restarted container without a volume."""
        shutil.rmtree(self._directory / "data")

    def alerts(self, event_id=None):
        """Return all firing alerts, or the firing alerts of *event_id*."""
        chosen = {} if event_id is None else {"filter": f'event_id="{event_id}"'}
        answer = requests.get(f"{self.url}/api/v2/alerts", params=chosen, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def labels(self):
        """Return the labels of each firing alert, ordered by EventId."""
        return sorted((alert["labels"] for alert in self.alerts()), key=lambda labels: str(labels["event_id"]))

    def notifications(self, event_id):
        """Return the state in each notification of *event_id*: firing or resolved."""
        bodies = [json.loads(request.body) for request in self._notified.requests]
        return [body["status"] for body in bodies if body["commonLabels"].get("event_id") == event_id]


@contextmanager
def alertmanager_in(directory):
    """Run an Alertmanager in *directory*."""
    with HttpPeer() as notified:
        running = Alertmanager(directory, notified)
        try:
            running.start()
            yield running
        finally:
            running.stop()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory):
    with alertmanager_in(tmp_path_factory.mktemp("alertmanager")) as running:
        yield running


def is_up(url):
    try:
        return requests.get(f"{url}/-/ready", timeout=5).ok
    except requests.ConnectionError:
        return False


@pytest.fixture
def sink(alertmanager):
    def sink_of(*, ahead=timedelta(0), path=""):
        config = WebhookConfig(url=alertmanager.url + path, format="alertmanager")
        return WebhookSink(config, now=lambda: datetime.now(timezone.utc) + ahead)

    with closing_each(sink_of) as make:
        yield make


def record(event_id, transition, **fields):
    event = {"event_id": event_id, "not_before": datetime.now(timezone.utc) + timedelta(minutes=15)}
    event.update(fields.pop("event", {}))
    observed_at = format_time(datetime.now(timezone.utc))
    return sample_record(transition=transition, event=sample_event(**event), observed_at=observed_at, **fields)


@pytest.mark.parametrize("transition", [Transition.COMPLETED, Transition.CANCELED, Transition.ENDED])
def test_alert_fires_and_resolves(alertmanager, sink, transition):
    event_id = f"life-{transition.value}"
    each = sink(path="/" if transition is Transition.ENDED else "")
    each.check()
    each.send([record(event_id, Transition.SCHEDULED)])
    (alert,) = until(lambda: alertmanager.alerts(event_id))
    assert alert["status"]["state"] in {"active", "unprocessed"}
    until(lambda: "firing" in alertmanager.notifications(event_id))
    each.send([record(event_id, transition)])
    until(lambda: not alertmanager.alerts(event_id))
    until(lambda: "resolved" in alertmanager.notifications(event_id))


def test_event_that_changes_its_type_keeps_one_alert(alertmanager, sink):
    each = sink()
    each.send([record("turns", Transition.SCHEDULED, event={"event_type": "Reboot"})])
    changed = {"previous": {"event_type": "Reboot"}, "changed": ("event_type",)}
    each.send([record("turns", Transition.UPDATED, **changed)])
    assert [alert["labels"]["event_type"] for alert in alertmanager.alerts("turns")] == ["Freeze"]
    each.send([record("turns", Transition.COMPLETED)])
    assert alertmanager.alerts("turns") == []


@pytest.mark.parametrize("seconds", [-90, -8, 8])
def test_ending_resolves_the_alert_despite_clock_skew(alertmanager, sink, seconds):
    event_id = f"clock{seconds}"
    each = sink(ahead=timedelta(seconds=seconds))
    each.send([record(event_id, Transition.SCHEDULED)])
    assert alertmanager.alerts(event_id)
    each.send([record(event_id, Transition.COMPLETED)])
    assert alertmanager.alerts(event_id) == []


# A restarted Alertmanager keeps at most its notifications. It has no alerts until the agent sends them again.

REFRESH_SECONDS = 3.0


@pytest.fixture
def azure():
    with Simulator(vms=["WestNO_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def agent(azure, tmp_path, agent_env):
    """Return a function that runs the agent with a sink for the Alertmanager at a URL."""
    started = []

    def start(url):
        config = tmp_path / "config.toml"
        config.write_text(
            f'[imds]\nendpoint = "{azure.endpoint}"\npoll_interval_seconds = 0.2\n'
            f'[state]\ndirectory = "{tmp_path / "state"}"\n[status]\nlisten = ""\n'
            f'[[sinks]]\ntype = "webhook"\nname = "alerts"\nformat = "alertmanager"\nurl = "{url}"\n'
            f"refresh_seconds = {REFRESH_SECONDS}\n"
        )
        command = [sys.executable, "-m", "bridge", "run", "--config", str(config)]
        with (tmp_path / "agent.log").open("wb") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, env=agent_env))

    yield start
    for process in started:
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0


def test_restarted_alertmanager_gets_its_alerts_back_without_notifications(azure, agent, tmp_path):
    week = 7 * 24 * 3600.0
    # With a long notice and no duration, the events end only when the test ends them.
    ids = {
        kind: azure.world.add_event(EventSpec(event_type=kind, notice_seconds=notice, duration_seconds=None))
        for kind, notice in (("Freeze", 900.0), ("Reboot", 900.0), ("Redeploy", week))
    }
    directory = tmp_path / "alertmanager"
    directory.mkdir()
    with alertmanager_in(directory) as running:
        agent(running.url)
        until(lambda: len(running.alerts()) == len(ids))
        for event_id in ids.values():
            until(lambda: running.notifications(event_id))  # noqa: B023
        before = running.labels()

        running.stop()
        running.start()
        since = time.monotonic()
        until(lambda: running.labels() == before)
        assert time.monotonic() - since < REFRESH_SECONDS + 2.0
        threading.Event().wait(REFRESH_SECONDS)
        assert {event_id: running.notifications(event_id) for event_id in ids.values()} == {
            event_id: ["firing"] for event_id in ids.values()
        }

        running.stop()
        running.delete_data()
        running.start()
        until(lambda: running.labels() == before)

        azure.world.start(ids["Freeze"])
        azure.world.complete(ids["Freeze"])
        azure.world.cancel(ids["Reboot"])
        azure.world.cancel(ids["Redeploy"])
        until(lambda: not running.alerts())
        for event_id in ids.values():
            until(lambda: running.notifications(event_id)[-1] == "resolved")  # noqa: B023
    account = Reader(tmp_path / "state").ask(read_status).totals.sinks["alerts"]
    # Two or three records of the Freeze, and two of each other event. A refresh counts once more.
    assert account.accepted == account.delivered
    assert account.accepted > 6


def test_killed_alertmanager_repeats_active_alerts_and_misses_endings(azure, agent, tmp_path):
    event = EventSpec(event_type="Freeze", notice_seconds=900.0, duration_seconds=None)
    lasting, ending = azure.world.add_event(event), azure.world.add_event(event)
    directory = tmp_path / "alertmanager"
    directory.mkdir()
    with alertmanager_in(directory) as running:
        agent(running.url)
        until(lambda: running.notifications(lasting) and running.notifications(ending))
        assert all("WestNO_0" in alert["annotations"]["summary"] for alert in running.alerts())

        running.kill()
        azure.world.cancel(ending)
        running.start()
        until(lambda: running.notifications(lasting) == ["firing", "firing"])
        account = Reader(tmp_path / "state")
        until(lambda: account.ask(read_status).totals.sinks["alerts"].pending == 0)
        azure.world.cancel(lasting)
        until(lambda: running.notifications(lasting)[-1] == "resolved")
        assert running.alerts() == []
        assert running.notifications(ending) == ["firing"]


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool (part of Alertmanager) is not installed")
@pytest.mark.parametrize(("severity", "receiver"), [("info", "log"), ("warning", "oncall"), ("critical", "oncall")])
def test_documented_route_sends_info_to_another_receiver(tmp_path, severity, receiver):
    shown = doc_pages.marked(doc_pages.page("docs/howto/alertmanager.md"), "alertmanager: route")
    file = tmp_path / "alertmanager.yml"
    file.write_text(f"{shown}receivers:\n  - name: oncall\n  - name: log\n")
    done = subprocess.run(
        ["amtool", "config", "routes", "test", f"--config.file={file}", "event_type=Freeze", f"severity={severity}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, receiver), done.stderr
