"""Converts the metrics of one scrape to an OTLP request.

The metrics have the same names in OTLP and on the /metrics page, so the same queries, alerts, and dashboards work with
both. The module does not use the OpenTelemetry SDK's instruments, because they would require a second definition of
each metric.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from bridge.events.otel_resource import SERVICE_NAME, own_version, unix_nanoseconds
from bridge.metrics.collectors import OutboxCollector
from bridge.metrics.metrics import Metrics

_NANOSECONDS = 1_000_000_000
_CUMULATIVE = AggregationTemporality.CUMULATIVE


def encode(metrics: Metrics, attributes: Mapping[str, str], outbox_created_at: str | None) -> bytes:
    """Return *metrics* as an ExportMetricsServiceRequest with the resource *attributes*.

    Totals from the outbox start at *outbox_created_at*. All other totals start when the agent starts.
    """
    now = time.time_ns()
    starts = {False: int(metrics.created_at * _NANOSECONDS)}
    starts[True] = unix_nanoseconds(outbox_created_at) if outbox_created_at else starts[False]
    found = [
        _metric(family, start=min(starts[family.name in OutboxCollector.FROM_DISK], now), now=now)
        for family in metrics.registry.collect()
        if family.samples
    ]
    scope = ScopeMetrics(scope=InstrumentationScope(SERVICE_NAME, own_version()), metrics=found, schema_url="")
    resource = ResourceMetrics(resource=Resource(attributes), scope_metrics=[scope], schema_url="")
    encoded: bytes = encode_metrics(MetricsData(resource_metrics=[resource])).SerializeToString()
    return encoded


def rejection(content: bytes) -> tuple[int, str]:
    """Return the number of rejected data points in a response, and the reason of the receiver."""
    try:
        refused = ExportMetricsServiceResponse.FromString(content).partial_success
    except DecodeError:  # some receivers respond with a text such as "OK"
        return 0, ""
    return refused.rejected_data_points, refused.error_message


def _metric(family: Family, *, start: int, now: int) -> Metric:
    samples, name = family.samples, family.name
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(list(_histogram_points(samples, start=start, now=now)), _CUMULATIVE)
    elif family.type == "counter":
        name = samples[0].name  # includes _total
        numbers = [NumberDataPoint(each.labels, start, now, float(each.value)) for each in samples]
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([NumberDataPoint(each.labels, 0, now, float(each.value)) for each in samples])
    return Metric(name=name, description=family.documentation, unit="", data=data)


def _histogram_points(samples: Sequence[Sample], *, start: int, now: int) -> Iterator[HistogramDataPoint]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(each for each in sample.labels.items() if each[0] != "le"), []).append(sample)
    for labels, group in groups.items():
        buckets = [(float(each.labels["le"]), int(each.value)) for each in group if "le" in each.labels]
        totals = [0, *(count for _, count in buckets)]
        yield HistogramDataPoint(
            attributes=dict(labels),
            start_time_unix_nano=start,
            time_unix_nano=now,
            count=totals[-1],
            sum=next(each.value for each in group if each.name.endswith("_sum")),
            bucket_counts=[after - before for before, after in pairwise(totals)],
            explicit_bounds=[bound for bound, _ in buckets if not math.isinf(bound)],
            min=None,  # type: ignore[arg-type]  # optional in OTLP, and prometheus_client has no minimum
            max=None,  # type: ignore[arg-type]  # likewise
        )
