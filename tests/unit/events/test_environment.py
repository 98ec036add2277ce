"""The environment variables that describe a record to a program."""

from pathlib import Path

from bridge.events.environment import ENVIRONMENT_PREFIX, environment_of
from bridge.testing.records import sample_event, sample_record


def test_variables_match_the_record():
    said = environment_of(sample_record(7, notice_seconds=-0.5, changed=("not_before", "resources")))
    assert {name.removeprefix(ENVIRONMENT_PREFIX): value for name, value in said.items()} == {
        "ID": sample_record(7).id,
        "TRANSITION": "scheduled",
        "EVIDENCE": "observed",
        "OBSERVED_AT": "2026-11-20T11:00:01.123Z",
        "SEQUENCE": "7",
        "EVENT_ID": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EVENT_TYPE": "Freeze",
        "EVENT_STATUS": "Scheduled",
        "EVENT_SOURCE": "Platform",
        "RESOURCES": "WestNO_0,WestNO_1",
        "RESOURCE_COUNT": "2",
        "AFFECTS_THIS_VM": "true",
        "NOT_BEFORE": "2026-11-20T11:15:00Z",
        "NOTICE_SECONDS": "-0.5",
        "DURATION_SECONDS": "5",
        "DESCRIPTION": sample_event().description,
        "CHANGED": "not_before,resources",
        "VM_NAME": "WestNO_0",
        "VM_ID": sample_record().vm.vm_id,
        "VM_RESOURCE_ID": sample_record().vm.resource_id,
        "APPROVAL_RESULT": "",
    }


def test_unknown_value_is_an_empty_variable():
    said = environment_of(sample_record(event=None, notice_seconds=None, affects_this_vm=None))
    assert set(said) == set(environment_of(sample_record()))
    for name in ("EVENT_ID", "NOT_BEFORE", "NOTICE_SECONDS", "AFFECTS_THIS_VM"):
        assert said[ENVIRONMENT_PREFIX + name] == ""


def test_values_are_one_printable_line():
    record = sample_record(event=sample_event(event_id="a\ud800b"), affects_this_vm=False)
    assert environment_of(record)[ENVIRONMENT_PREFIX + "EVENT_ID"] == "a b"
    assert environment_of(record)[ENVIRONMENT_PREFIX + "AFFECTS_THIS_VM"] == "false"


def test_resources_variable_is_truncated_between_names():
    names = tuple(f"a-vm-with-quite-a-long-name_{number:06}" for number in range(500))
    said = environment_of(sample_record(event=sample_event(resources=names)))
    whole = said[ENVIRONMENT_PREFIX + "RESOURCES"].split(",")
    assert (*whole,) == names[: len(whole)]
    assert 8_192 - len(names[0]) - 1 <= len(",".join(whole)) <= 8_192
    assert said[ENVIRONMENT_PREFIX + "RESOURCE_COUNT"] == "500"


def test_every_variable_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "sinks.md").read_text()
    listed = {row.split("`")[1] for row in page.splitlines() if row.startswith(f"| `{ENVIRONMENT_PREFIX}")}
    assert listed == set(environment_of(sample_record(), rule="short-freeze"))


def test_rule_name_is_set_only_for_the_command_of_a_rule():
    by_rule = environment_of(sample_record(), rule="short-freeze")
    assert by_rule == {**environment_of(sample_record()), "SCHEDULED_EVENT_RULE": "short-freeze"}
