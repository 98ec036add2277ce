"""The agent imports the Azure libraries while it is idle, so that the first record does not wait for the import."""

import subprocess
from contextlib import contextmanager

import pytest
from eventhubs_emulator.process import NEEDS, started
from private_ca import PrivateCa

from bridge.testing import EventSpec, Simulator
from bridge.testing.http_contract import HttpPeer
from bridge.testing.simulator.faults import Fault
from bridge.testing.simulator.imds_api import TOKEN_PATH

SINK = """[[sinks]]
type = "eventhubs"
fully_qualified_namespace = "127.0.0.1"
eventhub = "scheduled-events"
transport = "{transport}"
endpoint = "{endpoint}"
ca_file = "{ca_file}"
"""
LIBRARIES = ("azure.eventhub", "azure.identity", "cryptography", "msal")


@contextmanager
def https_hub(ca):
    with HttpPeer(tls=ca.server_context()) as peer:
        yield peer.address.authority, lambda: peer.requests


@contextmanager
def amqp_hub(ca):
    pytest.importorskip("proton", reason=NEEDS)
    files = ca.issue("localhost")
    with started(cert_file=str(files.cert_file), key_file=str(files.key_file)) as hub:
        yield f"127.0.0.1:{hub.ports['amqps']}", lambda: hub.state()["transfers"]


def imported(agent):
    modules = [line.rpartition("|")[2].strip() for line in agent.log.splitlines() if line.startswith("import time:")]
    return [name for name in modules if name.startswith(LIBRARIES)]


@pytest.mark.parametrize(
    ("transport", "hub", "library"),
    [("https", https_hub, "azure.identity"), ("amqp", amqp_hub, "azure.eventhub.aio._producer_client_async")],
)
def test_azure_libraries_are_imported_after_the_first_good_poll(agent, tmp_path, transport, hub, library):
    ca = PrivateCa(tmp_path / "ca")
    with hub(ca) as (endpoint, sent), Simulator(vms=["vm_0"], rate_limit=False) as azure:
        azure.world.faults.add(Fault(kind="status"))
        agent.env |= {"PYTHONPROFILEIMPORTTIME": "1", "AZURE_POD_IDENTITY_AUTHORITY_HOST": azure.endpoint}
        agent.configure(azure.endpoint, SINK.format(transport=transport, endpoint=endpoint, ca_file=ca.ca_file))
        with agent.err.open("wb") as stderr:  # a forked process would not write the import times to this file
            agent.process = subprocess.Popen(agent.command("run", "-c", agent.config), env=agent.env, stderr=stderr)
        agent.wait_for(lambda: sum(each.status == 500 for each in azure.requests) > 5)
        assert imported(agent) == []
        azure.world.faults.clear()
        agent.wait_for(lambda: any(each.path == TOKEN_PATH for each in azure.requests))
        before = imported(agent)
        assert library in before
        assert not sent()
        azure.world.add_event(EventSpec(event_type="Freeze"))
        agent.wait_for(sent)
        assert imported(agent) == before
        assert agent.stop() == 0
