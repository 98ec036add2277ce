"""For each fault of the event hub, the sink reports the outcome before its deadline and can send again."""

import contextlib
import threading
import time
from pathlib import Path

import pytest

from bridge.sink import DeliveryFailed, DeliveryRejected

pytestmark = pytest.mark.interop

LIMIT_SECONDS = 0.5
#: The deadline of sends that must succeed. It allows for the setup of a link on a busy machine.
AMPLE_SECONDS = 10.0


def counted():
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The descriptor of the listing is closed.
            links.append(str(each.readlink()))
    return threading.active_count(), sum("socket:" in link for link in links)


def held():
    """Return the numbers of threads and sockets once they are stable, because threads end with a delay."""
    steady = [counted()]
    while len(steady) < 10 or len(set(steady[-10:])) > 1:
        threading.Event().wait(0.02)
        steady.append(counted())
    return steady[-1]


def failure(sink, *records):
    with pytest.raises(DeliveryFailed) as caught:
        sink.send(records)
    return caught.value


def seconds_of(sink, *records):
    before = time.monotonic()
    failure(sink, *records)
    return time.monotonic() - before


@pytest.mark.parametrize("moment", ["accept", "open", "cbs", "attach"])
def test_send_to_a_silent_hub_ends_at_the_deadline_without_leaks(make_sink, make_record, emulator, moment):
    sink = make_sink(timeout_seconds=LIMIT_SECONDS)
    emulator.set(silent_at=moment)
    failure(sink, make_record())
    before = held()
    longest = max(seconds_of(sink, make_record()) for _ in range(5))
    assert longest <= 1.1 * LIMIT_SECONDS
    assert held() == before
    assert emulator.wait_for(lambda state: state["connections"] == 0)["transfers"] == 0


@pytest.mark.parametrize("kind", ["no_ack", "release", "modify"])
def test_send_without_a_final_outcome_ends_at_the_deadline(make_sink, make_record, emulator, kind):
    sink = make_sink(timeout_seconds=1.5)
    emulator.faults({"kind": kind, "count": 6})
    failure(sink, make_record())
    before = held()
    longest = max(seconds_of(sink, make_record()) for _ in range(5))
    assert longest <= 1.1 * 1.5
    assert held() == before
    sink.send([make_record(sequence=2)])
    state = emulator.wait_for(lambda state: state["connections"] == 1)
    assert state["transfers"] == 7
    assert len(state["events"]) == (7 if kind == "no_ack" else 1)


def test_canceled_send_does_not_create_a_late_duplicate(make_sink, make_record, emulator):
    sink = make_sink(timeout_seconds=3.0)
    emulator.faults({"kind": "late", "seconds": 3.2})
    failure(sink, make_record())
    emulator.wait_for(lambda state: state["connections"] == 0)
    sink.send([make_record()])
    threading.Event().wait(1.0)  # time for a late duplicate
    assert len(emulator.state()["events"]) == 1


def test_canceled_send_transmits_no_data_later(make_sink, make_record, emulator):
    sink = make_sink(timeout_seconds=2.0)
    emulator.set(max_message_size=64_000_000)
    sink.send([make_record(sequence=1)])
    emulator.set(is_reading=False)
    large = make_record(sequence=2, labels={"filling": "x" * 12_000_000})
    failure(sink, large)
    emulator.set(is_reading=True)
    emulator.wait_for(lambda state: state["connections"] == 0)
    make_sink(timeout_seconds=AMPLE_SECONDS).send([make_record(sequence=2)])
    assert len(emulator.state()["events"]) == 2


@pytest.mark.parametrize(
    ("message", "seconds"), [("Please wait 7 seconds and try again.", 7.0), ("The request was terminated.", 4.0)]
)
def test_server_busy_sets_the_retry_delay(make_sink, make_record, emulator, message, seconds):
    sink = make_sink()
    emulator.faults({"kind": "reject", "condition": "com.microsoft:server-busy", "description": message})
    assert failure(sink, make_record()).retry_after == seconds


def test_argument_error_parks_the_record(make_sink, make_record, emulator):
    sink = make_sink()
    emulator.faults({"kind": "reject", "condition": "com.microsoft:argument-error"})
    with pytest.raises(DeliveryRejected):
        sink.send([make_record()])


def test_oversized_batch_is_split_and_oversized_record_is_parked(make_sink, make_record, emulator):
    emulator.set(max_message_size=20_000)
    sink = make_sink()
    batch = [make_record(sequence=sequence, labels={"filling": "x" * 8_000}) for sequence in (1, 2, 3)]
    with pytest.raises(DeliveryRejected, match=r"A batch of 3 records exceeds .* 20000 bytes") as caught:
        sink.send(batch)
    assert caught.value.records == ()
    for record in batch:
        sink.send([record])
    with pytest.raises(DeliveryRejected, match="The record exceeds"):
        sink.send([make_record(labels={"filling": "x" * 30_000})])
    state = emulator.state()
    assert (state["connections_ever"], state["transfers"], len(state["events"])) == (1, 3, 3)


@pytest.mark.parametrize(("kind", "stored"), [("drop_before", 0), ("drop_after", 1), ("detach", 0)])
def test_lost_connection_fails_without_a_second_transfer(make_sink, make_record, emulator, kind, stored):
    sink = make_sink()
    emulator.faults(kind)
    failure(sink, make_record())
    state = emulator.state()
    assert (state["transfers"], len(state["events"])) == (1, stored)
    sink.send([make_record()])
    assert len(emulator.state()["events"]) == stored + 1


def test_connection_closed_by_the_service_is_reopened_without_a_failure(make_sink, make_record, emulator):
    sink = make_sink()
    sink.send([make_record(sequence=1)])
    emulator.drop()
    emulator.wait_for(lambda state: state["connections"] == 0)
    sink.send([make_record(sequence=2)])
    assert emulator.state()["transfers"] == 2


def test_rotated_connection_string_is_read_again(make_sink, make_record, emulator, tmp_path):
    path = tmp_path / "string"
    path.write_text(emulator.connection_string(key="b2xk"))
    sink = make_sink(connection_string_env=None, connection_string_file=str(path))
    assert failure(sink, make_record()).needs_attention
    path.write_text(emulator.connection_string())
    sink.send([make_record()])


def test_idle_connection_is_closed_and_reopened(make_sink, make_record, emulator):
    before = held()
    sink = make_sink(idle_close_seconds=0.2)
    sink.send([make_record(sequence=1)])
    emulator.wait_for(lambda state: state["connections"] == 0)
    deadline = time.monotonic() + 5
    while held() != before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert held() == before
    sink.send([make_record(sequence=2)])
    assert len(emulator.state()["events"]) == 2


@pytest.mark.parametrize("moment", ["accept", "attach"])
def test_send_to_a_silent_hub_over_tls_ends_at_the_deadline(make_sink, make_record, emulator, authority, moment):
    sink = make_sink(
        string=emulator.connection_string(is_tls=True),
        endpoint=f"127.0.0.1:{emulator.ports['amqps']}",
        ca_file=authority.ca_file,
        timeout_seconds=LIMIT_SECONDS,
    )
    emulator.set(silent_at=moment)
    failure(sink, make_record())
    before = held()
    assert max(seconds_of(sink, make_record()) for _ in range(10)) <= 1.1 * LIMIT_SECONDS
    assert held() == before
