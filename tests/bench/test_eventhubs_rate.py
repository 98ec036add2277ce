"""A backlog of 3,000 records (1,000 EventIds x 3) to Event Hubs, relative to the batch loop of the SDK.

    pytest -m "bench and interop" -s tests/bench/test_eventhubs_rate.py

Both send the same number of batches, each with one key, to one emulator. The SDK's loop gets encoded bodies. The speed
of the machine varies, so each run of the agent is compared with the mean of the SDK runs before and after it. The
result is the median of these ratios.
"""

import asyncio
import importlib.util
import itertools
import json
import os
import statistics
import threading
import time
from collections import defaultdict
from datetime import datetime, timezone

import pytest
from eventhubs_emulator.process import NEEDS, started
from outbox_kit import RouteAll

from bridge.config.settings import SinkSettings
from bridge.delivery.worker import DeliveryWorker
from bridge.events.event import Document
from bridge.events.record import Transition, new_record
from bridge.metrics.metrics import Metrics
from bridge.outbox import deliveries
from bridge.outbox.outbox import Outbox
from bridge.sink import TransitionRecord
from bridge.testing.records import sample_event, sample_record
from sinks.cloudevent import CONTENT_TYPE, cloud_event_bytes
from sinks.eventhubs.message import properties
from sinks.eventhubs.sink import EventHubsConfig, EventHubsSink

pytestmark = [pytest.mark.bench, pytest.mark.interop, pytest.mark.timeout(600)]

_EVENTS, _RECORDS_EACH = 1_000, 3
_ROUNDS = 9 if os.environ.get("BENCH") == "short" else 5
_LEAST_RATIO = 0.8

Backlog = list[list[TransitionRecord]]


@pytest.fixture
def emulator():
    """Return a running emulator, over plain TCP."""
    if importlib.util.find_spec("proton") is None:
        pytest.skip(NEEDS)
    with started() as emulator:
        yield emulator


@pytest.fixture
def backlog():
    """Return ordered batches of records, each of one event, like the batches of the delivery worker."""
    numbers = itertools.count(1)
    return [
        [sample_record(next(numbers), event=sample_event(event_id=f"EVENT-{event:04}")) for _ in range(_RECORDS_EACH)]
        for event in range(_EVENTS)
    ]


def test_eventhubs_drain_rate_is_close_to_the_bare_sdk(
    emulator,
    backlog,
    figure,
    monkeypatch,
    tmp_path,
):
    monkeypatch.setenv("EVENT_HUBS", emulator.connection_string())
    by_sdk, by_worker = [_rate_of_sdk(emulator.connection_string(), backlog)], []
    for number in range(_ROUNDS):
        by_worker.append(_rate_of_worker(tmp_path / str(number)))
        by_sdk.append(_rate_of_sdk(emulator.connection_string(), backlog))
    ratio = _ratio(by_worker, by_sdk)
    figure(_sentence("Event Hubs backlog through outbox and worker:", by_worker, by_sdk, ratio))
    arrived = defaultdict(list)
    for event in emulator.state()["events"]:
        record = json.loads(event["body"])["data"]
        if record["stream_id"] != sample_record(1).stream_id:
            arrived[record["stream_id"], record["event"]["event_id"]].append(record["sequence"])
    assert all(sequences == sorted(sequences) for sequences in arrived.values())
    assert sum(map(len, arrived.values())) == _ROUNDS * _EVENTS * _RECORDS_EACH
    assert ratio >= _LEAST_RATIO


def _ratio(ours, by_sdk):
    """Return the median of the ratios of *ours* to the mean of the SDK rates before and after it."""
    sdk_pairs = itertools.pairwise(by_sdk)
    return statistics.median(rate / statistics.mean(pair) for rate, pair in zip(ours, sdk_pairs, strict=False))


def _sentence(what, ours, by_sdk, ratio):
    return f"{what} {statistics.median(ours):.0f}/s, SDK alone {statistics.median(by_sdk):.0f}/s, ratio {ratio:.2f}"


def _rate_of_worker(directory):
    """Fill an outbox, and let a worker send its records. Return the records per second."""
    config = EventHubsConfig(credential="connection_string", connection_string_env="EVENT_HUBS", name="bench")
    directory.mkdir()
    outbox = Outbox(directory, max_pending_bytes=2**28)
    assert outbox.wait_loaded(10)
    outbox.configure(RouteAll("bench"), ["bench"], labels={})
    moment = datetime.now(timezone.utc)
    for step in range(_RECORDS_EACH):
        events = [sample_event(event_id=f"WORK-{event:04}", duration_seconds=step) for event in range(_EVENTS)]
        changes = [new_record(Transition.UPDATED, moment, event=event, incarnation=step) for event in events]
        outbox.append_observation(Document(incarnation=step), changes, active_event_ids=None)
    assert outbox.wait_saved(60)
    settings = SinkSettings(type_name="s", sink_class=EventHubsSink, config=config)
    worker = DeliveryWorker(settings, outbox=outbox, metrics=Metrics().sink("bench"))
    outbox.on_due = worker.notify
    never = threading.Event()
    worker.start()
    while (
        outbox.read(deliveries.totals).sinks["bench"].delivered == 0
    ):  # The measurement starts after the connection is open.
        never.wait(0.005)
    before, started = outbox.read(deliveries.totals).sinks["bench"].delivered, time.perf_counter()
    while outbox.read(deliveries.totals).sinks["bench"].pending:
        never.wait(0.05)
    seconds = time.perf_counter() - started
    worker.stop(grace_seconds=5)
    assert worker.join(10)
    outbox.close()
    return (_EVENTS * _RECORDS_EACH - before) / seconds


def _rate_of_sdk(string, batches):
    from azure.eventhub import EventData  # noqa: PLC0415  # what is measured
    from azure.eventhub.aio import EventHubProducerClient  # noqa: PLC0415  # likewise

    bodies = [
        (str(batch[0].event_key), [(cloud_event_bytes(record), properties(record)) for record in batch])
        for batch in batches
    ]

    async def send(client, key, events):
        data = await client.create_batch(partition_key=key)
        for body, named in events:
            event = EventData(body)
            event.content_type = CONTENT_TYPE
            event.properties = {**named}
            data.add(event)
        await client.send_batch(data)

    async def run():
        client = EventHubProducerClient.from_connection_string(string)
        async with client:
            await send(client, *bodies[0])
            started = time.perf_counter()
            for key, events in bodies[1:]:
                await send(client, key, events)
            return time.perf_counter() - started

    return (len(batches) - 1) * _RECORDS_EACH / asyncio.run(run())
