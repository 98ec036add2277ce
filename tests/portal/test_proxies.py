"""A proxy in front of the portal: only configured proxies determine the client address and the user."""

from fleet_records import fleet_record
from page_kit import Office

CLIENT, EVE = "203.0.113.7", "203.0.113.66"


def _guess(office, address, *names):
    browser = office.browser()
    browser.headers["X-Forwarded-For"] = address
    return [browser.sign_in(name, "wrong").status_code for name in names]


def _comes_in(office, address):
    browser = office.browser()
    browser.headers["X-Forwarded-For"] = address
    return browser.sign_in("ann").status_code


def test_wrong_passwords_of_one_client_do_not_block_others_behind_the_proxy(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        # The proxy appends the address of the client. The portal ignores the forged addresses before it.
        forged = [_guess(office, f"198.51.100.{turn}, {EVE}", f"user-{turn}")[0] for turn in range(6)]
        assert forged == [401] * 5 + [429]
        assert _comes_in(office, EVE) == 429
        assert _comes_in(office, CLIENT) == 303


def test_client_address_is_the_last_forwarded_address_that_is_not_a_proxy(tmp_path):
    forwarded = (f"{EVE}:51234", f"{CLIENT}, {EVE}, 192.0.2.6", f"192.0.2.6, {EVE}:443", EVE, f"{CLIENT}, {EVE}:1")
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1", "192.0.2.6"]}) as office:
        statuses = [_guess(office, each, "ann")[0] for each in (*forwarded, EVE)]
        assert statuses == [401] * 5 + [429]
        assert _comes_in(office, f"{EVE}, {CLIENT}:51234, 192.0.2.6") == 303


def test_guesses_from_many_addresses_behind_the_proxy_lock_no_account(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        statuses = [_guess(office, f"198.51.100.{turn}", "ann")[0] for turn in range(6)]
        assert statuses == [401] * 6


def test_forged_forwarded_address_allows_no_additional_guesses(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["192.0.2.1"]}) as office:
        statuses = [_guess(office, f"198.51.100.{turn}", f"user-{turn}")[0] for turn in range(6)]
        assert statuses == [401] * 5 + [429]


def test_user_header_is_ignored_without_proxy_header(tmp_path):
    with Office(tmp_path, people={"proxy_addresses": ["127.0.0.1"]}) as office:
        office.portal.send(fleet_record(0))
        eve = office.browser()
        eve.headers |= {"X-Forwarded-User": "ann", "X-Forwarded-For": CLIENT}
        assert (eve.get("/").status_code, eve.get("/").headers["Location"]) == (303, "/login?next=%2F")
