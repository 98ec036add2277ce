"""The client of the metadata service over real HTTP: requests, and the meaning of each response."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bridge.errors import DocumentInvalid, ImdsStatus, ImdsUnreachable
from bridge.events.event import SERVICE_OFF_AFTER_SECONDS, Document
from bridge.imds.client import ImdsClient
from bridge.testing.peers import nobody

EMPTY = b'{"DocumentIncarnation": 1, "Events": []}'
ONE = b'{"DocumentIncarnation": 2, "Events": [{"EventId": "E-1", "EventStatus": "Scheduled"}]}'


class Service(ThreadingHTTPServer):
    """Responds with each of `answers` in turn, and repeats the last. An answer is (status, headers, body)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = [(200, {}, EMPTY)]
        self.received = []
        self.silent = threading.Event()
        self.release = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.received.append((self.command, self.path, dict(self.headers), body))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer == "silence":
            self.server.silent.set()
            self.server.release.wait(20)
            self.close_connection = True
            return
        status, headers, body = answer
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    with Service() as server:
        yield server
        server.release.set()
        server.shutdown()
        server.thread.join()


@pytest.fixture
def connect(service):
    clients = []

    def begin(**changes):
        settings = {
            "endpoint": service.url,
            "api_version": "2020-07-01",
            "timeout_seconds": 5.0,
            "first_timeout_seconds": 20.0,
        }
        clients.append(ImdsClient(**{**settings, **changes}))
        return clients[-1]

    yield begin
    for client in clients:
        client.close()


@pytest.mark.parametrize("version", ["2017-03-01", "2020-07-01"])
def test_poll_sends_the_required_request(service, connect, version):
    connect(api_version=version).scheduled_events()
    ((method, path, headers, body),) = service.received
    assert (method, path, body) == ("GET", f"/metadata/scheduledevents?api-version={version}", b"")
    assert headers["Metadata"] == "true"
    assert headers["Accept-Encoding"] == "identity"
    assert "x-forwarded-for" not in {name.lower() for name in headers}


def test_identical_bytes_return_the_same_document_object(service, connect):
    service.answers = [(200, {}, body) for body in (EMPTY, EMPTY, ONE, ONE, EMPTY)]
    client = connect()
    first, again, one, one_again, last = (client.scheduled_events() for _ in range(5))
    assert first is again
    assert one is one_again
    assert (first.incarnation, one.events[0].event_id, last.events) == (1, "E-1", ())


def test_failure_keeps_the_last_good_document(service, connect):
    service.answers = [(200, {}, ONE), (500, {}, b"busy"), (200, {}, b""), (200, {}, ONE)]
    client = connect()
    first = client.scheduled_events()
    with pytest.raises(ImdsStatus):
        client.scheduled_events()
    with pytest.raises(DocumentInvalid):
        client.scheduled_events()
    assert client.scheduled_events() is first


def test_final_get_returns_the_polled_document_only_for_identical_bytes(service, connect):
    service.answers = [(200, {}, body) for body in (ONE, ONE, EMPTY, ONE)]
    client = connect()
    polled = client.scheduled_events()
    assert client.scheduled_events_again() is polled
    assert client.scheduled_events_again().events == ()
    assert client.scheduled_events() is polled


@pytest.mark.parametrize("status", [404, 410, 429, 500, 204])
def test_status_other_than_200_is_an_error_with_the_status(service, connect, status):
    service.answers = [(status, {}, b"" if status == 204 else b'{"error": "why"}')]
    with pytest.raises(ImdsStatus, match=str(status)) as caught:
        connect().scheduled_events()
    assert caught.value.status == status
    assert caught.value.retry_after_seconds is None


def test_the_error_of_an_unknown_api_version_lists_the_supported_versions(service, connect):
    body = json.dumps({"error": "Bad request.", "newest-versions": ["2021-12-13", "2021-11-15"]}).encode()
    service.answers = [(400, {}, body)]
    with pytest.raises(ImdsStatus) as caught:
        connect(api_version="2099-01-01").scheduled_events()
    for part in ("2099-01-01", "2021-12-13", "2021-11-15"):
        assert part in str(caught.value)


