"""Serves the page of all VMs and their agents.

By default, the page lists only agents that would not follow a decision of this portal. The portal reads the state of
the agents from memory, and uses the database to filter, sort, and count the VMs.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from bridge.clock import Clock, format_time
from bridge.portal.connected_agents import AgentReport, ConnectedAgents, Connection
from bridge.portal.form_fields import Form, text_of
from bridge.portal.login import LoginPages, redirect
from bridge.portal.requests import RequestRefused
from bridge.portal.store.database import StoreThreads
from bridge.portal.store.vms import ListedVm, VmFilter, bind_name, count_vms, keys_of_vms, list_vms
from bridge.portal.users import AccessDenied, Person
from bridge.text import without_nul

_PAGE = 50
_MOST_VERSIONS = 8
_MOST_UNKNOWN = 20
_SILENT = timedelta(days=1)
_CURSOR_PARTS = 3

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
_Reports = dict[str, tuple[Connection, AgentReport, bool]]


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """A VM and its agent, either of which might be unknown."""

    name: str
    vm: ListedVm | None
    connection: str
    version: str
    follows: str
    """"yes" if the agent would act on an approval by the portal's key, or the reason why not."""

    @property
    def where(self) -> str:
        """Return the groups except the subscription: "rg-web, team:web, westeurope"."""
        groups = () if self.vm is None else self.vm.groups
        shown = (each.removeprefix("labels.") for each in groups if not each.startswith("subscription:"))
        return ", ".join(each.removeprefix("resource_group:").removeprefix("region:") for each in shown)


class VersionCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of agents with one version."""

    version: str
    agents: int
    percent: float


class FleetPage:
    """Serves the page. *kid* names the portal's signing key, if any."""

    def __init__(
        self,
        *,
        login_pages: LoginPages,
        store: StoreThreads,
        connected_agents: ConnectedAgents,
        clock: Clock,
        kid: str | None,
    ) -> None:
        self._login_pages = login_pages
        self._store = store
        self._connected_agents = connected_agents
        self._clock = clock
        self._kid = kid

    async def show(self, request: Request, person: Person) -> Response:
        """``GET /agents``: show the counts, and the VMs that match the parameters `show` and `q`."""
        text = text_of(request, "q")
        shown = request.query_params.get("show") or ("all" if text else "refusing")
        if shown not in SHOWN:
            raise RequestRefused(400, f"show must be one of {', '.join(SHOWN)}.")
        first, cursor = _cursor(request.query_params.get("after"))
        reports = self._connected_agents.reports()
        visible = await self._store.read(keys_of_vms, VmFilter(scope=person.scope))
        if person.scope:
            reports = {key: each for key, each in reports.items() if key in visible}
        keys = _keys(reports, self._kid)
        since = format_time(self._clock.now() - _SILENT)
        filters = {
            "silent": VmFilter(scope=person.scope, text=text, silent_since=since),
            "conflict": VmFilter(scope=person.scope, text=text, is_conflict=True),
            "all": VmFilter(scope=person.scope, text=text),
        }
        counts = {name: len(found) for name, found in keys.items()} | {"all": len(visible)}
        for name in ("silent", "conflict"):
            counts[name] = await self._store.read(count_vms, msgspec.structs.replace(filters[name], text=""))
        wanted = filters.get(shown) or VmFilter(scope=person.scope, text=text, vm_keys=keys[shown])
        page = await self._store.read(list_vms, wanted, limit=_PAGE, cursor=cursor)
        rows = [self._row(vm.vm.vm_key, vm, reports) for vm in page.vms]
        unknown: list[str] = []
        if not person.scope and not text:  # an agent can poll before its first record
            found = keys.get(shown, reports if shown == "all" else ())
            unknown = sorted(set(found) - visible)
        return self._login_pages.page(
            request,
            person,
            "agents.html",
            counts=counts,
            without_agent=len(visible - reports.keys()),
            names=SHOWN,
            shown=shown,
            text=text,
            page=page,
            first=first,
            rows=rows,
            unknown=[self._row(key, None, reports) for key in unknown[:_MOST_UNKNOWN]],
            unknown_total=len(unknown),
            following=None if page.cursor is None else f"{first + len(rows)}~{page.cursor[1]}~{page.cursor[0]}",
            versions=_versions(reports),
            kid=self._kid,
            has_shared_tokens=not all(is_attested for _, _, is_attested in reports.values()),
        )

    async def bind(self, request: Request, person: Person, _form: Form) -> Response:
        """``POST /agents/{vm_key}/bind``: resolve a name conflict in favor of this VM."""
        if person.why_not_approver is not None or person.scope:
            raise AccessDenied(403, "Only an approver of all VMs can resolve a name conflict.")
        key = request.path_params["vm_key"]
        if not await self._store.write(bind_name, key, by=person.name, at=format_time(self._clock.now())):
            raise RequestRefused(409, "This VM does not have a name conflict, or no longer has one.")
        return redirect("/agents?show=conflict")

    def _row(self, key: str, vm: ListedVm | None, reports: _Reports) -> FleetRow:
        seen = reports.get(key)
        name = (None if vm is None else vm.vm.name) or key
        if seen is None:
            follows = "no: it has not polled for decisions within a day"
            return FleetRow(name=name, vm=vm, connection="never polled", version="unknown", follows=follows)
        connection, report, _ = seen
        why_not = None if self._kid is None else report.refusal(self._kid)
        if connection is not Connection.CONNECTED:
            why_not = f"is {connection.value}"
        if why_not is not None:
            follows = f"no: it {why_not}"
        else:
            follows = "the portal has no key" if self._kid is None else "yes"
        version = report.version or "unknown"
        return FleetRow(name=name, vm=vm, connection=connection.value, version=version, follows=follows)


