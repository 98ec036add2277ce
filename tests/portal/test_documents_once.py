"""Several portal processes accept an attested document only once, so that a stolen document is useless."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import msgspec
import pytest
from portal_kit import attested_table
from sqlalchemy import select
from starlette.applications import Starlette
from starlette.requests import Request

from bridge.clock import REAL_CLOCK, format_time
from bridge.portal.agents import AgentRoutes
from bridge.portal.metrics import PortalMetrics
from bridge.portal.schema import properties
from bridge.portal.settings import AttestedSettings
from bridge.portal.store.agents import take_document
from bridge.portal.store.database import StoreUnavailable
from bridge.testing import Simulator

VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
NOW = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def processes(azure, database, tmp_path):
    """Return a function that creates the routes of two portal processes."""
    made = []
    table = attested_table(azure, tmp_path)

    def two(**changes):
        settings = msgspec.convert({**table, **changes}, AttestedSettings)
        stores = database.store(), database.store()
        made.extend(
            AgentRoutes(settings, documents=PortalMetrics().documents, clock=REAL_CLOCK, store=each) for each in stores
        )
        return made[-2:]

    yield two
    for each in made:
        each.close()


def answer(route, **value):
    async def receive():
        return {"type": "http.request", "body": json.dumps(value).encode()}

    app = Starlette()
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "app": app}
    found = asyncio.run(route(Request(scope, receive)))
    return found.status_code, json.loads(found.body)


def document(azure, asked):
    return azure.attestation.document(azure.machines[0], answer(asked.challenge)[1]["nonce"])


def test_document_receives_a_token_from_only_one_process(processes, azure):
    ours, others = processes()
    shown = document(azure, ours)
    found = [answer(each.token, document=shown) for each in (others, ours, others)]
    assert [(status, body.get("reason")) for status, body in found] == [
        (200, None),
        (409, "replayed"),
        (409, "replayed"),
    ]
    assert answer(others.token, document=document(azure, ours))[0] == 200


def test_document_is_not_accepted_without_the_database(processes, azure, database):
    ours, _ = processes()
    database.store().write(properties.drop)
    with pytest.raises(StoreUnavailable):
        answer(ours.token, document=document(azure, ours))


def test_concurrent_uses_of_a_document_succeed_only_once(database):
    stores = [database.store() for _ in range(4)]
    begun = threading.Barrier(len(stores))

    def take(store):
        begun.wait(30)
        return store.write(take_document, VM, "a", at=format_time(NOW), until=format_time(NOW + timedelta(minutes=7)))

    with ThreadPoolExecutor(len(stores)) as pool:
        assert sorted(pool.map(take, stores)) == [False, False, False, True]


def test_used_document_is_deleted_after_its_expiry(database):
    store = database.store()

    def take(nonce, *, after, vm_id=VM):
        at = NOW + timedelta(seconds=after)
        until = format_time(at + timedelta(seconds=420))
        return store.write(take_document, vm_id, nonce, at=format_time(at), until=until)

    assert take("a", after=0)
    assert not take("a", after=419)
    assert take("a", after=1, vm_id="another")
    assert take("b", after=420)
    found = select(properties.c.name).where(properties.c.name.startswith("document:"))
    names = store.read(lambda connection: list(connection.execute(found).scalars()))
    assert len(names) == 2  # the document of the other VM, and b
    assert all(len(name) == 32 for name in names)
    assert take("a", after=421)
