"""The stream of changes to open pages: its messages, its end, and slow subscribers."""

import asyncio
import http.client
import logging
import socket
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from functools import partial

import pytest
from closing import closing_each
from fleet_records import NOW, fleet_record
from page_kit import Office
from portal_users import grant
from uvicorn import Config, Server

from bridge.clock import REAL_CLOCK
from bridge.events.record import Transition
from bridge.logs import ThrottledLog
from bridge.portal.connected_agents import ConnectedAgents
from bridge.portal.fleet import key_of_event_id
from bridge.portal.http_limits import REQUEST_SECONDS, LimitedHttp
from bridge.portal.metrics import PortalMetrics
from bridge.portal.server_sent_events import ALL, LiveUpdates
from bridge.portal.store.event_details import Marks
from bridge.portal.users import COOKIE, AccessDenied, Person
from bridge.testing import ManualClock

A, B = key_of_event_id("A"), key_of_event_id("B")
SECONDS = 20.0


@pytest.fixture
def office(tmp_path):
    with Office(tmp_path) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        yield office


class Stream:
    """An open stream of *browser*."""

    def __init__(self, browser):
        self._connection = http.client.HTTPConnection(browser.origin.removeprefix("http://"), timeout=SECONDS)
        self._connection.request("GET", "/live", headers={"Cookie": f"{COOKIE}={browser.cookie}"})
        self.answer = self._connection.getresponse()

    def events(self):
        """Yield the event name and the data words of each message until the stream ends."""
        name = ""
        for line in self.answer:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, set(value.split())

    def until(self, word):
        """Read the stream up to a message that contains *word*."""
        for name, words in self.events():
            if name == "changed" and word in words:
                return
        raise AssertionError(f"the stream ended without {word}")

    def close(self):
        self.answer.close()
        self._connection.close()


@pytest.fixture
def stream(office):  # noqa: ARG001  # closes the streams before the portal stops
    with closing_each(Stream) as open_for:
        yield open_for


def test_stream_reports_records_verdicts_and_agents(office, stream):
    ann = office.browser("ann")
    found = stream(office.browser("vic"))
    assert found.answer.headers["Content-Type"] == "text/event-stream"
    found.until(ALL)
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    found.until(B)
    ann.submit(f"/events/{A}", "hold")
    found.until(A)
    office.poll(0, kids=["p1"])
    found.until("agents")
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",), sequence=2, transition=Transition.CANCELED))
    found.until(B)


def test_page_offers_the_approval_again_after_agents_reconnect(tmp_path):
    clock, able = ManualClock(NOW + timedelta(minutes=1)), {"kids": ["p1"]}
    with Office(tmp_path, clock=clock.clock) as office:
        office.portal.send(fleet_record(0), fleet_record(1))
        ann = office.browser("ann")
        for vm in (0, 1):
            office.poll(vm, **able)
        office.wait_for_stored_agents(2)
        office.portal.stop()
        office.portal.start()
        ann.origin = office.origin
        page = ann.page(f"/events/{A}")
        assert "vm_0 is reconnecting to the portal; vm_1 is reconnecting to the portal." in page.text
        assert [text.split()[0] for text in page.buttons if text != "Sign out"] == ["Hold"]
        with closing(Stream(ann)) as found:
            found.until(ALL)
            office.poll(0, **able)
            found.until(A)
        assert any(text.startswith("Approve") for text in ann.page(f"/events/{A}").buttons)
        ann.submit(f"/events/{A}", "hold")
        assert "ann holds it" in ann.page(f"/events/{A}").text
        clock.advance(61)
        office.poll(0, **able)
        agents = {each["record"]["vm"]["name"]: each["agent"] for each in office.portal.get("/agents").json()["agents"]}
        shown = {name: (agent["is_connected"], agent["is_reconnecting"]) for name, agent in agents.items()}
        assert shown == {"vm_0": (True, False), "vm_1": (False, False)}


def test_stream_reports_a_changed_role(office, stream):
    found = stream(office.browser("vic"))
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    found.until(B)  # the initial messages of the stream precede it
    office.change_user("ann", grants=grant("viewer"))
    found.until(ALL)


def test_logout_ends_only_the_stream_of_its_session(office, stream):
    ann, other = office.browser("ann"), office.browser("ann")
    mine, theirs = stream(ann), stream(other)
    ann.submit("/", "Sign out")
    assert list(mine.events())[-1][0] == "ended"
    office.portal.send(fleet_record(2, event_id="B", resources=("vm_2",)))
    theirs.until(B)


