"""A process is killed at a random point of a decision: no decision is lost or duplicated.

The tests kill one of two processes on PostgreSQL, and the only process on SQLite. After a missing response, a user
checks the page before a second attempt, and a program sends its decision again.
"""

import contextlib
import logging
import random
import threading
import time
from collections import Counter

import pytest
import requests
from fleet_records import fleet_record, vm_id_of
from portal_databases import audit_fault, of_file
from portal_kit import poll
from portal_pair import Pair, bring, say, send
from portal_process import PortalProcess
from waiting import until

from bridge.portal.fleet import key_of_event_id
from bridge.portal.store.event_details import verdicts_of
from bridge.portal.store.events import event_of

logger = logging.getLogger(__name__)

FEW, MANY = 4, 200
#: Initial maximum delay of a kill. It adapts to the machine, so that about half of the kills precede the response.
_LONGEST_SECONDS = 0.06
LEFT = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND state <> 'idle' AND backend_type = 'client backend'"
)


class Agent(threading.Thread):
    """An agent that polls *portals* in turn, as behind a load balancer, and keeps the decisions."""

    def __init__(self, vm, portals):
        super().__init__(daemon=True)
        self._vm = vm
        self._portals = portals
        self.told = []
        self.index = 0
        self.stopping = False
        self.start()

    def run(self):
        turn = 0
        while not self.stopping:
            turn += 1
            with contextlib.suppress(requests.RequestException):
                found = poll(
                    self._portals[turn % len(self._portals)].url, self._vm, index=self.index, wait=2, kids=["p1"]
                )
                self.told += found["decisions"]
                self.index = found["index"]
                continue
            time.sleep(0.05)


class Fleet:
    """Portals, the agents of two VMs, and the users and programs that decide."""

    def __init__(self, directory, database, how_many):
        self.pair = Pair(directory, database)
        self.store = database.store()
        self.portals = [PortalProcess(directory / f"portal-{number}", self.pair.tables) for number in range(how_many)]
        for portal in self.portals:
            portal.start()
        self.agents = [Agent(vm, self.portals) for vm in (0, 1)]
        self.answered = Counter()
        self.clicked = []
        self.tokens = []
        self._longest_seconds = _LONGEST_SECONDS

    def close(self):
        for agent in self.agents:
            agent.stopping = True
        for portal in self.portals:
            portal.kill()
        for agent in self.agents:
            agent.join(30)

    def round(self, number, chance, end_of_killed):
        """Submit a decision, kill the portal during the request, and retry without a successful response."""
        dying = self.portals[number % len(self.portals)]
        decide = self.click(number) if number % 2 else self.carry()
        answers = []

        def first():
            with contextlib.suppress(requests.RequestException):
                answers.append(decide(dying.url))

        thread = threading.Thread(target=first)
        thread.start()
        time.sleep(chance.uniform(0, self._longest_seconds))
        dying.kill()
        thread.join()
        end_of_killed()
        if len(self.portals) == 1:
            dying.start()
        living = self.portals[(number + 1) % len(self.portals)]
        if answers and answers[0]:
            self.answered["before the kill"] += 1
            self._longest_seconds *= 0.8
        else:
            self.answered["after it"] += 1
            self._longest_seconds = min(1.0, 1.25 * self._longest_seconds)
            until(lambda: decide(living.url), seconds=60)
        if len(self.portals) > 1:
            dying.start()

    def carry(self):
        token = self.pair.signer.sign(vm_id_of(0))
        self.tokens.append(token)
        return lambda url: bring(url, token).status_code == 200

    def click(self, number):
        event_id = f"E-{number}"
        key = key_of_event_id(event_id)
        records = [fleet_record(vm, event_id=event_id, sequence=number) for vm in (0, 1)]
        assert send(self.portals[0].url, records).status_code == 204
        digest = self.store.read(event_of, key, now="").digest
        self.clicked.append(key)

        def decide(url):
            if self.store.read(verdicts_of, [key]):  # the page shows the approval of Ann
                return True
            answer = say(url, "ann", "approve", key=key, digest=digest)
            # 409: no agent has polled that process yet.
            assert answer.status_code in (201, 409, 503), answer.text
            return answer.status_code == 201

        return decide


def check(fleet):
    """Compare the database with the acknowledged decisions, and the received decisions with the database."""
    rows = fleet.store.read(
        lambda connection: connection.exec_driver_sql(
            "SELECT vm_key, jws, event_key, verdict_id FROM decisions ORDER BY decision_index"
        ).all()
    )
    carried = Counter(row.jws for row in rows if row.verdict_id is None)
    assert carried == Counter(fleet.tokens)
    decided = Counter((row.event_key, row.vm_key) for row in rows if row.verdict_id is not None)
    assert {key for key, _ in decided} == set(fleet.clicked)
    assert set(decided.values()) <= {1}
    for key in fleet.clicked:
        assert len(fleet.store.read(verdicts_of, [key])) == 1
    for vm, agent in enumerate(fleet.agents):
        wanted = [row.jws for row in rows if row.vm_key == vm_id_of(vm)]
        until(lambda agent=agent, wanted=wanted: len(agent.told) >= len(wanted))
        assert agent.told == wanted  # each once and in order
    assert audit_fault(fleet.store) is None


ROUNDS = [
    pytest.param(FEW, id="few"),
    pytest.param(MANY, id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killing_one_of_two_processes_loses_and_duplicates_no_decision(
    tmp_path, postgresql, postgresql_database, rounds
):
    fleet = Fleet(tmp_path, postgresql_database, 2)
    name = postgresql_database.name

    def end_of_killed():
        """Wait until PostgreSQL has ended the connections of the process and decided its open commits."""
        until(lambda: postgresql.sql(name, LEFT) == [(0,)])

    try:
        run(fleet, rounds, end_of_killed)
    finally:
        fleet.close()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killing_the_process_on_sqlite_loses_and_duplicates_no_decision(tmp_path, rounds):
    with of_file(tmp_path) as database:
        fleet = Fleet(tmp_path, database, 1)
        try:
            run(fleet, rounds, lambda: None)
        finally:
            fleet.close()


def run(fleet, rounds, end_of_killed):
    chance = random.Random(rounds)
    for number in range(1, rounds + 1):
        fleet.round(number, chance, end_of_killed)
    check(fleet)
    said = dict(fleet.answered)
    logger.info("%d kills: %s; %d carried, %d clicked", rounds, said, len(fleet.tokens), len(fleet.clicked))
