"""Validates form fields and query parameters of pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.requests import Request

from bridge.portal.fleet import key_of_event_id
from bridge.portal.requests import RequestRefused, body_of
from bridge.text import without_nul

FORM = "application/x-www-form-urlencoded"
_MOST_FIELDS = 1_000
_MOST_CHARACTERS = 200
#: The largest position of a row in a list.
MOST_ROWS = 10**9
KEY = re.compile("[0-9a-f]{32}")
DIGEST = re.compile("[0-9a-f]{64}")
_GROUP = re.compile(r"(resource_group|labels\.[^:\n]{1,256}):[^\n]{0,1024}")
_CURSOR = re.compile("([0-9T:.Z-]{1,24}~)?[0-9]{1,9}~([01]~)?[0-9T:.Z-]{1,24}~[0-9a-f]{32}")
#: The pages to which a login can redirect.
_NEXT = re.compile(r"/(timeline|agents|audit|events/[0-9a-f]{32})?")

Form = Mapping[str, Sequence[str]]


async def form_of(request: Request) -> Form:
    """Return the fields of the form in *request*. Raise RequestRefused if the form is invalid."""
    body = await body_of(request)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise RequestRefused(400, f"The Content-Type of a form must be {FORM}.")
    try:
        return parse_qs(body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS)
    except ValueError as error:  # includes UnicodeDecodeError
        raise RequestRefused(400, "The form cannot be read.") from error


def one(form: Form, name: str) -> str:
    """Return the value of a field, or "" if the field is missing or repeated."""
    values = form.get(name, ())
    return values[0] if len(values) == 1 else ""


def key_of(name: str) -> str:
    """Return the key of the event with the key or EventId *name*."""
    return name if KEY.fullmatch(name) else key_of_event_id(name)


def text_of(request: Request, name: str) -> str:
    """Return the query parameter *name*, with at most 200 characters."""
    return without_nul(request.query_params.get(name, "").strip())[:_MOST_CHARACTERS]


def group_of(request: Request) -> str:
    """Return the requested group of VMs, or "" for all VMs."""
    group = request.query_params.get("group", "")
    if group and not _GROUP.fullmatch(group):
        raise RequestRefused(400, "A group is resource_group:NAME or labels.NAME:VALUE.")
    return without_nul(group.casefold() if group.startswith("resource_group:") else group)


def cursor_of(request: Request) -> str | None:
    """Return the cursor, or None for the first page."""
    text = request.query_params.get("cursor")
    if text is not None and not _CURSOR.fullmatch(text):
        raise RequestRefused(400, "cursor must be the cursor of an earlier response.")
    return text


def own_page(text: str) -> str:
    """Return *text* if it is the address of a page of this portal. Otherwise, return "/"."""
    return text if _NEXT.fullmatch(text) else "/"
