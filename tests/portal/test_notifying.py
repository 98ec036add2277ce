"""Notifications: one for each reason, none for a decided event, and few for a hostile VM."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
import slow_peer
from fleet_records import fleet_record, vm_id_of
from fold_kit import add
from msgspec.structs import replace
from slow_peer import SlowPeer
from webhook_receiver import ORIGIN, SOON, SenderKit, WebhookReceiver

from bridge.clock import format_time
from bridge.events.record import Approval, Transition
from bridge.portal.fleet import key_of_event_id
from bridge.portal.notify_settings import Kind
from bridge.portal.notifying import NotificationSender
from bridge.portal.schema import notifications
from bridge.portal.store.agents import StoredAgent
from bridge.portal.store.decisions import NewDecision, insert_decisions
from bridge.portal.store.events import event_of
from bridge.portal.store.notifications import delete_notifications
from bridge.portal.store.verdicts import AcceptedVerdict, add_verdicts
from bridge.portal.user_names import local_key
from bridge.portal.verdicts import Choice, Verdict
from bridge.portal.webhook_signatures import is_signed, usable_keys

KEY = key_of_event_id("A")
_SECRET = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"


@pytest.fixture
def kit(store):
    add(store, fleet_record(0), fleet_record(1))
    return SenderKit(store)


@pytest.fixture
def receiver():
    with WebhookReceiver() as found:
        yield found


def _decide(kit, choice, *, required=1):
    now = kit.clock.now()
    verdict = Verdict(
        verdict_id=str(uuid.uuid4()),
        event_key=KEY,
        choice=choice,
        digest=kit.store.read(event_of, KEY, now=format_time(now)).digest,
        person_key=local_key("ann"),
        user_name="ann",
        reason="",
        made_at=format_time(now),
        expires_at=format_time(now + timedelta(hours=1)),
    )
    names = ("vm_0", "vm_1")
    [taken] = kit.store.write(
        add_verdicts, [verdict], at=format_time(now), required=required, sign=lambda *_: (), confirmed={KEY: names}
    )
    assert isinstance(taken, AcceptedVerdict)
    return verdict.verdict_id


def _sign(kit, verdict_id=None):
    decision = NewDecision(
        vm_key=vm_id_of(0),
        event_key=KEY,
        decision="approve",
        jws=str(uuid.uuid4()),
        issued_at_seconds=0.0,
        expires_at_seconds=int(SOON.timestamp()) + 3600,
        verdict_id=verdict_id,
    )
    kit.store.write(insert_decisions, [decision], at=format_time(kit.clock.now()))
    return decision


def _refuse(kit, decision, sequence=2):
    approval = Approval(source="portal", result="refused", reason="no", jws_sha256=(decision.jws_sha256,))
    refused = fleet_record(0, sequence=sequence, transition=Transition.APPROVAL_REFUSED, seconds=sequence)
    add(kit.store, replace(refused, approval=approval))


def _poll(kit, vm):
    kit.agents.begins(vm_id_of(vm), "")
    kit.agents.ends(vm_id_of(vm))


def _run(kit, sender, *, rounds=3):
    """Run *sender* several times, with intervals that allow retries and expire claims."""
    for _ in range(rounds):
        kit.agents.sweep()
        sender.run_once()
        kit.clock.advance(31)


def test_undecided_event_causes_one_signed_notification_shortly_before_not_before(kit, receiver, tmp_path):
    (tmp_path / "secret").write_text(_SECRET, encoding="utf-8")
    with closing(kit.sender(receiver.url, secret_file=str(tmp_path / "secret"), minutes=4)) as sender:
        sender.run_once()
        assert receiver.received.empty()  # five minutes before NotBefore
        kit.clock.advance(61)
        _run(kit, sender)
    headers, body = receiver.received.get_nowait()
    assert receiver.received.empty()
    assert is_signed(headers, body, usable_keys([_SECRET]), SOON.timestamp() + 61)
    assert f'"link":"{ORIGIN}/events/{KEY}"'.encode() in body
    assert b"Undecided event: Freeze of vm_0, vm_1" in body
    assert b"Azure starts the event on 2026-11-20 at 11:15:00 UTC." in body
    assert kit.counted("sent") == 1


def test_a_changed_event_that_is_undecided_causes_another_notification(kit, receiver):
    with closing(kit.sender(receiver.url)) as sender:
        _run(kit, sender)
        changed = [fleet_record(vm, sequence=2, seconds=1, duration_seconds=9) for vm in (0, 1)]
        add(kit.store, *changed)
        _run(kit, sender)
    assert receiver.types() == ["undecided", "undecided"]


def test_a_missing_second_approver_causes_one_notification(kit, receiver):
    _decide(kit, Choice.APPROVE, required=2)
    with closing(kit.sender(receiver.url)) as sender:
        _run(kit, sender)
    assert receiver.types() == ["second_approver"]


def test_each_refused_decision_causes_one_notification(kit, receiver):
    with closing(kit.sender(receiver.url)) as sender:
        first = _sign(kit, _decide(kit, Choice.APPROVE))
        _refuse(kit, first)
        _refuse(kit, first, 3)
        _run(kit, sender)
        assert receiver.types() == ["refused"]
        second = _sign(kit, _decide(kit, Choice.APPROVE))
        _run(kit, sender)
        _refuse(kit, second, 4)
        _run(kit, sender)
    assert receiver.types() == ["refused"]


def test_agent_disconnected_for_a_minute_causes_one_notification(kit, receiver):
    with closing(kit.sender(receiver.url, Kind.AGENT_DISCONNECTED)) as sender:
        for _ in range(3):  # as after a restart of the portal, when the agents reconnect
            for vm in (0, 1):
                _poll(kit, vm)
            sender.run_once()
            kit.clock.advance(50)
            kit.agents.sweep()
            sender.run_once()
        assert receiver.received.empty()
        kit.agents.begins(vm_id_of(0), "")
        _run(kit, sender, rounds=5)
    [body] = receiver.bodies()
    assert body["type"] == "event.agent_disconnected"
    assert "Disconnected: the agent of vm_1." in body["data"]["text"]


def test_agent_that_reconnects_after_a_portal_restart_causes_no_notification(kit, receiver):
    at = format_time(SOON)
    known = [
        StoredAgent(
            vm_key=vm_id_of(vm),
            process="stopped",
            is_connected=True,
            is_attested=False,
            received_index=0,
            report="{}",
            polled_at=at,
        )
        for vm in (0, 1)
    ]
    kit.agents.receive(["stopped"], known)
    with closing(kit.sender(receiver.url, Kind.AGENT_DISCONNECTED)) as sender:
        _run(kit, sender)
        kit.agents.begins(vm_id_of(0), "")
        assert receiver.received.empty()
        _run(kit, sender)
    [body] = receiver.bodies()
    assert "Disconnected: the agent of vm_1." in body["data"]["text"]


def test_a_started_event_causes_no_notification_about_its_agents(kit, receiver):
    _poll(kit, 0)
    add(kit.store, *[fleet_record(vm, sequence=2, transition=Transition.STARTED, seconds=1) for vm in (0, 1)])
    with closing(kit.sender(receiver.url)) as sender:
        _run(kit, sender, rounds=5)
    assert receiver.received.empty()


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("choice", [Choice.HOLD, Choice.APPROVE, None])
def test_event_decided_in_the_meantime_causes_no_notification(kit, choice, is_started):
    with WebhookReceiver(503, 503) as receiver, closing(kit.sender(receiver.url)) as sender:
        sender.run_once()
        assert receiver.types() == ["undecided"]
        if choice is not None:
            _decide(kit, choice)
        elif is_started:
            ends = [fleet_record(vm, sequence=2, transition=Transition.COMPLETED, seconds=1) for vm in (0, 1)]
            add(kit.store, *ends)
        else:
            _sign(kit)  # a decision that was signed elsewhere
        kit.clock.advance(60)
        _run(kit, sender)
        assert receiver.received.empty()
    assert kit.counted("failed") == 1


def test_reconnected_agent_causes_no_notification(kit):
    _poll(kit, 0)
    with WebhookReceiver(503) as receiver, closing(kit.sender(receiver.url, Kind.AGENT_DISCONNECTED)) as sender:
        _run(kit, sender, rounds=4)
        assert receiver.types() == ["agent_disconnected"]
        _poll(kit, 0)
        _run(kit, sender)
        assert receiver.received.empty()


def test_failed_notification_is_retried_with_the_same_id_without_redirects(kit):
    with WebhookReceiver(500, 302, 429) as receiver, closing(kit.sender(receiver.url)) as sender:
        for _ in range(3):
            sender.run_once()
            sender.run_once()  # before the backoff is over
            kit.clock.advance(16)
        _run(kit, sender)
        found = [receiver.received.get_nowait() for _ in range(4)]
        assert receiver.received.empty()
    assert len({headers["webhook-id"] for headers, _ in found}) == 1
    assert (kit.counted("failed"), kit.counted("sent")) == (3, 1)


def test_two_processes_send_one_notification(kit, receiver, database):
    senders = [kit.sender(receiver.url, store=database.store()) for _ in range(4)]
    for number in range(5):
        add(kit.store, *[fleet_record(vm, event_id=f"E-{number}", sequence=number + 2) for vm in (0, 1)])
        with ThreadPoolExecutor(len(senders)) as pool:
            list(pool.map(NotificationSender.run_once, senders))
    for sender in senders:
        _run(kit, sender)
        sender.close()
    assert receiver.types() == ["undecided"] * 6


@pytest.mark.parametrize("behaviour", [slow_peer.silent, slow_peer.drip_header, slow_peer.drip_body])
def test_slow_webhook_delays_no_other_webhook_and_a_stop_ends_its_request(kit, receiver, behaviour):
    peer = SlowPeer(behaviour)
    slow = kit.sender(peer.url)
    thread = threading.Thread(target=slow.run_once)
    thread.start()
    while not peer.accepted:
        thread.join(0.01)
    with closing(kit.sender(receiver.url, name="other")) as sender:
        sender.run_once()
    assert receiver.types() == ["undecided"]
    slow.close()
    thread.join(5)
    assert not thread.is_alive()
    peer.close()


@pytest.mark.parametrize("has_ca", [True, False])
def test_no_secret_is_logged_if_the_connection_fails(kit, tmp_path, caplog, has_ca):
    (tmp_path / "ca.pem").write_text("no certificate", encoding="utf-8")
    (tmp_path / "url").write_text("https://127.0.0.1:9/T0PSECRET/hook", encoding="utf-8")
    with closing(
        kit.sender("", url_file=str(tmp_path / "url"), ca_file=str(tmp_path / "ca.pem") if has_ca else None)
    ) as sender:
        _run(kit, sender)
    assert kit.counted("failed") == 3
    [line] = caplog.messages
    assert "The portal retries a notification to 'ops', because the request failed:" in line
    assert "T0PSECRET" not in line


def test_an_endless_response_counts_by_its_status(kit):
    def endless(peer, connection, _):
        peer.read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while not peer.stop.is_set():
            connection.sendall(b"x" * 65_536)

    peer = SlowPeer(endless)
    with closing(kit.sender(peer.url)) as sender:
        _run(kit, sender)
    assert (peer.accepted, kit.counted("sent")) == (1, 1)
    peer.close()


def test_many_events_of_one_vm_cause_one_notification_and_hide_no_other_event(kit, receiver):
    invented = [
        fleet_record(2, event_id=f"X-{number}", sequence=number + 1, resources=("vm_0", "vm_1", "vm_2"))
        for number in range(255)
    ]
    with closing(kit.sender(receiver.url)) as sender:
        add(kit.store, *invented)
        _run(kit, sender)
        bodies = [each["data"] for each in receiver.bodies()]
    assert sorted(each["event_id"][0] for each in bodies) == ["A", "X"]
    [alone] = [each["text"] for each in bodies if each["event_id"] != "A"]
    assert "Only one VM reports this event and 254 other open events." in alone


def test_vm_outside_resources_prevents_no_notification(kit, receiver):
    kinds = (Transition.STARTED, Transition.APPROVED, Transition.COMPLETED)
    add(kit.store, *[fleet_record(2, sequence=n, transition=kind, seconds=n) for n, kind in enumerate(kinds, start=1)])
    with closing(kit.sender(receiver.url)) as sender:
        _run(kit, sender)
    assert receiver.types() == ["undecided"]


def test_constantly_changing_event_causes_two_notifications_per_hour(kit, receiver):
    with closing(kit.sender(receiver.url)) as sender:
        for number in range(10):
            changed = fleet_record(2, event_id="X", sequence=number + 1, seconds=number, duration_seconds=number)
            add(kit.store, replace(changed, active_event_ids=("X",)))
            sender.run_once()
            kit.clock.advance(1)
    assert [each["data"]["event_id"] for each in receiver.bodies()].count("X") == 2


def test_notifications_are_deleted_a_day_after_their_event_is_over(kit, receiver):
    def left():
        return len(kit.store.read(lambda connection: connection.execute(notifications.select()).all()))

    tomorrow = format_time(SOON + timedelta(days=1))
    with closing(kit.sender(receiver.url)) as sender:
        sender.run_once()
        kit.store.write(delete_notifications, before=tomorrow)
        assert left() == 1
        ends = [fleet_record(vm, sequence=2, transition=Transition.COMPLETED, seconds=1) for vm in (0, 1)]
        add(kit.store, *ends)
        kit.store.write(delete_notifications, before=format_time(SOON))
        assert left() == 1
        kit.store.write(delete_notifications, before=tomorrow)
        assert left() == 0
