"""The contract suite for the command sink, with a program as the peer."""

import sys
from typing import ClassVar

import pytest

from bridge.sink import DeliveryRejected
from bridge.testing.contract import SinkContract
from bridge.testing.peers import Peer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the program is a shell script")

SECRET = "drain-token-4711"
PROGRAM = """#!/bin/sh
read -r record
printf '%s\\n' "$SCHEDULED_EVENT_ID" >>"{received}"
. "{behaviour}"
"""


class Program(Peer):
    """A script that records the ID of the record, and then runs a second file."""

    def __init__(self, directory):
        self._received = directory / "received"
        self._behaviour = directory / "behaviour"
        self._received.write_text("")
        path = directory / "on-event"
        path.write_text(PROGRAM.format(received=self._received, behaviour=self._behaviour))
        path.chmod(0o755)
        self.accept()

    @property
    def received(self):
        return [[line] for line in self._received.read_text().splitlines()]

    def accept(self):
        self._behaviour.write_text("exit 0")

    def refuse_for_good(self):
        self._behaviour.write_text("echo no such node >&2; exit 1")

    def refuse_for_now(self, retry_after_seconds=None):
        assert retry_after_seconds is None
        self._behaviour.write_text("echo pods are left >&2; exit 75")

    def stay_silent(self):
        self._behaviour.write_text("sleep 60")


class TestCommandSinkContract(SinkContract):
    sink_type = "command"
    secrets = (SECRET,)
    after_silence = DeliveryRejected
    #: Killing a process group takes time on a busy machine, and the host cancels the call at 1.04 of this deadline.
    deadline_seconds = 1.0
    no_network = "the sink runs a local program"
    skips: ClassVar = {
        "test_retry_after_is_passed_on": "an exit code has no delay",
        "test_part_of_a_batch_refused_is_rejected_by_name": "a command runs for one record at a time",
    }

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.directory = tmp_path

    def peer(self):
        return Program(self.directory)

    def table(self, address):
        del address
        return {"command": [str(self.directory / "on-event")], "environment": {"DRAIN_TOKEN": SECRET}}
