"""The agent with attested documents instead of a stored secret: decisions and records."""

import json

from attesting import Attesting
from portal_stub import PortalStub

from bridge.events.record import decode_record
from bridge.testing import EventSpec, Fault


def test_decisions_and_records_work_with_attested_tokens(agent, azure, tmp_path):
    attesting = Attesting()
    with PortalStub(tmp_path / "portal", attesting=attesting) as portal:
        azure.world.set_fault(Fault(kind="status", status=500, target="attested", count=1))
        sink = (
            f'[[sinks]]\ntype = "stdout"\n[[sinks]]\ntype = "webhook"\nurl = "{portal.url}/records"\n'
            f'credential = "attested"\nca_file = "{portal.ca_file}"\n'
        )
        agent.configure(azure.endpoint, portal.toml(wait_seconds=1, credential="attested") + sink)
        agent.start()
        azure.world.add_event(EventSpec(event_type="Freeze", resources=("vm_0",), notice_seconds=3600))
        agent.wait_for(lambda: attesting.records, timeout_seconds=60)
        record = decode_record(json.dumps(attesting.records[0][1]))
        portal.decide(record.event, vm_id=record.vm.vm_id, jti="d-1")
        agent.wait_for(lambda: len(attesting.records) >= 3, timeout_seconds=60)
        assert [record["transition"] for _, record in attesting.records][:3] == ["scheduled", "approved", "started"]
        assert set(attesting.tokens.values()) == {azure.machines[0].vm_id}
        assert agent.stop() == 0
    assert "Traceback" not in agent.log


def test_check_config_connects_to_portal_and_sink_with_separate_tokens(agent, azure, tmp_path):
    attesting = Attesting()
    with PortalStub(tmp_path / "portal", attesting=attesting) as portal:
        sink = (
            f'[[sinks]]\ntype = "webhook"\nurl = "{portal.url}/records"\n'
            f'credential = "attested"\nca_file = "{portal.ca_file}"\n'
        )
        agent.configure(azure.endpoint, portal.toml(wait_seconds=1, credential="attested") + sink)
        code, out, err = agent.call("check-config", "--config", agent.config, "--connect")
        assert len(attesting.tokens) == 2
        assert "0 decisions for this VM" in out + err
        code, out, err = agent.call("send-test", "--config", agent.config)
        assert (code, [record["transition"] for _, record in attesting.records]) == (0, ["test"]), out + err
        attesting.refuses = [(403, "untrusted")] * 9
        code, out, err = agent.call("check-config", "--config", agent.config, "--connect")
        assert code != 0
        assert (out + err).count("(untrusted)") == 2
