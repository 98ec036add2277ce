"""The client of the metadata service over real HTTP: requests, and the meaning of each response."""

import json
import threading
import time

import pytest
from closing import closing_each
from msgspec.structs import replace
from waiting import until

from bridge.config.settings import ImdsSettings
from bridge.errors import DocumentInvalid, ImdsStatus, ImdsUnreachable
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document
from bridge.imds.client import ImdsClient
from bridge.testing.http_peer import HttpPeer
from bridge.testing.peers import closed_port
from bridge.testing.simulator.imds_api import Answer

EMPTY = b'{"DocumentIncarnation": 1, "Events": []}'
ONE = b'{"DocumentIncarnation": 2, "Events": [{"EventId": "E-1", "EventStatus": "Scheduled"}]}'


@pytest.fixture
def service():
    with HttpPeer() as peer:
        peer.say(200, body=EMPTY)
        yield peer


def answer_in_turn(service, *answers):
    """Respond with each of *answers* in turn, and repeat the last. None is silence."""
    left = list(answers)
    service.reply(lambda _request: left.pop(0) if len(left) > 1 else left[0])


def ok(body):
    return Answer(body=body)


@pytest.fixture
def connect(service):
    def client(*, clock=time.time, **changes):
        settings = ImdsSettings(
            endpoint=f"http://{service.address.authority}", api_version="2020-07-01", first_timeout_seconds=20.0
        )
        return ImdsClient(replace(settings, **changes), clock=clock)

    with closing_each(client) as connect:
        yield connect


@pytest.mark.parametrize("version", ["2017-03-01", "2020-07-01"])
def test_poll_sends_the_required_request(service, connect, version):
    connect(api_version=version).scheduled_events()
    (asked,) = service.requests
    assert (asked.method, asked.path, asked.body) == ("GET", "/metadata/scheduledevents", b"")
    assert asked.query == {"api-version": version}
    assert asked.headers["metadata"] == "true"
    assert asked.headers["accept-encoding"] == "identity"
    assert "x-forwarded-for" not in asked.headers


def test_identical_bytes_return_the_same_document_object(service, connect):
    answer_in_turn(service, *map(ok, (EMPTY, EMPTY, ONE, ONE, EMPTY)))
    client = connect()
    first, again, one, one_again, last = (client.scheduled_events() for _ in range(5))
    assert first is again
    assert one is one_again
    assert (first.incarnation, one.events[0].event_id, last.events) == (1, "E-1", ())


def test_failure_keeps_the_last_good_document(service, connect):
    answer_in_turn(service, ok(ONE), Answer(status=500, body=b"busy"), ok(b""), ok(ONE))
    client = connect()
    first = client.scheduled_events()
    with pytest.raises(ImdsStatus):
        client.scheduled_events()
    with pytest.raises(DocumentInvalid):
        client.scheduled_events()
    assert client.scheduled_events() is first


def test_final_get_returns_the_polled_document_only_for_identical_bytes(service, connect):
    answer_in_turn(service, *map(ok, (ONE, ONE, EMPTY, ONE)))
    client = connect()
    polled = client.scheduled_events()
    assert client.scheduled_events_again() is polled
    assert client.scheduled_events_again().events == ()
    assert client.scheduled_events() is polled


@pytest.mark.parametrize("status", [404, 410, 429, 500, 204])
def test_status_other_than_200_is_an_error_with_the_status(service, connect, status):
    answer_in_turn(service, Answer(status=status, body=b"" if status == 204 else b'{"error": "why"}'))
    with pytest.raises(ImdsStatus, match=str(status)) as caught:
        connect().scheduled_events()
    assert caught.value.status == status
    assert caught.value.retry_after_seconds is None


def test_the_error_of_an_unknown_api_version_lists_the_supported_versions(service, connect):
    body = json.dumps({"error": "Bad request.", "newest-versions": ["2021-12-13", "2021-11-15"]}).encode()
    answer_in_turn(service, Answer(status=400, body=body))
    with pytest.raises(ImdsStatus) as caught:
        connect(api_version="2099-01-01").scheduled_events()
    for part in ("2099-01-01", "2021-12-13", "2021-11-15"):
        assert part in str(caught.value)


@pytest.mark.parametrize("body", [b'{"newest-versions": 5}', b"[" * 100_000, b"\xff" * 5000])
def test_other_body_of_a_400_is_truncated(service, connect, body):
    answer_in_turn(service, Answer(status=400, body=body))
    with pytest.raises(ImdsStatus, match="400") as caught:
        connect().scheduled_events()
    assert len(str(caught.value)) < 500


