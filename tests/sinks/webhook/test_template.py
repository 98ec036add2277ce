"""Templates of the webhook sink: validation at start, the sandbox, and valid JSON."""

import json
import sys

import pytest

from bridge.config.loader import read
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryRejected, Transition
from bridge.testing.http_contract import HttpPeer
from bridge.testing.records import sample_event, sample_record
from sinks.webhook.config import WebhookConfig
from sinks.webhook.sink import WebhookSink
from sinks.webhook.template import TemplateFormat

pytest.importorskip("jinja2", reason="the extra [template] is not installed")

CHAT = """
{"text": {{ ("%s: %s" | format(record.transition, event.description if event else "no event")) | tojson }},
 "vm": {{ vm.name | tojson }}{% if event %}, "resources": {{ event.resources | tojson }}{% endif %}}
"""


def mistake(**keys):
    try:
        read({"sinks": [{"type": "webhook", "url": "http://127.0.0.1:1/x", "format": "template", **keys}]})
    except ConfigurationError as error:
        return str(error)
    return ""


def test_template_formats_the_record():
    record = sample_record(event=sample_event(description='"quoted"\n\u2603'))
    with HttpPeer() as peer:
        sink = WebhookSink(WebhookConfig(url=f"http://{peer.address.authority}", format="template", template=CHAT))
        sink.send([record])
        sink.close()
        (request,) = peer.requests
    assert request.headers["content-type"] == "application/json"
    wanted = {"text": 'scheduled: "quoted"\n\u2603', "vm": "WestNO_0", "resources": ["WestNO_0", "WestNO_1"]}
    assert json.loads(request.body) == wanted


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "template or template_file is missing"),
        ({"template": "{}", "template_file": "x"}, "template and template_file are both set"),
        ({"template_file": "/no/such/template"}, "/no/such/template cannot be read: No such file"),
        ({"template": "{% if %}"}, "The template is invalid in line 1"),
        ({"template": "{% if transition == 'nothing' %}{}{% endif %}"}, "a blank text for every record"),
        ({"template": '{"a": {{ record.evnt | tojson }}}'}, "has no attribute 'evnt'"),
        ({"template": '{"a": {{ nothing | tojson }}}'}, "'nothing' is undefined"),
        ({"template": '{"a": "{{ event.event_type if event }}"'}, "does not create valid JSON"),
        ({"template": '{"a": "{{ event.description if event }}"}'}, "Quote values with | tojson"),
        ({"template": '{"a": {{ event.event_type | tojson }}}'}, "Put {% if event %}"),
        ({"template": '{"a": {{ "".__class__.__mro__ | tojson }}}'}, "unsafe"),
        ({"template": "{}", "content_type": "text/\nplain"}, "content_type"),
    ],
)
def test_invalid_template_is_detected_when_the_configuration_is_read(keys, sentence):
    assert sentence in mistake(**keys)


def test_template_is_tested_only_with_transitions_of_the_sink():
    template = '{"a": {{ event.event_type | tojson }}}'
    assert not mistake(template=template, transitions=["scheduled", "completed"])
    assert "heartbeat" in mistake(template=template, transitions=["scheduled"], heartbeat=True)
    assert not mistake(template='{"a": {{ (event or {}) | tojson }}}', heartbeat=True)


@pytest.mark.parametrize(
    ("value", "null"),
    [
        ("event.not_before[:10]", "event.not_before"),
        ("notice_seconds | round", "notice_seconds"),
        ("event.description[:80]", "event.description"),
        ("event.duration_seconds * 2", "event.duration_seconds"),
        ("event.event_source.lower()", "event.event_source"),
        ("vm.scale_set.lower()", "vm.scale_set"),
        ("vm.name.split('_')", "vm.name"),
    ],
)
def test_template_that_fails_on_a_null_field_is_detected_at_start(value, null):
    transitions = ["scheduled", "started", "completed"]
    said = mistake(template=f"{{{{ {value} }}}}", content_type="text/plain", transitions=transitions)
    assert "The template fails" in said
    careful = f"{{% if {null} %}}{{{{ {value} }}}}{{% endif %}}"
    assert not mistake(template=careful, content_type="text/plain", transitions=transitions)


@pytest.mark.parametrize(
    "keys",
    [
        {"template": '{"team": {{ labels.team | tojson }}, "again": {{ record.labels["team"] | tojson }}}'},
        {"template": "{}", "url": "https://example.net/{{ labels.team | urlencode }}"},
    ],
    ids=["template", "url"],
)
def test_template_can_use_only_configured_labels(keys):
    table = {"sinks": [{"type": "webhook", "url": "https://example.net/", "format": "template", **keys}]}
    assert len(read({**table, "labels": {"team": 'pay"ments'}}).sinks) == 1
    for others in ({}, {"labels": {"tema": "payments"}}):
        with pytest.raises(ConfigurationError, match="has no attribute 'team'"):
            read({**table, **others})


