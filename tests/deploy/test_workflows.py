"""The two workflows: pinned, with the least rights, and nothing in them that .ci/run does not do on any machine."""

import re
import shlex
import subprocess
import sys

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


def step_of(jobs, name, action):
    (found,) = (step for step in jobs[name]["steps"] if step.get("uses", "").startswith(f"{action}@"))
    return found


# ---- both -----------------------------------------------------------------------------------------------------------


def test_actionlint_has_nothing_to_say(tool, checkout):
    paths = [checkout / ".github/workflows" / name for name in WORKFLOWS]
    done = subprocess.run([tool("actionlint"), *paths], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_workflow_is_one_of_the_two(checkout):
    assert sorted(path.name for path in (checkout / ".github/workflows").iterdir()) == sorted(WORKFLOWS)


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


def test_every_job_ends_in_time(workflows):
    endless = [
        job for workflow in workflows.values() for job, said in workflow["jobs"].items()
        if "uses" not in said and "timeout-minutes" not in said
    ]  # fmt: skip
    assert endless == []


def test_every_step_of_ci_run_that_is_called_is_there(workflows, checkout):
    there = set(re.findall(r"(?m)^step_(\w+)\(\)", (checkout / ".ci/run").read_text()))
    runs = [step["run"] for workflow in workflows.values() for _, step in steps(workflow) if "run" in step]
    called = {name for run in runs for name in re.findall(r" (\w+)(?::\S+)?", run.partition("bash .ci/run")[2])}
    assert {"suite", "deploy", "release"} <= called
    assert called - {"matrix"} <= there


def test_ci_reads_and_nothing_else(workflows):
    assert workflows["ci.yml"]["permissions"] == {"contents": "read"}
    assert [job for job, said in workflows["ci.yml"]["jobs"].items() if "permissions" in said] == []


# ---- release.yml ----------------------------------------------------------------------------------------------------


def test_release_begins_with_a_tag_of_a_version_and_with_nothing_else(release):
    assert release[True] == {"push": {"tags": ["v[0-9]+.[0-9]+.[0-9]+"]}}  # YAML 1.1 reads `on` so


def test_releases_follow_one_another(release):
    assert release["concurrency"] == {"group": "release", "cancel-in-progress": False}


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


def test_every_command_is_in_the_repository(jobs, checkout):
    commands = [shlex.split(step["run"]) for job in jobs.values() for step in job.get("steps", []) if "run" in step]
    assert len(commands) == 4
    for program, path, *words in commands:
        assert (program, path) in {("bash", ".ci/run"), ("python3", ".ci/release.py")}
        assert (checkout / path).is_file()
        if path == ".ci/release.py":  # unknown words would end with 2
            done = subprocess.run(
                [sys.executable, checkout / path, *words, "--help"], capture_output=True, timeout=60, check=False
            )
            assert done.returncode == 0, words


def test_what_the_workflow_calls_is_what_ci_run_release_calls(jobs, checkout):
    text = (checkout / ".ci/run").read_text()
    step = re.search(r"(?ms)^step_release\(\) \{.*?^\}", text)[0]
    by_hand = set(re.findall(r"\.ci/release\.py (\w+)", step))
    runs = [step["run"] for job in jobs.values() for step in job.get("steps", []) if "run" in step]
    in_workflow = {found for run in runs for found in re.findall(r"\.ci/release\.py (\w+)", run)}
    assert "bash .ci/run release" in runs
    assert by_hand == {"check", "build", "verify"}
    assert in_workflow - by_hand == {"publish"}, "only what needs the token is not in .ci/run"


def test_nothing_is_published_before_every_test_and_every_installation(jobs):
    for name in PUBLISHING:
        assert {"check", "tests", "build", "verify-arm64"} <= before(jobs, name), name
    assert before(jobs, "page") == set(jobs) - {"page"}, "the page comes last"
    assert jobs["tests"]["uses"] == "./.github/workflows/ci.yml"


def test_ci_can_be_called(workflows):
    assert "workflow_call" in workflows["ci.yml"][True]


def test_job_that_can_write_runs_nothing_but_actions_and_the_page(jobs):
    runs = {name: [step["run"] for step in jobs[name]["steps"] if "run" in step] for name in PUBLISHING}
    (publish,) = runs.pop("page")
    assert publish.startswith("python3 .ci/release.py publish ")
    assert set(map(tuple, runs.values())) == {()}


def test_what_is_fetched_was_kept(jobs):
    kept = {step["with"]["name"] for _, step in steps({"jobs": jobs}) if "upload-artifact@" in step.get("uses", "")}
    for name, step in steps({"jobs": jobs}):
        if "download-artifact@" in step.get("uses", ""):
            assert step["with"]["name"] in kept, name
    assert step_of(jobs, "pypi", "actions/download-artifact")["with"]["name"] == "distributions"


def test_pypi_gets_the_sdist_and_the_wheel_alone(jobs):
    (step,) = (step for step in jobs["build"]["steps"] if step.get("with", {}).get("name") == "distributions")
    assert step["with"]["path"].split() == ["dist/*.whl", "dist/scheduled_events_bridge-*.tar.gz"]
    assert step_of(jobs, "pypi", "pypa/gh-action-pypi-publish")["with"]["packages-dir"] == "dist"


def test_image_is_made_for_both_machines_of_the_checkout_with_sbom_and_provenance(jobs, checkout):
    said = step_of(jobs, "image", "docker/build-push-action")["with"]
    assert said["platforms"].split(",") == ["linux/amd64", "linux/arm64"]
    assert (said["context"], said["provenance"], said["sbom"], said["push"]) == (".", "mode=max", True, True)
    declared = set(re.findall(r"(?m)^ARG (\w+)", (checkout / said["file"]).read_text()))
    assert {line.partition("=")[0] for line in said["build-args"].split()} - {"${{", "}}"} >= {"VERSION", "REVISION"}
    assert {"VERSION", "REVISION"} <= declared
    attested = step_of(jobs, "image", "actions/attest-build-provenance")["with"]
    assert attested["subject-digest"] == "${{ steps.image.outputs.digest }}"


def test_every_file_of_the_release_is_attested(jobs):
    for action in ("actions/attest-build-provenance", "actions/attest"):
        assert step_of(jobs, "attest", action)["with"]["subject-checksums"] == "dist/SHA256SUMS"
