"""Validates form fields and query parameters of pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qs

from starlette.requests import Request

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


def text_of(request: Request, name: str) -> str:
    """Return the query parameter *name*, with at most 200 characters."""
    return without_nul(request.query_params.get(name, "").strip())[:_MOST_CHARACTERS]


def group_of(request: Request) -> str | None:
    """Return the requested group of VMs, or None for all VMs.

    Raise RequestRefused if the group is invalid.
    """
    group = request.query_params.get("group") or None
    if group is not None and not _GROUP.fullmatch(group):
        raise RequestRefused(400, "A group is resource_group:NAME or labels.NAME:VALUE.")
    if group is not None and group.startswith("resource_group:"):
        group = group.casefold()
    return None if group is None else without_nul(group)


def part_of(request: Request) -> frozenset[str] | None:
    """Return the event keys in the parameter `part`, which requests only a part of the page.

    An empty set requests all events. The function returns None if the request is for the whole page.
    """
    text = request.query_params.get("part")
    return None if text is None else frozenset(key for key in text.split(",") if KEY.fullmatch(key))


def cursor_of(request: Request, name: str = "cursor") -> str | None:
    """Return the cursor in the parameter *name*, or None for the first page."""
    text = request.query_params.get(name)
    if text is not None and not _CURSOR.fullmatch(text):
        raise RequestRefused(400, f"{name} must be the cursor of an earlier response.")
    return text


def own_page(text: str) -> str:
    """Return *text* if it is the address of a page of this portal.

    Otherwise, return the first page.
    """
    return text if _NEXT.fullmatch(text) else "/"
