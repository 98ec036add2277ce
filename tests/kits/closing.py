"""Closes the objects that a fixture creates on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> object: ...


P = ParamSpec("P")
T = TypeVar("T", bound=Closable)


@contextmanager
def closing_each(create: Callable[P, T]) -> Iterator[Callable[P, T]]:
    """Return *create* as a function whose results are closed at the end, the newest first."""
    with ExitStack() as stack:

        def created(*args: P.args, **kwargs: P.kwargs) -> T:
            result = create(*args, **kwargs)
            stack.callback(result.close)
            return result

        yield created
