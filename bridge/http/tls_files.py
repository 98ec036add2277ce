"""The PEM files of a TLS client, as far as they are looked at when a configuration is read.

The sinks over HTTP and Event Hubs, and the ops portal, have the same keys: `ca_file`, `client_cert_file` and
`client_key_file`. A file that is wrong is found before the night it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def tls_file_problems(
    *, ca_file: str | None = None, client_cert_file: str | None = None, client_key_file: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the name of each key whose file cannot be used, and a sentence that says why."""
    files = {"ca_file": ca_file, "client_cert_file": client_cert_file, "client_key_file": client_key_file}
    for key, file in files.items():
        if file is None:
            continue
        if not Path(file).is_file():
            yield key, f"The file {file} does not exist. Put a PEM file there."
        elif key != "ca_file" and _is_encrypted(Path(file)):
            # OpenSSL would ask a terminal for the passphrase, and hang.
            yield key, f"The key in {file} is encrypted, and nobody is there to type its passphrase. Take it away."


def _is_encrypted(path: Path) -> bool:
    try:
        return b"ENCRYPTED" in path.read_bytes()
    except OSError:  # not readable for the user who checks the file; the agent may be another
        return False
