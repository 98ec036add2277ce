"""Checks the PEM files of a TLS client when the agent reads its configuration.

The HTTP sinks, the Event Hubs sink, and the ops portal have the same three keys: `ca_file`, `client_cert_file`, and
`client_key_file`. The check reports an unusable file before the first connection needs the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def tls_file_problems(
    *, ca_file: str | None = None, client_cert_file: str | None = None, client_key_file: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the key of each unusable file, with a sentence that states the problem."""
    files = {"ca_file": ca_file, "client_cert_file": client_cert_file, "client_key_file": client_key_file}
    for key, file in files.items():
        if file is None:
            continue
        if not Path(file).is_file():
            yield key, f"The file {file} does not exist. Put a PEM file there."
        elif key != "ca_file" and _is_encrypted(Path(file)):
            # OpenSSL would ask a terminal for the passphrase, and hang.
            yield key, f"The key in {file} is encrypted. Remove the passphrase from the key."


def _is_encrypted(path: Path) -> bool:
    try:
        return b"ENCRYPTED" in path.read_bytes()
    except OSError:  # the current user cannot read the file, but the agent's user may be able to
        return False
