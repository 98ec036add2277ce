"""An agent that is killed or restarted during an event sends its spans again with the same IDs."""

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bridge.testing import EventSpec
from bridge.testing.http_contract import HttpPeer
from bridge.testing.simulator.imds_api import Answer


@pytest.fixture
def collector():
    with HttpPeer() as peer:
        yield peer


def spans(collector):
    found = [ExportTraceServiceRequest.FromString(each.body) for each in collector.requests if "traces" in each.path]
    return [span for request in found for span in request.resource_spans[0].scope_spans[0].spans]


def logged_trace_ids(collector):
    found = [ExportLogsServiceRequest.FromString(each.body) for each in collector.requests if "logs" in each.path]
    return {request.resource_logs[0].scope_logs[0].log_records[0].trace_id for request in found}


def test_retry_crash_and_restart_produce_one_trace(agent, azure, collector):
    endpoint = f'endpoint = "http://{collector.address.authority}"\n'
    sinks = f'[[sinks]]\ntype = "otlp"\nname = "logs"\n{endpoint}'
    sinks += f'[[sinks]]\ntype = "otlp"\nname = "spans"\nsignal = "traces"\n{endpoint}'
    agent.configure(azure.endpoint, sinks)
    agent.start()
    event = azure.world.add_event(EventSpec(event_type="Freeze", notice_seconds=900))
    agent.wait_for(lambda: len(collector.requests) == 1)
    azure.world.start(event)
    agent.wait_for(lambda: len(collector.requests) == 2)
    assert agent.stop() == 0  # a restart in the middle of the event
    agent.start()
    collector.reply(lambda request: Answer(status=503) if "traces" in request.path else Answer(status=200))
    azure.world.complete(event)
    agent.wait_for(lambda: spans(collector))
    # A request without a response: the receiver has the span, and the agent is killed before the commit.
    collector.reply(lambda request: None if "traces" in request.path else Answer(status=200))
    agent.wait_for(lambda: len(spans(collector)) == 2)
    agent.kill()
    collector.accept()
    agent.start()
    agent.wait_for(lambda: len(spans(collector)) == 3)
    assert agent.stop() == 0
    assert len({(span.trace_id, span.span_id, span.start_time_unix_nano) for span in spans(collector)}) == 1
    assert logged_trace_ids(collector) == {spans(collector)[0].trace_id}
