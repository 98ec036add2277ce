"""The drain rate of a backlog to one webhook, relative to a bare loop of `requests.Session.post`."""

import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
from outbox_kit import OutboxKit

from bridge.clock import REAL_CLOCK
from bridge.config.settings import SinkSettings
from bridge.delivery.router import Router
from bridge.delivery.worker import DeliveryWorker
from bridge.events.event import encode
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

_RECORDS, _EVENTS = 6_000, 2_000
_LEAST_RATIO = 0.85


@pytest.fixture
def url():
    """Return the URL of a server in a separate process that accepts every request."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("bare_receiver.py")), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        receiver.stdout.readline()
        yield f"http://127.0.0.1:{port}/hook"
        receiver.kill()


def test_webhook_drain_rate_is_close_to_a_bare_loop(url, tmp_path, figure, *, is_short):
    count = _RECORDS // 3 if is_short else _RECORDS
    kit = OutboxKit(tmp_path / "state")
    kit.directory.mkdir()
    kit.time = REAL_CLOCK.now()
    outbox = Outbox(kit.directory)
    assert outbox.wait_loaded(10)
    config = WebhookConfig(name="s", url=url)
    outbox.configure(Router([config]), ["s"], labels={})
    records = kit.fill(outbox, count, events=_EVENTS, size=400)
    bare = [_bare_rate(url, encode(records[0]), count)]
    ours = _drain_rate(outbox, config, count)
    bare.append(_bare_rate(url, encode(records[0]), count))
    outbox.close()
    ratio = ours / statistics.mean(bare)
    figure(
        f"drain of {count} records to a webhook: {ours:.0f}/s, a bare loop {statistics.mean(bare):.0f}/s: {ratio:.2f}"
    )
    assert ratio >= _LEAST_RATIO


def _bare_rate(url, body, count):
    with requests.Session() as session:
        session.trust_env = False  # the search for proxies and .netrc would double the time of a bare post
        began = time.perf_counter()
        for _ in range(count):
            session.post(url, data=body, headers={"Content-Type": "application/json"}, timeout=10)
        return count / (time.perf_counter() - began)


def _drain_rate(outbox, config, count):
    settings = SinkSettings(type_name="s", sink_class=WebhookSink, config=config)
    worker = DeliveryWorker(settings, outbox=outbox, metrics=Metrics().sink("s"))
    outbox.on_due = worker.notify
    pause = threading.Event()
    began = time.perf_counter()
    worker.start()
    while outbox.read(deliveries.totals).sinks["s"].delivered < count:
        pause.wait(0.02)
    rate = count / (time.perf_counter() - began)
    worker.stop(grace_seconds=0.0)
    assert worker.join(10)
    return rate
