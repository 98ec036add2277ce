"""The table [telemetry], and the OTEL_* variables that complete it."""

import pytest

from bridge.config.loader import load
from bridge.errors import ConfigurationError

URL = 'a URL such as "http://127.0.0.1:4318", without user, query, and fragment.'
BASE, OWN = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_METRICS_"


@pytest.fixture
def push(tmp_path):
    def read(keys="", environ=None):
        path = tmp_path / "config.toml"
        path.write_text(f"[telemetry]\n{keys}\n")
        return load(path, environ or {}).push

    return read


def test_variables_have_no_effect_without_the_table():
    assert load(None, {f"{BASE}ENDPOINT": "http://a:4318", f"{BASE}PROTOCOL": "grpc"}).push is None


@pytest.mark.parametrize(
    ("keys", "environ", "url"),
    [
        ('otlp_endpoint = "http://a:4318"', {}, "http://a:4318/v1/metrics"),
        ('otlp_endpoint = "http://a:4318/x/"', {f"{OWN}ENDPOINT": "http://b"}, "http://a:4318/x/v1/metrics"),
        ('otlp_endpoint = "http://a/v1/metrics"', {}, "http://a/v1/metrics"),
        ("", {f"{BASE}ENDPOINT": "http://b:4318"}, "http://b:4318/v1/metrics"),
        ("", {f"{BASE}ENDPOINT": "http://b:4318", f"{OWN}ENDPOINT": "http://c/custom"}, "http://c/custom"),
    ],
)
def test_endpoint_of_the_file_comes_before_the_variables(push, keys, environ, url):
    assert push(keys, environ).url == url


def test_variables_complete_the_table(push, tmp_path):
    (tmp_path / "ca.pem").write_text("")
    environ = {
        "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        f"{BASE}TIMEOUT": "2500",
        f"{OWN}COMPRESSION": "gzip",
        f"{BASE}HEADERS": "api-key=secret",
        f"{BASE}CERTIFICATE": str(tmp_path / "ca.pem"),
        f"{OWN}TEMPORALITY_PREFERENCE": "Cumulative",
    }
    found = push('otlp_endpoint = "http://a"', environ)
    assert (found.interval_seconds, found.timeout_seconds, found.is_compressed) == (5.0, 2.5, True)
    assert (found.headers_env, found.ca_file) == (f"{BASE}HEADERS", str(tmp_path / "ca.pem"))
    assert "secret" not in repr(found)


def test_all_mistakes_are_reported_with_the_action(push):
    environ = {
        f"{OWN}TEMPORALITY_PREFERENCE": "delta",
        f"{BASE}PROTOCOL": "grpc",
        f"{BASE}TIMEOUT": "10s",
        f"{BASE}CERTIFICATE": "/missing.pem",
    }
    with pytest.raises(ConfigurationError) as caught:
        push("", environ)
    texts = "\n".join(sorted(caught.value.mistakes)).splitlines()
    assert [text.partition(". ")[0] for text in texts] == [
        "$OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE is 'delta'",
        "$OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        "$OTEL_EXPORTER_OTLP_TIMEOUT is '10s', but must be a whole number of milliseconds above 0.",
        "Set telemetry.otlp_endpoint or $OTEL_EXPORTER_OTLP_ENDPOINT to " + URL,
        "telemetry: ca_file: The file /missing.pem does not exist",
    ]
    assert "The agent supports only cumulative. Change or remove it." in texts[0]
