"""A record as whatever JSON (or text) a user's endpoint wants, by a Jinja2 template.

The template is the user's, but what it is filled with is not, so it runs in Jinja2's sandbox, an unknown name is an
error instead of a blank, and it is tried out when the configuration is read: once for every transition that the sink
gets, with awkward text in it and, where a record may have none, without an event. A template that breaks on a quotation
mark shall break at a desk, not at the first eviction.

A template that would not end hangs neither the start nor a delivery: each rendering has a second of the processor's
time and a MiB of text. Python cannot end a thread from outside, so the template looks at its time itself: a call is put
into every loop, block and macro of it before it is compiled.

Jinja2 comes with the extra [template] and is imported only where a template is configured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.sink import (
    DeliveryRejected,
    Evidence,
    ScheduledEvent,
    SinkConfig,
    Transition,
    TransitionRecord,
    VmIdentity,
    excerpt,
)
from sinks.webhook.format import Format, Message

if TYPE_CHECKING:  # it belongs to an extra
    import jinja2.nodes
    import jinja2.runtime
    import jinja2.sandbox

_MOST_SECONDS = 1.0
_MOST_CHARACTERS = 1024 * 1024
_LOOK = "_look_at_the_time"
_AWKWARD = 'He said "soon",\\ then\n<nothing> \u2014 {{ & }}'
_WITHOUT_EVENT = frozenset(
    {Transition.HEARTBEAT, Transition.APPROVED, Transition.APPROVAL_REFUSED, Transition.APPROVAL_FAILED}
)
_APPROVALS = _WITHOUT_EVENT - {Transition.HEARTBEAT}


class TemplateFormat(Format):
    """The template *text*; raises ValueError when Jinja2 is missing or the text is no template."""

    def __init__(self, text: str, *, content_type: str) -> None:
        try:
            # Inside: it costs memory, and belongs to an extra.
            import jinja2  # noqa: PLC0415
        except ImportError:
            raise ValueError(
                "format = 'template' needs Jinja2, which is not installed. It comes with the extra [template]: in the "
                "checkout, pip install '.[template]'."
            ) from None
        environment = _environment()
        self._content_type = content_type
        self._is_json = _says_json(content_type)
        try:
            self._template = environment.from_string(_bounded(environment.parse(text)))
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"The template is wrong{f' in line {line}' if line else ''}: {error}") from None

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return what the template makes of *record*."""
        del now
        return Message(url, self.render(record), self._content_type)

    def render(self, record: TransitionRecord) -> bytes:
        """Return the body for *record*; raise DeliveryRejected when the template cannot make one."""
        try:
            text = _joined(self._template.generate({**variables(record), _LOOK: _Time().look}))
            body = text.encode()
            if self._is_json:
                json.loads(text)
        except _TooMuch as error:
            raise DeliveryRejected(f"The template does not end: {error}.") from None
        except json.JSONDecodeError as error:
            raise DeliveryRejected(
                f"The template makes no valid JSON: {error.msg} at line {error.lineno}, column {error.colno}: "
                f"{excerpt(_around(text, error.pos).encode())} Quote values with | tojson."
            ) from None
        except Exception as error:  # noqa: BLE001  # the template is a program of the user's: it may raise anything
            raise DeliveryRejected(f"The template fails: {type(error).__name__}: {error}") from None
        return body

    def try_out(self, samples: Iterable[TransitionRecord]) -> None:
        """Raise ValueError with the first of *samples* that the template cannot render."""
        for sample in samples:
            try:
                self.render(sample)
            except DeliveryRejected as error:
                event = " with event = null" if sample.event is None else ""
                hint = " Put {% if event %} around what is about the event." if sample.event is None else ""
                raise ValueError(
                    f"For a record of transition {sample.transition.value}{event}: {error}{hint}"
                ) from None


class _TooMuch(Exception):
    """The template takes more time, or makes more text, than any webhook needs."""


