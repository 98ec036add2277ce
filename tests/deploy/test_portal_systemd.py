"""The portal's unit, drop-in, and configuration, checked by the systemd tools and the portal's loader."""

import re
import shutil

import pytest
from unit_file import exposure, findings, settings_of

from bridge.portal.setting_checks import address_of
from bridge.portal.settings import database_file, load

pytestmark = pytest.mark.deploy

NAME = "scheduled-events-portal"
UNIT = f"{NAME}.service"
MOST_EXPOSURE = 2.0


@pytest.fixture(scope="module")
def directory(deploy):
    return deploy / "portal/systemd"


@pytest.fixture(scope="module")
def unit(directory):
    return settings_of(directory / UNIT)


@pytest.fixture(scope="module", params=["as it is", "with TLS"])
def table(request, directory):
    """Return the configuration unchanged, or with the commented TLS settings in place of the first `listen`."""
    text = (directory / "portal.toml").read_text()
    if request.param == "with TLS":
        text = re.sub(r"(?m)^listen = .*\n(?=# listen = )", "", text)
        text = re.sub(r"(?m)^# (?=(?:listen|cert_file|key_file) = )", "", text)
    return text


def test_systemd_analyze_accepts_the_unit(tool, directory, unit, tmp_path):
    program = tmp_path / "scheduled-events-bridge"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (start,) = unit["ExecStart"]
    (tmp_path / UNIT).write_text((directory / UNIT).read_text().replace(start.split()[0], str(program)))
    for drop_ins in ([], ["tls.conf"]):
        (tmp_path / f"{UNIT}.d").mkdir(exist_ok=True)
        for name in drop_ins:
            shutil.copy(directory / name, tmp_path / f"{UNIT}.d")
        assert findings(tool("systemd-analyze"), tmp_path / UNIT) == (0, ""), drop_ins


def test_sandbox_exposure_level_is_low(tool, directory, tmp_path):
    shutil.copy(directory / UNIT, tmp_path)
    assert exposure(tool("systemd-analyze"), tmp_path / UNIT) <= MOST_EXPOSURE


def test_unit_restarts_without_a_limit_and_allows_a_graceful_stop(unit):
    assert (unit["Restart"], unit["StartLimitIntervalSec"]) == (["always"], ["0"])
    assert float(unit["TimeoutStopSec"][0]) > 5
    assert unit["Type"] == ["notify"]


def test_configuration_is_valid_in_both_variants(table, tmp_path):
    path = tmp_path / "portal.toml"
    path.write_text(table)
    settings = load(path)
    host, _ = address_of(settings.server.listen)
    assert (settings.server.cert_file is None) == (
        host == "127.0.0.1"
    )  # agents use plain HTTP only with loopback addresses
    assert str(database_file(settings, {"STATE_DIRECTORY": f"/var/lib/{NAME}"})) == f"/var/lib/{NAME}/portal.db"


def test_unit_loads_exactly_the_configured_credentials(table, unit, directory):
    given = list(unit["LoadCredential"])
    if "\ncert_file" in table:
        given += settings_of(directory / "tls.conf")["LoadCredential"]
    named = re.findall(r'(?m)^\w+_file = "(.+)"$', table)
    assert sorted(named) == sorted(f"/run/credentials/{UNIT}/{each.partition(':')[0]}" for each in given)
    for each in given:
        name, _, path = each.partition(":")
        assert path == f"/etc/{NAME}/private/{name}"
