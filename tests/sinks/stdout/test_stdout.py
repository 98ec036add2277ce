"""The stdout sink with real pipes: no record lost in a buffer, no partial line, and no hang."""

import io
import json
import os
import subprocess
import sys

import pytest

from bridge.sink import DeliveryFailed
from bridge.testing.records import sample_event, sample_record
from sinks.sentence import sentence
from sinks.stdout import StdoutConfig, StdoutSink

# A child process whose standard output is a pipe of the test. It reports on standard error.
CHILD = """
import sys, time
from sinks.stdout import StdoutConfig, StdoutSink
from bridge.sink import DeliveryFailed
from bridge.testing.records import sample_record

def record(number, filling=0):
    return sample_record(number, labels={"filling": "x" * filling})

def failure(sink, batch):
    try:
        sink.send(batch)
    except DeliveryFailed as exc:
        return str(exc)
    return ""
"""


def records_in(out):
    return [json.loads(line) for line in out.splitlines()]


def child(code, env, **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-c", CHILD + code], env=env, **options)


def test_json_format_writes_one_record_per_line(capfdbinary):
    records = [sample_record(id="a", event=sample_event(description="two\nlines")), sample_record(id="b")]
    StdoutSink(StdoutConfig()).send(records)
    lines = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["a", "b"]


@pytest.mark.parametrize("stream", [None, "closed"])
def test_closed_standard_output_needs_attention(monkeypatch, stream):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    sink = StdoutSink(StdoutConfig())
    for attempt in (sink.check, lambda: sink.send([sample_record()])):
        with pytest.raises(DeliveryFailed, match="Standard output is closed") as caught:
            attempt()
        assert caught.value.needs_attention


def test_piped_output_survives_a_kill_right_after_the_send(agent_env):
    process = child("import os; StdoutSink(StdoutConfig()).send([record(1)]); os.kill(os.getpid(), 9)", agent_env)
    out, _ = process.communicate(timeout=60)
    assert json.loads(out)["id"] == sample_record(1).id
    assert process.returncode == -9


@pytest.mark.parametrize("filling", [100, 10_000])
def test_stalled_reader_fails_at_the_deadline_without_partial_lines(agent_env, filling):
    code = f"""
sink, number, said = StdoutSink(StdoutConfig(timeout_seconds=0.5)), 0, ""
while not said:
    number += 1
    before = time.monotonic()
    said = failure(sink, [record(number, {filling})])
print(f"{{number}} {{time.monotonic() - before:.3f}} {{said}}", file=sys.stderr, flush=True)
sys.stdin.readline()
sink = StdoutSink(StdoutConfig(timeout_seconds=30))
sink.send([record(number, {filling})])
sink.send([record(number + 1, {filling})])
"""
    with child(code, agent_env, stdin=subprocess.PIPE) as process:
        number, seconds, said = process.stderr.readline().decode().split(" ", 2)
        assert float(seconds) < 5  # the contract suite measures the exact deadline
        assert "did not respond within 0.5 s" in said
        process.stdin.write(b"go on\n")
        process.stdin.flush()
        out, _ = process.communicate(timeout=60)
    seen = [record["sequence"] for record in records_in(out)]
    last = int(number)
    assert sorted(set(seen)) == list(range(1, last + 2))
    assert seen in ([*range(1, last + 2)], [*range(1, last + 1), last, last + 1])


def test_send_to_a_pipe_without_a_reader_fails(agent_env):
    reader, writer = os.pipe()
    os.close(reader)
    code = """
sink = StdoutSink(StdoutConfig(timeout_seconds=5))
print(failure(sink, [record(1)]), file=sys.stderr)
"""
    with child(code, agent_env, stdout=writer) as process:
        os.close(writer)
        _, err = process.communicate(timeout=60)
    assert err.decode().splitlines() == ["Standard output is a pipe without a reader. Restart the agent with a reader."]


def test_two_stdout_sinks_never_mix_their_lines(agent_env):
    code = """
import threading
def work(first):
    sink = StdoutSink(StdoutConfig(timeout_seconds=30))
    for number in range(first, first + 50):
        sink.send([record(number, 9000)])
workers = [threading.Thread(target=work, args=(first,)) for first in (0, 50)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
"""
    process = child(code, agent_env)
    out, _ = process.communicate(timeout=60)
    assert sorted(record["sequence"] for record in records_in(out)) == list(range(100))


def test_text_format_writes_the_sentence(capfdbinary):
    StdoutSink(StdoutConfig(format="text")).send([sample_record()])
    assert capfdbinary.readouterr().out.decode() == sentence(sample_record()) + "\n"
