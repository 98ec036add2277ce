"""What a real agent lives on: a simulated Azure, a destination that does as it is told, a disk that can hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from alert_stories.live import LiveAgent

from bridge.testing import EventSpec, Simulator
from bridge.testing.http_peer import HttpPeer

VM, ANOTHER_VM = "vm_0", "vm_1"


class Stage:
    """Azure, the destination of a sink, and agents that watch the one and send to the other; closes all of them."""

    def __init__(self, directory: Path, env: Mapping[str, str]) -> None:
        self.directory, self._env = directory, env
        self._stack = ExitStack()
        self.peer = HttpPeer()
        self._stack.callback(self.peer.close)
        self.azure = self._stack.enter_context(Simulator(vms=[VM, ANOTHER_VM], rate_limit=False))
        self.vm_id = self.azure.machines[0].vm_id

    def __enter__(self) -> Stage:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def close_with(self, close: Callable[[], object]) -> None:
        """Call *close* at the end."""
        self._stack.callback(close)

    def agent(self, name: str = "agent", *, vm: str = VM, state: Path | None = None) -> LiveAgent:
        """Return an agent on *vm* that is not started yet."""
        found = LiveAgent(self.directory / name, self._env, imds=self.azure.endpoints[vm])
        found.state = state or found.state
        self._stack.callback(found.kill)
        return found

    def watching(self, text: str | None = None, *, top: str = "") -> LiveAgent:
        """Return an agent that runs, has polled, and sends to the peer unless *text* says where to."""
        agent = self.agent()
        agent.configure(self.webhook() if text is None else text, top=top)
        agent.watch()
        return agent

    def webhook(self, name: str = "sre", *, more: str = "") -> str:
        """Return the table of a sink that sends to the peer."""
        url = f"http://{self.peer.address.authority}/hook"
        return f'[[sinks]]\ntype = "webhook"\nname = "{name}"\nurl = "{url}"\n{more}\n'

    def announce(self, event_type: str = "Freeze", **details: Any) -> str:
        """Have Azure announce an event that names this VM."""
        return self.azure.world.add_event(EventSpec(event_type=event_type, resources=(VM,), **details))
