"""The sampler and its verdicts, with manual clocks. The numbers were measured in a guest."""

import pytest

from bridge.impact.judgement import Reading, Verdict
from bridge.impact.report import impact_of
from bridge.impact.sampler import Sampler

NEAR = 0.05


class Machine:
    """A VM whose clocks and context switches move only when the test moves them."""

    def __init__(self, *, rate, cpus=1, has_host=False):
        self.now, self.real, self.host, self.switches = 100.0, 1_000_000.0, 1_000_000.0, 0.0
        self.rate, self.has_host, self.pauses = rate, has_host, []
        self.sampler = Sampler(clocks=self, cpus=cpus, on_pause=self.pauses.append)
        self.run(60, wait=1.0)
        self.sampler.watch(is_near=True)
        self.run(1)

    def raw(self):
        return self.now

    def read(self):
        host = self.host if self.has_host else None
        return Reading(raw=self.now, real=self.real, context_switches=int(self.switches), host=host)

    def move(self, seconds, *, switches):
        self.now, self.real, self.host = self.now + seconds, self.real + seconds, self.host + seconds
        self.switches += switches

    def run(self, seconds, *, wait=NEAR):
        for _ in range(round(seconds / wait)):
            self.move(wait, switches=self.rate * wait)
            self.sampler.sample_wait(wait)

    def late(self, seconds, *, switches):
        self.move(NEAR + seconds, switches=switches)
        self.sampler.sample_wait(NEAR)

    def found(self):
        return [(each.verdict, round(each.late_seconds + each.step_seconds, 1)) for each in self.interruptions()]

    def interruptions(self):
        return self.sampler.interruptions(since=0.0)


def test_pause_of_only_the_agent_is_a_stall():
    machine = Machine(rate=788)
    machine.late(3.0, switches=2364)
    assert machine.found() == [(Verdict.STALLED, 3.0)]
    assert machine.pauses == []


def test_vm_pause_with_a_running_clock_is_a_pause():
    machine = Machine(rate=788)
    machine.late(3.0, switches=33)
    assert machine.found() == [(Verdict.PAUSED, 3.0)]
    assert machine.pauses == [pytest.approx(3.0)]


def test_vm_pause_with_stopped_clocks_needs_two_clocks():
    machine = Machine(rate=788, has_host=True)
    machine.host += 3.0
    machine.run(2)
    (lone,) = machine.interruptions()
    assert (lone.verdict, lone.source) == (Verdict.UNDECIDED, "ptp_hyperv")
    assert machine.pauses == []
    machine.real += 3.0  # the time service of Hyper-V sets the clock after some seconds
    machine.run(1)
    assert [(each.verdict, each.source) for each in machine.interruptions()] == [(Verdict.PAUSED, "ptp_hyperv")]
    assert machine.pauses == [pytest.approx(3.0)]


def test_date_header_confirms_a_step_of_the_wall_clock():
    machine = Machine(rate=788)
    for second in range(5):
        machine.sampler.responded(f"Mon, 12 Jan 1970 13:46:{second + 40:02d} GMT")
        machine.run(1)
    machine.real += 3.2
    machine.run(0.5)
    assert machine.found() == []
    machine.sampler.responded("Mon, 12 Jan 1970 13:46:48 GMT")
    (pause,) = machine.interruptions()
    assert (pause.verdict, pause.source, round(pause.step_seconds, 1)) == (Verdict.PAUSED, "realtime", 3.2)


@pytest.mark.parametrize("seconds", [3.0, -3.0, 3600.0])
def test_step_of_only_the_wall_clock_is_not_a_pause(seconds):
    machine = Machine(rate=788, has_host=True)
    machine.real += seconds
    machine.run(5)
    assert machine.found() == []


@pytest.mark.parametrize(
    ("rate", "cpus", "switches", "verdict"),
    [
        (200, 1, 40, Verdict.PAUSED),
        (200, 1, 600, Verdict.STALLED),
        (50_000, 64, 300, Verdict.PAUSED),
        (50_000, 64, 150_000, Verdict.STALLED),
        (10, 1, 33, Verdict.UNDECIDED),
        (788, 1, 200, Verdict.UNDECIDED),
    ],
)
def test_idle_and_many_cpu_guests_are_classified_correctly(rate, cpus, switches, verdict):
    machine = Machine(rate=rate, cpus=cpus)
    machine.late(3.0, switches=switches)
    (found,) = machine.interruptions()
    assert found.verdict is verdict
    assert (found.reason is None) == (verdict is not Verdict.UNDECIDED)


def test_pause_of_an_unannounced_event_is_measured_by_the_idle_sampler():
    machine = Machine(rate=788)
    machine.sampler.watch(is_near=False)
    for _ in range(20):
        machine.move(1.0, switches=788)
        machine.sampler.sample_poll(0.0)
    machine.move(6.0, switches=788 + 33)
    machine.sampler.sample_poll(5.0)
    assert machine.found() == [(Verdict.PAUSED, 5.0)]
    assert machine.interruptions()[0].began_at == machine.real - 6.0


@pytest.mark.parametrize(("rate", "seconds"), [(788, 0.3), (2_000, 0.2), (20_000, 0.1)])
def test_near_an_event_every_pause_above_the_resolution_is_recognized(rate, seconds):
    for waits in range(12):
        machine = Machine(rate=rate)
        machine.run(waits * NEAR)
        assert machine.sampler.resolution_seconds <= seconds
        machine.late(seconds, switches=33)
        assert machine.found() == [(Verdict.PAUSED, seconds)]


def impact(machine, **fields):
    values = {"started_at": machine.real - 20, "ended_at": machine.real, **fields}
    return impact_of(machine.sampler, **values)


def test_impact_of_an_event_without_a_pause_is_a_measured_zero():
    found = impact(Machine(rate=788))
    assert (found.longest_seconds, found.total_seconds, found.coverage, found.reason) == (0.0, 0.0, 1.0, None)


def test_restart_during_an_event_is_not_a_measured_zero():
    machine = Machine(rate=788)
    machine.sampler.began_at = machine.real - 5
    found = impact(machine)
    assert (found.longest_seconds, found.total_seconds, found.coverage) == (None, None, 0.25)
    assert found.reason is not None


def test_event_that_never_started_has_no_coverage():
    machine = Machine(rate=788)
    machine.late(3.0, switches=33)
    found = impact(machine, started_at=None, ended_at=machine.real + 590)
    assert (found.longest_seconds, found.coverage) == (3.0, None)
    assert impact(machine, started_at=None, ended_at=machine.real + 610).longest_seconds is None


def test_undecided_pause_is_null_with_a_reason():
    machine = Machine(rate=10)
    machine.late(3.0, switches=33)
    found = impact(machine)
    assert (found.pauses[0].seconds, found.longest_seconds, found.total_seconds) == (None, None, None)
    assert found.pauses[0].reason == found.reason


def test_stall_lowers_the_coverage():
    machine = Machine(rate=788)
    machine.late(5.0, switches=788 * 5)
    found = impact(machine)
    assert (found.pauses, found.agent_stalled_seconds, found.coverage) == ((), 5.0, 0.75)
