"""The words that Azure documents for an event, and the check that a filter spells them as Azure does.

Filters compare exactly, so a known word in another case would never match: a sink would stay silent and a rule would
stay idle, and both would look like calm. Words that nobody knows yet pass, since Azure may add some.
(Microsoft, "Scheduled Events for Linux VMs in Azure", event properties.)
"""

from __future__ import annotations

EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
EVENT_SOURCES = ("Platform", "User")


def check_event_type(value: str) -> None:
    """Raise ValueError, with what it must be, when *value* is a known event type in another case."""
    _spelt(value, EVENT_TYPES)


def check_event_source(value: str) -> None:
    """Raise ValueError, with what it must be, when *value* is a known event source in another case."""
    _spelt(value, EVENT_SOURCES)


def _spelt(value: str, known: tuple[str, ...]) -> None:
    for right in known:
        if value != right and value.casefold() == right.casefold():
            raise ValueError(f"spelt {right!r}, as Azure spells it")
