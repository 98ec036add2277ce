"""Serves the audit page, and exports the entries that match its filters.

People whose role is limited to a scope see only entries about events in that scope and about their own actions.
"""

from __future__ import annotations

from datetime import date, timedelta
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from bridge.portal.audit_export import FORMATS, streamed
from bridge.portal.rendering import SECURITY_HEADERS
from bridge.portal.requests import KEY, MOST_ROWS, RequestRefused, choice_of, key_of, text_of, whole_number
from bridge.portal.site import Site
from bridge.portal.store.audit import AuditFilter, newest_entries
from bridge.portal.store.events import summaries_of
from bridge.portal.users import Person

_PAGE = 50


async def show(site: Site, request: Request, person: Person) -> Response:
    """``GET /audit``: show the entries that match the filters, newest first."""
    fields, wanted = _filter(request, person)
    first = whole_number(request.query_params, "first", 1, lowest=1, highest=MOST_ROWS)
    before = whole_number(request.query_params, "before", 0, lowest=0, highest=MOST_ROWS)
    found, total = await site.store.read(newest_entries, wanted, limit=_PAGE + 1, before=before or None)
    page = found[:_PAGE]
    keys = {key for entry in page for key in entry.event_keys if KEY.fullmatch(key)}
    events = await site.store.read(summaries_of, keys)
    rows = [(entry, [events[key] for key in entry.event_keys if key in events]) for entry in page]
    shown = {name: value for name, value in fields.items() if value}
    following = None
    if len(found) > _PAGE:
        following = urlencode({**shown, "first": first + _PAGE, "before": page[-1].entry})
    return site.login.page(
        request,
        person,
        "audit.html",
        rows=rows,
        fields=fields,
        query=urlencode(shown),
        first=first,
        total=total,
        following=following,
    )


async def export(site: Site, request: Request, person: Person) -> Response:
    """``GET /audit/export.{form}``: export all entries that match the filters."""
    form = request.path_params["form"]
    if form not in FORMATS:
        raise RequestRefused(404, "The format of the export must be jsonl or csv.")
    _, wanted = _filter(request, person)
    headers = {"Cache-Control": "no-store", "Content-Disposition": f'attachment; filename="audit.{form}"'}
    return await streamed(site.store, wanted, form, {**SECURITY_HEADERS, **headers})


def _filter(request: Request, person: Person) -> tuple[dict[str, str], AuditFilter]:
    fields = {name: text_of(request, name) for name in ("person", "event", "since", "until")}
    fields["show"] = choice_of(request, "show", ("decisions", "all"))
    return fields, AuditFilter(
        person=fields["person"],
        event_key=key_of(fields["event"]) if fields["event"] else "",
        since=_day(fields["since"]),
        until=_day(fields["until"], later=1),
        is_decision=fields["show"] != "all",
        scope=person.scope,
        own=(person.name, person.key),
    )


def _day(text: str, *, later: int = 0) -> str:
    try:
        return (date.fromisoformat(text) + timedelta(days=later)).isoformat() if text else ""
    except (ValueError, OverflowError):
        raise RequestRefused(400, "since and until must be dates such as 2026-11-20.") from None
