"""The two workflows: pinned actions, least privilege, and only steps of .ci/run, which also run on any machine."""

import re
import subprocess

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

WORKFLOWS = ("ci.yml", "release.yml")
#: The permissions of each job of release.yml. All other jobs have none.
RIGHTS = {
    "check": {"contents": "read"},
    "tests": {"contents": "read"},
    "build": {"contents": "read"},
    "verify-arm64": {"contents": "read"},
    "attest": {"id-token": "write", "attestations": "write"},
    "image": {"contents": "read", "packages": "write", "id-token": "write", "attestations": "write"},
    "pypi": {"id-token": "write"},
    "page": {"contents": "write"},
}
#: The jobs that can write or sign.
PUBLISHING = {name for name, rights in RIGHTS.items() if "write" in rights.values()}


@pytest.fixture(scope="module")
def workflows(package, checkout):
    yaml = package("yaml")
    directory = checkout / ".github/workflows"
    return {name: yaml.safe_load((directory / name).read_text()) for name in WORKFLOWS}


@pytest.fixture(scope="module")
def release(workflows):
    return workflows["release.yml"]


@pytest.fixture(scope="module")
def jobs(release):
    return release["jobs"]


def steps(workflow):
    return [(name, step) for name, job in workflow["jobs"].items() for step in job.get("steps", [])]


def before(jobs, name):
    """Return the jobs that must succeed before job *name* starts."""
    needs = jobs[name].get("needs", [])
    found = {needs} if isinstance(needs, str) else set(needs)
    return found.union(*(before(jobs, each) for each in found))


# ---- both -----------------------------------------------------------------------------------------------------------


def test_actionlint_reports_no_findings(tool, checkout):
    paths = [checkout / ".github/workflows" / name for name in WORKFLOWS]
    done = subprocess.run([tool("actionlint"), *paths], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_actions_are_pinned_to_a_commit_with_a_version_comment(checkout):
    pins = {}
    for name in WORKFLOWS:
        text = (checkout / ".github/workflows" / name).read_text()
        lines = re.findall(r"(?m)^ *(?:- )?uses: *(.*)$", text)
        assert lines
        for line in lines:
            if line.startswith("./"):
                assert (checkout / line).is_file()
                continue
            found = re.fullmatch(r"([\w./-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)", line)
            assert found, f"{name}: {line}"
            pins.setdefault(found[1], set()).add((found[2], found[3]))
    assert {action: pin for action, pin in pins.items() if len(pin) > 1} == {}, "actions with several versions"


def test_commands_contain_no_untrusted_expressions(workflows):
    allowed = re.compile(r"suite:\$\{\{ matrix\.python \}\}")
    for name, workflow in workflows.items():
        for job, step in steps(workflow):
            assert "${{" not in allowed.sub("", step.get("run", "")), f"{name}: {job}"


def test_checkouts_do_not_persist_credentials(workflows):
    for name, workflow in workflows.items():
        for job, step in steps(workflow):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, f"{name}: {job}"


def test_workflows_call_only_existing_ci_steps(workflows, checkout):
    there = set(re.findall(r"(?m)^step_(\w+)\(\)", (checkout / ".ci/run").read_text()))
    runs = [step["run"] for workflow in workflows.values() for _, step in steps(workflow) if "run" in step]
    called = {name for run in runs for name in re.findall(r" (\w+)(?::\S+)?", run.partition("bash .ci/run")[2])}
    assert {"suite", "deploy", "release"} <= called
    assert called - {"matrix"} <= there


# ---- release.yml ----------------------------------------------------------------------------------------------------


def test_only_a_version_tag_triggers_a_release(release):
    assert release[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}  # YAML 1.1 reads `on` as True


def test_jobs_have_least_privilege_permissions(release, jobs):
    assert release["permissions"] == {}
    assert {name: job["permissions"] for name, job in jobs.items()} == RIGHTS
    assert [name for name, job in jobs.items() if "environment" in job] == ["pypi"]
    assert jobs["pypi"]["environment"]["name"] == "pypi"


def test_release_reads_no_secret_except_the_github_token(checkout):
    text = (checkout / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    assert "secrets: inherit" not in text
    assert text.count("github.token") == 2


def test_publishing_waits_for_all_tests_and_installations(jobs):
    for name in PUBLISHING:
        assert {"check", "tests", "build", "verify-arm64"} <= before(jobs, name), name
    assert before(jobs, "page") == set(jobs) - {"page"}, "the release page is the last job"
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