def test_document_is_accepted_up_to_four_mebibytes(service, connect):
    blanks = 4 * 1024 * 1024 - len(ONE)
    answer_in_turn(service, ok(ONE + b" " * blanks), ok(ONE + b" " * (blanks + 1)))
    client = connect()
    assert [event.event_id for event in client.scheduled_events().events] == ["E-1"]
    with pytest.raises(DocumentInvalid, match=r"larger than 4 MiB"):
        client.scheduled_events()


def test_compressed_document_is_rejected(service, connect):
    answer_in_turn(service, Answer(status=200, headers={"Content-Encoding": "gzip"}, body=EMPTY))
    with pytest.raises(DocumentInvalid, match="Content-Encoding"):
        connect().scheduled_events()


def test_silent_service_is_unreachable_and_the_next_poll_succeeds(service, connect):
    answer_in_turn(service, ok(EMPTY), None, ok(ONE))
    client = connect(timeout_seconds=1.5)
    client.scheduled_events()
    with pytest.raises(ImdsUnreachable, match=r"1\.5 s"):
        client.scheduled_events()
    assert client.scheduled_events().incarnation == 2


def test_first_timeout_applies_before_a_response_and_after_a_day_without_one(service, connect):
    now = [1_700_000_000.0]
    answer_in_turn(service, None, None, ok(EMPTY), None, None)
    client = connect(timeout_seconds=0.2, first_timeout_seconds=1.5, clock=lambda: now[0])
    for _ in range(2):
        with pytest.raises(ImdsUnreachable, match=r"1\.5 s"):
            client.scheduled_events()
    client.scheduled_events()
    with pytest.raises(ImdsUnreachable, match=r"0\.2 s"):
        client.scheduled_events()
    now[0] += SERVICE_OFF_AFTER_SECONDS
    with pytest.raises(ImdsUnreachable, match=r"1\.5 s"):
        client.scheduled_events()


def test_identity_comes_from_the_instance_document(service, connect):
    answer_in_turn(service, ok(b'{"name": "web_0", "vmId": "V-1", "vmScaleSetName": "web", "zone": ""}'))
    identity = connect().identity()
    assert (identity.name, identity.vm_id, identity.scale_set, identity.zone) == ("web_0", "V-1", "web", None)
    (asked,) = service.requests
    assert asked.path == "/metadata/instance/compute"
    assert asked.query == {"api-version": "2021-02-01", "format": "json"}
    assert asked.headers["metadata"] == "true"


def test_slow_identity_request_does_not_delay_a_poll(service, connect):
    answer_in_turn(service, None, ok(ONE))
    client = connect(timeout_seconds=20)
    failed = threading.Event()

    def ask():
        with pytest.raises(ImdsUnreachable):
            client.identity()
        failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert until(lambda: service.requests)
    assert client.scheduled_events().incarnation == 2
    assert not failed.is_set()
    client.close()
    thread.join(10)
    assert failed.is_set()


@pytest.mark.parametrize("version", ["2017-03-01", "2017-11-01", "2019-01-01", "2020-07-01"])
def test_approval_includes_the_incarnation_only_for_versions_of_2017(service, connect, version):
    answer_in_turn(service, ok(b""))
    document = Document(api_version=version, incarnation=7)
    assert connect(api_version=version).start_requests(["E-1", "E-2"], document=document) == 200
    (asked,) = service.requests
    assert (asked.method, asked.path) == ("POST", "/metadata/scheduledevents")
    assert asked.query == {"api-version": version}
    assert asked.headers["metadata"] == "true"
    expected = {"StartRequests": [{"EventId": "E-1"}, {"EventId": "E-2"}]}
    if version.startswith("2017"):
        expected["DocumentIncarnation"] = 7
    assert json.loads(asked.body) == expected


@pytest.mark.parametrize("status", [400, 429, 500, 302])
def test_rejected_approval_raises_the_status(service, connect, status):
    answer_in_turn(service, Answer(status=status, headers={"Location": "/x"}, body=b"no"))
    with pytest.raises(ImdsStatus) as caught:
        connect().start_requests(["E-1"], document=Document())
    assert caught.value.status == status
    assert len(service.requests) == 1


