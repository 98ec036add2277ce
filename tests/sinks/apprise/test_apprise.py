"""The apprise sink with a stand-in for the library: retries, messages, and masked secrets.

The test requirements do not include the library. tests/interop runs the sink with the real library.
"""

import importlib.machinery
import logging
import sys
import threading
import types

import pytest
from leaks import new_threads

from bridge.config.loader import load
from bridge.errors import ConfigurationError
from bridge.sink import DeliveryFailed, Transition
from bridge.testing.records import sample_event, sample_record
from bridge.testing.watching import in_time
from sinks.apprise import AppriseConfig, AppriseSink
from sinks.sentence import sentence


class Library(types.ModuleType):
    """The part of the package `apprise` that the sink uses. `outcomes` sets the result for each URL."""

    def __init__(self):
        super().__init__("apprise")
        self.__spec__ = importlib.machinery.ModuleSpec("apprise", None)
        self.sent = []
        self.outcomes = {}
        self.release = threading.Event()
        library = self

        class Plugin:
            def __init__(self, url):
                self.url = url
                self.socket_connect_timeout = 4.0
                self.socket_read_timeout = 30.0
                library.plugins.append(self)

        class Apprise:
            def __init__(self, asset):
                assert asset == {"async_mode": False}
                self.asset = asset
                self.plugins = []

            @staticmethod
            def instantiate(url, asset):
                del asset
                logging.getLogger("apprise").error("Loading %s", url)
                return Plugin(url) if "://" in url else None

            def add(self, plugin):
                self.plugins.append(plugin)

            def notify(self, **message):
                taken = [library.notify(plugin.url, message) for plugin in self.plugins]
                return all(taken)

        self.plugins = []
        self.Apprise = Apprise
        self.AppriseAsset = dict

    def notify(self, url, message):
        self.sent.append((url, message))
        outcome = self.outcomes.get(url, "ok")
        if outcome == "raise":
            raise RuntimeError(f"cannot reach {url}")
        if outcome == "hang":
            assert self.release.wait(60)
            return True
        if outcome not in {"ok", "no"}:
            logging.getLogger("apprise").warning(outcome)
        return outcome == "ok"

    def urls(self):
        return sorted(url for url, _ in self.sent)


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setitem(sys.modules, "apprise", fake)
    log = logging.getLogger("apprise")
    before = (log.level, log.propagate, log.handlers)
    log.propagate, log.handlers = True, []  # the real library might have been imported in this process
    yield fake
    fake.release.set()
    log.level, log.propagate, log.handlers = before[0], before[1], before[2]


def sink_for(path, *urls, timeout_seconds=5.0):
    (path / "urls").write_text("# ours\n" + "\n".join(urls) + "\n")
    return AppriseSink(AppriseConfig(urls_file=str(path / "urls"), timeout_seconds=timeout_seconds))


def failure(sink, number=1):
    with pytest.raises(DeliveryFailed) as caught:
        sink.send([sample_record(number)])
    return caught.value


def wait_for_end(threads):
    for thread in threads:
        thread.join(10)


def test_every_url_receives_the_title_and_the_sentence(library, tmp_path):
    sink_for(tmp_path, "slack://a/b/c", "mailto://d").send([sample_record()])
    assert library.urls() == ["mailto://d", "slack://a/b/c"]
    assert library.sent[0][1] == {
        "title": "Freeze scheduled: WestNO_0",
        "body": sentence(sample_record()),
        "notify_type": "info",
        "body_format": "text",
    }


@pytest.mark.parametrize(
    ("transition", "event_type", "notify_type"),
    [
        ("scheduled", "Freeze", "info"),
        ("started", "Redeploy", "warning"),
        ("scheduled", "Preempt", "failure"),
        ("started", "Terminate", "failure"),
        ("completed", "Preempt", "success"),
        ("canceled", "Reboot", "success"),
        ("ended", "Reboot", "info"),
        ("approved", "Freeze", "info"),
        ("approval_failed", "Preempt", "warning"),
        ("test", "Preempt", "info"),
    ],
)
def test_notify_type_shows_the_severity(library, tmp_path, transition, event_type, notify_type):
    record = sample_record(transition=Transition(transition), event=sample_event(event_type=event_type))
    sink_for(tmp_path, "slack://a").send([record])
    assert library.sent[0][1]["notify_type"] == notify_type


