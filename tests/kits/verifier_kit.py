"""A document verifier with its challenges and a trusted certificate authority, for tests."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from asn1crypto import cms
from azure_documents import SUBSCRIPTION_ID, VM_ID, Authority, base64_of, said
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from bridge.portal.agent_tokens import Challenges
from bridge.portal.attested import DocumentRefused, DocumentVerifier
from bridge.portal.certificate_chain import IntermediateCertificates
from bridge.system.access_tokens import DocumentRefusal
from bridge.testing import ManualClock

NOW = datetime(2030, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
NAME = "metadata.azure.com"
SECRET = "one secret of forty characters, or so, or more"


class VerifierKit:
    """A portal's verifier with *options*, its trusted certificates, and a trusted authority."""

    def __init__(self, azure: Authority, **options: Any) -> None:
        self.azure = azure
        self.clock = ManualClock(NOW)
        self.challenges = Challenges(lambda: (SECRET,), clock=self.clock.clock)
        self.used: set[tuple[str, str]] = set()
        known = options.pop("known", (azure.intermediate,))
        self.verifier = DocumentVerifier(
            **{
                "roots": [azure.root],
                "subscriptions": [SUBSCRIPTION_ID.upper()],
                "challenges": self.challenges,
                "take_document": self._take,
                "intermediates": IntermediateCertificates(clock=self.clock.clock, base_urls=(), known=known),
                "clock": self.clock.clock,
                **options,
            }
        )

    def _take(self, vm_id: str, nonce: str) -> bool:
        is_new = (vm_id, nonce) not in self.used
        self.used.add((vm_id, nonce))
        return is_new

    def content(self, **changes: Any) -> bytes:
        """Return the content of a valid document, with *changes*."""
        return said(changes.pop("nonce", None) or self.challenges.new(), self.clock.now(), **changes)

    def document(
        self, *beside: x509.Certificate, names: tuple[str, ...] = (NAME,), content: bytes | None = None, **options: Any
    ) -> bytes:
        """Return a valid document, with *options*."""
        of_the_signer = ("valid", "serial", "usage", "key_usage", "more")
        issued = {name: options.pop(name) for name in of_the_signer if name in options}
        signer = self.azure.signer(*names, **issued)
        return self.azure.document(content or self.content(), signer, *beside, **options)

    def refusal(self, der: bytes | str) -> DocumentRefusal:
        """Return the reason why *der* (or a text) is rejected."""
        document = der if isinstance(der, str) else base64_of(der)
        before = len(self.used)
        with pytest.raises(DocumentRefused) as caught:
            self.verifier.vm_of(document)
        assert len(self.used) == before, "a rejected document stores nothing"
        assert VM_ID not in str(caught.value)
        return caught.value.reason

    def accepts(self, der: bytes) -> bool:
        """Return whether *der* is accepted for the VM of the tests."""
        return self.verifier.vm_of(base64_of(der)) == VM_ID


def with_bag(der: bytes, *certificates: x509.Certificate) -> bytes:
    """Return the document *der* with exactly *certificates*."""
    outer = cms.ContentInfo.load(der)
    ders = [each.public_bytes(Encoding.DER) for each in certificates]
    found = [cms.CertificateChoices(name="certificate", value=cms.Certificate.load(each)) for each in ders]
    outer["content"]["certificates"] = cms.CertificateSet(found)
    return bytes(outer.dump(force=True))
