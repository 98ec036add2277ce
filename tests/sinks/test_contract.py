"""The contract suite itself: a correct sink passes, and each faulty sink fails."""

import logging
import socket
import uuid

import pytest
import requests

from bridge.sink import (
    DeadlineExceeded,
    DeadlineSession,
    DeliveryFailed,
    DeliveryRejected,
    Sink,
    SinkConfig,
    encode,
    retry_after_seconds,
)
from bridge.testing.http_contract import Answer, HttpSinkContract
from bridge.testing.records import sample_record

SECRET = "path-secret-4711"
_OK, _PARTLY, _BAD = 200, 207, 400


class PostSink(Sink):
    """A sink that is correct except for *fault*."""

    failures = 0

    class Config(SinkConfig, frozen=True, kw_only=True):
        url: str = ""
        fault: str = ""

    def __init__(self, config):
        super().__init__(config)
        self._session = DeadlineSession()
        self._is_closed = False
        self._kept = []
        if config.fault == "connects early":
            self._ask("GET", None, config.timeout_seconds)

    def send(self, batch):
        fault = self.config.fault
        if fault == "keeps sockets":
            self._kept.append(socket.socket())
        if fault == "logs the secret":
            logging.getLogger("acme").debug("Posting to %s.", self.config.url)
        if fault == "sends one by one":
            for record in batch:
                self._judge(self._post([record]))
            return
        if fault == "never times out":
            self._judge(requests.post(self.config.url, data=_body(batch), timeout=None))
            return
        if fault == "makes up ids":
            batch = [sample_record(record.sequence, id=str(uuid.uuid4())) for record in batch]
        self._judge(self._post(batch))

    def check(self):
        if self.config.fault == "writes to check":
            self._judge(self._post([sample_record()]))
        elif self.config.fault != "checks nothing":
            self._ask("HEAD", None, self.config.timeout_seconds)

    def close(self):
        if self.config.fault == "closes once" and self._is_closed:
            raise RuntimeError("closed already")
        self._is_closed = True
        for kept in self._kept:
            kept.close()
        self._session.close()

    def _post(self, batch):
        is_late = self.config.fault == "is late" or (self.config.fault == "is late at first" and not PostSink.failures)
        # The faults "shrugs" and "keeps sockets" must respond long before the host cancels the call. The allowance for
        # a busy machine is half a second, and the delay of the fault "is late" is longer.
        slow = 3.0 if is_late else 0.4 if self.config.fault in {"shrugs", "keeps sockets"} else 1.0
        return self._ask("POST", _body(batch), self.config.timeout_seconds * slow)

    def _ask(self, method, body, deadline_seconds):
        fault = self.config.fault
        try:
            return self._session.request(method, self.config.url, data=body, deadline_seconds=deadline_seconds)
        except (DeadlineExceeded, requests.RequestException) as error:
            PostSink.failures += 1
            if fault == "shrugs":
                return None
            shown = self.config.url if fault == "shows the secret" else type(error).__name__
            raise DeliveryFailed(f"No answer: {shown}") from error

    def _judge(self, answer):
        fault = self.config.fault
        if fault in {"believes anything", "shrugs"} or answer.status_code == _OK:
            return
        if answer.status_code == _PARTLY:
            raise DeliveryRejected("Not all.", records=["stranger" if fault == "names strangers" else answer.text])
        if answer.status_code == _BAD and fault != "retries what is refused":
            raise DeliveryRejected(answer.text if fault == "repeats the peer" else "Refused.")
        wish = 60.0 if fault == "wishes for itself" else retry_after_seconds(answer.headers)
        raise DeliveryFailed("Not now.", retry_after=None if fault == "ignores wishes" else wish)


def _body(batch):
    return b"\n".join(encode(record) for record in batch)


class PostContract(HttpSinkContract):
    sink_type = f"{__name__}:PostSink"
    secrets = (SECRET,)
    batch_size = 2
    fault = ""

    def table(self, address):
        return {"url": f"http://{address.authority}/{SECRET}", "fault": self.fault}

    def partial(self, refused_ids):
        return Answer(status=_PARTLY, body=refused_ids[0].encode())


class TestPostContract(PostContract):
    """A correct sink passes the suite."""


CAUGHT = {
    "believes anything": "test_refused_for_good_is_rejected",
    "checks nothing": "test_check_reports_a_closed_port",
    "closes once": "test_close_may_be_called_twice",
    "connects early": "test_constructor_is_quick_and_connects_nowhere",
    "ignores wishes": "test_retry_after_is_passed_on",
    "is late": "test_sink_keeps_its_own_deadline",
    "keeps sockets": "test_silence_leaves_no_thread_and_no_socket_behind",
    "logs the secret": "test_no_secret_is_in_a_log_line_or_an_error",
    "makes up ids": "test_every_retry_has_the_same_id",
    "names strangers": "test_part_of_a_batch_refused_is_rejected_by_name",
    "never times out": "test_silence_leaves_no_thread_and_no_socket_behind",
    "repeats the peer": "test_no_secret_is_in_a_log_line_or_an_error",
    "retries what is refused": "test_refused_for_good_is_rejected",
    "sends one by one": "test_accepted_records_reach_the_peer_once_and_in_order",
    "shows the secret": "test_no_secret_is_in_a_log_line_or_an_error",
    "shrugs": "test_close_ends_a_send_in_flight",
    "wishes for itself": "test_refused_for_now_is_failed",
    "writes to check": "test_check_writes_nothing",
}


@pytest.mark.parametrize("fault", sorted(CAUGHT))
def test_faulty_sink_fails_the_contract(fault):
    contract = PostContract()
    contract.fault = fault
    contract.deadline_seconds = 0.5
    with pytest.raises(AssertionError) as caught:
        getattr(contract, CAUGHT[fault])()
    assert SECRET not in str(caught.value)


def test_sink_cut_once_by_the_host_passes_the_leak_test(monkeypatch):
    monkeypatch.setattr(PostSink, "failures", 0)
    contract = PostContract()
    contract.fault = "is late at first"
    contract.test_silence_leaves_no_thread_and_no_socket_behind()
