"""The contract suite for a sink that writes to the VM itself, such as to a file, a pipe, or a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from bridge.testing.contract import SinkContract
from bridge.testing.peers import Address


class LocalSinkContract(SinkContract):
    """The contract suite without the tests that need a service.

    Only a service rejects single records, sends a retry time, or requires a secret.
    """

    skips: ClassVar[Mapping[str, str]] = {
        "test_refused_for_good_is_rejected": "the sink accepts either all records or none",
        "test_retry_after_is_passed_on": "the destination never sends a retry time",
        "test_part_of_a_batch_refused_is_rejected_by_name": "the sink accepts either all records or none",
        "test_no_secret_is_in_a_log_line_or_an_error": "the sink has no secret",
    }

    def table(self, address: Address) -> Mapping[str, Any]:
        """Return no settings, because the destination has no address."""
        del address
        return {}
