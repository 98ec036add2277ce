"""The https transport with an endpoint that checks the requirements of Microsoft's page "Send event"."""

import http.server
import json
import ssl
import threading
from urllib.parse import parse_qs, urlsplit

import pytest
from connect_proxy import ConnectProxy
from eventhubs_emulator.claims import jwt_refusal, sas_refusal

from bridge.sink import DeliveryFailed

pytestmark = pytest.mark.interop

HUB = "scheduled-events"
KEY = "c2VjcmV0LWtleS1vZi10aGUtdGVzdHM="
NAMESPACE = "ns.servicebus.windows.net"


class Service(http.server.ThreadingHTTPServer):
    """Event Hubs over HTTPS, with the accepted events and all requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.events = []
        self.requests = []

    def refusal(self, authorization):
        if authorization.startswith("Bearer "):
            return jwt_refusal(authorization.removeprefix("Bearer "))
        return sas_refusal(authorization, f"https://{NAMESPACE}/{HUB}/messages", key_name="send", key=KEY)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def log_message(self, format, *args):  # noqa: A002 - the name in the base class
        """Log nothing."""

    def do_GET(self):
        self.server.requests.append(self.requestline)
        self.answer(401, {}, b"Manage,EventHub claims are required.")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(self.requestline)
        url = urlsplit(self.path)
        if refusal := self.server.refusal(self.headers["Authorization"]):
            self.answer(401, {}, refusal.encode())
        elif url.path != f"/{HUB}/messages" or parse_qs(url.query)["api-version"] != ["2014-01"]:
            self.answer(404, {}, b"No such entity.")
        else:
            self.server.events.append({"headers": dict(self.headers), "body": json.loads(body)})
            self.answer(201, {}, b"")

    def answer(self, status, headers, body):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def service(authority):
    with Service() as server:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(authority.cert_file, authority.key_file)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def sink(service, authority, make_https):
    return make_https(service.server_address[1], authority.ca_file)


@pytest.fixture
def make_https(make_bare_sink):
    def make(port, ca_file, **keys):
        string = f"Endpoint=sb://{NAMESPACE}/;SharedAccessKeyName=send;SharedAccessKey={KEY};EntityPath={HUB}"
        keys = {"string": string, "endpoint": f"127.0.0.1:{port}", "ca_file": ca_file, **keys}
        return make_bare_sink(transport="https", **keys)

    return make


def test_record_is_posted_as_microsoft_documents(sink, service, make_record):
    sink.send([make_record(sequence=7)])
    (event,) = service.events
    assert event["body"]["data"]["sequence"] == 7
    headers = {name.lower(): value for name, value in event["headers"].items()}
    assert headers["content-type"] == "application/cloudevents+json"
    assert json.loads(headers["brokerproperties"]) == {"PartitionKey": "A-1"}
    assert headers["host"] == NAMESPACE
    assert headers["authorization"].startswith("SharedAccessSignature sr=")
    assert (headers["transition"], headers["event_type"], headers["vm_name"]) == ("scheduled", "Freeze", "vm-1")


@pytest.mark.parametrize("client_id", [None, "11111111-2222-3333-4444-555555555555"])
def test_managed_identity_sends_a_bearer_token(  # noqa: PLR0917 - fixtures
    make_https, service, authority, make_record, identity_endpoint, client_id
):
    keys = {"fully_qualified_namespace": NAMESPACE, "eventhub": HUB, "client_id": client_id}
    sink = make_https(service.server_address[1], authority.ca_file, credential="managed_identity", **keys)
    sink.send([make_record()])
    token = service.events[0]["headers"]["Authorization"].removeprefix("Bearer ")
    assert (identity_endpoint(token)["appid"] == client_id) is (client_id is not None)


def test_record_is_sent_only_through_the_proxy(make_https, service, authority, make_record, tmp_path):
    port = service.server_address[1]
    with ConnectProxy(password="agent:right") as proxy:
        (tmp_path / "proxy").write_text(f"http://agent:hunter2-4711@127.0.0.1:{proxy.port}\n")
        sink = make_https(port, authority.ca_file, proxy_file=str(tmp_path / "proxy"))
        with pytest.raises(DeliveryFailed, match="proxy") as caught:
            sink.send([make_record()])
        assert (caught.value.needs_attention, caught.value.reason) == (True, "proxy")
        assert "hunter2" not in str(caught.value)
        assert service.requests == []
        (tmp_path / "proxy").write_text(f"http://agent:right@127.0.0.1:{proxy.port}\n")
        sink.send([make_record()])
        assert proxy.targets[-1] == f"127.0.0.1:{port}"
    assert len(service.events) == 1


def test_wrong_key_needs_attention(make_https, service, authority, make_record):
    string = f"Endpoint=sb://{NAMESPACE}/;SharedAccessKeyName=send;SharedAccessKey=d3Jvbmc=;EntityPath={HUB}"
    sink = make_https(service.server_address[1], authority.ca_file, string=string)
    with pytest.raises(DeliveryFailed, match="401") as caught:
        sink.send([make_record()])
    assert caught.value.needs_attention


def test_check_sends_no_record(sink, service):
    sink.check()
    assert service.requests == [f"GET /{HUB}?api-version=2014-01 HTTP/1.1"]
    assert service.events == []
