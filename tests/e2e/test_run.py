import json
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

import pytest
from imds_documents import document

EVENT = "5D1C6C5E-3B0B-4C1A-9D68-2B0C1F0E7A11"


def in_minutes(minutes):
    return format_datetime(datetime.now(timezone.utc) + timedelta(minutes=minutes), usegmt=True)


def event(status="Scheduled", **fields):
    return {
        "EventId": EVENT,
        "EventStatus": status,
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["EastNO_0", "EastNO_1"],
        "NotBefore": "" if status == "Started" else in_minutes(15),
        "Description": "Virtual machine is being paused.",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
        **fields,
    }


def run(agent, imds, *documents):
    agent.configure(imds.url)
    imds.body = json.dumps(documents[0]).encode()
    agent.start()
    for shown in documents:
        imds.show(shown, polls=2 if shown["Events"] else 7)  # five responses confirm an ending
    assert agent.stop() == 0
    assert "Traceback" not in agent.log


def test_live_migration_is_recorded_from_scheduled_to_completed(agent, imds):
    imds.identity = (200, b'{"name": "EastNO_0", "vmId": "3A4A-BB", "location": "eastnorway", "zone": ""}')
    # 2026-04-11 was a Saturday. The weekday is also wrong on Microsoft's page.
    scheduled = event(NotBefore="Mon, 11 Apr 2026 22:26:58 GMT")
    run(agent, imds, document(1), document(2, scheduled), document(3, event("Started")), document(4))
    first, second, third = agent.records
    assert agent.transitions == [("scheduled", "observed"), ("started", "observed"), ("completed", "observed")]
    assert first["event"] == {
        "event_id": EVENT,
        "event_type": "Freeze",
        "event_status": "Scheduled",
        "resource_type": "VirtualMachine",
        "resources": ["EastNO_0", "EastNO_1"],
        "not_before": "2026-04-11T22:26:58Z",
        "not_before_raw": "Mon, 11 Apr 2026 22:26:58 GMT",
        "description": "Virtual machine is being paused.",
        "event_source": "Platform",
        "duration_seconds": 5,
        "extra": {},
    }
    assert (first["previous"], first["changed"], first["previous_incarnation"]) == (None, [], 1)
    assert first["notice_seconds"] < 0
    assert second["previous"] == {"event_status": "Scheduled", "not_before": "2026-04-11T22:26:58Z"}
    assert (second["changed"], second["notice_seconds"]) == (["event_status", "not_before"], None)
    assert (second["event"]["not_before"], second["event"]["not_before_raw"]) == (None, "")
    assert third["event"] == second["event"]
    assert third["previous"] == {"event_status": "Started", "not_before": None}
    assert [record["sequence"] for record in agent.records] == [1, 2, 3]
    assert [record["incarnation"] for record in agent.records] == [2, 3, 4]
    assert len({record["stream_id"] for record in agent.records}) == 1
    assert all(record["affects_this_vm"] is True for record in agent.records)
    assert first["vm"]["name"] == "EastNO_0"
    assert (first["vm"]["location"], first["vm"]["zone"]) == ("eastnorway", None)
    assert list(first) == [
        *("schema_version", "id", "transition_key", "stream_id", "sequence", "active_event_ids"),
        *("transition", "evidence"),
        *("observed_at", "incarnation", "previous_incarnation", "event", "previous", "changed"),
        *("notice_seconds", "affects_this_vm", "vm", "labels", "approval", "impact", "timeline"),
    ]


def test_restart_neither_repeats_nor_misses_records(agent, imds):
    run(agent, imds, document(1), document(2, event()))
    imds.body = json.dumps(document(3, event("Started"))).encode()
    agent.start()
    imds.wait_for_polls(2)
    assert agent.stop() == 0
    imds.body = json.dumps(document(4)).encode()
    agent.start()
    imds.wait_for_polls(7)
    assert agent.stop() == 0
    assert agent.transitions == [("scheduled", "observed"), ("started", "observed"), ("completed", "inferred")]
    assert [record["sequence"] for record in agent.records] == [1, 2, 3]


