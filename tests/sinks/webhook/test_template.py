"""Records through a template: tried out before it is needed, kept in its sandbox, and never half a JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

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


def mistake(**keys: Any) -> str:
    try:
        read({"sinks": [{"type": "webhook", "url": "http://127.0.0.1:1/x", "format": "template", **keys}]})
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_record_becomes_what_the_template_says() -> None:
    record = sample_record(event=sample_event(description='"quoted"\n\u2603'))
    with HttpPeer() as peer:
        sink = WebhookSink(WebhookConfig(url=f"http://{peer.address.authority}", format="template", template=CHAT))
        sink.send([record])
        sink.close()
        (request,) = peer.requests
    assert request.headers["content-type"] == "application/json"
    wanted = {"text": 'scheduled: "quoted"\n\u2603', "vm": "WestNO_0", "resources": ["WestNO_0", "WestNO_1"]}
    assert json.loads(request.body) == wanted


def test_a_template_may_stand_in_a_file_and_make_text(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("{{ transition }} {{ vm.name }}")
    config = WebhookConfig(
        url="http://x", format="template", template_file=str(tmp_path / "t"), content_type="text/plain; charset=utf-8"
    )
    assert config.content_type.startswith("text/plain")
    text = TemplateFormat((tmp_path / "t").read_text(), content_type="text/plain").render(sample_record())
    assert text == b"scheduled WestNO_0"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, "template or template_file is missing"),
        ({"template": "{}", "template_file": "x"}, "template and template_file are both set"),
        ({"template_file": "/no/such/template"}, "/no/such/template cannot be read: No such file"),
        ({"template": "{% if %}"}, "The template is wrong in line 1"),
        ({"template": '{"a": {{ record.evnt | tojson }}}'}, "has no attribute 'evnt'"),
        ({"template": '{"a": {{ nothing | tojson }}}'}, "'nothing' is undefined"),
        ({"template": '{"a": "{{ event.event_type if event }}"'}, "makes no valid JSON"),
        ({"template": '{"a": "{{ event.description if event }}"}'}, "Quote values with | tojson"),
        ({"template": '{"a": {{ event.event_type | tojson }}}'}, "with event = null"),
        ({"template": '{"a": {{ "".__class__.__mro__ | tojson }}}'}, "unsafe"),
        ({"template": "{}", "content_type": "text/\nplain"}, "content_type"),
    ],
)
def test_a_template_that_would_fail_is_found_when_the_configuration_is_read(
    keys: dict[str, Any], sentence: str
) -> None:
    assert sentence in mistake(**keys)


def test_a_template_is_tried_only_with_what_the_sink_gets() -> None:
    template = '{"a": {{ event.event_type | tojson }}}'
    assert not mistake(template=template, transitions=["scheduled", "completed"])
    assert "heartbeat" in mistake(template=template, transitions=["scheduled"], heartbeat=True)
    assert not mistake(template='{"a": {{ (event or {}) | tojson }}}', heartbeat=True)


def test_a_record_that_the_template_cannot_take_is_parked_without_a_request() -> None:
    made = TemplateFormat('{"n": {{ 1 // (sequence - 2) }}}', content_type="application/json")
    assert made.render(sample_record(3)) == b'{"n": 1}'
    with pytest.raises(DeliveryRejected, match="ZeroDivisionError"):
        made.render(sample_record(2))


def test_every_transition_is_rendered_as_it_would_be_sent() -> None:
    made = TemplateFormat(CHAT, content_type="application/json")
    for transition in Transition:
        event = None if transition is Transition.HEARTBEAT else sample_event()
        assert json.loads(made.render(sample_record(transition=transition, event=event)))["vm"] == "WestNO_0"


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "the extra [template]: in the checkout, pip install '.[template]'" in mistake(template="{}")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
MACRO = "{% macro again(n) %}{% if n %}{{ again(n - 1) }}{{ again(n - 1) }}{% endif %}{% endmacro %}{{ again(60) }}"
ENDLESS = {
    "loops": LOOPS + ENDS,
    "loops that only count": LOOPS + "{% set x = a + b + c %}" + ENDS,
    "a loop within a macro within a loop": "{% macro m() %}"
    + LOOPS
    + ENDS
    + "{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}",
    "a macro that calls itself twice": MACRO,
    "a recursive loop": "{% for a in [[1, 2]] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a block that shows itself": "{% block b %}{% for x in [1, 2] %}{{ self.b() }}{% endfor %}{% endblock %}",
    "a call of a block": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% call m() %}"
    + LOOPS
    + ENDS
    + "{% endcall %}",
    "text without end": "{% for a in range(99999) %}{{ record }}{% endfor %}",
    "a filter of loops": "{% filter upper %}" + LOOPS + "x" + ENDS + "{% endfilter %}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "lorem ipsum": "{{ lipsum(n=1000000000) }}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_a_mistake_of_the_configuration_and_hangs_nothing(template: str) -> None:
    began = time.thread_time()
    said = mistake(template=template, content_type="text/plain")
    assert "For a record of transition scheduled: " in said
    assert time.thread_time() - began < 10


def test_a_template_that_never_ends_for_one_record_parks_it() -> None:
    endless = LOOPS + ENDS
    template = "{% if event and event.description == 'odd' %}" + endless + "{% endif %}{{ transition }}"
    sink = WebhookSink(WebhookConfig(url="http://x", format="template", template=template, content_type="text/plain"))
    with pytest.raises(DeliveryRejected, match="does not end: it takes more than 1 s"):
        sink.send([sample_record(event=sample_event(description="odd"))])
    sink.close()


def test_a_long_template_that_ends_is_fine() -> None:
    template = "{% for n in range(20000) %}{{ n * 2 }},{{ 'ab' * 2 }},{{ 2 ** 10 }};{% endfor %}"
    rendered = TemplateFormat(template, content_type="text/plain").render(sample_record())
    assert rendered.startswith(b"0,abab,1024;2,abab,1024;")
    assert rendered.count(b";") == 20_000