def test_anonymous_user_receives_no_stream(office, stream):
    assert stream(office.browser()).answer.status == 401


def test_portal_stop_ends_the_stream_within_five_seconds(office, stream):
    found = stream(office.browser("ann"))
    found.until(ALL)
    began = time.monotonic()
    office.portal.stop()
    assert list(found.events())[-1][0] == "stopped"
    assert time.monotonic() - began < 5


class _EndsElsewhere:
    """Users whose session ends in another process after two requests."""

    def __init__(self):
        self.asked = 0

    async def person_of(self, _request):
        self.asked += 1
        if self.asked > 2:
            raise AccessDenied(401, "Sign in first.")
        return Person(key="local ann", name="ann", grants=grant("viewer"), session_sha256="x")


def test_stream_ends_after_another_process_ends_its_session():
    async def served():
        sent = []

        async def send(message):
            sent.append(message)

        users = _EndsElsewhere()
        live = LiveUpdates(
            store=None,
            users=users,
            connected_agents=ConnectedAgents(REAL_CLOCK),
            clock=REAL_CLOCK,
            keep_alive_seconds=0.1,
        )
        scope = {"type": "http", "method": "GET", "path": "/live", "headers": [], "query_string": b""}
        await asyncio.wait_for(live(scope, asyncio.Event().wait, send), SECONDS)
        return users.asked, sent, len(live._subscribers)

    asked, sent, readers = asyncio.run(served())
    assert (asked, readers) == (3, 0)
    assert [message["body"] for message in sent[-2:]] == [b"event: ended\ndata: ended\n\n", b""]
    assert not sent[-1]["more_body"]


class _Stays:
    """Users with access for every request."""

    async def person_of(self, _request):
        return Person(key="local ann", name="ann", grants=grant("viewer"), session_sha256="x")


class _Changes:
    """A store in which 90 events have changed at each read."""

    def __init__(self):
        self.asked = 0

    async def read(self, _work):
        self.asked += 1
        return Marks(entry=0, open_events={f"{number:032x}": str(self.asked) for number in range(90)})


async def _ask(listening):
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    return reader, writer


async def _slow_and_quick(listening):
    """Send 200 changes to a slow and a fast subscriber, and return the size of the largest write buffer."""
    live = LiveUpdates(store=_Changes(), users=_Stays(), connected_agents=ConnectedAgents(REAL_CLOCK), clock=REAL_CLOCK)
    protocol = partial(
        LimitedHttp,
        request_seconds=REQUEST_SECONDS,
        metrics=PortalMetrics(),
        log=ThrottledLog(logging.getLogger(__name__)),
    )
    server = Server(Config(live, http=protocol, lifespan="off", log_config=None))
    running = [asyncio.ensure_future(server.serve(sockets=[listening])), asyncio.ensure_future(live.follow())]
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
    slow.connect(listening.getsockname())
    slow.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    reader, writer = await _ask(listening)
    largest, until = 0, time.monotonic() + SECONDS
    while len(live._subscribers) < 2 and time.monotonic() < until:
        await reader.readuntil(b"\n\n")
    assert len(live._subscribers) == 2
    for _ in range(200):
        live.check_now()
        await asyncio.wait_for(reader.readuntil(b"\n\n"), SECONDS)
        largest = max([largest, *(each.transport.get_write_buffer_size() for each in server.server_state.connections)])
    live.stop()
    server.should_exit = True
    running[1].cancel()
    writer.close()
    slow.close()
    await asyncio.gather(*running, return_exceptions=True)
    return largest


def test_slow_subscriber_uses_little_memory_and_delays_no_other():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)  # otherwise, kernel buffers hold megabytes
        assert asyncio.run(_slow_and_quick(listening)) < 256 * 1024


def test_many_streams_of_one_user_do_not_block_other_users(office):
    ann, bob = office.browser("ann"), office.browser("bob")
    with ExitStack() as streams:
        statuses = [streams.enter_context(ann.get("/live", stream=True)).status_code for _ in range(40)]
        assert (statuses.count(200), set(statuses)) == (16, {200, 429})
        assert streams.enter_context(bob.get("/live", stream=True)).status_code == 200
