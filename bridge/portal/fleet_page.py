"""Serves the page of all VMs and their agents.

By default, the page lists only agents that would not follow this portal's decisions. The database contains the names of
the VMs, and the memory contains the state of their agents. This module combines both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
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
from bridge.portal.store.vms import VmFilter, bind_name, find_vms, read_vms
from bridge.portal.users import AccessDenied, Person

_PAGE = 50
_MOST_VERSIONS = 8
_SILENT = timedelta(days=1)

#: The values of the parameter `show`, and the names of the counts.
SHOWN = {
    "refusing": "would not follow a decision",
    "idle": "without a polling agent",
    "connected": "connected",
    "reconnecting": "reconnecting",
    "disconnected": "disconnected",
    "silent": "silent for a day",
    "conflict": "with a name conflict",
    "all": "VMs",
}


async def show(site: Site, request: Request, person: Person) -> Response:
    """``GET /agents``: show the counts, and the VMs that match the `show` and `q` parameters."""
    text = text_of(request, "q")
    shown = choice_of(request, "show", SHOWN, "all" if text else "refusing")
    first = whole_number(request.query_params, "first", 1, lowest=1, highest=MOST_ROWS)
    cursor = (text_of(request, "name"), text_of(request, "key")) if first > 1 else ("", "")
    everything = VmFilter(scope=person.scope)
    everyone = await site.store.read(find_vms, everything)
    matching = await site.store.read(find_vms, replace(everything, text=text)) if text else everyone
    vms = {key for _, key in everyone}
    agents = site.connected_agents.of(vms) if person.scope else site.connected_agents.all()
    silent = replace(everything, silent_since=format_time(site.clock.now() - _SILENT))
    counted = {
        **_by_state(agents, site.kid),
        "idle": vms - agents.keys(),
        "silent": await _find(site, silent),
        "conflict": await _find(site, replace(everything, is_conflict=True)),
        "all": vms,
    }
    found = [each for each in matching if each[1] in counted[shown]]
    page = found[bisect_right(found, cursor) :][:_PAGE]
    following = None
    if page and page[-1] != found[-1]:
        name, key = page[-1]
        following = urlencode({"show": shown, "q": text, "first": first + len(page), "name": name, "key": key})
    unknown = set() if text else (agents.keys() if shown == "all" else counted[shown]) - vms
    return site.login.page(
        request,
        person,
        "agents.html",
        counts={name: len(keys) for name, keys in counted.items()},
        names=SHOWN,
        shown=shown,
        text=text,
        vms=await site.store.read(read_vms, [key for _, key in page]),
        total=len(found),
        first=first,
        agents=agents,
        unknown=sorted(unknown),
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


async def count_agents(site: Site, person: Person, affected: set[str]) -> dict[str, int]:
    """Return the numbers of agents for the first page.

    *affected* contains the members of the open events.
    """
    agents = site.connected_agents.all()
    if person.scope:
        visible = await _find(site, VmFilter(scope=person.scope))
        agents, affected = site.connected_agents.of(visible), affected & visible
    counts = {name: len(keys) for name, keys in _by_state(agents, site.kid).items()}
    return {**counts, "idle": len(affected - agents.keys())}


def _by_state(agents: Mapping[str, AgentSeen], kid: str | None) -> dict[str, set[str]]:
    """Return the VMs of each connection state, and those whose agent would not follow."""
    found: dict[str, set[str]] = {"refusing": set(), **{each.value: set() for each in Connection}}
    for key, seen in agents.items():
        found[seen.connection.value].add(key)
        why_not = seen.report.refusal(kid) if seen.connection is Connection.CONNECTED and kid is not None else None
        if why_not is not None or seen.connection is Connection.DISCONNECTED:
            found["refusing"].add(key)
    return found


async def _find(site: Site, wanted: VmFilter) -> set[str]:
    return {key for _, key in await site.store.read(find_vms, wanted)}


def _versions(agents: Mapping[str, AgentSeen]) -> list[tuple[str, int]]:
    """Return the number of agents with each version."""
    counts = Counter(seen.report.version or "unknown" for seen in agents.values())
    shown = counts.most_common(_MOST_VERSIONS)
    others = len(agents) - sum(number for _, number in shown)
    return [*shown, ("other versions", others)] if others else shown
