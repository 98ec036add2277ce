"""The script that creates the SAS of the package, with an `az` that records its arguments."""

import subprocess
from datetime import datetime, timedelta, timezone

import pytest
from shown_commands import OTHERS

pytestmark = pytest.mark.deploy

URL = "https://acme.blob.core.windows.net/packages/bridge.tar?sig=a"


@pytest.fixture
def sas(deploy, tmp_path):
    """Return a function that runs the script, and returns the result and the arguments of `az`."""
    recorded = tmp_path / "arguments"
    stub = tmp_path / "az"
    stub.write_text(f'#!/bin/sh\nprintf \'%s\\n\' "$@" >{recorded}\necho "{URL}"\nexit "${{AZ_ENDS:-0}}"\n')
    stub.chmod(0o755)

    def run(*arguments, **environment):
        command = [deploy / "azure" / "fleet" / "sas.sh", *arguments]
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30)
        return done, recorded.read_text().splitlines() if recorded.exists() else None

    return run


def options(arguments):
    """Return the options of `az` with their values; an option without a value has None."""
    following = [*arguments[1:], "--"]
    return {
        name: None if value.startswith("--") else value
        for name, value in zip(arguments, following, strict=True)
        if name.startswith("--")
    }


@pytest.mark.parametrize(("given", "hours"), [((), 24), (("--hours", "168"), 168)])
def test_url_allows_only_reading_one_blob_for_a_limited_time(sas, given, hours):
    done, arguments = sas(*given, "acme", "packages", "bridge.tar")
    assert (done.returncode, done.stdout) == (0, f"{URL}\n")
    assert arguments[:3] == ["storage", "blob", "generate-sas"]
    found = options(arguments)
    assert set(found) <= set(OTHERS["az"]["commands"]["storage blob generate-sas"])
    expiry = datetime.strptime(found.pop("--expiry"), "%Y-%m-%dT%H:%MZ").replace(tzinfo=timezone.utc)
    left = expiry - datetime.now(timezone.utc)
    assert timedelta(hours=hours, minutes=-3) < left <= timedelta(hours=hours)
    assert found == {
        "--auth-mode": "login",
        "--as-user": None,  # a user delegation SAS, without the account key
        "--account-name": "acme",
        "--container-name": "packages",
        "--name": "bridge.tar",
        "--permissions": "r",
        "--https-only": None,
        "--full-uri": None,
        "--output": "tsv",
    }


def test_dry_run_prints_the_command_and_runs_nothing(sas):
    done, arguments = sas("--dry-run", "acme", "packages", "bridge.tar")
    assert (done.returncode, arguments) == (0, None)
    assert done.stdout.startswith("az storage blob generate-sas ")
    assert " --name bridge.tar " in done.stdout


def test_help_names_each_option(sas):
    done, arguments = sas("--help")
    assert (done.returncode, arguments) == (0, None)
    assert {"--hours", "--dry-run", "--help"} <= set(done.stdout.split())


@pytest.mark.parametrize("hours", ["0", "169", "1d", "", "-1", "99999999999999999999"])
def test_validity_beyond_the_limit_of_azure_is_refused(sas, hours):
    done, arguments = sas("--hours", hours, "acme", "packages", "bridge.tar")
    assert (done.returncode, done.stdout, arguments) == (2, "", None)
    assert "168" in done.stderr


@pytest.mark.parametrize("given", [(), ("acme", "packages"), ("--days", "1", "a", "b", "c"), ("--hours",)])
def test_wrong_arguments_are_refused(sas, given):
    done, arguments = sas(*given)
    assert (done.returncode, done.stdout, arguments) == (2, "", None)


def test_failure_of_az_is_the_failure_of_the_script(sas):
    assert sas("acme", "packages", "bridge.tar", AZ_ENDS="1")[0].returncode == 1


def test_script_is_clean(tool, deploy):
    command = [tool("shellcheck"), deploy / "azure" / "fleet" / "sas.sh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
