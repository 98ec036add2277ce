"""`portal-check`: says which sentence of PROTOCOL.md an ops portal does not meet, with the request and the answer."""

from __future__ import annotations

import json
import shlex
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from bridge.cli.portal_options import remote_of
from bridge.cli.terminal import Colour, styled, wrapped
from bridge.config.settings import ImdsSettings
from bridge.config.trusted_keys import TrustedKey, key_mistakes, unusable_keys
from bridge.events.event import encode
from bridge.events.record import TransitionRecord, Verdict
from bridge.imds.client import attested_document
from bridge.system.run_and_kill import Ending, Runner
from bridge.testing.portal_check.check import CheckSettings, Decider, NotDecided, check_portal
from bridge.testing.portal_check.report import Finding, Report, Result
from bridge.testing.portal_check.requirements import Requirement

_TITLES = {
    1: "The portal's part",
    2: "The request",
    3: "The answer",
    4: "Statuses and failures",
    5: "The decision",
    6: "The digest",
    8: "Several decisions on one event",
    9: "Outcomes",
}
_WORDS = {Result.MET: "met", Result.NOT_MET: "NOT MET", Result.NOT_TRIED: "not tried"}
_COLOURS: dict[Result, Colour | None] = {Result.MET: "green", Result.NOT_MET: "bright_red", Result.NOT_TRIED: None}
_WIDTH = 11
_INDENT = " " * (_WIDTH + 2)
_PERSON = "person"
_ENVIRONMENT = "PORTAL_CHECK_"


def portal_check(
    *,
    remote: Mapping[str, object],
    vm_id: str,
    imds: str,
    key: tuple[Path, str, str] | None,
    records_url: str | None,
    decision_by: str | None,
    decision_seconds: float,
    as_json: bool,
) -> bool:
    """Check a portal, print what was found, and return whether all that was to be tried is met.

    *remote* has keys of ``[approval.remote]``, *imds* is the endpoint of the metadata service, and *key* a public key's
    file, its kid and its approver.
    """
    keys = () if key is None else (TrustedKey(public_key_file=key[0], kid=key[1], approver=key[2]),)
    for mistake in (*key_mistakes(keys), *unusable_keys(keys)):
        raise click.UsageError(mistake)
    settings = CheckSettings(
        remote=remote_of(remote),
        vm_id=_vm_id(vm_id),
        keys=keys,
        records_url=records_url,
        decider=_decider(decision_by, decision_seconds),
        document=partial(attested_document, ImdsSettings(endpoint=imds)),
    )
    report = check_portal(settings)
    if as_json:
        for finding in report.findings:
            click.echo(json.dumps(_members(finding)))
    else:
        _show(report)
    results = {finding.requirement: finding.result for finding in report.findings}
    is_decided = decision_by is None or results[Requirement.NEWS] is not Result.NOT_TRIED
    return is_decided and Result.NOT_MET not in results.values()


def _vm_id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise click.UsageError(f"--vm-id {text!r} is no vmId, which is a UUID.") from None


# Who decides.


def _decider(decision_by: str | None, seconds: float) -> Decider | None:
    if decision_by is None:
        return None
    if decision_by == _PERSON:
        return Decider(decide=_ask_a_person, is_command=False, timeout_seconds=seconds)
    arguments = shlex.split(decision_by)
    if not arguments:
        raise click.UsageError("--decision-by is empty. Give a command, or the word person.")

    def decide(verdict: Verdict, record: TransitionRecord) -> None:
        _run(arguments, verdict, record, seconds=seconds)

    return Decider(decide=decide, is_command=True, timeout_seconds=seconds)


def _ask_a_person(verdict: Verdict, record: TransitionRecord) -> None:
    event = record.event
    name = "" if event is None else f"; if the portal has the event {event.event_id}, on that one"
    click.echo(f"Now decide at the portal: {verdict.value}, for the VM {record.vm.vm_id}{name}.", err=True)


def _run(arguments: Sequence[str], verdict: Verdict, record: TransitionRecord, *, seconds: float) -> None:
    event_id = None if record.event is None else record.event.event_id
    told = {"DECISION": verdict.value, "VM_ID": record.vm.vm_id or "", "EVENT_ID": event_id or ""}
    environment = {_ENVIRONMENT + name: value for name, value in told.items()}
    runner = Runner()
    try:
        finished = runner.run(
            arguments, deadline_seconds=seconds, stdin=encode(record) + b"\n", environment=environment
        )
    except OSError as error:
        raise NotDecided(f"The command of --decision-by cannot be started: {error.strerror or error}.") from error
    if finished.ending is not Ending.ITSELF or finished.exit_code != 0:
        said = f": {finished.error_output}" if finished.error_output else "."
        raise NotDecided(f"The command of --decision-by ended with {finished.exit_code}{said}")


# What is printed.


def _show(report: Report) -> None:
    for section, findings in groupby(report.findings, key=lambda finding: finding.requirement.value.section):
        click.echo(styled(f"Section {section}: {_TITLES[section]}", bold=True))
        for finding in findings:
            _show_finding(finding)
    counts = Counter(finding.result for finding in report.findings)
    summary = ", ".join(f"{counts[result]} {result.value}" for result in Result)
    click.echo(f"{summary}. The sections are those of PROTOCOL.md.")


def _show_finding(finding: Finding) -> None:
    word = styled(_WORDS[finding.result].ljust(_WIDTH), colour=_COLOURS[finding.result])
    click.echo(f"  {word}{finding.requirement.value.text}")
    lines = [finding.detail] if finding.detail else []
    if finding.result is Result.NOT_MET:
        lines += [f"asked: {finding.asked}", f"answered: {finding.answered}"] if finding.asked else []
        lines.append(f'the page: "{finding.requirement.value.quote}"')
    for line in (each for text in lines for each in wrapped(text, first=_INDENT, indent=_INDENT + "  ")):
        click.echo(line)


def _members(finding: Finding) -> dict[str, object]:
    sentence = finding.requirement.value
    return {
        "section": sentence.section,
        "requirement": finding.requirement.key,
        "result": finding.result.value,
        "text": sentence.text,
        "page": sentence.quote,
        "detail": finding.detail,
        "asked": finding.asked,
        "answered": finding.answered,
    }
