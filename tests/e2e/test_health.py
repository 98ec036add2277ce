"""/healthz, /readyz, /metrics, and systemd notifications of the real agent."""

import json
import re
import socket
import time

import pytest
import requests
from imds_documents import document, event
from prometheus_client.parser import text_string_to_metric_families

STATES = ("delivered_total", "pending_records", "parked_records", "evicted_total", "discarded_total", "expired_total")
_PREFIX = "scheduled_events_bridge_"


def wait_for(condition, what, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Listener:
    """The agent's status listener. The log contains its address."""

    def __init__(self, agent):
        self.agent = agent

    @property
    def url(self):
        def found():
            return re.findall(r'"listen":"(127\.0\.0\.1:\d+)"', self.agent.err.read_text())

        wait_for(lambda: bool(found()), "the agent did not log its listen address")
        return f"http://{found()[-1]}"

    def get(self, path):
        answer = requests.get(self.url + path, timeout=10)
        return answer.status_code, answer.json()

    def samples(self):
        text = requests.get(f"{self.url}/metrics", timeout=10).text
        return {
            sample.name.removeprefix(_PREFIX)
            + "".join(f"|{value}" for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def listener(agent):
    return Listener(agent)


def configure(agent, imds, text=""):
    agent.configure(imds.url, text)
    agent.config.write_text(agent.config.read_text().replace('listen = ""', 'listen = "127.0.0.1:0"'))


def assert_counts_add_up(samples, *sinks):
    for sink in sinks:
        states = [samples[f"sink_{state}|{sink}"] for state in STATES]
        assert samples[f"sink_accepted_total|{sink}"] == sum(states), samples


def test_agent_becomes_ready_after_the_first_imds_response(agent, imds, listener):
    configure(agent, imds)
    imds.answer = lambda handler: handler.send_error(500)
    agent.start()
    status, report = listener.get("/readyz")
    assert (status, report["reasons"]) == (503, ["IMDS has not responded yet."])
    assert listener.get("/healthz") == (200, {"status": "ok", "late": {}})
    imds.answer = None
    imds.show(document(1))
    wait_for(lambda: listener.get("/readyz")[0] == 200, "the agent is not ready")
    assert agent.stop() == 0


def test_metrics_count_polls_and_records(agent, imds, listener):
    configure(agent, imds)
    imds.body = json.dumps(document(1)).encode()
    began_at = time.time()
    agent.start()
    imds.wait_for_polls(2)
    imds.show(document(7, event("E-1")))
    imds.show(document(8, event("E-1", "Started")))
    seen = listener.samples()
    assert (seen["document_incarnation"], seen["active_events|Started|Freeze"]) == (8, 1)
    imds.status = 503
    imds.wait_for_polls(1)
    imds.status = 200
    imds.show(document(9), polls=3)
    wait_for(
        lambda: listener.samples()["records_total|completed"] == 1, "the agent did not record the end of the event"
    )
    seen = listener.samples()
    transitions = {name: value for name, value in seen.items() if name.startswith("records_total") and value}
    assert transitions == {f"records_total|{name}": 1 for name in ("scheduled", "started", "completed")}
    polls = {name.split("|")[1]: value for name, value in seen.items() if name.startswith("polls_total")}
    assert polls["status_503"] >= 1
    assert seen["poll_duration_seconds_count"] == sum(polls.values())
    assert 0 < seen["poll_duration_seconds_sum"] < time.time() - began_at
    assert began_at <= seen["last_good_poll_timestamp_seconds"] <= time.time()
    assert not [name for name in seen if name.startswith("active_events")]
    assert agent.stop() == 0


def test_record_counts_add_up_at_every_scrape_under_load_and_after_kills(agent, imds, listener):
    configure(
        agent,
        imds,
        '[[sinks]]\ntype = "stdout"\n[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:1/"\nmax_age_seconds = 2.0\n',
    )
    imds.body = json.dumps(document(0)).encode()
    accepted, incarnation = 0.0, 0
    for run in range(3):
        agent.start()
        for _ in range(4):
            incarnation += 1
            imds.show(document(incarnation, *(event(f"E-{incarnation}-{number}") for number in range(20))))
            for _ in range(5):
                seen = listener.samples()
                assert_counts_add_up(seen, "stdout", "webhook")
                assert seen["sink_accepted_total|stdout"] >= accepted, "the counter decreased"
                accepted = seen["sink_accepted_total|stdout"]
        if run < 2:
            agent.kill()
            agent.err.write_text("")
    wait_for(lambda: listener.samples()["sink_expired_total|webhook"] > 0, "nothing expired")
    agent.call("outbox", "discard", "--sink", "webhook", "--yes", "--config", agent.config)
    seen = listener.samples()
    assert_counts_add_up(seen, "stdout", "webhook")
    assert seen["sink_accepted_total|stdout"] >= 3 * 4 * 20
    assert agent.stop() == 0


def test_removed_sink_keeps_its_counters_but_needs_no_attention(agent, imds, listener):
    refused = '[[sinks]]\ntype = "webhook"\nurl = "http://127.0.0.1:1/"\nbearer_token_file = "/nowhere/token"\n'
    configure(agent, imds, refused + '[[sinks]]\ntype = "stdout"\n')
    agent.start()
    imds.show(document(1, event("E-1")))
    wait_for(lambda: listener.samples().get("sink_needs_attention|webhook") == 1, "the sink does not need attention")
    assert listener.samples()["sink_configured|webhook"] == 1
    agent.config.write_text(agent.config.read_text().replace(refused, ""))
    agent.process.send_signal(1)
    wait_for(lambda: listener.samples()["sink_configured|webhook"] == 0, "the agent did not reload the configuration")
    wait_for(lambda: "sink_needs_attention|webhook" not in listener.samples(), "the sink still needs attention")
    seen = listener.samples()
    assert seen["sink_pending_records|webhook"] == 1
    agent.config.write_text("rubbish")
    agent.process.send_signal(1)
    wait_for(
        lambda: listener.samples()["config_last_reload_successful"] == 0, "the metric does not report the invalid file"
    )
    assert agent.stop() == 0


def test_systemd_gets_ready_and_watchdog_messages_during_a_slow_first_poll(agent, imds, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        agent.env |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
        configure(agent, imds)
        imds.answer = lambda handler: handler.server.released.wait(60)  # a slow first poll
        agent.start()
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=Started with ")
        assert [manager.recv(4096) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        assert agent.stop() == 0
        while (message := manager.recv(4096)) == b"WATCHDOG=1":
            pass
        assert message.startswith(b"STOPPING=1")
