"""What is over is skipped by a sink that disturbs people, but only while surely nothing of it arrived."""

import json

import pytest
from delivery_kit import Pager

from bridge.errors import DeliveryFailed
from bridge.events.event import Document
from bridge.outbox import deliveries
from bridge.testing.http_contract import HttpPeer
from sinks.webhook.sink import WebhookSink


class Incidents(Pager):
    """A pager whose every record but an updated one is worth nothing beside the end of its event."""

    @classmethod
    def superseded_by_end(cls, config, record):
        del config
        return record.transition.value != "updated"


def mark(bench, event_key):
    """Mark an event as the sink's worker does before it sends."""
    return bench.outbox.write(deliveries.mark_started, "s", event_key, now=bench.outbox_kit.time.timestamp()).result()


def end(bench, event_id="E"):
    gone = Document(incarnation=2)
    bench.outbox_kit.commit(bench.outbox, bench.event(event_id), transition="canceled", document=gone)
    bench.notify()


def sent(box):
    return [batch[0].transition.value for batch in box.tries]


def failing(*, uncertain):
    def outcome(_batch):
        raise DeliveryFailed("down", uncertain=uncertain)

    return outcome


def test_an_event_that_was_over_before_it_could_be_told_is_skipped_whole(bench, pager):
    bench.add("E")
    end(bench)
    bench.start()
    bench.until_totals(expired=2)
    assert sent(pager) == []


def test_an_event_that_came_back_after_its_end_is_told(bench, pager):
    bench.add("E")
    end(bench)
    bench.add("E")
    bench.start()
    bench.until_totals(expired=2, delivered=1)
    assert sent(pager) == ["scheduled"]


def test_an_event_whose_start_was_told_gets_its_end(bench, pager):
    bench.add("E")
    bench.start()
    bench.until_totals(delivered=1)
    end(bench)
    bench.until_totals(delivered=2)
    assert sent(pager) == ["scheduled", "canceled"]


def test_a_start_that_surely_did_not_arrive_is_not_told_afterwards(bench, pager):
    pager.script(failing(uncertain=False))
    bench.add("E")
    bench.start(chance=1.0)
    bench.until(lambda: len(pager.tries) == 1)
    bench.stop()
    end(bench)
    bench.start()
    bench.until_totals(expired=2)
    assert sent(pager) == ["scheduled"]


def test_a_start_that_may_have_arrived_is_ended(bench, pager):
    pager.script(failing(uncertain=True))
    bench.add("E")
    bench.start(chance=1.0)
    bench.until(lambda: len(pager.tries) == 1)
    bench.stop()
    end(bench)
    bench.start()
    bench.until_totals(delivered=2)
    assert sent(pager) == ["scheduled", "scheduled", "canceled"]


def test_a_sure_failure_after_an_unsure_one_leaves_it_unsure(bench, pager):
    pager.script(failing(uncertain=True), failing(uncertain=False))
    bench.add("E")
    bench.start()
    bench.until(lambda: len(pager.tries) == 3)
    end(bench)
    bench.until_totals(delivered=2)
    assert sent(pager)[-1] == "canceled"


def test_a_parked_start_may_have_begun_so_its_end_is_told(bench, pager):
    pager.script("reject")
    bench.add("E")
    bench.start()
    bench.until_totals(parked=1)
    end(bench)
    bench.until_totals(parked=1, delivered=1)


def test_an_end_alone_is_told(bench, kit, pager):
    bench.add("E")
    kit.settle(bench.outbox, "s", 1, state="discarded")
    end(bench)
    bench.start()
    bench.until_totals(discarded=1, delivered=1)
    assert sent(pager) == ["canceled"]


def test_a_crash_while_sending_counts_as_begun(bench, pager):
    pager.script("hang")
    bench.add("E")
    bench.start()
    bench.until(lambda: len(pager.tries) == 1)
    # What a crash leaves behind is what is in the outbox now.
    assert mark(bench, "E").is_new is False


def test_an_ordinary_sink_is_told_everything(bench):
    box = bench.sink("plain")
    bench.add("E")
    end(bench)
    bench.start("plain")
    bench.until_totals("plain", delivered=2)
    assert sent(box) == ["scheduled", "canceled"]


def test_marks_do_not_pile_up(bench, pager):
    bench.start()
    for number in range(5):
        bench.add(f"E-{number}")
        bench.until_totals(delivered=2 * number + 1)
        end(bench, f"E-{number}")
        bench.until_totals(delivered=2 * number + 2)
    bench.stop()
    bench.outbox.clean().result()
    assert all(mark(bench, f"E-{number}").is_new for number in range(5))
    assert len(pager.tries) == 10


@pytest.fixture
def incidents(bench):
    return bench.sink(sink_class=Incidents)


def test_of_an_event_that_began_only_the_end_is_sent_once_it_is_known(bench, incidents):
    bench.add("E")
    bench.start(chance=1.0)
    bench.until_totals(delivered=1)
    incidents.script("fail")
    bench.add("E", status="Started")
    bench.until_failed(1)
    bench.stop()
    bench.add("E", status="Started", description="longer")
    end(bench)
    bench.start()
    bench.until_totals(delivered=2, expired=2)
    assert sent(incidents) == ["scheduled", "scheduled", "canceled"]


def test_what_its_sink_needs_beside_the_end_is_sent_before_it(bench, incidents):
    bench.add("E")
    bench.start()
    bench.until_totals(delivered=1)
    bench.stop()
    changed = bench.event("E", description="other")
    bench.outbox_kit.commit(bench.outbox, changed, transition="updated")
    bench.outbox_kit.commit(bench.outbox, changed, transition="started")
    end(bench)
    bench.start()
    bench.until_totals(delivered=3, expired=1)
    assert sent(incidents) == ["scheduled", "updated", "canceled"]


def test_what_comes_back_after_its_end_is_sent_though_an_end_was_pending(bench, incidents):
    bench.add("E")
    bench.start()
    bench.until_totals(delivered=1)
    bench.stop()
    bench.add("E", status="Started")
    end(bench)
    bench.add("E")
    bench.start()
    bench.until_totals(delivered=3, expired=1)
    assert sent(incidents) == ["scheduled", "canceled", "scheduled"]


def test_a_vm_that_was_cut_off_pages_nobody_for_what_is_over(bench, monkeypatch):
    monkeypatch.setenv("ROUTING_KEY", "R0123456789ABCDEFGHIJKLMNOPQRSTU")
    with HttpPeer() as peer:
        url = f"http://{peer.address.authority}/v2/enqueue"
        bench.sink("p", sink_class=WebhookSink, url=url, format="pagerduty", routing_key_env="ROUTING_KEY")
        bench.add("E")
        bench.start("p", chance=1.0)
        bench.until_totals("p", delivered=1)
        peer.say(503)
        bench.add("E", status="Started")
        bench.until_failed(1, "p", reason="status_503")
        end(bench)
        tries = len(peer.requests)
        peer.say(202)
        while bench.totals("p").get("pending"):
            bench.advance(15)
        actions = [json.loads(request.body)["event_action"] for request in peer.requests]
        assert actions[tries:] == ["resolve"]
        assert bench.totals("p") == {"delivered": 2, "expired": 1}
