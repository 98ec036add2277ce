"""A proxy before the portal: whose request it brings is believed from the proxies of the settings, and nobody else."""

from __future__ import annotations

import pytest
from fleet_records import fleet_record
from page_kit import Office

from bridge.errors import ConfigurationError
from bridge.portal.proxies import Proxies
from bridge.portal.settings import read

CLIENT, EVE = "203.0.113.7", "203.0.113.66"


@pytest.mark.parametrize(
    ("peer", "said", "client"),
    [
        ("10.0.0.5", CLIENT, CLIENT),
        ("10.0.0.5", f"{CLIENT}:51234", CLIENT),
        ("10.0.0.5", f"1.2.3.4, {CLIENT}", CLIENT),
        ("10.0.0.5", f"1.2.3.4, {CLIENT}, 10.0.0.6", CLIENT),
        ("10.0.0.5", f"10.0.0.6, {CLIENT}", CLIENT),
        ("10.0.0.5", f"{CLIENT}, {EVE}", EVE),
        ("10.0.0.5", "[2001:db8::7]:443", "2001:db8::7"),
        ("10.0.0.5", "2001:DB8:0::7", "2001:db8::7"),
        ("10.0.0.5", f"::ffff:{CLIENT}", CLIENT),
        ("::ffff:10.0.0.5", CLIENT, CLIENT),
        ("2001:db8::5", CLIENT, CLIENT),
        ("10.0.0.5", None, "10.0.0.5"),
        ("10.0.0.5", "", "10.0.0.5"),
        ("10.0.0.5", "unknown", "10.0.0.5"),
        ("10.0.0.5", f"{CLIENT}, unknown", "10.0.0.5"),
        ("10.0.0.5", f"{CLIENT}, unknown, 10.0.0.6", "10.0.0.6"),
        ("10.0.0.7", CLIENT, "10.0.0.7"),
        ("10.0.0.7", f"{CLIENT}, 10.0.0.5", "10.0.0.7"),
        ("", CLIENT, ""),
        ("10.0.0.5", ", ".join(["10.0.0.6"] * 100_000), "10.0.0.6"),
    ],
)
def test_address_is_what_the_last_proxy_of_ours_saw(peer, said, client):
    proxies = Proxies(["10.0.0.5", "10.0.0.6", "2001:db8:0:0::5"])
    headers = {} if said is None else {"x-forwarded-for": said}
    assert proxies.client_of(headers, peer) == client


def test_no_proxy_is_believed_where_none_is_named():
    assert Proxies([]).client_of({"x-forwarded-for": CLIENT}, "127.0.0.1") == "127.0.0.1"


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
