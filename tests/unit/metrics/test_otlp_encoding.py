"""The OTLP request of one scrape has the names, labels, and values of /metrics."""

from listed_outbox import ListedOutbox
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from prometheus_client.parser import text_string_to_metric_families

from bridge.events.otel_resource import unix_nanoseconds
from bridge.events.record import Transition
from bridge.metrics.metrics import Metrics
from bridge.metrics.otlp_encoding import encode, rejection

CREATED_AT = "2026-01-01T00:00:00.000Z"


def busy_metrics():
    metrics = Metrics()
    metrics.polled("ok", duration_seconds=0.02)
    metrics.polled("timeout", duration_seconds=500)
    metrics.recorded(Transition.STARTED)
    metrics.sink("hook").sent(0.3)
    metrics.sink("hook").retried("timeout")
    metrics.watch_vm(lambda: "vm_0")
    metrics.watch_outbox(ListedOutbox("hook", delivered=2, pending=1), tuple)
    return metrics


def encoded(metrics, *, created_at=CREATED_AT):
    content = encode(metrics, {"service.name": "x"}, created_at)
    [resource] = ExportMetricsServiceRequest.FromString(content).resource_metrics
    return resource


def values_of(resource):
    """Return the samples that Prometheus would show for the request."""
    found = {}
    for metric in resource.scope_metrics[0].metrics:
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            labels = {each.key: each.value.string_value for each in point.attributes}
            if not metric.HasField("histogram"):
                found[metric.name, frozenset(labels.items())] = point.as_double
                continue
            total = 0
            for bound, count in zip([*point.explicit_bounds, float("inf")], point.bucket_counts, strict=True):
                total += count
                found[f"{metric.name}_bucket", frozenset((labels | {"le": bound}).items())] = total
            found[f"{metric.name}_count", frozenset(labels.items())] = point.count
            found[f"{metric.name}_sum", frozenset(labels.items())] = point.sum
    return found


def test_request_equals_the_exposition():
    metrics = busy_metrics()
    shown = {
        (
            sample.name,
            frozenset((name, float(text) if name == "le" else text) for name, text in sample.labels.items()),
        ): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }
    pushed = values_of(encoded(metrics))
    changing = {name for name, _ in shown if name.startswith("process_")}
    assert pushed.keys() == shown.keys()
    assert {key: value for key, value in pushed.items() if key[0] not in changing} == {
        key: value for key, value in shown.items() if key[0] not in changing
    }


def test_totals_are_cumulative_and_stored_totals_start_with_the_outbox():
    starts = {}
    metrics = busy_metrics()
    for metric in encoded(metrics).scope_metrics[0].metrics:
        kind = metric.WhichOneof("data")
        data = getattr(metric, kind)
        if kind != "gauge":
            assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            starts[metric.name.removeprefix("scheduled_events_bridge_")] = data.data_points[0].start_time_unix_nano
    assert starts["sink_delivered_total"] == starts["sink_expired_by_reason_total"] == unix_nanoseconds(CREATED_AT)
    assert starts["polls_total"] == starts["poll_duration_seconds"] == int(metrics.created_at * 1e9)


def test_start_is_never_later_than_the_time_of_the_push():
    for metric in encoded(busy_metrics(), created_at="2999-01-01T00:00:00.000Z").scope_metrics[0].metrics:
        for point in getattr(metric, metric.WhichOneof("data")).data_points:
            assert point.start_time_unix_nano <= point.time_unix_nano


def test_invalid_protobuf_response_reports_no_rejection():
    assert rejection(b"OK") == (0, "")
