"""Approver fixtures: one with the keys of two people, and one with a portal and rules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from approver_kit import ANNE, BORIS, ApproverKit
from drain import Drain
from poller_kit import HELD_SECONDS, KEYS, VM, Desk, stop_in_time
from portal_stub import PortalStub

from bridge.approval.portal_client import PortalClient
from bridge.approval.portal_poller import PortalPoller
from bridge.config.approval import RemoteSettings
from bridge.events.event import VmIdentity
from bridge.metrics.metrics import Metrics


@pytest.fixture
def new_kit(tmp_path: Path) -> Iterator[ApproverKit]:
    """Return an approver that has not started."""
    with contextlib.closing(ApproverKit(tmp_path)) as made:
        yield made


@pytest.fixture
def kit(new_kit: ApproverKit) -> ApproverKit:
    """Return an approver that trusts the keys of two people."""
    new_kit.trust(("k1", ANNE), ("k2", BORIS))
    new_kit.start()
    new_kit.wait(10)
    return new_kit


@pytest.fixture
def two(new_kit: ApproverKit) -> ApproverKit:
    """Return an approver that requires two people, of whom one has two keys."""
    new_kit.trust(("k1", ANNE), ("k2", BORIS), ("k3", ANNE), required=2)
    new_kit.start()
    new_kit.wait(10)
    return new_kit


@pytest.fixture
def drain(tmp_path: Path) -> Drain:
    return Drain(tmp_path)


@pytest.fixture
def portal(tmp_path: Path) -> Iterator[PortalStub]:
    with PortalStub(tmp_path / "portal", tls=False) as portal:
        yield portal


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Callable[..., PortalStub]]:
    """Return a factory of TLS portals. Request it before `start`, so that portals stop after the pollers."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(PortalStub(tmp_path / "portal", **options))


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def start(desk: Desk) -> Iterator[Callable[..., PortalPoller]]:
    """Return a function that starts a poller for a portal or a URL. Teardown stops each poller."""
    with contextlib.ExitStack() as stack:

        def started(portal: Any, *, remote: dict[str, Any] | None = None, **options: Any) -> PortalPoller:
            url = portal if isinstance(portal, str) else portal.url
            ca_file = None if isinstance(portal, str) or portal.ca_file is None else str(portal.ca_file)
            given = {"url": url, "ca_file": ca_file, "keys": KEYS, "wait_seconds": HELD_SECONDS, **(remote or {})}
            for_client = {name: options.pop(name) for name in ("token", "document", "grace_seconds") if name in options}
            client = PortalClient(RemoteSettings(**given), **for_client)
            options.setdefault("metrics", Metrics().approval_channel())
            channel = PortalPoller(client, **{"vm": lambda: VmIdentity(vm_id=VM), "receive": desk, **options})
            stack.callback(stop_in_time, channel)
            channel.start()
            return channel

        yield started