def test_attested_document_is_requested_with_its_nonce(service, connect):
    answer_in_turn(service, ok(b'{"encoding": "pkcs7", "signature": "TUlJ"}'))
    assert connect().attested_document("abc-1 &x") == "TUlJ"
    (asked,) = service.requests
    assert (asked.method, asked.path) == ("GET", "/metadata/attested/document")
    assert asked.query == {"api-version": "2020-09-01", "nonce": "abc-1 &x"}
    assert asked.headers["metadata"] == "true"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"signature": ""}',
        b'{"signature": "\xc3\xa4"}',
        b'{"signature": "%s"}' % (b"A" * (48 * 1024 + 1)),
    ],
)
def test_response_without_an_attested_document_is_reported(service, connect, body):
    answer_in_turn(service, ok(body))
    with pytest.raises(DocumentInvalid, match="attested document"):
        connect().attested_document("abc")


@pytest.mark.parametrize("answer", [Answer(status=404), Answer(status=302, headers={"Location": "/"}), None])
def test_attested_document_error_is_the_same_for_any_nonce(service, connect, answer):
    answer_in_turn(service, answer or ok(b""))
    said = []
    with closed_port() as address:
        client = connect(**({} if answer else {"endpoint": f"http://{address.authority}"}))
        for nonce in ("first", "second"):
            with pytest.raises((ImdsStatus, ImdsUnreachable)) as caught:
                client.attested_document(nonce)
            said.append(str(caught.value))
    assert said[0] == said[1]
    assert "/metadata/attested/document" in said[0]


# The api-version "auto".

PREVIEW, STABLE = "2024-07-09", "2020-07-01"
REFUSED = Answer(status=400, body=b'{"error": "Bad request. api-version is invalid."}')
DAY = 86_400.0


class Versions:
    """An automatic client with a manual clock, and the versions of its requests."""

    def __init__(self, service, connect):
        self.service, self.now = service, 1_800_000_000.0
        self.client = connect(api_version="auto", clock=lambda: self.now)

    def poll(self, *answers):
        before = len(self.service.requests)
        answer_in_turn(self.service, *answers, ok(ONE))
        shown = self.client.scheduled_events().api_version
        return [request.query["api-version"] for request in self.service.requests[before:]], shown


@pytest.fixture
def versions(service, connect):
    return Versions(service, connect)


def test_preview_version_is_used_if_supported(versions):
    assert versions.poll() == ([PREVIEW], PREVIEW)
    assert versions.poll() == ([PREVIEW], PREVIEW)


@pytest.mark.parametrize("status", [400, 404])
def test_two_rejections_and_a_good_response_select_the_stable_version(versions, status):
    refused = Answer(status=status)
    assert versions.poll(refused, refused) == ([PREVIEW, PREVIEW, STABLE], STABLE)
    assert versions.poll() == ([STABLE], STABLE)


def test_one_rejection_keeps_the_version(versions):
    assert versions.poll(REFUSED) == ([PREVIEW, PREVIEW], PREVIEW)
    assert versions.poll() == ([PREVIEW], PREVIEW)


def test_withdrawn_version_is_replaced_within_one_poll(versions):
    assert versions.poll() == ([PREVIEW], PREVIEW)
    assert versions.poll(REFUSED, REFUSED) == ([PREVIEW, PREVIEW, STABLE], STABLE)


@pytest.mark.parametrize("rejections", [0, 1, 2])
def test_preview_version_remains_without_two_rejections_and_a_response(versions, rejections):
    with pytest.raises(ImdsStatus):
        versions.poll(*[REFUSED] * rejections, Answer(status=500))
    assert versions.poll() == ([PREVIEW], PREVIEW)


@pytest.mark.parametrize("answer", [REFUSED, Answer(status=500), ok(b"no document")])
def test_the_daily_attempt_is_discarded_unless_it_returns_a_document(versions, answer):
    versions.poll(REFUSED, REFUSED)
    versions.now += DAY - 1
    assert versions.poll() == ([STABLE], STABLE)
    versions.now += 1
    assert versions.poll(answer) == ([PREVIEW, STABLE], STABLE)
    assert versions.poll() == ([STABLE], STABLE)
    versions.now += DAY
    assert versions.poll() == ([PREVIEW], PREVIEW)


def test_approval_uses_the_version_of_its_final_get(versions, service):
    versions.poll(REFUSED, REFUSED)
    document = versions.client.scheduled_events_again()
    versions.client.start_requests(["E-1"], document=document)
    assert [request.query["api-version"] for request in service.requests[-2:]] == [STABLE, STABLE]
