r"""The address that DHCP option 245 names, read from whatever DHCP client this machine runs.

Microsoft's Scheduled Events pages: a VM in a virtual network finds the service at 169.254.169.254; one that is not
(cloud services, classic VMs) must take the address from DHCP option 245. The Azure Linux agent and cloud-init read
the same option as the address of the wire server, from the same files; the DHCP server need not be asked again. On
an ordinary VM option 245 names the wire server too (168.63.129.16), so this is looked up only where it is asked for
(``imds.endpoint = "auto"``).

Formats: dhclient.leases(5), where unknown options print as hex pairs, or as a quoted text when every byte is
printable; systemd-networkd and NetworkManager, ``NAME=hex``; Windows, the binary value DhcpInterfaceOptions under
``HKLM\SYSTEM\CurrentControlSet\Services\Tcpip\Parameters\Interfaces\{guid}``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

DEFAULT_ENDPOINT = "http://169.254.169.254"

_OPTION = 245
_MAX_LEASE_BYTES = 1024 * 1024

_DHCLIENT_FILES = (
    "var/lib/dhcp/*.lease*",
    "var/lib/dhcp3/*.lease*",
    "var/lib/dhclient/*.lease*",
    "var/lib/NetworkManager/dhclient-*.lease",
    "var/db/dhclient.leases.*",
)
_NETWORKD_FILES = ("run/systemd/netif/leases/*",)
_NETWORK_MANAGER_FILES = ("run/NetworkManager/devices/*", "var/lib/NetworkManager/*.lease")

_DHCLIENT_OPTION = re.compile(r"\s*option\s+unknown-245\s+(.+?)\s*;\s*")
_DHCLIENT_EXPIRE = re.compile(r"\s*expire\s+(.+?)\s*;.*")
_NAMED_OPTION = re.compile(r"\s*(?:dhcp4[._])?(?:option|private|unknown)[_-]245\s*[=:]\s*(.+?)\s*", re.IGNORECASE)
_ESCAPE = re.compile(r"\\([0-7]{3}|.)")

_WINDOWS_INTERFACES = r"SYSTEM\CurrentControlSet\Services\Tcpip\Parameters\Interfaces"
_WINDOWS_RECORD = struct.Struct("<5I")  # option, class, length, vendor flag, expiry in Unix time; then the value


def find_endpoint(root: Path = Path("/"), *, now: datetime | None = None) -> str:
    """Return ``http://ADDRESS`` with the address of option 245, or of 169.254.169.254 when no lease names one.

    The newest file with a valid lease wins, dhclient's first, then systemd-networkd's, then NetworkManager's, on
    Windows the registry. Files that cannot be read or understood are skipped.
    """
    moment = now or datetime.now(timezone.utc)
    sources: tuple[tuple[tuple[str, ...], Callable[[str], str | None]], ...] = (
        (_DHCLIENT_FILES, lambda text: parse_dhclient_leases(text, now=moment)),
        (_NETWORKD_FILES, parse_named_option),
        (_NETWORK_MANAGER_FILES, parse_named_option),
    )
    for patterns, parse in sources:
        for text in _newest_first(root, patterns):
            address = parse(text)
            if address is not None:
                return f"http://{address}"
    for value in _windows_interface_options():
        address = parse_interface_options(value, now=moment)
        if address is not None:
            return f"http://{address}"
    return DEFAULT_ENDPOINT


def parse_dhclient_leases(text: str, *, now: datetime) -> str | None:
    """Return the address in the last lease of *text* that has not expired, None when there is none.

    dhclient appends each new lease, so the last is the newest. A lease without a readable expiry is not used.
    """
    found: str | None = None
    address: str | None = None
    is_valid = False
    for line in text.splitlines():
        if line.startswith("lease"):
            address, is_valid = None, False
        elif line.startswith("}"):
            found = address if is_valid and address is not None else found
        elif match := _DHCLIENT_OPTION.fullmatch(line):
            address = parse_address(match[1])
        elif match := _DHCLIENT_EXPIRE.fullmatch(line):
            is_valid = _is_ahead(match[1], now)
    return found


def parse_named_option(text: str) -> str | None:
    """Return the address in a line like ``OPTION_245=a83f8110`` or ``private_245=a8:3f:81:10``, the last one."""
    found: str | None = None
    for line in text.splitlines():
        match = _NAMED_OPTION.fullmatch(line)
        if match is not None:
            found = parse_address(match[1]) or found
    return found


def parse_interface_options(value: bytes, *, now: datetime) -> str | None:
    """Return the address in Windows' DhcpInterfaceOptions, None when it holds no option 245 that is still valid.

    The value is a row of records: five little-endian 32-bit numbers (option, class, length, vendor flag, expiry as
    Unix time), then the option's bytes, filled up to a multiple of four.
    """
    position = 0
    while position + _WINDOWS_RECORD.size <= len(value):
        option, _, length, is_vendor, expiry = _WINDOWS_RECORD.unpack_from(value, position)
        position += _WINDOWS_RECORD.size
        packed = value[position : position + length]
        if option == _OPTION and not is_vendor and (expiry == 0 or expiry > now.timestamp()):
            address = _usable(packed)
            if address is not None:
                return address
        position += (length + 3) // 4 * 4
    return None


def parse_address(text: str) -> str | None:
    """Return the IPv4 address that *text* writes: ``a8:3f:81:10``, ``a83f8110``, ``"d@2<"`` or dotted."""
    bare = text.strip()
    quoted = len(bare) > 1 and bare[0] == bare[-1] == '"'
    if quoted:
        unescaped = _ESCAPE.sub(_unescaped, bare[1:-1])
        if len(unescaped) == 4:  # noqa: PLR2004 - an IPv4 address has four bytes
            return _usable(unescaped.encode("latin-1", "replace"))
        bare = unescaped
    try:
        if "." in bare:
            return _usable(ipaddress.IPv4Address(bare).packed)
        pairs = bare.split(":") if ":" in bare else [bare]
        return _usable(bytes.fromhex("".join(pair.zfill(2) for pair in pairs)))
    except ValueError:
        return None


def _unescaped(match: re.Match[str]) -> str:
    digits = match[1]
    return chr(int(digits, 8) & 0xFF) if len(digits) > 1 else digits


def _usable(packed: bytes) -> str | None:
    if len(packed) != 4:  # noqa: PLR2004 - an IPv4 address has four bytes
        return None
    address = ipaddress.IPv4Address(packed)
    is_no_host = address.is_unspecified or address.is_multicast or address.is_reserved
    return None if is_no_host else str(address)


def _is_ahead(expiry: str, now: datetime) -> bool:
    """Return whether dhclient's *expiry* has not passed: ``never``, ``epoch SECONDS`` or ``WEEKDAY DATE TIME``, UTC."""
    if expiry == "never":
        return True
    words = expiry.split()
    try:
        if words[0] == "epoch":
            return int(words[1]) > now.timestamp()
        moment = datetime.strptime(" ".join(words[1:3]), "%Y/%m/%d %H:%M:%S").replace(tzinfo=timezone.utc)
    except (ValueError, IndexError):
        return False
    return moment > now


def _newest_first(root: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    found = [entry for pattern in patterns for entry in _matching(root, pattern)]
    for _, path in sorted(found, reverse=True):
        with contextlib.suppress(OSError), path.open("rb") as file:
            yield file.read(_MAX_LEASE_BYTES).decode("latin-1")


def _matching(root: Path, pattern: str) -> list[tuple[float, Path]]:
    try:
        return [(path.stat().st_mtime, path) for path in root.glob(pattern) if path.is_file()]
    except OSError:  # a directory that is not ours to list, or a file gone meanwhile
        return []


def _windows_interface_options() -> Iterator[bytes]:
    if sys.platform != "win32":
        return
    import winreg  # noqa: PLC0415 - exists on Windows only

    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_INTERFACES) as interfaces:
        for position in range(winreg.QueryInfoKey(interfaces)[0]):
            # An interface without DHCP has no such value.
            with (
                contextlib.suppress(OSError),
                winreg.OpenKey(interfaces, winreg.EnumKey(interfaces, position)) as interface,
            ):
                value, kind = winreg.QueryValueEx(interface, "DhcpInterfaceOptions")
                if kind == winreg.REG_BINARY and value:
                    yield bytes(value)
