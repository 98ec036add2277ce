"""Serves the page of all VMs and their agents.

By default, the page lists only agents that would not follow this portal's decisions. The portal keeps the state of the
agents in memory, but filters, sorts, and counts the VMs in the database.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from urllib.parse import urlencode

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import format_time
from bridge.portal.connected_agents import AgentSeen, Connection
from bridge.portal.login import redirect
from bridge.portal.requests import MOST_ROWS, Form, RequestRefused, choice_of, text_of, whole_number
from bridge.portal.site import Site
from bridge.portal.store.vms import VmFilter, bind_name, count_vms, keys_of_vms, list_vms
from bridge.portal.users import AccessDenied, Person

_PAGE = 50
_MOST_VERSIONS = 8
_SILENT = timedelta(days=1)

#: The values of the parameter `show`, and the names of the counts.
SHOWN = {
    "refusing": "would not follow a decision",
    "connected": "connected",
    "reconnecting": "reconnecting",
    "disconnected": "disconnected",
    "silent": "silent for a day",
    "conflict": "with a name conflict",
    "all": "VMs",
}
_Agents = dict[str, AgentSeen]


async def show(site: Site, request: Request, person: Person) -> Response:
    """``GET /agents``: show the counts, and the VMs that match the `show` and `q` parameters."""
    text = text_of(request, "q")
    shown = choice_of(request, "show", SHOWN, "all" if text else "refusing")
    first = whole_number(request.query_params, "first", 1, lowest=1, highest=MOST_ROWS)
    cursor = (text_of(request, "name"), text_of(request, "key")) if first > 1 else None
    everything = VmFilter(scope=person.scope)
    agents, visible = site.connected_agents.all(), await site.store.read(keys_of_vms, everything)
    if person.scope:
        agents = {key: each for key, each in agents.items() if key in visible}
    keys = _keys(agents, site.kid)
    filters = {
        **{name: replace(everything, vm_keys=found) for name, found in keys.items()},
        "silent": replace(everything, silent_since=format_time(site.clock.now() - _SILENT)),
        "conflict": replace(everything, is_conflict=True),
        "all": everything,
    }
    counts = {name: len(found) for name, found in keys.items()} | {"all": len(visible)}
    for name in ("silent", "conflict"):
        counts[name] = await site.store.read(count_vms, filters[name])
    page = await site.store.read(list_vms, replace(filters[shown], text=text), limit=_PAGE, cursor=cursor)
    unknown: list[str] = []
    if not person.scope and not text:  # an agent can poll before its first record
        found = keys.get(shown, agents if shown == "all" else ())
        unknown = sorted(set(found) - visible)
    following = None
    if page.cursor is not None:
        name, key = page.cursor
        following = urlencode({"show": shown, "q": text, "first": first + len(page.vms), "name": name, "key": key})
    return site.login.page(
        request,
        person,
        "agents.html",
        counts=counts,
        without_agent=len(visible - agents.keys()),
        names=SHOWN,
        shown=shown,
        text=text,
        page=page,
        first=first,
        agents=agents,
        unknown=unknown,
        following=following,
        versions=_versions(agents),
        kid=site.kid,
        has_shared_tokens=not all(seen.is_attested for seen in agents.values()),
    )


async def bind(site: Site, request: Request, person: Person, _form: Form) -> Response:
    """``POST /agents/{vm_key}/bind``: resolve a name conflict in favor of this VM."""
    if person.why_not_approver is not None or person.scope:
        raise AccessDenied(403, "Only an approver of all VMs can resolve a name conflict.")
    key = request.path_params["vm_key"]
    if not await site.store.write(bind_name, key, by=person.name, at=site.now()):
        raise RequestRefused(409, "This VM does not have a name conflict, or no longer has one.")
    return redirect("/agents?show=conflict")


async def count_agents(site: Site, person: Person) -> dict[str, int]:
    """Return the number of ``disconnected`` and ``refusing`` agents that *person* can see."""
    keys = _keys(site.connected_agents.all(), site.kid)
    counts = {name: len(keys[name]) for name in ("disconnected", "refusing")}
    for name, number in counts.items():
        if person.scope and number:
            counts[name] = await site.store.read(count_vms, VmFilter(scope=person.scope, vm_keys=keys[name]))
    return counts


def _keys(agents: _Agents, kid: str | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"refusing": [], **{each.value: [] for each in Connection}}
    for key, seen in agents.items():
        found[seen.connection.value].append(key)
        why_not = seen.report.refusal(kid) if seen.connection is Connection.CONNECTED and kid is not None else None
        if why_not is not None or seen.connection is Connection.DISCONNECTED:
            found["refusing"].append(key)
    return found


def _versions(agents: _Agents) -> list[tuple[str, int]]:
    """Return the number of agents with each version."""
    counts = Counter(seen.report.version or "unknown" for seen in agents.values())
    shown = counts.most_common(_MOST_VERSIONS)
    others = len(agents) - sum(number for _, number in shown)
    return [*shown, ("other versions", others)] if others else shown
