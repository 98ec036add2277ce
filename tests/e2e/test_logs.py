"""The agent's log on standard error: one JSON line for each state change, and no secrets.

Failures repeat many times in these tests, because repeated messages fill a disk. The agent logs the first failure,
counts the following failures, and logs the count at the end of the outage.
"""

import base64
import json
import re
import signal
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.metadata import version

import pytest
from imds_documents import document, event
from private_ca import PrivateCa

from bridge.testing.http_peer import HttpPeer
from bridge.testing.simulator.imds_api import Answer

STDOUT = '[[sinks]]\nname = "out"\ntype = "stdout"\n'
#: This logger reports whether the test directory survives a redeploy, which depends on the machine.
IGNORED_LOGGER = "bridge.system.ephemeral_disk"
WORDS = re.compile(r"^\d\d:\d\d:\d\dZ (INFO|WARNING|ERROR) +\S")


def webhook(peer, text=""):
    return f'[[sinks]]\nname = "hook"\ntype = "webhook"\nurl = "http://{peer.address.authority}/"\n{text}\n'


@pytest.fixture
def peer():
    with HttpPeer(ids_in=lambda request: [request.headers["webhook-id"]]) as peer:
        yield peer


def start(agent, imds, sinks, *arguments):
    imds.identity = (200, b'{"name": "vm_0", "vmId": "AAAA"}')
    imds.body = json.dumps(document(1)).encode()
    agent.configure(imds.url, sinks)
    agent.start(*arguments)
    imds.wait_for_polls(2)


def lines(agent):
    """Return the log. Each line must be one JSON object with the common fields."""
    complete, _, rest = agent.log.rpartition("\n")
    assert rest == "" or agent.process.poll() is None, "the stopped agent left an incomplete line"
    found = [line for line in map(json.loads, complete.splitlines()) if line.get("logger") != IGNORED_LOGGER]
    for line in found:
        assert list(line)[:4] == ["time", "level", "logger", "message"], line
        assert datetime.fromisoformat(line["time"].replace("Z", "+00:00")).tzinfo == timezone.utc
        assert line["level"] in {"INFO", "WARNING", "ERROR"}
        assert line["logger"].startswith("bridge")
        assert line["message"] == line["message"].strip() != ""
    return found


def messages(agent):
    return [(line["level"], line["message"]) for line in lines(agent)]


def only(agent, words):
    """Return the only line that contains *words*."""
    found = [line for line in lines(agent) if words in line["message"]]
    assert len(found) == 1, found
    return found[0]


def refuse(peer, status, body=b"busy"):
    """Make *peer* always send the same response. By default, its error responses contain the request."""
    peer.say(status, body=body)


def wait_for_tries(agent, peer, count):
    least = len(peer.received) + count
    agent.wait_for(lambda: len(peer.received) >= least)


def test_each_state_change_is_logged_on_one_line_in_order(agent, imds):
    start(agent, imds, STDOUT)
    imds.show(document(2, event("E-1")))
    imds.show(document(3, event("E-1", "Started")))
    imds.show(document(4), polls=5)
    agent.wait_for(lambda: "Freeze completed" in agent.log)
    agent.configure(imds.url, STDOUT + '[labels]\nteam = "b"\n')
    agent.process.send_signal(signal.SIGHUP)
    agent.wait_for(lambda: "was reloaded" in agent.log)
    assert agent.stop() == 0
    assert messages(agent) == [
        ("INFO", "The agent is running."),
        ("INFO", "Freeze scheduled"),
        ("INFO", "Freeze started"),
        ("INFO", "Freeze completed"),
        ("INFO", "The configuration was reloaded."),
        ("INFO", "The agent stopped."),
    ]
    running, scheduled, *_, stopped = lines(agent)
    assert (running["vm"], running["imds"], running["sinks"]) == ("vm_0", imds.url, ["out"])
    assert running["state_directory"] == str(agent.state)
    assert {name: scheduled[name] for name in ("transition", "evidence", "event_id", "sequence")} == {
        "transition": "scheduled",
        "evidence": "observed",
        "event_id": "E-1",
        "sequence": 1,
    }
    for name in ("event_source", "not_before", "notice_seconds", "resources", "affects_this_vm"):
        assert name in scheduled, "a line about an event has the source, the times, and the affected VMs"
    assert (running["configuration"], running["version"]) == (str(agent.config), version("scheduled-events-bridge"))
    assert stopped["pending"] == {"out": 0}
    assert [record["transition"] for record in agent.records] == ["scheduled", "started", "completed"]


