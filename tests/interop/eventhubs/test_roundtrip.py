"""The consumer of the SDK reads the events of the sink, over TCP and TLS, with a key and with an identity."""

import json

import pytest

from bridge.sink import DeliveryRejected

pytestmark = pytest.mark.interop


def test_consumer_reads_body_type_key_and_properties(make_sink, make_record, consume):
    make_sink().send([make_record(sequence=1), make_record(sequence=2)])
    first, second = consume(2)
    body = json.loads(first.body_as_str())
    assert (body["specversion"], body["subject"], body["data"]["id"]) == ("1.0", "A-1", "A-1/1")
    assert json.loads(second.body_as_str())["data"]["sequence"] == 2
    assert first.content_type == "application/cloudevents+json"
    assert first.partition_key == b"A-1"
    assert {name.decode(): value.decode() for name, value in first.properties.items()} == {
        "transition": "scheduled",
        "event_type": "Freeze",
        "event_status": "Scheduled",
        "vm_name": "vm-1",
    }


def test_records_of_each_event_stay_in_order(make_sink, make_record, consume):
    sink = make_sink()
    for sequence in range(1, 21, 2):
        for name in ("A", "B", "C", "D", "E"):
            sink.send([make_record(name, sequence), make_record(name, sequence + 1)])
    seen = {}
    for event in consume(100):
        data = json.loads(event.body_as_str())["data"]
        seen.setdefault(data["event"]["event_id"], []).append(data["sequence"])
    assert seen == {name: list(range(1, 21)) for name in "ABCDE"}


def test_one_send_is_one_transfer(make_sink, make_record, emulator):
    sink = make_sink()
    sink.send([make_record(sequence=sequence) for sequence in range(100)])
    assert (emulator.state()["transfers"], len(emulator.state()["events"])) == (1, 100)


def test_prepared_batch_is_sent_once_and_only_if_it_is_next(make_sink, make_record, emulator):
    sink = make_sink()
    first, second, third, fourth = ([make_record(name, 1), make_record(name, 2)] for name in "ABCD")
    sink.prepare_next(second)
    sink.send(first)
    sink.prepare_next(third)
    sink.send(second)
    sink.send(fourth)
    sink.send(third)
    sent = [json.loads(event["body"])["data"]["id"] for event in emulator.state()["events"]]
    assert sorted(sent) == ["A/1", "A/2", "B/1", "B/2", "C/1", "C/2", "D/1", "D/2"]
    assert emulator.state()["transfers"] == 4


def test_oversized_record_is_rejected_by_send_not_by_prepare_next(make_sink, make_record, emulator):
    sink = make_sink()
    huge = [make_record("B", 1, labels={"note": "x" * 2**21})]
    sink.prepare_next(huge)
    sink.send([make_record("A", 1)])
    with pytest.raises(DeliveryRejected, match="exceeds"):
        sink.send(huge)
    assert emulator.state()["transfers"] == 1


def test_record_is_sent_over_tls_with_a_private_authority(make_sink, make_record, emulator, authority):
    endpoint = f"sb://127.0.0.1:{emulator.ports['amqps']}"
    keys = {"string": emulator.connection_string(is_tls=True), "endpoint": endpoint}
    make_sink(ca_file=authority.ca_file, **keys).send([make_record()])
    assert len(emulator.state()["events"]) == 1


@pytest.mark.parametrize("client_id", [None, "11111111-2222-3333-4444-555555555555"])
def test_record_is_sent_with_a_managed_identity(  # noqa: PLR0917 - fixtures
    make_sink, make_record, emulator, authority, identity_endpoint, client_id
):
    make_sink(
        credential="managed_identity",
        client_id=client_id,
        fully_qualified_namespace="127.0.0.1",
        eventhub=emulator.hub,
        endpoint=f"127.0.0.1:{emulator.ports['amqps']}",
        ca_file=authority.ca_file,
    ).send([make_record()])
    state = emulator.state()
    assert len(state["events"]) == 1
    assert {token["type"] for token in state["tokens"]} == {"jwt"}
    assert (identity_endpoint(state["tokens"][0]["token"])["appid"] == client_id) is (client_id is not None)


def test_check_connects_to_the_hub_and_sends_no_record(make_sink, emulator):
    make_sink().check()
    assert emulator.state()["transfers"] == 0
