"""One VM under attack: its agent as a process, a simulated Azure, and an independent portal from PROTOCOL.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outside_portal import Signer
from small_portal import Asked, Said, SmallPortal

from bridge.testing import EventSpec, Fault, Simulator

RULE = '[[approval.rules]]\nname = "all"\naction = "approve"\nresources = "any"\nact = "each"\n'
NOTHING = '{"DocumentIncarnation": 0, "Events": []}'

#: So many decisions of the tests are far below the limit of one mebibyte for a response.
_PAGE = 250

Record = Mapping[str, Any]


def is_in(record: Record, found: Mapping[str, int]) -> bool:
    """Return whether the event of *record* is among *found*."""
    return record["event"]["event_id"] in found


def only(*records: Record) -> Counter[str]:
    """Return the expected posts if each of *records* is approved exactly once."""
    return Counter(record["event"]["event_id"] for record in records)


class OpenPortal(SmallPortal):
    """Serves the agent of one VM without a token, and returns many decisions in several responses."""

    _asked = 0

    def refused(self, asked: Asked) -> Said | None:
        """Note the index of the poll."""
        self._asked = asked.index
        return None

    def value(self, asked: Asked) -> dict[str, Any]:
        value = super().value(asked)
        page = value["decisions"][:_PAGE]
        if len(page) < len(value["decisions"]):
            value |= {"decisions": page, "index": max(asked.index, 1) + len(page)}
        return value

    def is_read(self) -> bool:
        """Return whether the agent has polled with the last index, so that it has received every decision."""
        return self._asked == self.newest

    def put_all(self, *tokens: str) -> None:
        """Add *tokens* at once."""
        with self.changed:
            for token in tokens:
                self.put(token)

    def toml(self, *signers: Signer, required_approvals: int = 1) -> str:
        """Return `[approval.remote]` for an agent that trusts *signers*."""
        return (
            f'[approval.remote]\nurl = "{self.url}"\nwait_seconds = 5\nrequired_approvals = {required_approvals}\n'
            + "".join(signer.table() for signer in signers)
        )


class Stage:
    """*agent* on one VM of *azure* with its portal and the signers `anne` and `boris`. Keys are in *directory*."""

    def __init__(self, agent: Any, azure: Simulator, directory: Path) -> None:
        self.agent, self.azure = agent, azure
        self._keys = directory / "keys"
        self._keys.mkdir()
        self.anne, self.boris = self.signer("anne"), self.signer("boris")
        self.vm_id = azure.machines[0].vm_id
        self.portal = OpenPortal(self.anne, vm_id=self.vm_id, token="")

    def signer(self, kid: str) -> Signer:
        """Return a new signer with a key."""
        return Signer(self._keys, kid)

    # The agent.

    def configure(self, *signers: Signer, rules: str = "", **options: Any) -> None:
        """Write a configuration that trusts *signers*, by default anne and boris."""
        remote = self.portal.toml(*(signers or (self.anne, self.boris)), **options)
        self.agent.configure(self.azure.endpoint, f"[approval]\n{rules}{remote}")

    def start(self, *signers: Signer, **options: Any) -> None:
        """Start the agent, and wait until it has polled the portal and Azure."""
        self.configure(*signers, **options)
        self.restart()
        self.wait(self.portal.is_read)

    def restart(self) -> None:
        """Start the agent with the existing configuration, and wait until it has polled Azure."""
        self.agent.start()
        self.wait_for_polls(2)

    def wait(self, condition: Callable[[], object], timeout_seconds: float = 30) -> None:
        """Wait until *condition* is true."""
        self.agent.wait_for(condition, timeout_seconds)

    def wait_for_polls(self, count: int) -> None:
        """Wait until Azure has returned *count* more documents."""

        def polls() -> int:
            return sum("scheduledevents" in each.path and each.status == 200 for each in list(self.azure.requests))

        wanted = polls() + count
        self.wait(lambda: polls() >= wanted)

    def end(self) -> None:
        """Stop the agent, and check that it logged no internal error."""
        assert self.agent.stop() == 0
        assert "Traceback" not in self.agent.log, self.agent.log

    def close(self) -> None:
        """Stop the agent, the portal, and the simulator."""
        if self.agent.process is not None and self.agent.process.poll() is None:
            self.agent.kill()
        self.portal.close()

    # Azure.

    def event(self, *, is_seen: bool = True, **options: Any) -> Record:
        """Announce an event that stays Scheduled, and return its record."""
        given = {"event_type": "Freeze", "on_approval": "never", "notice_seconds": 3600, "resources": ("vm_0", "vm_1")}
        event_id = self.azure.world.add_event(EventSpec(**{**given, **options}))
        if is_seen:
            self.wait(lambda: event_id in self.agent.out.read_text())
        return self.record(event_id)

    def hidden(self, **options: Any) -> Record:
        """Announce an event that another VM already sees and this VM does not see until `show`."""
        self.azure.world.set_fault(Fault(kind="garbage", body=NOTHING, method="GET"))
        record = self.event(is_seen=False, **options)
        self.wait_for_polls(2)
        return record

    def show(self, record: Record) -> None:
        """Show the hidden events, and wait until the agent has seen the event of *record*."""
        self.azure.world.clear_faults()
        self.wait(lambda: record["event"]["event_id"] in self.agent.out.read_text())

    def record(self, event_id: str) -> Record:
        """Return the event as in the record of any VM."""
        events = json.loads(self.azure.world.document())["Events"]
        found = next(each for each in events if each["EventId"] == event_id)
        duration = found.get("DurationInSeconds", -1)
        event = {
            "event_id": event_id,
            "event_type": found["EventType"],
            "event_source": found["EventSource"],
            "duration_seconds": None if duration == -1 else duration,
            "resources": found["Resources"],
            "not_before_raw": found["NotBefore"],
        }
        return {"vm": {"vm_id": self.vm_id}, "event": event}

    @property
    def posted(self) -> Counter[str]:
        """Return the number of StartRequests for each event."""
        return Counter(each.event_id for each in self.azure.world.approvals)

    # The portal.

    def put(self, *tokens: str) -> None:
        """Add *tokens* to the portal, and wait until the agent has received them."""
        self.portal.put_all(*tokens)
        self.wait(self.portal.is_read)

    def control(self, signer: Signer | None = None) -> Record:
        """Send a valid approval last. Its effect shows that the agent has processed all earlier decisions."""
        record = self.event()
        self.put((signer or self.anne).decide(record))
        self.wait_posted(record)
        return record

    def wait_posted(self, *records: Record) -> None:
        """Wait for the StartRequests of *records*, and two more polls for unexpected ones."""
        self.wait(lambda: all(is_in(record, self.posted) for record in records))
        self.wait_for_polls(2)

    def refusals(self) -> Counter[str]:
        """Return the number of records about refused decisions, by reason."""
        refused = [each for each in self.agent.records if each["transition"] == "approval_refused"]
        return Counter(each["approval"]["result"] for each in refused)
