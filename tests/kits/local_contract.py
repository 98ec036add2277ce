"""The contract suite for a sink of this machine (a file, a pipe, a log): what it takes is any record or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bridge.testing.contract import SinkContract
from bridge.testing.peers import Address


class LocalSinkContract(SinkContract):
    """The suite without what only a service does: refuse one record of many, name a time, ask for a secret."""

    skips: ClassVar[Mapping[str, str]] = {
        "test_refused_for_good_is_rejected": "it takes any record or none",
        "test_retry_after_is_passed_on": "it names no time",
        "test_part_of_a_batch_refused_is_rejected_by_name": "it takes any record or none",
        "test_no_secret_is_in_a_log_line_or_an_error": "it has no secret",
    }

    def table(self, address: Address) -> Mapping[str, Any]:
        """Return no key: it has no address."""
        del address
        return {}
