"""Checks the recipes of `init` with the agent's parser, and sends records to a strict stub of each service."""

import json
import re
import sys
from importlib.util import find_spec

import doc_pages
import pytest
import strict_services
from private_ca import PrivateCa

from bridge.cli.init import configuration, recipe, recipe_names
from bridge.config.loader import read
from bridge.sink import Transition, encode
from bridge.testing import Simulator
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_event, sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = doc_pages.ROOT
NASTY = 'He said "soon",\\ then\n<!channel> & {{ }} \u2603 ' + "x" * 3_000
SECRETS = {
    "pagerduty-key": "0123456789abcdef0123456789abcdef",
    "opsgenie-headers": "Authorization: GenieKey 0123",
    "servicenow-headers": "Authorization: Basic dXNlcjpwYXNz",
    "splunk-headers": "Authorization: Splunk 12345678-1234-1234-1234-123456789012",
}
#: Formats that send a request for each record. The other formats skip records that require no attention.
ONE_EACH = {
    "webhook", "webhook:slack", "webhook:teams", "webhook:opsgenie", "webhook:servicenow", "webhook:splunk",
    "webhook:log-analytics",
}  # fmt: skip
ENDS = {Transition.COMPLETED, Transition.CANCELED, Transition.ENDED}


def records(transitions):
    """Yield records of *transitions*: complete, with special characters, and with all optional fields null."""
    bare = sample_event(not_before=None, description=None, event_source=None, duration_seconds=None)
    events = [sample_event(), sample_event(description=NASTY), bare]
    if Transition.HEARTBEAT in transitions:
        yield sample_record(1, transition=Transition.HEARTBEAT, event=None, affects_this_vm=None)
    for transition in transitions:
        if transition is not Transition.HEARTBEAT:
            for event in events:
                yield sample_record(2, transition=transition, event=event)


def table_of(name, peer, folder):
    """Return the table of the recipe with the address of *peer* and with files in *folder*."""
    text = recipe(name).replace("/etc/scheduled-events-bridge", str(folder))
    [table] = tomllib.loads(text)["sinks"]
    path = strict_services.SERVICES[name][2]
    here = f"http://{peer.address.authority}"
    for file, secret in SECRETS.items():
        (folder / file).write_text(secret)
    if name == "eventhubs":  # with the key from the comment of the recipe
        return {**table, "transport": "https", "endpoint": peer.address.authority, "ca_file": str(folder / "ca.pem")}
    if "url_file" in table:
        (folder / table["url_file"].rpartition("/")[2]).write_text(here + path)
    elif name == "otlp":
        table["endpoint"] = here
    else:
        table["url"] = re.sub(r"^https://[^/]+", here, table.get("url", "https://events.pagerduty.com/v2/enqueue"))
    return table


def sent(name, folder):
    """Send records of each transition of the recipe *name* to its stub. Return the records with their requests."""
    refusal, accepted, _ = strict_services.SERVICES[name]
    tls = PrivateCa(folder).server_context() if name == "eventhubs" else None
    with HttpPeer(tls=tls) as peer:
        peer.reply(
            lambda request: (
                Answer(status=400, body=refusal(request).encode()) if refusal(request) else Answer(status=accepted)
            )
        )
        [settings] = read({"sinks": [table_of(name, peer, folder)]}).sinks
        sink = settings.build()
        transitions = [Transition(each) for each in settings.config.transitions or Transition]
        for record in records(transitions):
            sink.send([record])
        sink.close()
        return list(zip(records(transitions), peer.requests, strict=name in ONE_EACH))


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_a_valid_configuration(name, tmp_path):
    if name == "eventlog" and sys.platform != "win32":
        pytest.skip("needs Windows")
    if name.startswith("apprise"):
        pytest.importorskip("apprise", reason="the extra [apprise] is not installed")
    text = configuration([name]).replace("/var/log/scheduled-events-bridge", str(tmp_path))
    for settings in read(tomllib.loads(text)).sinks:
        settings.build().close()


def test_recipes_can_be_combined_and_leave_approvals_commented_out():
    needs_more = {"eventlog", *(["apprise:mail"] if find_spec("apprise") is None else [])}
    names = [name for name in recipe_names() if name not in needs_more]
    table = tomllib.loads(configuration([*names, names[0]]))
    assert set(table) == {"sinks"}
    sinks = read(table).sinks
    assert len({sink.name for sink in sinks}) == len(sinks) >= len(names)


def test_commented_tables_are_valid_when_uncommented():
    text = configuration(["stdout"])
    commented = re.findall(r"^# (\[.*\].*|\w+ = .*)$", text, re.MULTILINE)
    table = tomllib.loads("\n".join(commented))
    assert set(table) == {"labels", "approval"}
    assert read(table).approval.rules[0].event_sources == ("User",)


@pytest.mark.parametrize("name", sorted(strict_services.SERVICES))
def test_service_accepts_every_record_of_the_recipe(name, tmp_path, monkeypatch):
    pytest.importorskip("jinja2", reason="the extra [template] is not installed")
    for variable in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID"):
        monkeypatch.delenv(variable, raising=False)
    with Simulator("quiet") as simulator:  # for Azure access tokens
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        assert len(sent(name, tmp_path)) > len(ENDS)


def send_every_transition(text):
    """Send a record of each transition to the sink of the recipe *text*. Return the records as JSON."""
    [settings] = read(tomllib.loads(text)).sinks
    sink = settings.build()
    wanted = list(records(list(Transition)))
    for record in wanted:
        sink.send([record])
    sink.close()
    return [json.loads(encode(record)) for record in wanted]


def test_recipe_for_a_file_appends_each_record(tmp_path):
    text = recipe("file").replace("/var/log/scheduled-events-bridge", str(tmp_path))
    sent = send_every_transition(text)
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == sent


def test_recipe_for_standard_output_prints_each_record(capfdbinary):
    sent = send_every_transition(recipe("stdout"))
    assert [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()] == sent


def test_opsgenie_alert_is_closed_under_its_alias(tmp_path):
    for record, request in sent("webhook:opsgenie", tmp_path):
        if record.transition in ENDS:
            assert request.path == f"/v2/alerts/{record.event.event_id}/close"
        else:
            assert json.loads(request.body)["alias"] == record.event.event_id


def test_servicenow_alert_is_cleared_by_severity_0(tmp_path):
    for record, request in sent("webhook:servicenow", tmp_path):
        [event] = json.loads(request.body)["records"]
        assert (event["severity"] == "0") == (record.transition in ENDS)
        assert event["message_key"] == record.event.event_id
        assert json.loads(event["additional_info"]) == json.loads(encode(record))


def test_splunk_receives_the_complete_record(tmp_path):
    for record, request in sent("webhook:splunk", tmp_path):
        assert json.loads(request.body)["event"] == json.loads(encode(record))
