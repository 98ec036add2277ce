"""Each log event is one line, and logging never blocks the agent."""

import json
import logging
import os
import pty
import subprocess
import sys

import pytest
from least_time import least

from bridge.logs import JournalFormatter, JsonFormatter, LineFormatter, ThrottledLog
from bridge.testing.simulator.clock import ManualClock

LOGGER = logging.getLogger("tests.logs")
CYCLE = {}
CYCLE["itself"] = CYCLE


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def report(clock, caplog):
    with caplog.at_level(logging.DEBUG, logger="tests.logs"):
        yield ThrottledLog(LOGGER, clock=clock.clock)


def run(code, env, **options):
    code = "import logging, sys, time; from bridge.logs import configure; log = logging.getLogger('a.b')\n" + code
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "timeout": 60, **options}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, **options)


def lines(err):
    return [json.loads(line) for line in err.splitlines()]


def made(message, **fields):
    values = {"name": "a", "levelno": 30, "levelname": "WARNING", "msg": message, **fields}
    return logging.makeLogRecord(values)


def test_piped_logs_are_json_lines_with_the_extra_fields(agent_env):
    done = run("configure(); log.warning('try %d', 2, extra={'sink': 'x', 'tags': {'a'}}); log.debug('no')", agent_env)
    (line,) = lines(done.stderr)
    assert line.pop("time", "").endswith("Z")
    assert line == {"level": "WARNING", "logger": "a.b", "message": "try 2", "sink": "x", "tags": ["a"]}
    assert done.stdout == b""


@pytest.mark.parametrize("odd", [float("nan"), {(1, 2): 3}, {"again": CYCLE}], ids=["NaN", "key", "cycle"])
def test_field_that_json_does_not_support_loses_no_line(odd):
    record = made("calm", odd=odd, sink="x")
    found = json.loads(JsonFormatter().format(record), parse_constant=pytest.fail)
    assert (found["message"], found["sink"], found["odd"]) == ("calm", "x", str(odd))
    assert JournalFormatter().format(record).startswith("<4>calm odd=")


def test_journal_lines_have_a_priority_and_no_time(agent_env):
    code = (
        "configure(form='journal'); log.info('calm', extra={'sinks': ['a', 'b'], 'why': 'two words', 'is_on': True, "
        "'lost': {'rows': 2}, 'vm': None, 'names': [], 'reason': ''})\n"
        "log.warning('hm\\nforged')\ntry: 1 / 0\nexcept ZeroDivisionError: log.exception('it broke')"
    )
    first, second, *others = run(code, agent_env).stderr.decode().splitlines()
    assert first == '<6>calm sinks=a,b why="two words" is_on=true lost={"rows": 2}'
    assert second == "<4>hm\\nforged"
    assert others[0] == "<3>it broke"
    assert others[-1] == "<3>  ZeroDivisionError: division by zero"
    assert all(line.startswith("<3>") for line in others)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a journal")
def test_journal_is_detected_only_by_its_stream(agent_env, tmp_path):
    file = tmp_path / "journal"
    for is_same, begins in ((True, "<6>calm"), (False, "{")):
        with file.open("wb") as stream:
            status = os.fstat(stream.fileno())
            named = f"{status.st_dev}:{status.st_ino if is_same else status.st_ino + 1}"
            run("configure(); log.info('calm')", {**agent_env, "JOURNAL_STREAM": named}, stderr=stream)
        assert file.read_text().startswith(begins)


def test_exception_is_one_field(agent_env):
    code = "configure()\ntry: 1 / 0\nexcept ZeroDivisionError: log.exception('it broke')"
    (line,) = lines(run(code, agent_env).stderr)
    assert line["level"] == "ERROR"
    assert str(line["exception"]).endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("close", ["os.close(2)", "sys.stderr.close()", "sys.stderr = None"])
def test_closed_standard_error_does_not_affect_the_agent(agent_env, close):
    first, then = (close, "configure()") if close.endswith("None") else ("configure()", close)
    done = run(f"import os; {first}; {then}; log.error('lost %s'); log.error('x', 1); print('alive')", agent_env)
    assert done.stdout == b"alive\n"


def test_dropped_lines_are_counted(agent_env):
    code = "configure()\nfor n in range(5000): log.error('x' * 200)\nprint('full', flush=True)\nsys.stdin.readline()"
    command = "import logging, sys; from bridge.logs import configure; log = logging.getLogger('a')\n" + code
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", command], env=agent_env, **pipes) as process:
        assert process.stdout.readline() == b"full\n"
        _, err = process.communicate(b"\n", timeout=60)
    seen = lines(err)
    dropped = sum(int(str(line.get("dropped", 0))) for line in seen)
    assert dropped > 0
    assert sum(line["level"] == "ERROR" for line in seen) + dropped == 5000


def terminal(code, env):
    """Return what *code* writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    try:
        run(code, env, stderr=theirs)
        return os.read(ours, 65536).decode()
    finally:
        os.close(theirs)
        os.close(ours)


def test_terminal_gets_short_coloured_lines(agent_env):
    env = {**agent_env, "TERM": "xterm"}
    env.pop("NO_COLOR", None)
    shown = terminal("configure(); log.warning('slow', extra={'sink': 'x'})", env)
    assert "\x1b[33mWARNING\x1b[0m slow sink=x" in shown


def test_remote_text_cannot_inject_log_lines_or_terminal_escapes():
    line = LineFormatter(colour=False).format(made("a\n12:00:00 ERROR b\x1b[2J\ud800", body="\x9b\r"))
    assert line.isprintable()
    assert "\\n12:00:00" in line


def test_same_error_is_logged_once_and_counted(report, clock, caplog):
    for attempt in range(5):
        report.problem("poll", logging.WARNING, "refused", attempt=attempt)
        clock.advance(10)
    report.recovered("poll", "The metadata service answers again.", sink="x")
    report.recovered("poll", "The metadata service answers again.")
    assert [(entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("WARNING", "refused"),
        ("INFO", "The metadata service answers again."),
    ]
    last = vars(caplog.records[1])
    assert (last["failures"], last["lasted_seconds"], last["sink"]) == (5, 50.0, "x")


def test_failure_with_varying_message_is_logged_once(report, clock, caplog):
    for attempt in range(5):
        report.problem("sink", logging.WARNING, f"503: request {attempt}", kind="status_503")
        clock.advance(10)
    report.problem("sink", logging.WARNING, "No response.", kind="timeout")
    assert [entry.getMessage() for entry in caplog.records] == ["503: request 0", "No response."]


def test_repeated_error_is_logged_again_hourly_with_its_count(report, clock, caplog):
    for _ in range(7201):
        report.problem("a", logging.WARNING, "refused")
        clock.advance(1)
    assert [entry.getMessage() for entry in caplog.records] == [
        "refused",
        *["refused (3599 more times since the last report)"] * 2,
    ]


def test_shutdown_waits_at_most_half_a_second_for_a_stalled_reader(agent_env):
    reader, writer = os.pipe()
    code = (
        "configure(form='json')\nfor n in range(5000): log.error('x' * 200)\n"
        "before = time.monotonic(); logging.shutdown(); print(time.monotonic() - before)\n"
    )
    few = code.replace("5000", "400")  # the pipe is full, the queue is not
    try:
        for each in (code, few):
            assert least(lambda each=each: float(run(each, agent_env, stderr=writer).stdout), below=0.6) < 0.6
    finally:
        os.close(writer)
        os.close(reader)
