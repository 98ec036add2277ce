"""Implements the `portal-check` command, which tests a portal against PROTOCOL.md."""

from __future__ import annotations

import json
import shlex
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from bridge.cli.terminal import Colour, styled, wrapped
from bridge.config.approval import RemoteSettings
from bridge.config.mistakes import Problems
from bridge.config.settings import ImdsSettings
from bridge.config.toml import convert
from bridge.config.trusted_keys import TrustedKey, key_mistakes, unusable_keys
from bridge.events.event import encode
from bridge.events.record import TransitionRecord, Verdict
from bridge.exit_codes import ExitCode
from bridge.imds.client import attested_document
from bridge.system.run_and_kill import Ending, Runner
from bridge.testing.portal_check.check import CheckSettings, Decider, NotDecided, check_portal
from bridge.testing.portal_check.report import Finding, Result
from bridge.testing.portal_check.requirements import Requirement

_COLOURS: dict[Result, Colour | None] = {Result.MET: "green", Result.NOT_MET: "bright_red", Result.NOT_TRIED: None}
_INDENT = " " * 4
_PERSON = "person"


def portal_check(
    *,
    url: str,
    vm_id: uuid.UUID,
    imds: str,
    public_key: Path | None,
    kid: str | None,
    approver: str,
    records_url: str | None,
    decision_by: str | None,
    decision_seconds: float,
    attested: bool,
    as_json: bool,
    **remote: object,
) -> int:
    """Check a portal, and return the exit code of the command.

    *remote* contains settings of the ``[approval.remote]`` table.
    """
    keys: tuple[TrustedKey, ...] = ()
    if public_key is not None:
        kid = kid or public_key.name.split(".")[0]
        keys = (TrustedKey(public_key_file=public_key, kid=kid, approver=approver),)
    for mistake in (*key_mistakes(keys), *unusable_keys(keys)):
        raise click.UsageError(mistake)
    settings = CheckSettings(
        remote=_remote({"url": url, "credential": "attested" if attested else None, **remote}),
        vm_id=str(vm_id),
        keys=keys,
        records_url=records_url,
        decider=_decider(decision_by, decision_seconds),
        document=partial(attested_document, ImdsSettings(endpoint=imds)),
    )
    report = check_portal(settings)
    for finding in report.findings:
        if as_json:
            click.echo(json.dumps(_members(finding)))
        else:
            _show(finding)
    results = {finding.requirement: finding.result for finding in report.findings}
    if not as_json:
        counts = Counter(results.values())
        click.echo(f"{', '.join(f'{counts[result]} {result.value}' for result in Result)}.")
    is_decided = decision_by is None or results[Requirement.NEWS] is not Result.NOT_TRIED
    is_met = is_decided and Result.NOT_MET not in results.values()
    return ExitCode.OK if is_met else ExitCode.FAILED


def _remote(table: Mapping[str, object]) -> RemoteSettings:
    problems = Problems()
    unused = {"kid": "unused", "approver": "unused", "public_key_file": "unused"}
    given = {
        name: str(value) if isinstance(value, Path) else value for name, value in table.items() if value is not None
    }
    found = convert({**given, "keys": [unused]}, RemoteSettings, "", problems)
    if found is None:
        raise click.UsageError(" ".join(problems.sentences))
    return found


def _decider(decision_by: str | None, seconds: float) -> Decider | None:
    if decision_by is None:
        return None
    if decision_by == _PERSON:
        return Decider(decide=_ask_a_person, is_command=False, timeout_seconds=seconds)
    arguments = shlex.split(decision_by)
    if not arguments:
        raise click.UsageError("--decision-by is empty. Set --decision-by to a command or to `person`.")
    return Decider(decide=partial(_run, arguments, seconds=seconds), is_command=True, timeout_seconds=seconds)


def _ask_a_person(verdict: Verdict, record: TransitionRecord) -> None:
    name = "" if record.event is None else f", on the event {record.event.event_id} if the portal has it"
    click.echo(f"Decide in the portal now: {verdict.value} for the VM {record.vm.vm_id}{name}.", err=True)


def _run(arguments: Sequence[str], verdict: Verdict, record: TransitionRecord, *, seconds: float) -> None:
    event_id = None if record.event is None else record.event.event_id
    environment = {
        "PORTAL_CHECK_DECISION": verdict.value,
        "PORTAL_CHECK_VM_ID": record.vm.vm_id or "",
        "PORTAL_CHECK_EVENT_ID": event_id or "",
    }
    runner = Runner()
    try:
        finished = runner.run(
            arguments, deadline_seconds=seconds, stdin=encode(record) + b"\n", environment=environment
        )
    except OSError as error:
        raise NotDecided(f"The command of --decision-by cannot be started: {error.strerror or error}.") from error
    if finished.ending is not Ending.ITSELF or finished.exit_code != 0:
        said = f": {finished.error_output}" if finished.error_output else "."
        raise NotDecided(f"The command of --decision-by exited with {finished.exit_code}{said}")


def _show(finding: Finding) -> None:
    requirement, result = finding.requirement.value, finding.result
    click.echo(f"{styled(result.value, colour=_COLOURS[result])}: section {requirement.section}: {requirement.text}")
    lines = [finding.detail] if finding.detail else []
    if result is Result.NOT_MET:
        lines += [f"request: {finding.asked}", f"response: {finding.answered}"] if finding.asked else []
    for line in (each for text in lines for each in wrapped(text, first=_INDENT, indent=_INDENT + "  ")):
        click.echo(line)


def _members(finding: Finding) -> dict[str, object]:
    sentence = finding.requirement.value
    about = {"section": sentence.section, "text": sentence.text, "requirement": finding.requirement.key}
    return {**msgspec.structs.asdict(finding), **about}