def test_failures_with_varying_texts_are_logged_once(agent, imds, peer):
    peer.reply(lambda _: Answer(status=503, body=b"request %d" % len(peer.received)))
    start(agent, imds, webhook(peer))
    events = []
    for number in range(12):
        events.append(event(f"E-{number}"))
        imds.show(document(2 + number, *events), polls=1)
    agent.wait_for(lambda: len(peer.received) >= 12)
    assert agent.stop() == 0
    assert only(agent, "Sending failed")["level"] == "WARNING"


def test_new_failure_reason_and_second_outage_are_logged(agent, imds, peer):
    start(agent, imds, webhook(peer))
    for number, (status, level) in enumerate([(503, "WARNING"), (401, "ERROR"), (503, "WARNING")]):
        refuse(peer, status)
        before = len(peer.received)
        imds.show(document(2 + number, *(event(f"E-{each}") for each in range(number + 1))))
        agent.wait_for(lambda before=before: len(peer.received) > before)
        agent.wait_for(lambda status=status: f"{status}" in agent.log)
        assert [line["level"] for line in lines(agent) if f" {status}" in line["message"]] == [level]
    peer.accept()
    agent.wait_for(lambda: "responds again" in agent.log)
    refuse(peer, 503)
    imds.show(document(9, *(event(f"E-{each}") for each in range(4))))
    agent.wait_for(lambda: agent.log.count("Sending failed") == 3)
    assert agent.stop() == 0
    levels = [line["level"] for line in lines(agent) if "Sending failed" in line["message"]]
    assert levels == ["WARNING", "ERROR", "WARNING"]
    only(agent, "responds again")


def test_parked_records_are_logged_once_and_counted(agent, imds, peer):
    refuse(peer, 400)
    start(agent, imds, webhook(peer) + "park_statuses = [400]\n")
    events = [event(f"E-{number}") for number in range(10)]
    imds.show(document(2, *events))
    agent.wait_for(lambda: len(peer.received) == 10)
    peer.accept()
    imds.show(document(3, *events, event("E-10")))
    agent.wait_for(lambda: "accepts records again" in agent.log)
    assert agent.stop() == 0
    refused = only(agent, "parked")
    assert (refused["level"], refused["sink"], len(refused["records"])) == ("ERROR", "hook", 1)
    assert only(agent, "accepts records again")["failures"] == 10
    assert lines(agent)[-1]["pending"] == {"hook": 0}


def test_repeated_imds_failures_are_logged_once_and_counted(agent, imds):
    start(agent, imds, STDOUT)
    good, struck = imds.body, []

    def strike(handler):
        struck.append(handler)
        handler.send_response(500)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    imds.answer = strike
    imds.wait_for_polls(6)
    imds.body, imds.answer = good, None
    agent.wait_for(lambda: "responds again" in agent.log)
    assert agent.stop() == 0
    failed = [line for line in lines(agent) if (line["level"], line["logger"]) == ("WARNING", "bridge.polling.poller")]
    assert len(failed) == 1
    assert only(agent, "The metadata service responds again.")["failures"] == len(struck)
    assert len(struck) >= 6
    assert [words for words in messages(agent) if words != ("WARNING", failed[0]["message"])] == [
        ("INFO", "The agent is running."),
        ("INFO", "The metadata service responds again."),
        ("INFO", "The agent stopped."),
    ]


# Secrets.

