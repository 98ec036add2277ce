"""Converts the metrics of one scrape to an OTLP request.

The metrics keep their names in /metrics, so queries, alerts, and dashboards work with both. The SDK's own instruments
are not used, because each metric would then need a second definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from bridge.events.otel_resource import SERVICE_NAME, own_version

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def encode(
    families: Iterable[Family], attributes: Mapping[str, str], *, now: int, since: Mapping[str, int], started_at: int
) -> bytes:
    """Return *families* as an ExportMetricsServiceRequest with the resource *attributes*.

    All times are in Unix nanoseconds. *since* contains the start of totals that began before *started_at*.
    """
    metrics = [
        _metric(family, start=min(since.get(family.name, started_at), now), now=now)
        for family in families
        if family.samples
    ]
    scope = ScopeMetrics(scope=InstrumentationScope(SERVICE_NAME, own_version()), metrics=metrics, schema_url="")
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
        points = [_histogram_point(labels, each, start=start, now=now) for labels, each in _by_labels(samples)]
        data = Histogram(data_points=points, aggregation_temporality=_CUMULATIVE)
    elif family.type == "counter":
        name = samples[0].name  # with _total
        numbers = [NumberDataPoint(each.labels, start, now, float(each.value)) for each in samples]
        data = Sum(numbers, _CUMULATIVE, is_monotonic=True)
    else:
        data = Gauge([NumberDataPoint(each.labels, 0, now, float(each.value)) for each in samples])
    return Metric(name=name, description=family.documentation, unit="", data=data)


def _by_labels(samples: Sequence[Sample]) -> Iterator[tuple[dict[str, str], list[Sample]]]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        groups.setdefault(labels, []).append(sample)
    yield from ((dict(labels), group) for labels, group in groups.items())


def _histogram_point(
    labels: Mapping[str, str], samples: Sequence[Sample], *, start: int, now: int
) -> HistogramDataPoint:
    buckets = sorted((float(each.labels["le"]), int(each.value)) for each in samples if "le" in each.labels)
    totals = [0, *(count for _, count in buckets)]
    return HistogramDataPoint(
        attributes=labels,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=totals[-1],
        sum=next(each.value for each in samples if each.name.endswith("_sum")),
        bucket_counts=[after - before for before, after in pairwise(totals)],
        explicit_bounds=[bound for bound, _ in buckets if not math.isinf(bound)],
        min=None,  # type: ignore[arg-type]  # optional in OTLP, and prometheus_client has no minimum
        max=None,  # type: ignore[arg-type]  # likewise
    )
