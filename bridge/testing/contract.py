"""The contract suite: tests that every sink must pass before you use it in production.

To test your own sink, subclass the contract in a test file and describe how your sink is configured. pytest then runs
the inherited tests.

    class TestPagerSinkContract(HttpSinkContract):
        sink_type = "acme.sinks:PagerSink"
        secrets = ("s3cret-path",)

        def table(self, address):
            return {"url": f"http://{address.authority}/s3cret-path"}

If your sink uses HTTP, subclass `bridge.testing.http_contract.HttpSinkContract`. If it uses another protocol, subclass
`SinkContract` and write a `Peer`. Tests that do not apply to your sink are skipped, and the test report shows why.

This module does not import pytest, because the installed package does not depend on pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from bridge.config.loader import read
from bridge.config.settings import SinkSettings
from bridge.errors import DeliveryError, DeliveryFailed, DeliveryRejected, RetryReason
from bridge.events.record import TransitionRecord
from bridge.sink import Sink
from bridge.testing.calls import Call, Host, expect, expect_accepted, expect_named, fail, skip
from bridge.testing.peers import (
    NOWHERE,
    Address,
    Peer,
    closed_port,
    resetting_listener,
    silent_listener,
    was_connected_to,
)
from bridge.testing.records import sample_record
from bridge.testing.watching import Census, agent_logs, in_time

_PATIENCE_SECONDS = 10.0
_QUICK_SECONDS = 0.5
#: Half of the time that a send takes if `close` does not end it.
_CLOSE_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 7
_SILENCES = 3
_RETRIES = 3

_Test = Callable[["SinkContract"], None]


def _needs_network(test: _Test) -> _Test:
    test.needs_network = True  # type: ignore[attr-defined]
    return test


class SinkContract:
    """The contract for all sinks. Write a subclass that implements `table` and `peer`."""

    sink_type: ClassVar[str] = ""
    """The name of the sink's entry point, or ``module:Class``."""
    secrets: ClassVar[Sequence[str]] = ()
    """The secrets in the sink's configuration. Log lines and errors must not contain these secrets."""
    batch_size: ClassVar[int] = 1
    """The number of records in each batch. Increase this number if the sink accepts more than one record."""
    deadline_seconds: ClassVar[float] = 0.5
    """The `timeout_seconds` of the sink in tests with a silent peer. Increase this value for a slow SDK."""
    after_silence: ClassVar[type[DeliveryError]] = DeliveryFailed
    """The error if the peer stays silent. Use DeliveryRejected if the sink must not send such a record again."""
    no_network: ClassVar[str] = ""
    """The reason why the sink makes no network connections. If set, tests of connections are skipped."""
    skips: ClassVar[Mapping[str, str]] = {}
    """The names of the tests that do not apply to the sink, each with the reason."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        tests = {name: test for name in dir(cls) if name.startswith("test_") and callable(test := getattr(cls, name))}
        unknown = sorted(set(cls.skips) - set(tests))
        if unknown:
            raise TypeError(f"{cls.__name__}.skips names {', '.join(unknown)}; the suite has {', '.join(tests)}.")
        for name, test in tests.items():
            reason = cls.skips.get(name) or (cls.no_network if hasattr(test, "needs_network") else "")
            if reason:
                setattr(cls, name, _skipped(reason))

    # For the sink author.

    def table(self, address: Address) -> Mapping[str, Any]:
        """Return the sink's ``[[sinks]]`` table for a peer at *address*.

        Omit the type, name, and timeout.
        """
        raise NotImplementedError

    def peer(self) -> Peer:
        """Return a peer that accepts all records."""
        raise NotImplementedError

    # The tests.

    def test_accepted_records_reach_the_peer_once_and_in_order(self) -> None:
        batch = self._batch()
        with self.peer() as peer, self._host(peer.address) as host:
            expect_accepted(host.send(batch))
            seen, wanted = [list(ids) for ids in peer.received], [[record.id for record in batch]]
            if seen != wanted:
                fail(f"The peer received {seen}, but the suite sent {wanted}.")

    def test_refused_for_good_is_rejected(self) -> None:
        batch = self._batch()
        with self.peer() as peer, self._host(peer.address) as host:
            peer.refuse_for_good()
            error = expect(DeliveryRejected, host.send(batch))
            expect_named(error, batch)

    def test_refused_for_now_is_failed(self) -> None:
        with self.peer() as peer, self._host(peer.address) as host:
            peer.refuse_for_now()
            error = expect(DeliveryFailed, host.send(self._batch()))
            if error.retry_after is not None:
                fail(f"retry_after is {error.retry_after}, but the response has no Retry-After.")

    def test_retry_after_is_passed_on(self) -> None:
        with self.peer() as peer, self._host(peer.address) as host:
            peer.refuse_for_now(_RETRY_AFTER_SECONDS)
            error = expect(DeliveryFailed, host.send(self._batch()))
            if error.retry_after != _RETRY_AFTER_SECONDS:
                fail(f"retry_after is {error.retry_after}, but the peer requested {_RETRY_AFTER_SECONDS}.")

    def test_part_of_a_batch_refused_is_rejected_by_name(self) -> None:
        batch = [sample_record(number) for number in (1, 2, 3)]
        with self.peer() as peer, self._host(peer.address, max_batch=len(batch)) as host:
            peer.refuse_part([batch[1].id])
            error = expect(DeliveryRejected, host.send(batch))
            named = expect_named(error, batch)
            if batch[1].id not in named:
                fail(f"The peer rejected {batch[1].id}, but the error names {named or 'no record'}.")

    def test_silence_ends_at_the_deadline_and_the_next_send_works(self) -> None:
        self._warm_up()
        with self.peer() as peer, self._host(peer.address, timeout_seconds=self.deadline_seconds) as host:
            peer.stay_silent()
            self._endure(host)
            peer.accept()
            expect_accepted(self._sent_at_last(host))

    def test_sink_keeps_its_own_deadline(self) -> None:
        """Call the sink directly, so that only its own deadline can end the send."""
        self._warm_up()
        with self._silent() as address, ExitStack() as sinks:
            settings = self._settings(address, timeout_seconds=self.deadline_seconds)

            def send() -> Call:
                sink = settings.build()
                sinks.callback(sink.close)
                call = Call(lambda: sink.send(self._batch()))
                if not call.wait(self.deadline_seconds + _PATIENCE_SECONDS):
                    fail(f"The send continued for {_PATIENCE_SECONDS} s after its deadline.")
                return call

            sent = in_time(send, deadline_seconds=self.deadline_seconds, seconds_of=lambda call: call.seconds)
            expect(self.after_silence, sent.error)

    def test_silence_leaves_no_thread_and_no_socket_behind(self) -> None:
        self._warm_up()
        with self._silent() as address:
            before = Census.baseline()
            with self._host(address, timeout_seconds=self.deadline_seconds) as host:
                self._endure(host)
                first = Census.taken()
                most = replace(first, threads=first.threads + 1)  # a canceled send ends the host's thread
                for _ in range(_SILENCES - 1):
                    self._endure(host)
                    if (now := most.settled()).exceeds(most):
                        fail(f"After the first send to a silent peer: {first}. After a later send: {now}.")
            if (now := before.settled()).exceeds(before):
                fail(f"Before {_SILENCES} sends to a silent peer: {before}. After the sink was closed: {now}.")

    @_needs_network
    def test_connection_refused_is_failed(self) -> None:
        with closed_port() as address, self._host(address) as host:
            expect(DeliveryFailed, host.send(self._batch()))

    @_needs_network
    def test_reset_is_failed(self) -> None:
        for after_reading in (False, True):
            with resetting_listener(after_reading=after_reading) as address, self._host(address) as host:
                expect(DeliveryFailed, host.send(self._batch()))

    @_needs_network
    def test_unknown_host_is_failed_within_the_deadline(self) -> None:
        self._warm_up()
        address = Address(host=NOWHERE, port=9)
        with self._host(address, timeout_seconds=self.deadline_seconds) as host:
            expect(DeliveryFailed, in_time(lambda: host.send(self._batch()), deadline_seconds=self.deadline_seconds))

    def test_no_secret_is_in_a_log_line_or_an_error(self) -> None:
        if not self.secrets:
            skip("The contract lists no secrets.")
        with agent_logs() as lines:
            errors = [str(error) + repr(error) for error in self._every_failure()]
            logged = lines()
        for secret in self.secrets:
            shown = [text for text in (*errors, *logged.splitlines()) if secret in text]
            if shown:
                fail("A secret is visible: " + shown[0].replace(secret, "<the secret>"))

    def test_every_retry_has_the_same_id(self) -> None:
        """Consumers use the ID of a record to detect duplicates."""
        batch = self._batch()
        with self.peer() as peer, self._host(peer.address) as host:
            peer.refuse_for_now()
            for _ in range(_RETRIES - 1):
                expect(DeliveryFailed, host.send(batch))
            peer.accept()
            expect_accepted(host.send(batch))
            wanted = [record.id for record in batch]
            # A peer can reject a request before it has read the body.
            seen = [list(ids) for ids in peer.received]
            if not seen or any(ids != wanted for ids in seen):
                fail(f"The suite sent {wanted} {_RETRIES} times, but the peer received {seen}.")

    def test_send_after_each_failure_works_again(self) -> None:
        with self.peer() as peer, self._host(peer.address) as host:
            for refuse in (peer.refuse_for_now, peer.refuse_for_good):
                if refuse.__name__ == "refuse_for_good" and "test_refused_for_good_is_rejected" in self.skips:
                    continue
                refuse()
                expect(DeliveryError, host.send(self._batch()))
                peer.accept()
                expect_accepted(host.send(self._batch()))

    def test_close_ends_a_send_in_flight(self) -> None:
        self._warm_up()
        with self.peer() as peer:
            peer.stay_silent()
            sink = self._settings(peer.address, timeout_seconds=_PATIENCE_SECONDS).build()
            writes_before = len(peer.received)
            send = Call(lambda: sink.send(self._batch()))
            peer.wait_until_busy(writes_before=writes_before)
            close = Call(sink.close)
            if not close.wait(_CLOSE_SECONDS):
                fail(f"close took longer than {_CLOSE_SECONDS} s during a send.")
            if close.error is not None:
                fail(f"close raised {close.error!r} during a send.")
            if not send.wait(_CLOSE_SECONDS):
                fail(f"The send continued for more than {_CLOSE_SECONDS} s after close.")
            if send.error is None:
                fail("The send returned without an error, but the peer sent no response.")

    def test_close_may_be_called_twice(self) -> None:
        with self.peer() as peer:
            for is_used in (False, True):
                sink = self._settings(peer.address).build()
                if is_used:
                    sink.send(self._batch())
                sink.close()
                again = Call(sink.close)
                if not again.wait(_CLOSE_SECONDS) or again.error is not None:
                    fail(f"The second close raised {again.error!r} or took longer than {_CLOSE_SECONDS} s.")

    def test_constructor_is_quick_and_connects_nowhere(self) -> None:
        """The agent creates a new instance of the sink after each send that it cancels."""
        with silent_listener() as (address, listener), ExitStack() as sinks:
            settings = self._settings(address)

            def build() -> None:
                built: list[Sink] = []
                call = Call(lambda: built.append(settings.build()))
                is_over = call.wait(_QUICK_SECONDS)
                if was_connected_to(listener):
                    fail("The constructor connects to the destination. Connect in the first send.")
                if not is_over and not call.wait(_PATIENCE_SECONDS):
                    fail(f"The constructor takes more than {_PATIENCE_SECONDS} s. Move the work to the first send.")
                if call.error is not None:
                    fail(f"The constructor raised {call.error!r}.")
                sinks.callback(built[0].close)

            in_time(build, deadline_seconds=_QUICK_SECONDS)

    def test_check_writes_nothing(self) -> None:
        """Operators run `check-config --connect` on production configurations."""
        with self.peer() as peer, self._host(peer.address) as host:
            error = host.check()
            if error is not None:
                fail(f"check raised {error!r}, but the peer accepts records.")
            if peer.received:
                fail(f"check sent {peer.received}. It must not write to the destination.")

    @_needs_network
    def test_check_reports_a_closed_port(self) -> None:
        with closed_port() as address, self._host(address) as host:
            expect(DeliveryFailed, host.check())

    # Helpers.

    def _batch(self) -> list[TransitionRecord]:
        return [sample_record(number + 1) for number in range(self.batch_size)]

    def _settings(self, address: Address, **values: Any) -> SinkSettings:
        ours = {"type": self.sink_type, "name": "contract", "timeout_seconds": _PATIENCE_SECONDS}
        if self.batch_size > 1:
            ours["max_batch"] = self.batch_size
        return read({"sinks": [{**ours, **self.table(address), **values}]}).sinks[0]

    @contextmanager
    def _host(self, address: Address, **values: Any) -> Iterator[Host]:
        host = Host(self._settings(address, **values))
        try:
            yield host
        finally:
            host.close()

    @contextmanager
    def _silent(self) -> Iterator[Address]:
        if not self.no_network:
            with silent_listener() as (address, _):
                yield address
            return
        with self.peer() as peer:
            peer.stay_silent()
            yield peer.address

    def _warm_up(self) -> None:
        """Send once with a long timeout.

        Importing an SDK can take longer than the deadline.
        """
        with self.peer() as peer, self._host(peer.address) as host:
            expect_accepted(host.send(self._batch()))

    def _endure(self, host: Host) -> None:
        """Send to a silent peer, and check that the send ends within the deadline."""

        def was_cut(error: DeliveryError | None) -> bool:
            is_by_the_host = isinstance(error, DeliveryFailed) and error.reason == RetryReason.TIMEOUT
            return is_by_the_host and not isinstance(error, self.after_silence)

        error = in_time(lambda: host.send(self._batch()), deadline_seconds=self.deadline_seconds, was_cut=was_cut)
        expect(self.after_silence, error)

    def _sent_at_last(self, host: Host) -> DeliveryError | None:
        """Try to send up to three times, because a canceled send might still be running."""
        for _ in range(_RETRIES):
            error = host.send(self._batch())
            if error is None:
                break
        return error

    def _every_failure(self) -> Iterator[DeliveryError]:
        """Yield every error that the suite can cause in the sink."""
        with self.peer() as peer, self._host(peer.address, timeout_seconds=self.deadline_seconds) as host:
            _ = host.send(self._batch())
            part = partial(peer.refuse_part, [record.id for record in self._batch()[:1]])
            for tell in (peer.refuse_for_good, peer.refuse_for_now, part, peer.stay_silent):
                try:
                    tell()
                except NotImplementedError:
                    continue
                for error in (host.send(self._batch()), host.check()):
                    if error is not None:
                        yield error
        if self.no_network:
            return
        with closed_port() as refusing, resetting_listener(after_reading=True) as resetting:
            for address in (refusing, resetting, Address(host=NOWHERE, port=9)):
                with self._host(address, timeout_seconds=self.deadline_seconds) as host:
                    for error in (host.send(self._batch()), host.check()):
                        if error is not None:
                            yield error


def _skipped(reason: str) -> _Test:
    def test(_self: SinkContract) -> None:
        skip(reason)

    return test