async def count_agents(
    store: StoreThreads, connected_agents: ConnectedAgents, person: Person, kid: str | None
) -> dict[str, int]:
    """Return the number of ``disconnected`` and ``refusing`` agents that *person* can see.

    The function counts only agents that polled within the last day. It queries the database only if the person's role
    is limited to a scope.
    """
    keys = _keys(connected_agents.reports(), kid)
    counts = {name: len(keys[name]) for name in ("disconnected", "refusing")}
    for name in counts if person.scope else ():
        counts[name] = (
            await store.read(count_vms, VmFilter(scope=person.scope, vm_keys=keys[name])) if keys[name] else 0
        )
    return counts


def _keys(reports: _Reports, kid: str | None) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"refusing": [], **{each.value: [] for each in Connection}}
    refusals: dict[AgentReport, bool] = {}
    for key, (connection, report, _) in reports.items():
        found[connection.value].append(key)
        if report not in refusals:
            refusals[report] = kid is not None and report.refusal(kid) is not None
        if connection is Connection.DISCONNECTED or (connection is Connection.CONNECTED and refusals[report]):
            found["refusing"].append(key)
    return found


def _versions(reports: _Reports) -> list[VersionCount]:
    counts = Counter(report.version or "unknown" for _, report, _ in reports.values())
    shown = counts.most_common(_MOST_VERSIONS)
    others = len(reports) - sum(number for _, number in shown)
    if others:
        shown.append(("other versions", others))
    return [
        VersionCount(version=version, agents=number, percent=round(100 * number / len(reports), 1))
        for version, number in shown
    ]


def _cursor(text: str | None) -> tuple[int, tuple[str, str] | None]:
    if text is None:
        return 1, None
    parts = without_nul(text).split("~", _CURSOR_PARTS - 1)
    if len(parts) != _CURSOR_PARTS or not parts[0].isdecimal() or len(parts[0]) > 9:  # noqa: PLR2004  # digits
        raise RequestRefused(400, "after must be the cursor of an earlier page.")
    return int(parts[0]), (parts[2], parts[1])
