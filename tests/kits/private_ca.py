"""A private certificate authority, like that of a company."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

import trustme


class CertificateFiles(NamedTuple):
    """A certificate and its key in PEM format."""

    cert_file: Path
    key_file: Path


class PrivateCa:
    """Issues certificates into *directory*. Clients with `ca_file` trust all of them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._authority = trustme.CA()
        self.ca_file = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, name: str) -> CertificateFiles:
        """Return a new certificate for *name* and the loopback addresses, valid for servers and clients."""
        issued = self._authority.issue_cert(name, "127.0.0.1", "::1")
        files = CertificateFiles(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(str(files.cert_file))
        issued.private_key_pem.write_to_path(str(files.key_file))
        return files

    def server_context(self, name: str = "localhost", *, wants_client: object = None) -> ssl.SSLContext:
        """Return a server context with a certificate for *name*. *wants_client* requires a client certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self.issue(name))
        if wants_client:
            context.load_verify_locations(self.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context
