"""Renders templates, serves static files, and sets security headers.

Templates escape HTML and invisible characters, such as control characters, bidirectional marks, and lone surrogates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import format_time, parse_time
from bridge.events.event import compact_json
from bridge.events.otel_resource import own_version
from bridge.portal.requests import error_answer
from bridge.portal.sentences import STATE_WORDS, effect_of, how_many, start_text, these, vm_names
from bridge.portal.verdicts import MOST_APPROVED, people_of
from bridge.text import escaped

_HERE = Path(__file__).parent
_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_A_YEAR = 365 * 86_400
_HOUR_SECONDS, _SOON_SECONDS, _URGENT_SECONDS = 3_600, 600, 300

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer, a browser would send the Origin "null" with forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class Renderer:
    """Renders pages."""

    def __init__(self) -> None:
        self._files = {path.name: path.read_bytes() for path in sorted((_HERE / "static").iterdir()) if path.is_file()}
        self._hashes = {name: hashlib.sha256(body).hexdigest()[:16] for name, body in self._files.items()}
        self._templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_printed,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.globals.update(
            version=own_version(),
            static=self._address_of,
            states=STATE_WORDS,
            effect_of=effect_of,
            how_many=how_many,
            most_approved=MOST_APPROVED,
            start_text=start_text,
            people_of=people_of,
            these=these,
            vm_names=vm_names,
        )
        self._templates.filters.update(
            time=_time_element, clock=_clock_element, countdown=_countdown_element, pretty=_indented, json=compact_json
        )

    def page(self, template: str, values: Mapping[str, Any], *, status: int = 200) -> Response:
        """Return the page from *template* and *values*. Caches must not store the page."""
        html = self._templates.get_template(template).render(values)
        return Response(
            html.encode("utf-8", "replace"),
            status_code=status,
            media_type="text/html",
            headers={**SECURITY_HEADERS, "Cache-Control": "no-store"},
        )

    async def static(self, request: Request) -> Response:
        """``GET /static/{name}``: return a file. Browsers cache URLs with a hash."""
        name = request.path_params["name"]
        body = self._files.get(name)
        if body is None:
            return error_answer(404, "This address does not exist.")
        is_named = request.query_params.get("v") == self._hashes[name]
        kept = f"public, max-age={_A_YEAR}, immutable" if is_named else "no-cache"
        return Response(
            body, headers={**SECURITY_HEADERS, "Content-Type": _TYPES[Path(name).suffix], "Cache-Control": kept}
        )

    def _address_of(self, name: str) -> str:
        return f"/static/{name}?v={self._hashes[name]}"


def _time_element(when: datetime | str, css_class: str = "") -> Markup:
    at = parse_time(when) if isinstance(when, str) else when
    element = Markup('<time class="{}" datetime="{}">{:%Y-%m-%d %H:%M:%S} UTC</time>')
    return element.format(css_class, format_time(at), at)


def _clock_element(when: datetime | str, now: datetime) -> Markup:
    """Return "at 11:15", or "on 29 Nov at 11:15" if the date differs from the date of *now*."""
    at = parse_time(when) if isinstance(when, str) else when
    text = f"at {at:%H:%M}" if at.date() == now.date() else f"on {at.day} {at:%b} at {at:%H:%M}"
    return Markup('<time datetime="{}" class="clock">{}</time>').format(format_time(at), text)


def _countdown_element(when: datetime | str, now: datetime) -> Markup:
    """Return the time until *when*: "14m 20s", "3h 05m", or "now". The script updates it."""
    at = parse_time(when) if isinstance(when, str) else when
    seconds = max(0, int((at - now).total_seconds()))
    minutes, rest = divmod(seconds, 60)
    text = f"{minutes}m {rest:02d}s" if seconds < _HOUR_SECONDS else f"{minutes // 60}h {minutes % 60:02d}m"
    urgency = "" if seconds >= _SOON_SECONDS else " is-urgent" if seconds < _URGENT_SECONDS else " is-soon"
    element = Markup('<time class="countdown{}" datetime="{}">{}</time>')
    return element.format(urgency, format_time(at), text if seconds else "now")


def _indented(body: str) -> Markup:
    """Return the indented JSON of *body*. Only the indentation contains line breaks."""
    lines = msgspec.json.format(body, indent=2).split("\n")
    return Markup.escape("\n".join(map(escaped, lines)))


def _printed(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value
