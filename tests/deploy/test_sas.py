"""The script that creates the SAS of the package, with an `az` that records its arguments."""

import subprocess
from datetime import datetime, timedelta, timezone

import pytest
from shown_commands import OTHERS

pytestmark = pytest.mark.deploy

URL = "https://acme.blob.core.windows.net/packages/bridge.tar?sig=a"
BLOB = ("acme", "packages", "bridge.tar")
READ_ONLY = "--permissions r --https-only --expiry EXPIRY --full-uri --output tsv"
COMMAND = f"--auth-mode login --as-user --account-name acme --container-name packages --name bridge.tar {READ_ONLY}"


@pytest.fixture
def sas(deploy, tmp_path):
    """Return a function that runs the script, and returns the result and the arguments of `az`."""
    recorded = tmp_path / "arguments"
    (tmp_path / "az").write_text(f'#!/bin/sh\necho "$@" >{recorded}\necho "{URL}"\nexit "${{AZ_ENDS:-0}}"\n')
    (tmp_path / "az").chmod(0o755)

    def run(*arguments, **environment):
        command = [deploy / "azure" / "fleet" / "sas.sh", *arguments]
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=30)
        return done, recorded.read_text().split() if recorded.exists() else None

    return run


@pytest.mark.parametrize(("given", "hours"), [((), 24), (("--hours", "168"), 168)])
def test_url_allows_only_reading_one_blob_for_a_limited_time(sas, given, hours):
    done, arguments = sas(*given, *BLOB)
    assert (done.returncode, done.stdout) == (0, f"{URL}\n")
    at = arguments.index("--expiry") + 1
    expiry = datetime.strptime(arguments[at], "%Y-%m-%dT%H:%MZ").replace(tzinfo=timezone.utc)
    arguments[at] = "EXPIRY"
    assert timedelta(hours=hours, minutes=-3) < expiry - datetime.now(timezone.utc) <= timedelta(hours=hours)
    assert arguments == ["storage", "blob", "generate-sas", *COMMAND.split()]
    options = {each for each in arguments if each.startswith("--")}
    assert options <= set(OTHERS["az"]["commands"]["storage blob generate-sas"])


def test_dry_run_and_help_run_nothing(sas):
    done, arguments = sas("--dry-run", *BLOB)
    assert (done.returncode, done.stdout.split()[:4], arguments) == (0, ["az", "storage", "blob", "generate-sas"], None)
    done, arguments = sas("--help")
    assert (done.returncode, arguments) == (0, None)
    assert {"--hours", "--dry-run", "--help"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    "given",
    [
        *(("--hours", hours, *BLOB) for hours in ("0", "169", "1d", "", "-1", "99999999999999999999")),
        *((), BLOB[:2], ("--days", "1", *BLOB), ("--hours",)),
    ],
)
def test_wrong_arguments_are_rejected(sas, given):
    done, arguments = sas(*given)
    assert (done.returncode, done.stdout, arguments) == (2, "", None)


def test_script_returns_the_exit_code_of_az(sas):
    assert sas(*BLOB, AZ_ENDS="1")[0].returncode == 1