def redirect(handler):
    handler.send_response(302)
    handler.send_header("Location", "/metadata/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def truncate(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "500")
    handler.end_headers()
    handler.wfile.write(b'{"DocumentIncarnation": 9, "Events": [')
    handler.close_connection = True


def stay_silent(handler):
    handler.server.released.wait(20)
    handler.close_connection = True


def answering(body, status=200):
    def answer(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        *(redirect, truncate, stay_silent),
        *(answering(body) for body in (b"", b'{"Events": null}')),
        answering(b'{"DocumentIncarnation": 9, "Events": []}', 500),
    ],
    ids=lambda answer: answer.__name__,
)
def test_invalid_imds_responses_end_no_event(agent, imds, answer):
    agent.configure(imds.url)
    agent.config.write_text(agent.config.read_text().replace("[imds]\n", "[imds]\ntimeout_seconds = 0.3\n"))
    imds.body = json.dumps(document(2, event("Started"))).encode()
    agent.start()
    imds.wait_for_polls(2)
    imds.answer = answer
    imds.wait_for_polls(2)
    imds.released.set()
    imds.answer = None
    imds.show(document(2, event("Started")))
    assert agent.stop() == 0
    assert agent.transitions == [("started", "observed")]
    assert "Traceback" not in agent.log
    log = [json.loads(line) for line in agent.log.splitlines()]
    assert [line for line in log if (line["level"], line["logger"]) == ("WARNING", "bridge.polling.poller")], agent.log


def test_all_five_configuration_mistakes_are_reported_at_once(agent):
    agent.config.write_text(
        """
        [imds]
        poll_intervall_seconds = 1
        timeout_seconds = "5"
        [state]
        max_bytes = -1
        [[sinks]]
        type = "stdot"
        [[sinks]]
        type = "stdout"
        format = "yaml"
        """
    )
    for command in ("run", "check-config"):
        code, out, err = agent.call(command, "--config", agent.config)
        assert (code, out) == (78, "")
        mistakes = err.splitlines()
        assert len(mistakes) == 5
        for key, value, instead in (
            ("imds.poll_intervall_seconds", "poll_intervall_seconds", "poll_interval_seconds"),
            ("imds.timeout_seconds", "'5'", "number"),
            ("state.max_bytes", "-1", "1048576"),
            ("sinks[0].type", "stdot", "stdout"),
            ("sinks[1]", "yaml", "text"),
        ):
            assert any(key in line and value in line and instead in line for line in mistakes), (key, err)


def test_events_and_outbox_list_the_stored_records(agent, imds):
    run(agent, imds, document(2, event()))
    code, out, _ = agent.call("events", "--config", agent.config, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == agent.records
    assert agent.call("outbox", "list", "--config", agent.config) == (0, "", "No undelivered records.\n")
    code, out, _ = agent.call("events", "--state-directory", agent.state)
    assert code == 0
    assert EVENT in out


def test_send_test_sends_to_the_sinks_without_creating_an_outbox(agent, imds):
    agent.configure(imds.url)
    code, out, err = agent.call("send-test", "--config", agent.config)
    assert code == 0, err
    assert json.loads(out)["transition"] == "test"
    assert not agent.state.exists()
    code, _, err = agent.call("send-test", "--config", agent.config, "nobody")
    assert code in (2, 78)
    assert "nobody" in err


def test_stop_kills_a_hung_command_and_keeps_its_record_pending(agent, imds, tmp_path):
    started = tmp_path / "started"
    script = f"sleep 600 & echo $! > {started}; wait"
    agent.configure(
        imds.url,
        f'stop_grace_seconds = 0.5\n[[sinks]]\ntype = "command"\ncommand = ["/bin/sh", "-c", "{script}"]\n',
    )
    text = agent.config.read_text()
    agent.config.write_text("stop_grace_seconds = 0.5\n" + text.replace("stop_grace_seconds = 0.5\n", ""))
    imds.body = json.dumps(document(2, event())).encode()
    agent.start()
    agent.wait_for(lambda: started.exists() and started.read_text().strip())
    assert agent.stop(timeout_seconds=20) == 0
    child = int(started.read_text())
    agent.process = None
    agent.wait_for(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())
    code, out, _ = agent.call("outbox", "list", "--config", agent.config, "--json")
    assert (code, [json.loads(line)["state"] for line in out.splitlines()]) == (0, ["pending"])
