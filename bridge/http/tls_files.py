"""Checks the PEM files of a TLS client when the agent reads its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def tls_file_problems(
    *, ca_file: str | None = None, client_cert_file: str | None = None, client_key_file: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the setting and the problem of each unusable file."""
    files = {"ca_file": ca_file, "client_cert_file": client_cert_file, "client_key_file": client_key_file}
    for key, file in files.items():
        if file is None:
            continue
        if not Path(file).is_file():
            yield key, f"The file {file} does not exist. Put a PEM file there."
        elif key != "ca_file" and _is_encrypted(Path(file)):
            # OpenSSL would request the passphrase on a terminal and hang.
            yield key, f"The key in {file} is encrypted. Remove the passphrase from the key."


def _is_encrypted(path: Path) -> bool:
    try:
        return b"ENCRYPTED" in path.read_bytes()
    except OSError:  # the current user cannot read the file, but the agent's user may be able to
        return False
