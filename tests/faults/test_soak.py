"""Twenty documents per second through every sink: no record is lost, and memory does not grow.

The expected records follow from the numbers of the documents. The short form only finds a leak per document. The long
form measures the slope of the memory and prints its figures:

    SOAK_MINUTES=30 pytest -m long -s tests/faults/test_soak.py

The long form begins with 30,000 documents at full speed, which fill all caches. It uses every sink, including Event
Hubs over AMQP, so it needs the extra [apprise] and python-qpid-proton. The short form uses Apprise if it is installed.
tests/kits/soak/agent.py makes the agent poll faster than a configuration allows.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, closing

import pytest
from eventhubs_emulator.process import started
from private_ca import PrivateCa
from soak import agent as soak_agent
from soak.peers import Azure, HttpPeer, expected, ids_of_cloud_event, ids_of_otlp, lines_of, lives_of_apprise, name_of
from soak.watch import Watch, lows, slope

from bridge.agent.control import ControlClient
from bridge.agent.requests import Status
from bridge.outbox.database import read_newest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
A_SECOND = 20
#: Azure holds its answers back; the agent only must not be the slower one.
POLL_SECONDS = 0.01
#: The allocator's and the interpreter's own stores fill for some 30,000 documents. What leaks does not stop there.
BURN_IN = int(os.environ.get("SOAK_BURN_IN", "30000"))
#: Of the short form: an agent that keeps each document grows by 4 MB, one that does not by 1.
MOST_GROWTH_MB = 2.3
MOST_MB_AN_HOUR = 1.0
ALL_SINKS = {"stdout", "webhook", "eventhubs", "eventhubs-amqp", "otlp", "command", "apprise"}
#: After the burn-in, until what has gathered at the slowest sink is gone.
SETTLE_SECONDS = 60.0
#: These sinks start a process or wait their turn, so an event that ends before their turn is not sent.
SKIPPING = {"command", "apprise"}
LISTENS = re.compile(r'"listen":"([^"]+)"')

CONFIG = """
[imds]
endpoint = "{imds}"
[state]
directory = "{directory}/state"
[status]
listen = "127.0.0.1:0"
[[sinks]]
type = "stdout"
[[sinks]]
type = "webhook"
url = "http://{webhook}/hook"
[[sinks]]
type = "eventhubs"
transport = "https"
endpoint = "{hub}"
credential = "connection_string"
connection_string_env = "SOAK_HUB"
ca_file = "{ca_file}"
[[sinks]]
type = "otlp"
endpoint = "http://{otlp}"
[[sinks]]
type = "command"
command = ["/bin/sh", "-c", "echo $SCHEDULED_EVENT_ID >> {directory}/command.ids"]
"""
APPRISE = """
[[sinks]]
type = "apprise"
urls_env = "SOAK_APPRISE"
"""
AMQP = """
[[sinks]]
type = "eventhubs"
name = "eventhubs-amqp"
credential = "connection_string"
connection_string_env = "SOAK_HUB_AMQP"
"""
HUB = "Endpoint=sb://soak.servicebus.windows.net/;SharedAccessKeyName=send;SharedAccessKey=c29hay1rZXk=;EntityPath=hub"


class Soak:
    """One agent at work in *directory*, from the first document to number *last*, and what stands around it.

    The first *burn_in* documents come as fast as they can.
    """

    def __init__(self, directory, env, *, last, burn_in=0):
        self.directory, self.env, self.last, self.burn_in = directory, dict(env), last, burn_in
        self.out, self.err = directory / "out.jsonl", directory / "err.log"
        self.stack = ExitStack()
        self.arrivals = {
            "stdout": lambda: Counter(record["id"] for record in self.records()),
            "command": lambda: lines_of(directory / "command.ids"),
        }

    def __enter__(self):
        self.azure = self.stack.enter_context(closing(Azure(self.last, burn_in=self.burn_in, a_second=A_SECOND)))
        ca = PrivateCa(self.directory / "ca")
        self.env["SOAK_HUB"] = HUB
        self.config = CONFIG.format(
            imds=self.azure.endpoint,
            directory=self.directory,
            ca_file=ca.ca_file,
            webhook=self.peer("webhook", ids_of_cloud_event),
            hub=self.peer("eventhubs", ids_of_cloud_event, tls=ca.server_context()),
            otlp=self.peer("otlp", ids_of_otlp),
        )
        if importlib.util.find_spec("apprise"):
            self.env["SOAK_APPRISE"] = f"json://{self.peer('apprise', lives_of_apprise)}/"
            self.config += APPRISE
        return self

    def __exit__(self, *exception):
        self.stack.close()

    def peer(self, sink, names, **options):
        """Start a peer over HTTP for *sink*; return HOST:PORT."""
        peer = self.stack.enter_context(closing(HttpPeer(names, **options)))
        self.arrivals[sink] = peer.seen
        return peer.authority

    def add_amqp(self):
        """Let Event Hubs be reached over AMQP too, if the emulator can run."""
        if importlib.util.find_spec("proton") is None:
            return
        emulator = self.stack.enter_context(started())
        self.env["SOAK_HUB_AMQP"] = emulator.connection_string()
        self.config += AMQP
        self.arrivals["eventhubs-amqp"] = lambda: Counter(
            json.loads(event["body"])["id"] for event in emulator.state()["events"]
        )

    def run(self, *, most_seconds):
        """Run the agent until every document was seen and every record has arrived; stop it."""
        path = self.directory / "config.toml"
        path.write_text(self.config)
        command = [sys.executable, soak_agent.__file__, path, str(POLL_SECONDS)]
        with self.out.open("wb") as stdout, self.err.open("wb") as stderr:
            agent = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=self.env, cwd=self.directory)
        try:
            self.watch = Watch(agent.pid, self.listener(agent))
            self.watch.start()
            began_at, cpu = time.monotonic(), self.watch.cpu_seconds()
            assert self.azure.is_seen.wait(most_seconds), (self.azure.shown, agent.poll(), self.log()[-2000:])
            self.seconds = time.monotonic() - began_at
            self.burn_seconds = self.azure.burnt_in_at - began_at
            self.cpu_share = (self.watch.cpu_seconds() - cpu) / self.seconds
            self.watch.stop()
            self.wait_until_delivered()
            agent.terminate()
            assert agent.wait(20) == 0, self.log()[-2000:]
        finally:
            if agent.poll() is None:
                agent.kill()
                agent.wait()

    def listener(self, agent):
        """Return HOST:PORT of the status listener, once the agent has said it."""
        deadline = time.monotonic() + 30
        while (found := LISTENS.search(self.log())) is None:
            assert agent.poll() is None, self.log()[-2000:]
            assert time.monotonic() < deadline, self.log()[-2000:]
            time.sleep(0.05)
        return found[1]

    def wait_until_delivered(self):
        """Wait until every expected record has arrived; a process for each record takes its time on a busy machine."""
        client, count = ControlClient(self.directory / "state"), len(list(expected(self.last)))
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            sinks = client.ask(Status()).totals.sinks.values()
            if all(row.accepted >= count and not row.pending for row in sinks):
                break
            time.sleep(0.2)

    def samples(self, *, after):
        """Return the samples taken once that share of the time was over."""
        return [sample for sample in self.watch.samples if sample.seconds > self.seconds * after]

    def log(self):
        return self.err.read_text()

    def records(self):
        with self.out.open(encoding="ascii") as lines:
            for line in lines:
                yield json.loads(line)

    def judge(self):
        """Return, for each sink, how much was lost, invented and sent twice, by what its peer has."""
        wanted = Counter(map(name_of, expected(self.last)))
        lives = {record["id"]: self.life(record) for record in self.records()}
        counts = {}
        for sink, arrived in self.arrivals.items():
            came = arrived()
            seen = Counter(name if sink == "apprise" else lives.get(name, "?") for name in came)
            counts[sink] = {
                "lost": sum((wanted - seen).values()),
                "invented": sum((seen - wanted).values()),
                "duplicates": came.total() - len(came),
            }
        return counts

    def life(self, record):
        return name_of((int(record["event"]["description"].split()[1]), record["transition"]))

    def assert_nothing_lost(self):
        """Every record arrived; or was skipped where all was too fast for the sink, because its event was over.

        That is so in a burn-in; and on a busy machine, where nine of ten may be.
        """
        judged = self.judge()
        count = len(list(expected(self.last)))
        accounts = {row.name: row for row in read_newest(self.directory / "state").rows["sinks"]}
        skipped = {sink: account.expired for sink, account in accounts.items()}
        most = count if self.burn_in else count * 9 // 10
        assert all(sink in SKIPPING and number < most for sink, number in skipped.items() if number), skipped
        assert {
            sink: (each["lost"] - skipped[sink], each["invented"]) for sink, each in judged.items()
        } == dict.fromkeys(self.arrivals, (0, 0))
        assert {
            sink: (each.accepted, each.delivered + each.expired) for sink, each in accounts.items()
        } == dict.fromkeys(self.arrivals, (count, count))
        return count, judged

    def assert_said_well(self):
        """Every scrape was good, and the log holds no failure."""
        assert self.watch.amiss == []
        assert self.watch.scrapes > 0
        lines = [json.loads(line) for line in self.log().splitlines()]
        # Whether the test's own directory would survive a redeploy is the machine's business.
        assert [line for line in lines if line["level"] != "INFO" and "ephemeral" not in line["logger"]] == []


def assert_steady(samples, name):
    """Assert that *name* does not grow from the first third of *samples* to the last; return what it was.

    What is open only for a moment (a command that runs, a scrape) goes up and down; what leaks lifts the least too.
    """
    third = len(samples) // 3
    first, last = ([getattr(sample, name) for sample in part] for part in (samples[:third], samples[-third:]))
    assert min(last) <= min(first), (name, Counter(first), Counter(last))
    return f"{min(first)} to {max(first)} at first, {min(last)} to {max(last)} at last"


def test_a_short_soak_loses_nothing_and_nothing_grows(tmp_path, agent_env):
    with Soak(tmp_path, agent_env, last=17 * A_SECOND) as soak:
        soak.run(most_seconds=120)
        soak.assert_nothing_lost()
    soak.assert_said_well()
    warm = soak.samples(after=1 / 3)
    assert_steady(warm, "threads")
    assert_steady(warm, "descriptors")
    fifth = len(warm) // 5
    first, last = (min(sample.rss_mb for sample in part) for part in (warm[:fifth], warm[-fifth:]))
    assert last - first < MOST_GROWTH_MB, [round(sample.rss_mb, 1) for sample in soak.watch.samples]


@pytest.mark.long
@pytest.mark.timeout(MINUTES * 60 + 600 + BURN_IN / 5)
def test_a_long_soak_loses_nothing_and_memory_stays(tmp_path, agent_env):
    documents = round(MINUTES * 60 * A_SECOND)
    with Soak(tmp_path, agent_env, last=BURN_IN + documents, burn_in=BURN_IN) as soak:
        soak.add_amqp()
        assert set(soak.arrivals) == ALL_SINKS, "install the extra [apprise] and python-qpid-proton"
        soak.run(most_seconds=MINUTES * 60 * 1.2 + 60 + BURN_IN / 5)
        samples = soak.watch.samples
        warm = [sample for sample in samples if sample.seconds > soak.burn_seconds + SETTLE_SECONDS]
        seconds = soak.seconds - soak.burn_seconds
        floor = lows(warm, every_seconds=min(60.0, seconds / 15))
        mb_an_hour = slope(floor) * 3600
        say(f"{BURN_IN} documents in {soak.burn_seconds:.0f} s, then {documents} in {seconds:.0f} s")
        say(f"CPU {soak.cpu_share:.0%} of a core; scrapes {soak.watch.scrapes}, amiss {soak.watch.amiss}")
        say(f"RSS {samples[0].rss_mb:.1f} MB at first, {floor[0][1]:.1f} warm, {floor[-1][1]:.1f} at the end")
        say(f"RSS slope {mb_an_hour:+.2f} MB an hour over {len(floor)} lows after {warm[0].seconds:.0f} s")
        say(f"lows {' '.join(f'{low:.2f}' for _, low in lows(samples, every_seconds=60.0))}")
        for name in ("threads", "descriptors"):
            say(f"{name} {assert_steady(warm, name)}")
        count, judged = soak.assert_nothing_lost()
        say(f"{count} records to each of {len(judged)} sinks: {judged}")
    soak.assert_said_well()
    assert documents / seconds > A_SECOND * 0.9, "it was no soak at 20 documents a second"
    assert mb_an_hour < MOST_MB_AN_HOUR


def say(text):
    print(f"\nsoak: {text}", end="", flush=True)  # noqa: T201
