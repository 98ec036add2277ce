"""A proxy before the portal: whose request it brings is believed from the proxies of the settings, and nobody else."""

from __future__ import annotations

import pytest
from fleet_records import fleet_record
from page_kit import Office

from bridge.errors import ConfigurationError
from bridge.portal.settings import read

CLIENT, EVE = "203.0.113.7", "203.0.113.66"


def _guess(office, address, *names):
    browser = office.browser()
    browser.headers["X-Forwarded-For"] = address
    return [browser.sign_in(name, "wrong").status_code for name in names]


def _comes_in(office, address):
    browser = office.browser()
    browser.headers["X-Forwarded-For"] = address
    return browser.sign_in("ann").status_code


def test_wrong_passwords_of_one_stop_nobody_else_behind_the_proxy(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        # What Eve writes before the address that the proxy puts at the end counts for nothing.
        forged = [_guess(office, f"198.51.100.{turn}, {EVE}", f"user-{turn}")[0] for turn in range(6)]
        assert forged == [401] * 5 + [429]
        assert _comes_in(office, EVE) == 429
        assert _comes_in(office, CLIENT) == 303


def test_address_is_the_last_one_that_is_not_a_proxy_of_ours(tmp_path):
    forwarded = (f"{EVE}:51234", f"{CLIENT}, {EVE}, 192.0.2.6", f"192.0.2.6, {EVE}:443", EVE, f"{CLIENT}, {EVE}:1")
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1", "192.0.2.6"]}) as office:
        statuses = [_guess(office, each, "ann")[0] for each in (*forwarded, EVE)]
        assert statuses == [401] * 5 + [429]
        assert _comes_in(office, f"{EVE}, {CLIENT}:51234, 192.0.2.6") == 303


def test_name_that_is_guessed_from_many_addresses_behind_the_proxy_is_not_locked(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        statuses = [_guess(office, f"198.51.100.{turn}", "ann")[0] for turn in range(6)]
        assert statuses == [401] * 6


def test_forged_address_gives_no_further_guesses(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["192.0.2.1"]}) as office:
        statuses = [_guess(office, f"198.51.100.{turn}", f"user-{turn}")[0] for turn in range(6)]
        assert statuses == [401] * 5 + [429]


def test_proxy_that_only_passes_on_lets_nobody_in_by_a_name(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        office.portal.send(fleet_record(0))
        eve = office.browser()
        eve.headers |= {"X-Forwarded-User": "ann", "X-Forwarded-For": CLIENT}
        assert (eve.get("/").status_code, eve.get("/").headers["Location"]) == (303, "/login?next=%2F")


def test_header_of_a_proxy_needs_the_addresses_that_it_is_believed_from():
    table = {"agents": {"token_env": "T"}, "people": {"proxy_header": "X-Forwarded-User"}}
    with pytest.raises(ConfigurationError, match="proxy_header needs proxy_addresses"):
        read(table)