def test_branch_for_a_transition_is_tested_without_the_fields_it_lacks():
    template = '{"a": {{ (event.not_before[:10] if transition == "completed" else "") | tojson }}}'
    assert "transition completed: " in mistake(template=template, transitions=["completed"])
    assert not mistake(template=template, transitions=["scheduled"])


def test_template_can_use_severity_summary_and_sentence():
    template = "{{ severity }}|{{ summary }}|{{ sentence }}"
    config = WebhookConfig(url="http://x", format="template", template=template, content_type="text/plain")
    assert config.template == template
    made = TemplateFormat(template, content_type="text/plain")
    said = made.render(sample_record(event=sample_event(event_type="Reboot"))).decode()
    assert said.startswith(
        "warning|Reboot of WestNO_0, WestNO_1 scheduled, not before 2026-11-20 11:15:00 UTC|scheduled: "
    )
    assert made.render(sample_record(transition=Transition.HEARTBEAT, event=None)).startswith(b"info|heartbeat")


def test_icon_and_color_follow_the_severity_of_the_transition():
    made = TemplateFormat("{{ severity }} {{ icon }} {{ color }} {{ card_color }}", content_type="text/plain")
    event = sample_event(event_type="Preempt")
    looks = {each: made.render(sample_record(transition=each, event=event)).decode() for each in Transition}
    assert looks[Transition.SCHEDULED] == looks[Transition.STARTED] == "critical \U0001f6a8 #d13438 attention"
    assert looks[Transition.COMPLETED] == looks[Transition.CANCELED] == "info \u2705 #107c10 good"
    assert looks[Transition.APPROVAL_FAILED].split()[0] == "warning"
    assert looks[Transition.ENDED].split()[0] == looks[Transition.TEST].split()[0] == "info"


def test_blank_body_causes_no_request():
    template = "{% if not previous %}{}{% endif %}\n"
    with HttpPeer() as peer:
        url = f"http://{peer.address.authority}"
        sink = WebhookSink(WebhookConfig(url=url, format="template", template=template))
        sink.send([sample_record(previous={"event_status": "Scheduled"})])
        assert sink.sent_nothing
        assert not peer.requests
        sink.send([sample_record()])
        assert not sink.sent_nothing
        assert len(peer.requests) == 1
        sink.close()


OPSGENIE = {
    "format": "template",
    "transitions": ("scheduled", "started", "updated", "completed", "canceled", "ended"),
    "template": '{% if transition in ["completed", "canceled", "ended"] %}{"note": {{ sentence | tojson }}}'
    '{% else %}{"alias": {{ event.event_id | tojson }}, "message": {{ summary | tojson }}}{% endif %}',
}
CLOSE = (
    "{% if transition in ['completed', 'canceled', 'ended'] %}"
    "/{{ event.event_id | urlencode }}/close?identifierType=alias{% endif %}"
)


@pytest.mark.parametrize("by", ["url", "url_env"])
def test_url_template_closes_the_alert(monkeypatch, by):
    with HttpPeer() as peer:
        url = f"http://{peer.address.authority}/v2/alerts{CLOSE}"
        monkeypatch.setenv("OPSGENIE", url)
        sink = WebhookSink(WebhookConfig(**OPSGENIE, **{by: url if by == "url" else "OPSGENIE"}))
        sink.check()
        sink.send([sample_record(event=sample_event(event_id="A b"))])
        sink.send([sample_record(2, transition=Transition.COMPLETED, event=sample_event(event_id="A b"))])
        sink.close()
        asked, opened, closed = peer.requests
    assert (asked.method, asked.path) == ("OPTIONS", "/v2/alerts")
    assert (opened.method, opened.path, json.loads(opened.body)["alias"]) == ("POST", "/v2/alerts", "A b")
    assert (closed.method, closed.path) == ("POST", "/v2/alerts/A%20b/close")
    assert closed.query == {"identifierType": "alias"}
    assert set(json.loads(closed.body)) == {"note"}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"url": "http://{{ vm.name }}/x"}, "use templates only after the host name"),
        ({"url": "http://example.net{{ vm.name }}"}, "use templates only after the host name"),
        ({"url": "http://user:secret@example.net/{{ vm.name }}"}, "user name or a password"),
        ({"url": "http://example.net/{{ event.description }}"}, "Quote values with | urlencode"),
        ({"url": "http://example.net/{{ event.nothing }}"}, "url fails"),
        ({"url": "http://example.net/{% if %}"}, "url is invalid"),
    ],
)
def test_invalid_url_template_is_detected_when_the_configuration_is_read(keys, sentence):
    found = mistake(**{"template": "{}", "transitions": ["scheduled"], **keys})
    assert sentence in found
    assert "secret" not in found


def test_template_error_parks_the_record_without_a_request():
    made = TemplateFormat('{"n": {{ 1 // (sequence - 2) }}}', content_type="application/json")
    assert made.render(sample_record(3)) == b'{"n": 1}'
    with pytest.raises(DeliveryRejected, match="ZeroDivisionError"):
        made.render(sample_record(2))


def test_missing_jinja2_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    said = mistake(template="{}")
    assert "the extra [template]: " in said
    assert sys.executable in said
