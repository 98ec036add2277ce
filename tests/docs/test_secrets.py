"""Runs the program of the secrets page with a strict stub of Key Vault."""

import base64
import json
import os
import re
import subprocess
import sys

import doc_pages
import pytest

from bridge.testing import Simulator
from bridge.testing.http_contract import Answer, HttpPeer

PAGE = doc_pages.page("docs/operate/secrets.md")
PROGRAM = doc_pages.marked(PAGE, "file: fetch-secrets")
VAULT = "fleet-secrets"


def refusal(request):
    """Return the reasons why Key Vault would reject *request*."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ").split(".")
    claims = json.loads(base64.urlsafe_b64decode(token[1] + "=" * (-len(token[1]) % 4))) if len(token) > 1 else {}
    wrong = {
        "method": request.method != "GET",
        "path": not re.fullmatch(r"/secrets/[0-9a-zA-Z-]{1,127}", request.path),
        "api-version": dict(request.query) != {"api-version": "7.4"},
        "audience": claims.get("aud") not in ("https://vault.azure.net", "https://vault.azure.net/"),
    }
    return ", ".join(name for name, is_so in wrong.items() if is_so)


@pytest.fixture
def vault():
    """A local stub of Key Vault, and its secrets by name."""
    with HttpPeer() as peer:
        peer.secrets = {"webhook-secret": "whsec_1", "token": "two\nlines"}

        def answer(request):
            if refusal(request):
                return Answer(status=401, body=refusal(request).encode())
            value = peer.secrets.get(request.path.rpartition("/")[2])
            if value is None:
                return Answer(status=404, body=b"SecretNotFound")
            return Answer(status=200, body=json.dumps({"value": value, "id": request.path}).encode())

        peer.reply(answer)
        yield peer


@pytest.fixture
def fetch(vault, tmp_path):
    """Return a function that runs the program of the page with local addresses and paths."""
    places = {
        "http://169.254.169.254": None,
        "https://{vault}.vault.azure.net": f"http://{vault.address.authority}",
        "/etc/scheduled-events-bridge": str(tmp_path / "etc"),
        '"root", "scheduled-events-bridge"': f"{os.getuid()}, {os.getgid()}",
    }
    (tmp_path / "etc").mkdir()
    with Simulator("quiet") as simulator:
        places["http://169.254.169.254"] = simulator.endpoint
        text = PROGRAM
        for there, here in places.items():
            assert text.count(there) == (2 if there.startswith("/etc") else 1), there
            text = text.replace(there, here)
        program = tmp_path / "fetch-secrets"
        program.write_text(text)

        def run(*names):
            command = [sys.executable, "-I", str(program), VAULT, *names]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

        yield run


@pytest.mark.skipif(sys.platform == "win32", reason="requires systemd")
def test_documented_program_writes_vault_secrets_for_the_agent(fetch, vault, tmp_path):
    etc = tmp_path / "etc"
    done = fetch("webhook-secret", "token")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name: path.read_text() for path in etc.iterdir()} == vault.secrets
    assert {path.stat().st_mode & 0o777 for path in etc.iterdir()} == {0o640}
    assert "whsec_1" not in done.stdout

    # Only a changed secret gets a new file.
    files = {path.name: path.stat().st_ino for path in etc.iterdir()}
    vault.secrets["token"] = "another"
    done = fetch("webhook-secret", "token")
    assert (done.returncode, done.stdout) == (0, "token has changed\n")
    assert (etc / "token").read_text() == "another"
    assert (etc / "webhook-secret").stat().st_ino == files["webhook-secret"]
