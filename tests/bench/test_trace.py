"""The path of a document and of a decision through a running agent: few files, and one direction.

A real agent runs in this process with a simulated metadata service and a portal. `threading.setprofile` records each
call from one file of `bridge` to another. The path of a document ends when its records are in the state and the saver
is notified. The path of a decision also includes the result of its approval.

A file is on the path if it calls another file, or if it is the end of the path (`state` and `saver`). A file that only
returns a result to its caller, such as a parser, is not on the path. All files may call the modules in _BOTTOM, which
do not count. Delivery begins where the outbox wakes the workers, and is a separate path. Print both paths with
``pytest -s tests/bench/test_trace.py``.
"""

import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from portal_stub import PortalStub

import bridge
from bridge.agent.agent import Agent
from bridge.config import loader
from bridge.imds.document import parse_document
from bridge.testing import EventSpec, Simulator

T = TypeVar("T")

_ROOT = Path(str(bridge.__file__)).parent
_WAIT_SECONDS = 20.0
#: Threads that do unrelated work during the processing of a decision.
_OTHER_THREADS = ("MainThread", "identity", "deadline", "saver", "control", "delivery", "sink")
_BOTTOM = ("backoff", "clock", "delivery/", "errors", "events/event", "events/record", "http/", "logs", "metrics/")
_BOTTOM += ("outbox/rows", "sink", "strict_json", "system/", "testing/", "text")
_ENDS = ("outbox/state.py", "outbox/saver.py")
#: The poller gives its history to the tracker.
_CALLBACKS = {"polling/poller.py:_event_row"}


class Call(NamedTuple):
    """A call from another file. *stack* contains the files of the callers, the nearest first."""

    at: float
    file: str
    name: str
    stack: tuple[str, ...]


class Tracer:
    """Records calls in threads that start while the tracer is installed."""

    def __init__(self):
        self.calls = []
        self.skipped = None
        """The threads that are not traced. None means that no thread is traced."""
        self._files = {}

    def note(self, frame, event, _argument):
        if event != "call" or self.skipped is None or threading.current_thread().name.startswith(self.skipped):
            return
        file = self._file(frame)
        stack = tuple(self._stack(frame.f_back))
        if file is not None and stack and stack[0] != file:
            self.calls.append(Call(time.monotonic(), file, frame.f_code.co_name, stack))

    def _stack(self, frame):
        while frame is not None:
            if file := self._file(frame):
                yield file
            frame = frame.f_back

    def _file(self, frame):
        name = frame.f_code.co_filename
        if name not in self._files:
            path = Path(name)
            file = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else ""
            self._files[name] = None if not file or file.startswith(_BOTTOM) else file
        return self._files[name]

    @property
    def files(self):
        """Return the files on the path in the order in which they are entered."""
        callers = {call.stack[0] for call in self.calls}
        entered = (file for call in self.calls for file in (*reversed(call.stack), call.file))
        return [file for file in dict.fromkeys(entered) if file in callers or file in _ENDS]

    @property
    def re_entered(self):
        """Return ``file:function`` for each call into a file that waits for its caller."""
        return {f"{call.file}:{call.name}" for call in self.calls if call.file in call.stack}


@pytest.fixture
def tracer():
    tracer = Tracer()
    threading.setprofile(tracer.note)
    yield tracer
    threading.setprofile(None)


def test_path_of_a_document_has_few_files_and_one_direction(tracer, tmp_path):
    with Simulator(vms=["vm_0"], rate_limit=False) as azure, running_agent(tmp_path, azure, sinks=[memory()]):
        wait_for_poll(azure)
        tracer.skipped = (*_OTHER_THREADS, "approv")
        announce(azure)
        wait(lambda: any(call.name == "append_observation" for call in tracer.calls))
        wait_for_poll(azure)
        tracer.skipped = None
    judge("document", tracer, 10)


def test_path_of_a_decision_has_few_files_and_one_direction(tracer, tmp_path):
    with (
        Simulator(vms=["vm_0"], rate_limit=False) as azure,
        PortalStub(tmp_path / "portal", tls=False) as portal,
        running_agent(
            tmp_path / "agent",
            azure,
            approval={"remote": {"url": portal.url, "keys": portal.key_tables()}},
            sinks=[memory()],
        ),
    ):
        announce(azure)
        (event,) = parse_document(azure.world.document()).events
        portal.wait_for_requests(2)
        wait_for_poll(azure)
        wait_for_poll(azure)
        tracer.skipped = (*_OTHER_THREADS, "poll")
        portal.decide(event, vm_id=azure.machines[0].vm_id)
        wait(lambda: azure.world.approvals)
        posted_at = next(seen.monotonic_seconds for seen in azure.requests if seen.method == "POST")
        wait(lambda: any(call.name == "write_changes" and call.at > posted_at for call in tracer.calls))
        tracer.skipped = None
    judge("decision", tracer, 14)


def judge(title, tracer, most_files):
    files = tracer.files
    print(f"{title}: {len(files)} files", *files, sep="\n  ")  # noqa: T201
    assert set(_ENDS) <= set(files)
    assert len(files) <= most_files
    assert tracer.re_entered <= _CALLBACKS


@contextmanager
def running_agent(directory, azure, **tables):
    imds = {"endpoint": azure.endpoint, "poll_interval_seconds": 1.0}
    agent = Agent(loader.read({"imds": imds, "status": {"listen": ""}, **tables}), directory)
    agent.start()
    try:
        yield
    finally:
        agent.stop()


def memory():
    return {"type": "scripted_sink:ScriptedSink", "name": "memory", "box": "trace"}


def announce(azure):
    azure.world.add_event(EventSpec(event_type="Freeze", on_approval="wait", notice_seconds=36_000))


def wait_for_poll(azure):
    """Wait for the end of the next poll."""
    count = len(azure.requests)
    wait(lambda: any(seen.method == "GET" and "scheduledevents" in seen.path for seen in azure.requests[count:]))
    time.sleep(0.3)


def wait(condition):
    deadline = time.monotonic() + _WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not occur in time"
        time.sleep(0.001)
