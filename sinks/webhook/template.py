"""The webhook format that creates the body from a Jinja2 template.

The path of the URL can also be a template, but the host name cannot. Otherwise, a record could determine which server
receives the configured headers.

Templates run in Jinja2's sandbox, and unknown names are errors. To find errors before the first event, the agent
renders each template with sample records of all transitions when it reads the configuration (`sinks.webhook.samples`).

Jinja2 is part of the `template` extra. The sink imports Jinja2 only if a template is configured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.sink import (
    DeliveryError,
    DeliveryFailed,
    DeliveryRejected,
    Transition,
    TransitionRecord,
    excerpt,
    how_to_install,
)
from sinks.http.endpoint import Endpoint
from sinks.http.urls import check_plain_url
from sinks.severity import look_of
from sinks.webhook.alerts import details, portal_url, summary
from sinks.webhook.format import Format, Message
from sinks.webhook.samples import sample

if TYPE_CHECKING:  # part of an extra
    import jinja2
    import jinja2.sandbox

_BRACES = re.compile(r"\{[{%#]")
_ANY_TIME = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
_HOST = re.compile(r"https?://[^/?#]+/")


class TemplateFormat(Format):
    """Creates requests from the template *text*. Raise ValueError if the template is invalid."""

    def __init__(self, text: str, *, content_type: str) -> None:
        try:
            # Imported here, because Jinja2 is part of an extra.
            import jinja2.sandbox  # noqa: PLC0415
        except ImportError:
            raise ValueError(
                f"format = 'template' needs Jinja2, which is not installed. {how_to_install('template')}."
            ) from None
        # No autoescape, because JSON is not HTML. The filter `tojson` quotes values.
        self._environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, autoescape=False
        )
        self._environment.policies["json.dumps_kwargs"] = {"default": _not_json}
        self._content_type = content_type
        media_type = content_type.partition(";")[0].strip().lower()
        self._is_json = media_type == "application/json" or media_type.endswith("+json")
        self._body = self._compiled(text, "The template")
        self._url_text = ""
        self._url: jinja2.Template | None = None

    def message(self, url: str, record: TransitionRecord, now: datetime) -> Message | None:
        """Return the request with rendered body and URL, or None if the body is blank."""
        del now
        body = self.render(record)
        return Message(self.url(url, record), body, self._content_type) if body.strip() else None

    def check(self, url: str, endpoint_of: Callable[[str], Endpoint]) -> None:
        """Test the URL that the template creates for a test record."""
        endpoint_of(self.url(url, sample(Transition.TEST))).check()

    def render(self, record: TransitionRecord) -> bytes:
        """Return the body for *record*. Raise DeliveryRejected if the template cannot render it."""
        text = self._filled(self._body, record, "The template")
        try:
            if self._is_json and text.strip():
                json.loads(text)
        except json.JSONDecodeError as error:
            raise DeliveryRejected(
                f"The template does not create valid JSON: {error.msg} at line {error.lineno}, column {error.colno}: "
                f"{excerpt(_around(text, error.pos).encode())} Quote values with | tojson."
            ) from None
        return text.encode()

    def url(self, text: str, record: TransitionRecord) -> str:
        """Return the URL for *record*. Raise DeliveryRejected if the rendered URL is invalid.

        Raise DeliveryFailed if the template *text* is invalid. The text can come from a file or an environment
        variable.
        """
        if not is_url_template(text):
            return text
        if self._url is None or text != self._url_text:
            try:
                self._url = self._compiled(text, "url")
            except ValueError as error:
                raise DeliveryFailed(f"The URL cannot be used: {error}", needs_attention=True) from None
            self._url_text = text
        made = self._filled(self._url, record, "url").strip()
        try:
            check_plain_url(made, key="url")
        except ValueError as error:
            raise DeliveryRejected(
                f"The template creates an invalid URL: {error} Quote values with | urlencode."
            ) from None
        return made

    def try_out(self, records: Iterable[TransitionRecord], url: str | None) -> None:
        """Raise ValueError if a template fails for a record, or renders no text for any record."""
        messages = []
        for record in records:
            try:
                messages.append(self.message(url or "", record, _ANY_TIME))
            except DeliveryError as error:
                hint = " Put {% if event %} around the text about the event." if record.event is None else ""
                hint = hint or " Many fields of a real record can be null."
                raise ValueError(f"For a record of transition {record.transition.value}: {error}.{hint}") from None
        if not any(messages):
            raise ValueError(
                "The template creates a blank text for every record, so the sink would never send a request."
            )

    def _compiled(self, text: str, what: str) -> jinja2.Template:
        import jinja2  # noqa: PLC0415  # likewise

        try:
            return self._environment.from_string(text)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"{what} is invalid{f' in line {line}' if line else ''}: {error}") from None

    def _filled(self, template: jinja2.Template, record: TransitionRecord, what: str) -> str:
        try:
            text = template.render(variables(record))
            text.encode()
        except Exception as error:  # noqa: BLE001  # a template of the user can raise any exception
            raise DeliveryRejected(f"{what} fails: {type(error).__name__}: {error}") from None
        return text


def is_url_template(text: str) -> bool:
    """Return whether *text* contains an expression of Jinja2."""
    return _BRACES.search(text) is not None


def check_url_template(text: str) -> None:
    """Raise ValueError if the URL *text* contains a template before its path."""
    braces = _BRACES.search(text)
    if braces and not _HOST.match(text[: braces.start()]):
        raise ValueError(
            "In a URL, use templates only after the host name, such as https://example.net/{{ event.event_id }}."
        )


def variables(record: TransitionRecord) -> dict[str, Any]:
    """Return the variables for a template: `record`, its fields, and derived values."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    look = look_of(record)
    words = {
        "summary": summary(record),
        "sentence": details(record),
        "portal_url": portal_url(record.vm),
        **look._asdict(),
        "severity": look.severity.value,
    }
    return {"record": fields, **words, **fields}


def _not_json(value: object) -> str:
    """Raise TypeError for a value that has no JSON form, such as an undefined variable."""
    raise TypeError(f"{value} is not JSON")


def _around(text: str, position: int) -> str:
    return text[max(0, position - 30) : position + 30]
