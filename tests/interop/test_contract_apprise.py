"""The apprise sink against the contract every sink passes, by the service of Apprise that posts JSON."""

from __future__ import annotations

from typing import ClassVar

import pytest

from bridge.testing.http_contract import HttpSinkContract
from bridge.testing.records import sample_record

pytestmark = [
    pytest.mark.interop,
    # Of the library's plugins, when it loads them all: not ours to mend.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytest.importorskip("apprise", reason="the extra [apprise] is not installed")

SECRET = "chat-token-4711"


class TestAppriseSinkContract(HttpSinkContract):
    sink_type = "apprise"
    secrets = (SECRET,)
    skips: ClassVar = {
        "test_refused_for_good_is_rejected": "Apprise says whether it worked and not why, so all is tried again",
        "test_retry_after_is_passed_on": "Apprise keeps what the service wished to itself",
        "test_part_of_a_batch_refused_is_rejected_by_name": "Apprise sends one record at a time",
        "test_check_says_when_nobody_listens": "Apprise cannot try a service without writing to it",
    }

    @pytest.fixture(autouse=True)
    def files(self, tmp_path):
        self.urls = tmp_path / "urls"

    def table(self, address):
        self.urls.write_text(f"json://{address.authority}/{SECRET}\n")
        return {"urls_file": str(self.urls)}

    def ids_in(self, request):
        """A chat message is for people and carries no id; the one that the suite sends is known by its words."""
        return [sample_record().id] if b"memory-preserving Live Migration" in request.body else []
