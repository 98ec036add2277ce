"""SIGKILL at random points of a stream of documents: no record is lost, forged, or out of order.

The metadata service serves the next document only after one agent process has polled the current document twice. Its
changes are then stored, so every change must reach the sinks, regardless of the number of kills. The expected records
follow from the steps of the service, not from the code of the agent. The webhook ``waiting`` rejects all records until
the end, so the outbox keeps every record across every kill.

``KILLS=1000 pytest -m long -s tests/faults/test_kill.py`` is the long form.
"""

import os
import random
import time
from collections import Counter
from itertools import pairwise

import pytest
from agent_stage import Stage, judge, key_of, open_in_fold, sum_of_chains

KILLS = int(os.environ.get("KILLS", "20"))
MOST_EVENTS = 8
BEFORE_THE_FIRST_POLL = 0.25
"""The share of the kills."""


class World:
    """Events that are announced, begin, and end at random."""

    def __init__(self, azure, seed):
        self.azure = azure
        self.chance = random.Random(seed)
        self.made = 0

    def step(self):
        touched = set()
        for _ in range(self.chance.randint(1, 4)):
            active = [event_id for event_id in self.azure.events if event_id not in touched]
            if len(self.azure.events) < MOST_EVENTS and (not active or self.chance.random() < 0.5):
                touched.add(self.add())
            elif active:
                event_id = self.chance.choice(active)
                touched.add(event_id)
                self.change(event_id)

    def add(self):
        self.made += 1
        event_id = f"E-{self.made:06}"
        event_type = self.chance.choice(["Freeze", "Reboot", "Redeploy", "Preempt"])
        self.azure.announce(event_id, EventType=event_type, Description="x" * self.chance.choice([0, 40, 900]))
        return event_id

    def change(self, event_id):
        if self.azure.events[event_id]["EventStatus"] == "Started" or self.chance.random() < 0.3:
            self.azure.end(event_id)
        else:
            self.azure.begin(event_id)


def run_chain(directory, env, *, kills, seed):
    """Kill one agent *kills* times. Return its stage."""
    chance = random.Random(seed)
    stage = Stage(directory, env, approval="")
    world = World(stage.azure, seed)
    try:
        for _ in range(kills):
            stage.process = stage.new_agent()
            polls = len(stage.azure.polled_at)
            if chance.random() > BEFORE_THE_FIRST_POLL:
                stage.wait(lambda polls=polls: len(stage.azure.polled_at) > polls)
            live(stage, world, chance.uniform(0.0, 1.2))
            stage.kill()
        stage.waiting.accepts = True
        stage.start()
        for receiver in (stage.healthy, stage.waiting):
            stage.wait_for_records(receiver, 60.0)
        stage.wait(stage.is_saved)
        stage.process.terminate()
        assert stage.process.wait(20) == 0
        assert "Traceback" not in stage.log, stage.log
    finally:
        stage.close()
    return stage


def live(stage, world, seconds):
    """Serve the next document each time the agent has polled the current document twice."""
    end = time.monotonic() + seconds
    polls = len(stage.azure.polled_at)
    while time.monotonic() < end:
        if len(stage.azure.polled_at) >= polls + 2:
            world.step()
            polls = len(stage.azure.polled_at)
        time.sleep(0.005)


def figures_of(stage, receiver):
    """Return the counts of records, duplicates, and errors."""
    records = receiver.records
    first = {}
    for record in records:
        first.setdefault(record["id"], record)
    by_place = sorted(first.values(), key=lambda record: (record["stream_id"], record["sequence"]))
    newest = by_place[-1]["active_event_ids"]
    return Counter(
        {
            **{what: len(keys) for what, keys in judge(stage.expected(), records).items()},
            "records": len(stage.expected()),
            "duplicates": len(records) - len(first),
            "out of order": out_of_order(stage, first.values()) + out_of_order(stage, by_place),
            "gaps in a stream": sum(
                one["stream_id"] == two["stream_id"] and two["sequence"] != one["sequence"] + 1
                for one, two in pairwise(by_place)
            ),
            "wrong fold": open_in_fold(records) not in (None, set(stage.azure.events)),
            "wrong open events": newest is not None and set(newest) != set(stage.azure.events),
        }
    )


def out_of_order(stage, records):
    """Return the number of records that follow a later record of their event."""
    places = sorted(stage.azure.changed_at, key=stage.azure.changed_at.get)
    order = {key: place for place, key in enumerate(places)}
    count, last = 0, {}
    for record in records:
        event_id, place = record["event"]["event_id"], order.get(key_of(record), -1)
        count += place < last.get(event_id, -1)
        last[event_id] = place
    return count


@pytest.mark.parametrize(
    ("kills", "chains"),
    [(KILLS, 2), pytest.param(max(KILLS, 1000), 4, marks=[pytest.mark.long, pytest.mark.timeout(5400)])],
)
def test_records_survive_sigkill_at_random_points(tmp_path, agent_env, kills, chains):
    def run(directory, seed):
        stage = run_chain(directory, agent_env, kills=-(-kills // chains), seed=seed)
        return figures_of(stage, stage.healthy) + figures_of(stage, stage.waiting)

    summary = sum_of_chains(run, tmp_path, chains=chains, at_once=chains)
    print(f"\nbench: {kills} x SIGKILL: {dict(summary)}")  # noqa: T201
    assert summary["records"] > kills
    assert {name for name, count in summary.items() if count} <= {"records", "duplicates"}, summary