class _Time:
    """The processor's time of one rendering: what another program takes meanwhile does not count."""

    def __init__(self) -> None:
        self._ends_at = time.thread_time() + _MOST_SECONDS

    def look(self) -> str:
        """Return an empty text while there is time left; raise _TooMuch then."""
        if time.thread_time() > self._ends_at:
            raise _TooMuch(f"it takes more than {_MOST_SECONDS:g} s")
        return ""


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    import jinja2.sandbox  # noqa: PLC0415  # likewise

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, without the powers and products that a single step of takes minutes and gigabytes."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    # No autoescape: JSON is no HTML; `tojson` is what quotes.
    made = Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    made.policies["json.dumps_kwargs"] = {"default": _not_json}
    del made.globals["lipsum"]  # text without end, and no use
    return made


def _check_size(operator: str, left: Any, right: Any) -> None:
    """Raise _TooMuch when a text or a list times *right*, or a number to that power, is more than a template needs."""
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_CHARACTERS:
            raise _TooMuch("a power in it is too large")
        return
    for many, factor in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(factor, int) and len(many) * factor > _MOST_CHARACTERS:
            raise _TooMuch("a product in it is too long")


def _bounded(template: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """Return *template*, which looks at its time at each step of a loop and in each block and macro."""
    from jinja2 import nodes  # noqa: PLC0415  # likewise

    found: Iterator[Any] = template.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
    for node in found:
        look = nodes.Call(nodes.Name(_LOOK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(look).set_lineno(node.lineno))
    return template


def _joined(parts: Iterable[str]) -> str:
    kept: list[str] = []
    left = _MOST_CHARACTERS
    for part in parts:
        left -= len(part)
        if left < 0:
            raise _TooMuch(f"it makes more than {_MOST_CHARACTERS} characters")
        kept.append(part)
    return "".join(kept)


def variables(record: TransitionRecord) -> dict[str, Any]:
    """Return what a template may name: ``record``, the wire record, and each of its fields."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return {"record": fields, **fields}


def samples(config: SinkConfig) -> Iterator[TransitionRecord]:
    """Yield a record of every transition that a sink with *config* may get; where the event may be null, both."""
    for transition in Transition:
        is_wanted = config.transitions is None or transition.value in config.transitions
        if config.heartbeat if transition is Transition.HEARTBEAT else is_wanted or transition is Transition.TEST:
            if transition is not Transition.HEARTBEAT:
                yield _sample(transition, _EVENT)
            if transition in _WITHOUT_EVENT:
                yield _sample(transition, None)


_EVENT = ScheduledEvent(
    event_id="C7061BAC-AFDC-4513-B24B-AA5F13A16123",
    event_type="Freeze",
    event_status="Scheduled",
    resource_type="VirtualMachine",
    resources=("WestNO_0", "WestNO_1"),
    not_before=datetime(2026, 11, 20, 11, 15, tzinfo=timezone.utc),
    not_before_raw="Fri, 20 Nov 2026 11:15:00 GMT",
    description=_AWKWARD,
    event_source="Platform",
    duration_seconds=5,
)


def _sample(transition: Transition, event: ScheduledEvent | None) -> TransitionRecord:
    approval = {"source": "portal", "decision_id": "d-1", "reason": _AWKWARD, "result": "sent", "http_status": 200}
    value = {
        "id": "7d6b5d5e-3f2f-5d7a-9a0a-5f1f2c7f9b11",
        "transition_key": "0" * 64,
        "stream_id": "b1a5c1de-0000-4000-8000-000000000000",
        "sequence": 17,
        "transition": transition.value,
        "evidence": Evidence.OBSERVED.value,
        "observed_at": "2026-11-20T11:00:01.123Z",
        "incarnation": 3,
        "previous_incarnation": 2,
        "event": msgspec.to_builtins(event),
        "previous": {"event_status": None} if transition is Transition.UPDATED else None,
        "changed": ["event_status"] if transition is Transition.UPDATED else [],
        "notice_seconds": None if event is None else 898.877,
        "affects_this_vm": None if event is None else True,
        "vm": msgspec.to_builtins(VmIdentity(name="WestNO_0", vm_id="a3d7b4a0-0000-4000-8000-000000000000")),
        "labels": {"note": _AWKWARD},
        "approval": approval if transition in _APPROVALS else None,
    }
    return msgspec.convert(value, TransitionRecord)


def _not_json(value: object) -> str:
    """Raise what `tojson` shall say of *value*: an undefined one names itself when it is made a text."""
    raise TypeError(f"{value} is no JSON")


def _says_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def _around(text: str, position: int) -> str:
    return text[max(0, position - 30) : position + 30]
