"""SIGKILL at random points of a stream of documents: nothing lost, nothing invented, nothing out of order.

The server goes on to the next document only when the agent polls again in the same life: the document before is
committed then, so every change must reach the sink, however often the agent dies. What is expected follows from the
server's own steps, not from the agent's code.

``KILLS=1000 pytest -m long -s tests/faults/test_kill.py`` is the long run; its figure stands in the README.
"""

import json
import os
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import fork_server
import pytest

KILLS = int(os.environ.get("KILLS", "20"))
CHAINS = 4
MOST_EVENTS = 8


class World:
    """Events that are added, changed and removed at random; one incarnation a step."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.incarnation = 0
        self.events = {}
        self.expected = []
        self.made = 0
        self.not_before = format_datetime(datetime.now(timezone.utc) + timedelta(days=2), usegmt=True)

    def step(self):
        self.incarnation += 1
        for _ in range(self.chance.randint(1, 4)):
            active = list(self.events)
            if not active or (len(active) < MOST_EVENTS and self.chance.random() < 0.5):
                self.add()
            else:
                self.change(self.chance.choice(active))
        gone = [event_id for event_id, event in self.events.items() if event is None]
        self.events = {event_id: event for event_id, event in self.events.items() if event_id not in gone}

    def add(self):
        self.made += 1
        event_id = f"E-{self.made:06}"
        self.events[event_id] = {
            "EventId": event_id,
            "EventStatus": "Scheduled",
            "EventType": self.chance.choice(["Freeze", "Reboot", "Redeploy", "Preempt"]),
            "ResourceType": "VirtualMachine",
            # No two events are alike: one that vanishes as its like appears is `ended`, not `canceled`.
            "Resources": ["vm_0", f"vm_{self.made}"],
            "NotBefore": self.not_before,
            "Description": "x" * self.chance.choice([0, 40, 900]),
            "EventSource": "Platform",
            "DurationInSeconds": 5,
        }
        self.note(event_id, "scheduled")

    def change(self, event_id):
        event = self.events[event_id]
        if event is None or self.touched_now(event_id):
            return
        if event["EventStatus"] == "Started":
            self.events[event_id] = None
            self.note(event_id, "completed")
        elif self.chance.random() < 0.3:
            self.events[event_id] = None
            self.note(event_id, "canceled")
        else:
            self.events[event_id] = {**event, "EventStatus": "Started", "NotBefore": ""}
            self.note(event_id, "started")

    def touched_now(self, event_id):
        """One change an event a document: two would be seen as one."""
        return any(key[0] == event_id and key[2] == self.incarnation for key in self.expected[-8:])

    def note(self, event_id, transition):
        self.expected.append((event_id, transition, self.incarnation))

    def body(self):
        return json.dumps({"DocumentIncarnation": self.incarnation, "Events": list(self.events.values())}).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, world):
        super().__init__(("127.0.0.1", 0), Handler)
        self.world = world
        self.lock = threading.Lock()
        self.served_in_this_life = False
        self.is_frozen = False

    def next_body(self):
        with self.lock:
            if self.served_in_this_life and not self.is_frozen:
                self.world.step()
                self.served_in_this_life = False
            else:
                self.served_in_this_life = True
            return self.world.body()

    def new_life(self):
        with self.lock:
            self.served_in_this_life = False


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        is_document = "scheduledevents" in self.path
        body = self.server.next_body() if is_document else b'{"name": "vm_0", "vmId": "0000-11"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self):
        with suppress(ConnectionError):  # the agent was killed while it was answered
            super().handle()

    def log_message(self, *_):
        pass


def run_chain(directory, env, *, kills, seed):
    """Kill one agent *kills* times; return (expected, the lines its sink got, stray lines)."""
    world = World(seed)
    server = Server(world)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    config = directory / "config.toml"
    config.write_text(
        f'[imds]\nendpoint = "http://127.0.0.1:{server.server_port}"\npoll_interval_seconds = 0.2\n'
        f'[state]\ndirectory = "{directory / "state"}"\n[status]\nlisten = ""\n'
    )
    out = directory / "out.jsonl"
    chance = random.Random(seed)
    with out.open("ab") as stdout, (directory / "err.log").open("ab") as stderr:

        def new_life():
            server.new_life()
            return fork_server.start("run", "--config", config, stdout=stdout, stderr=stderr, env=env, cwd=directory)

        for _ in range(kills):
            agent = new_life()
            if chance.random() < 0.75:  # else while it starts
                wait_for_a_poll(server)
            time.sleep(chance.uniform(0.0, 1.2))
            agent.kill()
            agent.wait()
        server.is_frozen = True
        agent = new_life()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (
            server.served_in_this_life and len(ids(lines(out))) >= len(world.expected)
        ):
            time.sleep(0.05)
        agent.terminate()
        assert agent.wait(20) == 0
    server.shutdown()
    server.server_close()
    return world.expected, lines(out), (directory / "err.log").read_text()


def wait_for_a_poll(server):
    """Wait until this life has polled: on a busy machine a start takes seconds, and a kill before it is none."""
    deadline = time.monotonic() + 20
    while not server.served_in_this_life and time.monotonic() < deadline:
        time.sleep(0.01)


def lines(path):
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut in the middle of a write by the kill; it comes again whole
            continue
    return found


def ids(records):
    return {record["id"] for record in records}


def key(record):
    return (record["event"]["event_id"], record["transition"], record["incarnation"])


def judge(expected, records):
    """Return the counts that matter."""
    first = {}
    for record in records:
        first.setdefault(record["id"], record)
    seen = Counter(key(record) for record in first.values())
    wanted = Counter(expected)
    order = {wanted_key: place for place, wanted_key in enumerate(expected)}
    disorder, last = 0, {}
    for record in first.values():  # by arrival
        event_id, place = record["event"]["event_id"], order.get(key(record), -1)
        disorder += place < last.get(event_id, -1)
        last[event_id] = place
    by_sequence = sorted(first.values(), key=lambda record: record["sequence"])
    incarnations = [record["incarnation"] for record in by_sequence]
    return {
        "records": len(expected),
        "lost": sum((wanted - seen).values()),
        "invented": sum((seen - wanted).values()),
        "out of order": disorder + sum(a > b for a, b in pairwise(incarnations)),
        "duplicates": len(records) - len(first),
        "streams": len({record["stream_id"] for record in records}),
        "ids that differ": len({(record["id"], key(record)) for record in records}) - len(first),
    }


def test_records_survive_sigkill_at_random_points(tmp_path, agent_env):
    summary = kill_many(tmp_path, agent_env, kills=KILLS, chains=2)
    assert summary["records"] > KILLS
    assert_nothing_amiss(summary)


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_records_survive_sigkill_a_thousand_times(tmp_path, agent_env):
    kills = max(KILLS, 1000)
    summary = kill_many(tmp_path, agent_env, kills=kills, chains=CHAINS)
    print(f"\nbench: {kills} x SIGKILL: {summary}")  # noqa: T201
    assert summary["records"] > kills
    assert_nothing_amiss(summary)


def kill_many(tmp_path, env, *, kills, chains):
    """Share *kills* out over *chains* agents at work side by side; return the summed counts."""

    def one(number):
        directory = tmp_path / f"chain{number}"
        directory.mkdir()
        seed = random.SystemRandom().randrange(2**32)
        expected, records, log = run_chain(directory, env, kills=-(-kills // chains), seed=seed)
        assert "Traceback" not in log, log
        return Counter({**judge(expected, records), "streams": 0}) + Counter(
            {"forked streams": len({record["stream_id"] for record in records}) - 1}
        )

    with ThreadPoolExecutor(chains) as pool:
        total = sum(pool.map(one, range(chains)), Counter())
    names = ("records", "lost", "invented", "out of order", "duplicates", "ids that differ", "forked streams")
    return {name: total[name] for name in names}


def assert_nothing_amiss(summary):
    amiss = ("lost", "invented", "out of order", "ids that differ", "forked streams")
    assert {name: summary[name] for name in amiss} == dict.fromkeys(amiss, 0), summary
