"""The exit code and output of `portal-check` for a correct portal, for an incorrect portal, and without a portal."""

import json
import sys
import threading

import pytest
from closing import closing_each
from outside_portal import Signer
from small_portal import Said, SmallPortal

VM_ID = "7ef1d8a4-0c2b-4c7e-9a35-1f5f6d1f2b90"
TOKEN = "the-token-of-this-vm"


class Operable(SmallPortal):
    """Decides when it receives a record with a verdict."""

    def posted(self, record):
        if "verdict" in record:
            self.decide(record["verdict"], record["record"])
            return 204
        return super().posted(record)


class DecidesByItself(SmallPortal):
    """Has an operator who decides during every second held request, first to approve and then to hold."""

    held = 0

    def value(self, asked):
        if asked.index == self.newest:
            self.held += 1
            if self.held % 2 == 0:
                threading.Timer(1, self._operate).start()
        return super().value(asked)

    def _operate(self):
        self.decide("hold" if self.decisions else "approve", self.records[0])


@pytest.fixture
def serve(tmp_path):
    with closing_each(lambda portal: portal(Signer(tmp_path, "ops"), vm_id=VM_ID, token=TOKEN)) as serve:
        yield serve


@pytest.fixture
def check(agent, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")

    def check(portal, *arguments):
        return agent.call(
            *("portal-check", portal.url, "--vm-id", VM_ID.upper(), "--token-file", tmp_path / "token", "--wait", "2"),
            *arguments,
        )

    return check


def operator(folder, portal):
    """Return the command that sends decisions to *portal*."""
    program = folder / "decide_there.py"
    program.write_text(
        "import json, os, sys, urllib.request\n"
        "record = json.load(sys.stdin)\n"
        "assert os.environ['PORTAL_CHECK_VM_ID'] == record['vm']['vm_id']\n"
        "assert os.environ['PORTAL_CHECK_EVENT_ID'] == record['event']['event_id']\n"
        "body = json.dumps({'data': {'verdict': os.environ['PORTAL_CHECK_DECISION'], 'record': record}}).encode()\n"
        f"headers = {{'Authorization': 'Bearer {TOKEN}'}}\n"
        f"urllib.request.urlopen(urllib.request.Request({portal.records_url!r}, body, headers))\n"
    )
    return f"{sys.executable} {program}"


def test_portal_that_meets_all_requirements_exits_0(serve, check, tmp_path):
    portal = serve(Operable)
    code, out, err = check(
        portal,
        *("--public-key", portal.signer.public_key_file, "--kid", "ops", "--approver", "ops"),
        *("--records-url", portal.records_url, "--decision-by", operator(tmp_path, portal)),
    )
    assert (code, err) == (0, "")
    assert "not met: section" not in out
    assert out.count("not tried: section") == out.count("--attested") == 8  # no metadata service runs here
    assert out.splitlines()[-1].endswith(" met, 0 not met, 8 not tried.")


def test_failed_decision_command_exits_1_without_unmet_requirements(serve, check):
    code, out, _ = check(serve(SmallPortal), "--decision-by", "false")
    assert code == 1
    assert "not met: section" not in out
    assert "The command of --decision-by exited with 1." in out


def test_person_is_prompted_to_decide(serve, check):
    portal = serve(DecidesByItself)
    code, out, err = check(
        portal,
        *("--public-key", portal.signer.public_key_file, "--kid", "ops", "--approver", "ops"),
        *("--records-url", portal.records_url, "--decision-by", "person", "--json"),
    )
    found = {each["requirement"]: each for each in map(json.loads, out.splitlines())}
    assert code == 0, [each for each in found.values() if each["result"] != "met"]
    others = [each["detail"] for each in found.values() if each["result"] != "met"]
    assert [detail for detail in others if "--attested" not in detail] == []
    event_id = portal.records[0]["event"]["event_id"]
    assert err.splitlines() == [
        f"Decide in the portal now: {verdict} for the VM {VM_ID}, on the event {event_id} if the portal has it."
        for verdict in ("approve", "hold")
    ]


class WithoutAuthentication(SmallPortal):
    def refused(self, _asked):
        return None


def test_unmet_requirement_exits_1_with_section_request_and_response(serve, check):
    portal = serve(WithoutAuthentication)
    code, out, _ = check(portal)
    lines = [line.strip() for line in out.splitlines()]
    at = next(number for number, line in enumerate(lines) if line.startswith("not met: "))
    assert code == 1
    assert lines[at] == "not met: section 2: The portal refuses a request without the VM's credential."
    assert lines[at + 1] == "The response to no token is not 401 or 403."
    assert lines[at + 2].startswith(f"request: GET {portal.url}/vms/{VM_ID}/decisions?index=0&wait=2, without Authoriz")
    assert lines[at + 3].startswith("response: 200, application/json, ")
    assert "1 not met" in lines[-1]
    assert TOKEN not in out


def test_json_prints_one_requirement_per_line(serve, check):
    class Fails(SmallPortal):
        def polled(self, _asked):
            return Said(500)

    code, out, _ = check(serve(Fails), "--json")
    found = {each["requirement"]: each for each in map(json.loads, out.splitlines())}
    assert code == 1
    assert (found["status"]["section"], found["status"]["result"]) == (4, "not met")
    assert found["status"]["answered"].startswith("500, ")
    assert found["form"]["result"] == "not tried"


@pytest.mark.parametrize(
    ("url", "arguments", "message"),
    [
        ("https://portal.invalid", (), "Missing option '--vm-id'"),
        ("https://portal.invalid", ("--vm-id", "web-0"), "'web-0' is not a valid UUID."),
        ("http://portal.invalid", ("--vm-id", VM_ID), "Use plain http only for a loopback address"),
        ("ftp://127.0.0.1", ("--vm-id", VM_ID), "url is 'ftp://', but must be"),
        ("https://portal.invalid", ("--vm-id", VM_ID, "--token-file", "a", "--token-env", "B"), "are both set"),
        ("https://portal.invalid", ("--vm-id", VM_ID, "--public-key", "nowhere.pub"), "nowhere.pub"),
        ("https://portal.invalid", ("--vm-id", VM_ID, "--wait", "1"), "--wait"),
        ("https://portal.invalid", ("--vm-id", VM_ID, "--decision-by", " "), "--decision-by is empty"),
    ],
)
def test_invalid_arguments_exit_2(agent, url, arguments, message):
    code, out, err = agent.call("portal-check", url, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_missing_token_file_exits_1(agent):
    code, out, err = agent.call("portal-check", "http://127.0.0.1:9", "--vm-id", VM_ID, "--token-file", "nowhere")
    assert (code, out) == (1, "")
    assert "nowhere" in err
