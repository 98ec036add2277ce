"""Calls a sink as the agent does, for the contract suite."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

from bridge.config.settings import SinkSettings
from bridge.delivery.sender import Sender
from bridge.errors import DeliveryError, DeliveryRejected
from bridge.events.record import TransitionRecord

_Error = TypeVar("_Error", bound=BaseException)


class Host:
    """Calls a sink through `Sender`, as the agent does.

    Each method returns an error instead of raising it.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self._sender = Sender(settings.build, name=settings.name, timeout_seconds=settings.config.timeout_seconds)

    def send(self, batch: Sequence[TransitionRecord]) -> DeliveryError | None:
        """Send *batch*, and return the error or None."""
        return _raised(lambda: self._sender.send(batch))

    def check(self) -> DeliveryError | None:
        """Check the destination, and return the error or None."""
        return _raised(self._sender.check)

    def close(self) -> None:
        """Close the sink."""
        self._sender.close()


def _raised(call: Callable[[], object]) -> DeliveryError | None:
    try:
        call()
    except DeliveryError as error:
        return error
    return None


class Call:
    """Runs a function on a separate thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.error: BaseException | None = None
        self.seconds = 0.0
        """The duration of the call in seconds. Set when the call ends."""
        self._thread = threading.Thread(target=self._run, name="contract-call", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for at most *seconds*, and return whether the call has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001  # the test checks it
            self.error = error
        self.seconds = time.monotonic() - began


def skip(reason: str) -> NoReturn:
    """Skip the test with *reason*."""
    from unittest import SkipTest  # noqa: PLC0415  # only a skipped test needs it

    raise SkipTest(reason)


def fail(message: str) -> NoReturn:
    """Fail the test with *message*."""
    raise AssertionError(message)


def expect_accepted(error: BaseException | None) -> None:
    """Fail the test if *error* is not None, because the peer accepts all records."""
    if error is not None:
        raise AssertionError(f"The peer accepted the records, but the sink raised {error!r}.") from error


def expect(kind: type[_Error], error: BaseException | None) -> _Error:
    """Return *error* if its type is *kind*. Otherwise, fail the test."""
    if error is None:
        fail(f"The sink returned without an error. Expected: {kind.__name__}.")
    if not isinstance(error, kind):
        raise AssertionError(  # noqa: TRY004  # a test fails; no argument has a wrong type
            f"The sink raised {error!r}. Expected: {kind.__name__}."
        ) from error
    return error


def expect_named(error: DeliveryRejected, batch: Sequence[TransitionRecord]) -> list[str]:
    """Return the record IDs in *error*. Fail the test if an ID is not in *batch*."""
    named = [str(getattr(record, "id", record)) for record in error.records]
    strangers = set(named) - {record.id for record in batch}
    if strangers:
        fail(f"The error names records that were not sent: {', '.join(sorted(strangers))}.")
    return named
