"""The recipes that `init` writes: each is read as the agent reads it, and what it sends is taken by a strict stub."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec

import pytest
import strict_services

from bridge.cli.init import configuration, recipe, recipe_names
from bridge.config.loader import read
from bridge.sink import Transition, encode
from bridge.testing.http_contract import Answer, HttpPeer
from bridge.testing.records import sample_event, sample_record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NASTY = 'He said "soon",\\ then\n<!channel> & {{ }} \u2603 ' + "x" * 3_000
SECRETS = {
    "opsgenie-headers": "Authorization: GenieKey 0123",
    "servicenow-headers": "Authorization: Basic dXNlcjpwYXNz",
    "splunk-headers": "Authorization: Splunk 12345678-1234-1234-1234-123456789012",
}
ENDS = {Transition.COMPLETED, Transition.CANCELED, Transition.ENDED}


def records(transitions):
    """Return records of *transitions*: whole, with awkward text, and with every null that a real one may have."""
    bare = sample_event(not_before=None, description=None, event_source=None, duration_seconds=None)
    events = [sample_event(), sample_event(description=NASTY), bare]
    if Transition.HEARTBEAT in transitions:
        yield sample_record(1, transition=Transition.HEARTBEAT, event=None, affects_this_vm=None)
    for transition in transitions:
        if transition is not Transition.HEARTBEAT:
            for event in events:
                yield sample_record(2, transition=transition, event=event)


def table_of(name, peer, folder):
    """Return the recipe's one table with its addresses led to *peer* and its files to *folder*."""
    text = recipe(name).replace("/etc/scheduled-events-bridge", str(folder))
    [table] = tomllib.loads(text)["sinks"]
    path = strict_services.SERVICES[name][2]
    here = f"http://{peer.address.authority}"
    if "url_file" in table:
        (folder / table["url_file"].rpartition("/")[2]).write_text(here + path)
    else:
        table["url"] = re.sub(r"^https://[^/]+", here, table["url"])
    for file, secret in SECRETS.items():
        (folder / file).write_text(secret)
    return table


def sent(name, folder):
    """Send records of every transition of the recipe *name* to the stub of its service; return what it took."""
    refusal, accepted, _ = strict_services.SERVICES[name]
    with HttpPeer() as peer:
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
        return list(zip(records(transitions), peer.requests, strict=True))


def test_every_recipe_for_a_service_is_judged_by_a_stub_of_it():
    templates = {name for name in recipe_names() if 'format = "template"' in recipe(name)}
    assert templates == set(strict_services.SERVICES)


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_is_a_configuration_that_the_agent_takes(name, tmp_path):
    if name == "eventlog" and sys.platform != "win32":
        pytest.skip("needs Windows")
    if name.startswith("apprise"):
        pytest.importorskip("apprise", reason="the extra [apprise] is not installed")
    text = configuration([name]).replace("/var/log/scheduled-events-bridge", str(tmp_path))
    for settings in read(tomllib.loads(text)).sinks:
        settings.build().close()


def test_recipes_can_stand_in_one_file_and_their_approval_is_a_comment():
    needs_more = {"eventlog", *(["apprise:mail"] if find_spec("apprise") is None else [])}
    names = [name for name in recipe_names() if name not in needs_more]
    table = tomllib.loads(configuration([*names, names[0]]))
    assert set(table) == {"sinks"}
    sinks = read(table).sinks
    assert len({sink.name for sink in sinks}) == len(sinks) >= len(names)


def test_commented_part_is_right_when_it_is_uncommented():
    text = configuration(["stdout"])
    commented = re.findall(r"^# (\[.*\].*|\w+ = .*)$", text, re.MULTILINE)
    table = tomllib.loads("\n".join(commented))
    assert set(table) == {"labels", "approval"}
    assert read(table).approval.rules[0].event_sources == ("User",)


@pytest.mark.parametrize("name", sorted(strict_services.SERVICES))
def test_service_takes_every_record_of_the_recipe(name, tmp_path):
    pytest.importorskip("jinja2", reason="the extra [template] is not installed")
    assert len(sent(name, tmp_path)) > len(ENDS)


def test_opsgenie_is_told_of_the_end_under_the_alias_that_was_opened(tmp_path):
    for record, request in sent("webhook:opsgenie", tmp_path):
        if record.transition in ENDS:
            assert request.path == f"/v2/alerts/{record.event.event_id}/close"
        else:
            assert json.loads(request.body)["alias"] == record.event.event_id


def test_servicenow_is_told_of_the_end_by_a_severity_that_clears(tmp_path):
    for record, request in sent("webhook:servicenow", tmp_path):
        [event] = json.loads(request.body)["records"]
        assert (event["severity"] == "0") == (record.transition in ENDS)
        assert event["message_key"] == record.event.event_id
        assert json.loads(event["additional_info"]) == json.loads(encode(record))


def test_splunk_gets_the_record_whole(tmp_path):
    for record, request in sent("webhook:splunk", tmp_path):
        assert json.loads(request.body)["event"] == json.loads(encode(record))
