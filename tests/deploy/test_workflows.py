"""The two workflows: pinned, with the least rights, and nothing in them that .ci/run does not do on any machine."""

import re
import subprocess

import pytest

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(120)]

WORKFLOWS = ("ci.yml", "release.yml")
#: What each job of release.yml may do with the repository and its registry; a job that is not named may do nothing.
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
    """Return the jobs that end well before job *name* begins."""
    needs = jobs[name].get("needs", [])
    found = {needs} if isinstance(needs, str) else set(needs)
    return found.union(*(before(jobs, each) for each in found))


# ---- both -----------------------------------------------------------------------------------------------------------


def test_actionlint_has_nothing_to_say(tool, checkout):
    paths = [checkout / ".github/workflows" / name for name in WORKFLOWS]
    done = subprocess.run([tool("actionlint"), *paths], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_action_is_pinned_to_a_commit_and_says_its_version(checkout):
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
    assert {action: pin for action, pin in pins.items() if len(pin) > 1} == {}, "one version of each"


def test_no_command_is_made_of_what_somebody_else_names(workflows):
    allowed = re.compile(r"suite:\$\{\{ matrix\.python \}\}")
    for name, workflow in workflows.items():
        for job, step in steps(workflow):
            assert "${{" not in allowed.sub("", step.get("run", "")), f"{name}: {job}"


def test_no_checkout_leaves_its_token_behind(workflows):
    for name, workflow in workflows.items():
        for job, step in steps(workflow):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, f"{name}: {job}"


def test_every_step_of_ci_run_that_is_called_is_there(workflows, checkout):
    there = set(re.findall(r"(?m)^step_(\w+)\(\)", (checkout / ".ci/run").read_text()))
    runs = [step["run"] for workflow in workflows.values() for _, step in steps(workflow) if "run" in step]
    called = {name for run in runs for name in re.findall(r" (\w+)(?::\S+)?", run.partition("bash .ci/run")[2])}
    assert {"suite", "deploy", "release"} <= called
    assert called - {"matrix"} <= there


# ---- release.yml ----------------------------------------------------------------------------------------------------


def test_release_begins_with_a_tag_of_a_version_and_with_nothing_else(release):
    assert release[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}  # YAML 1.1 reads `on` so


def test_jobs_have_the_rights_of_their_steps_and_no_more(release, jobs):
    assert release["permissions"] == {}
    assert {name: job["permissions"] for name, job in jobs.items()} == RIGHTS
    assert [name for name, job in jobs.items() if "environment" in job] == ["pypi"]
    assert jobs["pypi"]["environment"]["name"] == "pypi"


def test_no_secret_but_the_token_of_the_run_is_read(checkout):
    text = (checkout / ".github/workflows/release.yml").read_text()
    assert "secrets." not in text
    assert "secrets: inherit" not in text
    assert text.count("github.token") == 2


def test_nothing_is_published_before_every_test_and_every_installation(jobs):
    for name in PUBLISHING:
        assert {"check", "tests", "build", "verify-arm64"} <= before(jobs, name), name
    assert before(jobs, "page") == set(jobs) - {"page"}, "the page comes last"
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"