def test_service_that_accepted_a_record_does_not_receive_it_again(library, tmp_path):
    sink = sink_for(tmp_path, "slack://one", "slack://two")
    library.outcomes = {"slack://two": "Failed to send, error=503."}
    error = failure(sink)
    assert str(error) == "Apprise: Failed to send, error=503."
    assert not error.needs_attention
    failure(sink, 2)
    library.outcomes = {}
    sink.send([sample_record()])
    assert library.urls() == ["slack://one"] * 2 + ["slack://two"] * 3


def test_authorization_failure_needs_attention(library, tmp_path):
    library.outcomes = {"slack://a": "Failed to send: Unauthorized - Invalid Token, error=401."}
    assert failure(sink_for(tmp_path, "slack://a")).needs_attention


def test_invalid_url_needs_attention_before_any_message_is_sent(library, tmp_path):
    sink = sink_for(tmp_path, "slack://a", "hunter2-no-url")
    for call in (sink.check, lambda: sink.send([sample_record()])):
        with pytest.raises(DeliveryFailed, match=r"^URL 2: Apprise cannot use this URL") as caught:
            call()
        assert caught.value.needs_attention
        assert "hunter2" not in str(caught.value)
    assert library.sent == []


def test_hung_service_uses_one_thread(library, tmp_path):
    sink = sink_for(tmp_path, "slack://hangs", timeout_seconds=1.0)
    library.outcomes = {"slack://hangs": "hang"}
    before = threading.enumerate()
    assert "Apprise did not respond within 1 s." in str(failure(sink, 1))
    for number in (2, 3):
        error = in_time(lambda number=number: failure(sink, number), deadline_seconds=1.0)
        assert "did not respond" in str(error)
    hanging = new_threads(before)
    assert len(hanging) == 1
    assert library.urls() == ["slack://hangs"]
    library.release.set()
    wait_for_end(hanging)
    sink.send([sample_record(4)])
    assert len(library.sent) == 2


def test_success_after_the_deadline_is_not_retried(library, tmp_path):
    sink = sink_for(tmp_path, "slack://slow", timeout_seconds=1.0)
    library.outcomes = {"slack://slow": "hang"}
    before = threading.enumerate()
    failure(sink)
    hanging = new_threads(before)
    library.release.set()
    wait_for_end(hanging)
    sink.send([sample_record()])
    assert len(library.sent) == 1
    sink.send([sample_record(2)])
    assert len(library.sent) == 2


def test_errors_and_logs_contain_no_part_of_a_url(library, tmp_path, caplog):
    url = "tgram://AbC123token/user%40mail?pass=geheim%21x&t=ab"
    library.outcomes = {url: f"{url} abc123TOKEN abc123token AbC123token user@mail geheim!x geheim%21x " * 3}
    with caplog.at_level(logging.DEBUG):
        said = str(failure(sink_for(tmp_path, url)))
    for secret in ("AbC123token", "abc123token", "user@mail", "user%40mail", "geheim"):
        assert secret not in said
        assert secret not in caplog.text
    assert said.startswith("Apprise: <secret>")


def test_missing_package_names_the_extra_at_start(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "apprise", None)
    path = tmp_path / "config.toml"
    path.write_text('[[sinks]]\ntype = "apprise"\nurls_env = "APPRISE_URLS"\n')
    with pytest.raises(ConfigurationError, match=r"the extra \[apprise\]: .* -m pip install \".*\[apprise\]\""):
        load(path)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "Set urls_file or urls_env"),
        ('urls_env = "A"\nurls_file = "b"', "Set urls_file or urls_env"),
        ('urls_env = "A"\nmax_batch = 5', "Apprise sends one record at a time"),
        ('urls = "slack://hunter2"', "Unknown key `sinks[0].urls` (sink 'apprise')"),
    ],
)
def test_invalid_configuration_is_reported(tmp_path, table, said):
    path = tmp_path / "config.toml"
    path.write_text(f'[[sinks]]\ntype = "apprise"\n{table}\n')
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
