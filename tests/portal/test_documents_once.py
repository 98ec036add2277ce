"""A portal of several processes takes an attested document once: who stole it on its way has no use for it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import datetime, timedelta, timezone

import msgspec
import pytest
from starlette.requests import Request

from bridge.clock import REAL_CLOCK, format_time
from bridge.portal.agents import AgentRoutes
from bridge.portal.settings import AttestedSettings
from bridge.portal.store.database import Store
from bridge.portal.store.documents import take_document
from bridge.testing import Simulator

VM = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
NOW = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)


@pytest.fixture
def store(tmp_path):
    made = Store.of_file(tmp_path / "portal.db")
    made.migrate()
    yield made
    made.close()


@pytest.fixture
def azure():
    with Simulator(vms=["vm_0"], rate_limit=False) as simulator:
        yield simulator


@pytest.fixture
def processes(azure, store, tmp_path):
    """Return what makes the routes of two processes of a portal."""
    made = []
    (tmp_path / "secret").write_text("one secret of forty characters, or so, or more\n")
    (tmp_path / "roots.pem").write_bytes(azure.attestation.root_pem)
    (tmp_path / "intermediates.pem").write_bytes(azure.attestation.intermediate_pem)
    table = {
        "subscriptions": [azure.machines[0].subscription_id],
        "secret_file": str(tmp_path / "secret"),
        "roots_file": str(tmp_path / "roots.pem"),
        "intermediates_file": str(tmp_path / "intermediates.pem"),
    }

    def two(**changes):
        settings = msgspec.convert({**table, **changes}, AttestedSettings)
        made.extend(AgentRoutes(settings, count=[].append, clock=REAL_CLOCK, store=store) for _ in range(2))
        return made[-2:]

    yield two
    for each in made:
        each.close()


def answer(route, **value):
    async def receive():
        return {"type": "http.request", "body": json.dumps(value).encode()}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
    found = asyncio.run(route(Request(scope, receive)))
    return found.status_code, json.loads(found.body)


def document(azure, asked):
    return azure.attestation.document(azure.machines[0], answer(asked.challenge)[1]["nonce"])


def test_a_document_gets_a_token_of_one_process_alone(processes, azure):
    ours, others = processes()
    shown = document(azure, ours)
    found = [answer(each.token, document=shown) for each in (others, ours, others)]
    assert [(status, body.get("reason")) for status, body in found] == [
        (200, None),
        (409, "replayed"),
        (409, "replayed"),
    ]
    assert answer(others.token, document=document(azure, ours))[0] == 200


def test_without_the_database_no_document_is_taken(processes, azure, tmp_path):
    ours, _ = processes()
    with closing(sqlite3.connect(tmp_path / "portal.db")) as held:
        held.execute("DROP TABLE properties")
        held.commit()
    assert answer(ours.token, document=document(azure, ours))[0] == 503


def test_a_portal_that_prefers_a_nonce_remembers_none(processes, azure):
    ours, others = processes(nonce="preferred")
    shown = document(azure, ours)
    assert [answer(each.token, document=shown)[0] for each in (ours, others)] == [200, 200]


def test_what_was_taken_is_forgotten_when_its_time_is_over(store):
    def take(nonce, *, after, vm_id=VM):
        at = NOW + timedelta(seconds=after)
        until = format_time(at + timedelta(seconds=420))
        return store.write(take_document, vm_id, nonce, at=format_time(at), until=until)

    assert take("a", after=0)
    assert not take("a", after=419)
    assert take("a", after=1, vm_id="another")
    assert take("b", after=420)
    with store.engine.connect() as connection:
        names = [
            name for (name,) in connection.exec_driver_sql("SELECT name FROM properties WHERE name LIKE 'document:%'")
        ]
    assert len(names) == 2  # that of the other VM, and b
    assert all(len(name) == 32 for name in names)
    assert take("a", after=421)