@pytest.mark.parametrize("body", [b'{"newest-versions": 5}', b"[" * 100_000, b"\xff" * 5000])
def test_other_body_of_a_400_is_truncated(service, connect, body):
    service.answers = [(400, {}, body)]
    with pytest.raises(ImdsStatus, match="400") as caught:
        connect().scheduled_events()
    assert len(str(caught.value)) < 500


def test_document_is_accepted_up_to_four_mebibytes(service, connect):
    blanks = 4 * 1024 * 1024 - len(ONE)
    service.answers = [(200, {}, ONE + b" " * blanks), (200, {}, ONE + b" " * (blanks + 1))]
    client = connect()
    assert [event.event_id for event in client.scheduled_events().events] == ["E-1"]
    with pytest.raises(DocumentInvalid, match=r"larger than 4 MiB"):
        client.scheduled_events()


def test_compressed_document_is_rejected(service, connect):
    service.answers = [(200, {"Content-Encoding": "gzip"}, EMPTY)]
    with pytest.raises(DocumentInvalid, match="Content-Encoding"):
        connect().scheduled_events()


def test_silent_service_is_unreachable_and_the_next_poll_succeeds(service, connect):
    service.answers = [(200, {}, EMPTY), "silence", (200, {}, ONE)]
    client = connect(timeout_seconds=1.5)
    client.scheduled_events()
    with pytest.raises(ImdsUnreachable, match=r"1\.5 s"):
        client.scheduled_events()
    assert client.scheduled_events().incarnation == 2


def test_first_timeout_applies_before_a_response_and_after_a_day_without_one(service, connect):
    now = [1_700_000_000.0]
    service.answers = ["silence", "silence", (200, {}, EMPTY), "silence", "silence"]
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
    service.answers = [(200, {}, b'{"name": "web_0", "vmId": "V-1", "vmScaleSetName": "web", "zone": ""}')]
    identity = connect().identity()
    assert (identity.name, identity.vm_id, identity.scale_set, identity.zone) == ("web_0", "V-1", "web", None)
    assert service.received[0][1] == "/metadata/instance/compute?api-version=2021-02-01&format=json"
    assert service.received[0][2]["Metadata"] == "true"


def test_slow_identity_request_does_not_delay_a_poll(service, connect):
    service.answers = ["silence", (200, {}, ONE)]
    client = connect(timeout_seconds=20)
    failed = threading.Event()

    def ask():
        with pytest.raises(ImdsUnreachable):
            client.identity()
        failed.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert service.silent.wait(10)
    assert client.scheduled_events().incarnation == 2
    assert not failed.is_set()
    client.close()
    thread.join(10)
    assert failed.is_set()


@pytest.mark.parametrize("version", ["2017-03-01", "2017-11-01", "2019-01-01", "2020-07-01"])
def test_approval_includes_the_incarnation_only_for_versions_of_2017(service, connect, version):
    service.answers = [(200, {}, b"")]
    document = Document(api_version=version, incarnation=7)
    assert connect(api_version=version).start_requests(["E-1", "E-2"], document=document) == 200
    ((method, path, headers, body),) = service.received
    assert (method, path) == ("POST", f"/metadata/scheduledevents?api-version={version}")
    assert headers["Metadata"] == "true"
    expected = {"StartRequests": [{"EventId": "E-1"}, {"EventId": "E-2"}]}
    if version.startswith("2017"):
        expected["DocumentIncarnation"] = 7
    assert json.loads(body) == expected


@pytest.mark.parametrize("status", [400, 429, 500, 302])
def test_rejected_approval_raises_the_status(service, connect, status):
    service.answers = [(status, {"Location": "/x"}, b"no")]
    with pytest.raises(ImdsStatus) as caught:
        connect().start_requests(["E-1"], document=Document())
    assert caught.value.status == status
    assert len(service.received) == 1


