"""The simulator as the token endpoint of azure-identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bridge.testing import Simulator


@contextmanager
def managed_identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    """Yield a simulator that issues the tokens. The proxy in the environment does not exist and must not be used."""
    for name in ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_CLIENT_ID", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with Simulator("quiet", listen="127.0.0.1:0") as simulator:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", simulator.endpoint)
        yield simulator
