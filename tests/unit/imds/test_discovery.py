"""DHCP option 245, as each DHCP client writes it down."""

import os
import struct
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.imds.discovery import (
    DEFAULT_ENDPOINT,
    find_endpoint,
    parse_address,
    parse_dhclient_leases,
    parse_interface_options,
    parse_named_option,
)

NOW = datetime(2026, 11, 20, 11, 0, tzinfo=timezone.utc)
AHEAD = "5 2026/11/20 12:00:00"
PAST = "5 2026/11/20 10:00:00"


def lease(option: str, expire: str = AHEAD) -> str:
    return (
        'lease {\n  interface "eth0";\n  fixed-address 10.0.0.4;\n'
        "  option rfc3442-classless-static-routes 0,10,0,0,1,32,168,63,129,16,10,0,0,1;\n"
        f"  option unknown-245 {option};\n  renew 5 2026/11/20 10:30:00;\n  expire {expire};\n}}\n"
    )


def put(root, name, text, *, age_seconds=0):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (NOW.timestamp() - age_seconds,) * 2)


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("a8:3f:81:10", "168.63.129.16"),
        ("64:4f:0:1", "100.79.0.1"),
        ("a83f8110", "168.63.129.16"),
        ("A83F8110", "168.63.129.16"),
        ("168.63.129.16", "168.63.129.16"),
        ('"d@2<"', "100.64.50.60"),
        (r'"d\"\0072"', "100.34.7.50"),
        ('"168.63.129.16"', "168.63.129.16"),
    ],
)
def test_an_address_is_read_however_it_is_written(written, address):
    assert parse_address(written) == address


@pytest.mark.parametrize(
    "written", ["", '"', '""', "a8:3f:81", "a8:3f:81:10:00", "xx:3f:81:10", "0.0.0.0", "ffffffff", "e0000001", "1.2.3"]
)
def test_what_is_no_address_of_a_host_is_not_one(written):
    assert parse_address(written) is None


def test_the_last_unexpired_lease_wins():
    text = lease("a8:3f:81:10") + lease("64:4f:0:2") + lease("64:4f:0:3", PAST)
    assert parse_dhclient_leases(text, now=NOW) == "100.79.0.2"


@pytest.mark.parametrize(
    ("expire", "is_used"),
    [
        ("never", True),
        (AHEAD, True),
        (PAST, False),
        ("epoch 4102444800", True),
        ("epoch 1500000000; # Fri Jul 14 2017", False),
        ("soon", False),
        ("epoch", False),
    ],
)
def test_a_lease_counts_until_it_expires(expire, is_used):
    assert (parse_dhclient_leases(lease("a8:3f:81:10", expire), now=NOW) is not None) is is_used


def test_a_lease_cut_off_in_the_middle_is_not_used():
    assert parse_dhclient_leases(lease("a8:3f:81:10")[:-3], now=NOW) is None


def test_a_lease_without_the_option_forgets_the_one_before_it_only_for_itself():
    text = lease("a8:3f:81:10") + "lease {\n  expire never;\n}\n"
    assert parse_dhclient_leases(text, now=NOW) == "168.63.129.16"


@pytest.mark.parametrize("line", ["OPTION_245=a83f8110", "private_245=a8:3f:81:10", "dhcp4.private_245 = a8:3f:81:10"])
def test_named_options_of_networkd_and_network_manager_are_read(line):
    assert parse_named_option(f"# private data\nADDRESS=10.0.0.4\n{line}\nLIFETIME=1\n") == "168.63.129.16"


def test_another_option_is_not_mistaken_for_it():
    assert parse_named_option("OPTION_2450=a83f8110\nXOPTION_245=a83f8110\nOPTION_245=\n") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("var/lib/dhcp/dhclient.eth0.leases", lease("64:4f:0:9")),
        ("var/lib/dhclient/dhclient-eth0.lease", lease("64:4f:0:9")),
        ("var/lib/dhclient/dhclient.leases", lease("64:4f:0:9")),
        ("var/lib/NetworkManager/dhclient-uuid-eth0.lease", lease("64:4f:0:9")),
        ("run/systemd/netif/leases/2", "OPTION_245=644f0009\n"),
        ("var/lib/NetworkManager/internal-uuid-eth0.lease", "OPTION_245=644f0009\n"),
        ("run/NetworkManager/devices/2", "[dhcp4]\nprivate_245=64:4f:00:09\n"),
    ],
)
def test_every_dhcp_client_is_asked(tmp_path, name, text):
    put(tmp_path, name, text)
    assert find_endpoint(tmp_path, now=NOW) == "http://100.79.0.9"


def test_without_a_lease_the_address_is_the_well_known_one(tmp_path):
    assert find_endpoint(tmp_path, now=NOW) == DEFAULT_ENDPOINT == "http://169.254.169.254"


def test_of_several_files_the_newest_with_a_valid_lease_wins(tmp_path):
    put(tmp_path, "var/lib/dhcp/a.leases", lease("64:4f:0:1"), age_seconds=300)
    put(tmp_path, "var/lib/dhcp/b.leases", lease("64:4f:0:2"), age_seconds=200)
    put(tmp_path, "var/lib/dhcp/c.leases", lease("64:4f:0:3", PAST), age_seconds=100)
    assert find_endpoint(tmp_path, now=NOW) == "http://100.79.0.2"


def test_broken_and_unreadable_files_are_skipped(tmp_path):
    put(tmp_path, "var/lib/dhcp/good.leases", lease("64:4f:0:1"), age_seconds=300)
    (tmp_path / "var/lib/dhcp/binary.leases").write_bytes(os.urandom(4096))
    (tmp_path / "var/lib/dhcp/folder.leases").mkdir()
    (tmp_path / "var/lib/dhcp/dangling.leases").symlink_to(tmp_path / "nowhere")
    assert find_endpoint(tmp_path, now=NOW) == "http://100.79.0.1"


def record(option, value, *, expiry=0, vendor=0):
    padding = b"\0" * (-len(value) % 4)
    return struct.pack("<5I", option, 0, len(value), vendor, expiry) + value + padding


ADDRESS = bytes([100, 79, 0, 9])


def test_windows_options_are_walked_over_padding_to_option_245():
    value = record(12, b"my-host") + record(53, b"\5") + record(1, b"") + record(245, ADDRESS)
    assert parse_interface_options(value, now=NOW) == "100.79.0.9"


def test_expired_vendor_and_odd_windows_options_are_passed_over():
    past = int(NOW.timestamp()) - 1
    odd = record(245, ADDRESS, expiry=past) + record(245, ADDRESS, vendor=1) + record(245, b"\1\2")
    assert parse_interface_options(odd, now=NOW) is None
    assert parse_interface_options(odd + record(245, ADDRESS, expiry=past + 60), now=NOW) == "100.79.0.9"


@given(value=st.binary(max_size=200))
def test_any_bytes_of_the_registry_give_an_answer(value):
    parse_interface_options(value, now=NOW)


@given(text=st.text(max_size=200))
def test_any_text_of_a_lease_file_gives_an_answer(text):
    parse_dhclient_leases(lease(text), now=NOW)
    parse_named_option(f"OPTION_245={text}")
    parse_address(text)
