"""The recipe for Azure Monitor, against a stub that is as strict as the Logs Ingestion API: what it sends is taken."""

from __future__ import annotations

import base64
import json
import re
import sys
from urllib.parse import urlsplit

import doc_pages
import pytest

from bridge.config.loader import read
from bridge.sink import DeliveryFailed, Transition, encode
from bridge.testing import Simulator
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_event, sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AZURE = doc_pages.ROOT / "deploy" / "azure"
BICEP = (AZURE / "logs.bicep").read_text(encoding="utf-8")
TRANSFORM = (AZURE / "kql" / "log-analytics" / "transform.kql").read_text(encoding="utf-8")
TABLE = tomllib.loads(
    re.search(
        r"^<!-- file: logs-ingestion\.toml -->\n```toml\n(.*?)^```",
        doc_pages.page("deploy/azure/kql/README.md"),
        re.MULTILINE | re.DOTALL,
    )[1]
)["sinks"][0]
RECORDS = [
    sample_record(1),
    sample_record(2, transition=Transition.HEARTBEAT, event=None),
    sample_record(
        3, event=sample_event(description='He said "soon",\\ then <nothing> \u2603 & {{ }}', not_before=None)
    ),
]


def refusal(request):
    """Return what the service would have against *request*; empty when it takes it."""
    stream = re.search(r"^var stream = '(.+)'$", BICEP, re.MULTILINE)[1]
    columns = set(re.findall(r"name: '(\w+)'\n +type: 'string'", BICEP))
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    payload = token.split(".")[1] if token.count(".") == 2 else ""
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)) or b"{}")
    rows = json.loads(request.body)
    wrong = {
        "method": request.method != "POST",
        "path": not re.fullmatch(rf"/dataCollectionRules/dcr-\w+/streams/{stream}", request.path),
        "api-version": dict(request.query) != {"api-version": "2023-01-01"},
        "audience": claims.get("aud") != "https://monitor.azure.com/",
        "content type": request.headers.get("content-type") != "application/json",
        "no array": not isinstance(rows, list),
        "columns": any(set(row) != columns or not all(isinstance(each, str) for each in row.values()) for row in rows),
        "size": len(request.body) > 1024 * 1024,
    }
    return ", ".join(name for name, is_so in wrong.items() if is_so)


@pytest.fixture
def rule(monkeypatch):
    """The ingestion endpoint; it keeps the rows that it took."""
    for name in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with Simulator("quiet", listen="127.0.0.1:0") as simulator, HttpPeer() as peer:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        peer.rows = []

        def answer(request):
            problem = refusal(request)
            if problem:
                return Answer(status=400, body=problem.encode())
            peer.rows += json.loads(request.body)
            return Answer(status=204)

        peer.reply(answer)
        yield peer


def sink_of(rule, **keys):
    parts = urlsplit(TABLE["url"])
    url = f"http://{rule.address.authority}{parts.path.replace('dcr-ID', 'dcr-0a1b')}?{parts.query}"
    return read({"sinks": [{**TABLE, "url": url, **keys}]}).sinks[0].build()


def test_rows_of_the_recipe_are_taken_and_hold_the_records_whole(rule):
    pytest.importorskip("jinja2")
    sink = sink_of(rule)
    for record in RECORDS:
        sink.send([record])
    sink.close()
    assert [json.loads(row["RawData"])["data"] for row in rule.rows] == [json.loads(encode(each)) for each in RECORDS]
    assert "parse_json(RawData).data" in TRANSFORM


def test_check_shows_a_token_and_writes_nothing(rule):
    pytest.importorskip("jinja2")
    rule.reply(lambda _: Answer(status=405))
    sink = sink_of(rule)
    sink.check()
    rule.reply(lambda _: Answer(status=403))
    with pytest.raises(DeliveryFailed, match="403"):
        sink.check()
    sink.close()
    assert rule.rows == []
    assert {request.method for request in rule.requests} == {"OPTIONS"}
