import sqlite3
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bridge.outbox import deliveries
from bridge.outbox.reader import OutboxFile

ENDS = ("delivered", "pending", "parked", "evicted", "discarded", "expired")


class Totals(RuleBasedStateMachine):
    """Whatever is done to an outbox, its totals add up, and agree with its rows."""

    make_kit: Any = None

    @initialize()
    def start(self):
        self.kit = self.make_kit()
        self.outbox = self.open()
        self.accepted = 0

    def open(self):
        return self.kit.open(max_bytes=260_000, keep_delivered_seconds=50)

    @rule(events=st.lists(st.integers(0, 5), min_size=1, max_size=6), urgent=st.booleans(), size=st.integers(0, 3000))
    def commit(self, events, urgent, size):
        kind = "Preempt" if urgent else "Freeze"
        made = [self.kit.event(f"E-{n}", event_type=kind, description="x" * size) for n in events]
        self.accepted += len(self.kit.commit(self.outbox, *made))

    @rule(sink=st.sampled_from("ab"), state=st.sampled_from(["delivered", "parked", None]), count=st.integers(1, 9))
    def settle(self, sink, state, count):
        self.kit.settle(self.outbox, sink, *self.kit.due(self.outbox, sink, limit=count), state=state)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.kit.wait(seconds)

    @rule(sink=st.sampled_from("ab"))
    def expire(self, sink):
        self.outbox.write(deliveries.expire, sink, now=self.kit.time.timestamp(), max_age_seconds=60).result()

    @rule()
    def clean(self):
        self.outbox.clean().result()

    @rule()
    def beat(self):
        self.outbox.write(self.outbox.records.append_heartbeat, incarnation=1).result()
        self.accepted += 1

    @precondition(lambda self: not self.outbox.in_memory)
    @rule(sink=st.sampled_from("ab"))
    def retry(self, sink):
        with OutboxFile(self.kit.directory) as beside:
            beside.retry(sink)

    @precondition(lambda self: not self.outbox.in_memory)
    @rule(sink=st.sampled_from("ab"), state=st.sampled_from(["pending", "parked", None]))
    def discard(self, sink, state):
        with OutboxFile(self.kit.directory) as beside:
            beside.discard(sink, state=state)

    @rule()
    def restart(self):
        self.outbox.close()
        self.outbox = self.open()

    @precondition(lambda self: not self.outbox.in_memory)
    @rule()
    def salvage(self):
        self.outbox.exclusive(
            lambda store: store.replace_database("damaged", carry=True, why="a test says so")
        ).result()
        for path in self.kit.directory.glob("outbox.db.*"):
            path.unlink()

    @precondition(lambda self: not self.outbox.in_memory)
    @rule()
    def leave_the_disk(self):
        error = sqlite3.OperationalError("database or disk is full")
        self.outbox.exclusive(lambda store: store.recover(error)).result()

    @precondition(lambda self: self.outbox.in_memory)
    @rule()
    def return_to_the_disk(self):
        self.outbox.tend().result()

    @invariant()
    def totals_hold(self):
        totals = self.kit.totals(self.outbox)
        for counts in totals.values():
            assert counts["accepted"] == sum(counts[state] for state in ENDS) == self.accepted
            assert min(counts.values()) >= 0
        if not self.outbox.in_memory:
            self.rows_agree_with(totals)
        for sink in "ab":
            by_event = {}
            for row in self.outbox.read(deliveries.due, sink, limit=10_000).result():
                by_event.setdefault(row.event_key, []).append(row.sequence)
            assert all(sequences == sorted(sequences) for sequences in by_event.values())

    def rows_agree_with(self, totals):
        connection = sqlite3.connect(self.kit.directory / "outbox.db")
        try:
            rows = connection.execute("SELECT sink, state, COUNT(*) FROM deliveries GROUP BY sink, state").fetchall()
        finally:
            connection.close()
        counted = {(sink, state): count for sink, state, count in rows}
        for sink, counts in totals.items():
            for state in ("pending", "parked"):
                assert counts[state] == counted.get((sink, state), 0)

    def teardown(self):
        self.kit.close()


def test_totals_add_up_whatever_is_done(kit, tmp_path_factory):
    class Machine(Totals):
        def make_kit(self):
            return type(kit)(tmp_path_factory.mktemp("totals"))

    run_state_machine_as_test(Machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))


def test_a_huge_document_does_not_evict_the_records_that_came_with_it(kit):
    outbox = kit.open(max_bytes=2**20)
    events = [kit.event(f"BIG-{number}", description="x" * 30_000) for number in range(33)]
    kit.commit(outbox, *events, kit.event("NEWS"))
    totals = kit.totals(outbox)["a"]
    assert (totals["pending"], totals["evicted"]) == (34, 0)
