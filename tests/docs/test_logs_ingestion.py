"""The rows of the Log Analytics recipe contain complete records.

test_recipes.py tests that the Logs Ingestion API accepts the requests of the recipe.
"""

import json
import sys
from urllib.parse import urlsplit

import doc_pages
import pytest
import strict_services

from bridge.cli.init import recipe
from bridge.config.loader import read
from bridge.sink import Transition, encode
from bridge.testing import Simulator
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_event, sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AZURE = doc_pages.ROOT / "deploy" / "azure"
TRANSFORM = (AZURE / "kql" / "log-analytics" / "transform.kql").read_text(encoding="utf-8")
[TABLE] = tomllib.loads(recipe("webhook:log-analytics"))["sinks"]
RECORDS = [
    sample_record(1),
    sample_record(2, transition=Transition.HEARTBEAT, event=None),
    sample_record(
        3, event=sample_event(description='He said "soon",\\ then <nothing> \u2603 & {{ }}', not_before=None)
    ),
]


@pytest.fixture
def rule(monkeypatch):
    """The ingestion endpoint, which stores the accepted rows."""
    for name in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(name, raising=False)
    with Simulator("quiet", listen="127.0.0.1:0") as simulator, HttpPeer() as peer:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        peer.rows = []

        def answer(request):
            problem = strict_services.log_analytics(request)
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


def test_log_analytics_accepts_rows_with_complete_records(rule):
    pytest.importorskip("jinja2")
    sink = sink_of(rule)
    for record in RECORDS:
        sink.send([record])
    sink.close()
    assert [json.loads(row["RawData"])["data"] for row in rule.rows] == [json.loads(encode(each)) for each in RECORDS]
    assert "parse_json(RawData).data" in TRANSFORM