def test_attested_document_is_requested_with_its_nonce(service, connect):
    service.answers = [(200, {}, b'{"encoding": "pkcs7", "signature": "TUlJ"}')]
    assert connect().attested_document("abc-1 &x") == "TUlJ"
    ((method, path, headers, _),) = service.received
    assert (method, path) == ("GET", "/metadata/attested/document?api-version=2020-09-01&nonce=abc-1%20%26x")
    assert headers["Metadata"] == "true"


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
    service.answers = [(200, {}, body)]
    with pytest.raises(DocumentInvalid, match="attested document"):
        connect().attested_document("abc")


@pytest.mark.parametrize("answer", [(404, {}, b"no"), (302, {"Location": "/"}, b""), None])
def test_attested_document_error_is_the_same_for_any_nonce(service, connect, answer):
    service.answers = [answer or (200, {}, b"")]
    said = []
    with nobody() as address:
        client = connect(**({} if answer else {"endpoint": f"http://{address.authority}"}))
        for nonce in ("first", "second"):
            with pytest.raises((ImdsStatus, ImdsUnreachable)) as caught:
                client.attested_document(nonce)
            said.append(str(caught.value))
    assert said[0] == said[1]
    assert "/metadata/attested/document" in said[0]


# The api-version "auto".

PREVIEW, STABLE = "2024-07-09", "2020-07-01"
REFUSED = (400, {}, b'{"error": "Bad request. api-version is invalid."}')
DAY = 86_400.0


class Versions:
    """An automatic client with a manual clock, and the versions of its requests."""

    def __init__(self, service, connect):
        self.service, self.now = service, 1_800_000_000.0
        service.answers = [(200, {}, ONE)]
        self.client = connect(api_version="auto", clock=lambda: self.now)

    def poll(self, *answers):
        self.service.received.clear()
        self.service.answers = [*answers, (200, {}, ONE)]
        shown = self.client.scheduled_events().api_version
        return [path.rpartition("=")[2] for _, path, _, _ in self.service.received], shown


@pytest.fixture
def versions(service, connect):
    return Versions(service, connect)


def test_preview_version_is_used_if_supported(versions):
    assert versions.poll() == ([PREVIEW], PREVIEW)
    assert versions.poll() == ([PREVIEW], PREVIEW)


@pytest.mark.parametrize("status", [400, 404])
def test_two_rejections_and_a_good_response_select_the_stable_version(versions, status):
    refused = (status, {}, b"")
    assert versions.poll(refused, refused) == ([PREVIEW, PREVIEW, STABLE], STABLE)
    assert versions.poll() == ([STABLE], STABLE)


def test_one_rejection_keeps_the_version(versions):
    assert versions.poll(REFUSED) == ([PREVIEW, PREVIEW], PREVIEW)
    assert versions.poll() == ([PREVIEW], PREVIEW)


def test_withdrawn_version_is_replaced_within_one_poll(versions):
    assert versions.poll() == ([PREVIEW], PREVIEW)
    assert versions.poll(REFUSED, REFUSED) == ([PREVIEW, PREVIEW, STABLE], STABLE)


@pytest.mark.parametrize("answers", [[(500, {}, b"")], [REFUSED, (500, {}, b"")], [REFUSED, REFUSED, (500, {}, b"")]])
def test_preview_version_remains_without_two_rejections_and_a_response(versions, answers):
    with pytest.raises(ImdsStatus):
        versions.poll(*answers)
    assert versions.poll() == ([PREVIEW], PREVIEW)


@pytest.mark.parametrize("answer", [REFUSED, (500, {}, b""), (200, {}, b"no document")])
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
    service.received.clear()
    document = versions.client.scheduled_events_again()
    versions.client.start_requests(["E-1"], document=document)
    assert {path.rpartition("=")[2] for _, path, _, _ in service.received} == {STABLE}