URL_SECRET, HEADER_SECRET, BEARER_SECRET = "T0PSECRETPATH", "header-hunter2", "bearer-hunter2"
SIGNING_SECRET = base64.b64encode(b"signing-hunter2-signing-hunter2!").decode()
SHARED_KEY = base64.b64encode(b"shared-hunter2").decode()


@contextmanager
def secretive_sinks(agent):
    """Yield the sinks of a configuration with many secrets, and their peers, which echo rejected requests."""
    with ExitStack() as stack:
        ca = PrivateCa(agent.directory / "ca")
        peers = {
            "hook": stack.enter_context(HttpPeer()),
            "otlp": stack.enter_context(HttpPeer()),
            "eventhubs": stack.enter_context(HttpPeer(tls=ca.server_context())),
        }
        authority = {name: peer.address.authority for name, peer in peers.items()}
        for name, text in {
            "url": f"http://{authority['hook']}/services/{URL_SECRET}?token={URL_SECRET}",
            "headers": f"X-Api-Key: {HEADER_SECRET}",
            "bearer": BEARER_SECRET,
            "signing": f"whsec_{SIGNING_SECRET}",
            "connection": f"Endpoint=sb://soak.servicebus.windows.net/;SharedAccessKeyName=send;"
            f"SharedAccessKey={SHARED_KEY};EntityPath=hub",
        }.items():
            (agent.directory / name).write_text(text)
        yield (
            f"""
[[sinks]]
type = "webhook"
name = "hook"
url_file = "{agent.directory}/url"
headers_file = "{agent.directory}/headers"
secret_file = "{agent.directory}/signing"
[[sinks]]
type = "otlp"
endpoint = "http://{authority["otlp"]}"
bearer_token_file = "{agent.directory}/bearer"
[[sinks]]
type = "eventhubs"
transport = "https"
endpoint = "{authority["eventhubs"]}"
credential = "connection_string"
connection_string_file = "{agent.directory}/connection"
ca_file = "{ca.ca_file}"
""",
            peers,
        )


def sinks_that_logged(agent, words):
    return {line["sink"] for line in lines(agent) if words in line["message"]}


def test_logs_contain_no_secrets(agent, imds):
    with secretive_sinks(agent) as (sinks, peers):
        start(agent, imds, sinks)
        for number, status in enumerate([400, 503, 401, 302]):
            for peer in peers.values():
                peer.say(status)
            imds.show(document(2 + number, *(event(f"E-{each}") for each in range(number + 1))), polls=1)
            agent.wait_for(lambda status=status: sinks_that_logged(agent, f" {status}") == set(peers))
        seen = {name: str(peer.requests) for name, peer in peers.items()}
        assert agent.stop() == 0
        code, listed, _ = agent.call("outbox", "list", "--config", agent.config, "--json")
    assert code == 0
    assert URL_SECRET in seen["hook"]
    assert HEADER_SECRET in seen["hook"]
    assert BEARER_SECRET in seen["otlp"]
    assert "SharedAccessSignature" in seen["eventhubs"]
    signatures = re.findall(r"v1,([^'\"\s]+)", seen["hook"]) + re.findall(r"sig=([^&'\"]+)", seen["eventhubs"])
    assert len(signatures) >= 2
    for secret in (URL_SECRET, HEADER_SECRET, BEARER_SECRET, SIGNING_SECRET, SHARED_KEY, *signatures):
        assert secret not in agent.log
        assert secret not in listed


# Formats and levels.


def test_log_format_option_selects_text_without_a_terminal(agent, imds):
    start(agent, imds, STDOUT, "--log-format", "text")
    assert agent.stop() == 0
    assert all(WORDS.match(line) for line in agent.log.splitlines()), agent.log
    assert "\x1b" not in agent.log


def test_log_level_option_hides_lower_levels(agent, imds, peer):
    refuse(peer, 503)
    start(agent, imds, webhook(peer), "--log-level", "warning")
    imds.show(document(2, event("E-1")))
    agent.wait_for(lambda: peer.received)
    peer.accept()
    wait_for_tries(agent, peer, 1)
    assert agent.stop() == 0
    assert [level for level, _ in messages(agent)] == ["WARNING"]
