"""The certified OpenID Connect provider `oidc-provider` (npm) as a process, and a browser that logs in there.

OIDC_PROVIDER is the directory with the installed package, and with the npm package `node` if Node.js is older than 20.
The script .ci/run installs both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
import requests

_CONFIGURATION = Path(__file__).with_suffix(".mjs")


class CertifiedProvider:
    """The provider at `issuer`; a context manager. *users* are the claims of each user by login name."""

    def __init__(self, directory: Path, **users: dict[str, Any]) -> None:
        packages = os.environ.get("OIDC_PROVIDER")
        if packages is None:
            pytest.skip("OIDC_PROVIDER does not name a directory with the npm package oidc-provider")
        self._file = directory / "users.json"
        self.change(**users)
        own_node = Path(packages) / "node_modules" / "node" / "bin" / "node"
        node = str(own_node) if own_node.exists() else "node"
        command = [node, str(_CONFIGURATION), packages, str(self._file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.issuer = next(line.split()[1] for line in self._process.stdout if line.startswith("issuer "))

    def change(self, **users: dict[str, Any]) -> None:
        """Replace all users."""
        self._file.write_text(json.dumps(users), encoding="utf-8")

    def __enter__(self) -> CertifiedProvider:  # noqa: PYI034  # Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class ProviderBrowser:
    """A browser at the provider, with the session cookies of one user."""

    def __init__(self) -> None:
        self._session = requests.Session()

    def authorize(self, url: str, user: str = "") -> str:
        """Open the login page at *url*, log in as *user*, and return the URL of the portal's callback.

        Without *user*, return an empty string if the provider asks for a login.
        """
        answer = self._session.get(url, allow_redirects=False, timeout=20)
        while (target := answer.headers.get("Location")) is not None:
            if not target.startswith(url.partition("/auth?")[0]) and not target.startswith("/"):
                return target
            if "/interaction/" in target and not user:
                return ""
            answer = self._follow(urljoin(url, target), user)
        raise AssertionError(answer.text)

    def log_out(self, url: str) -> None:
        """Open the logout page at *url*, and confirm."""
        page = self._session.get(url, timeout=20)
        fields = dict(re.findall(r'name="(\w+)" value="([^"]*)"', page.text))
        [action] = re.findall(r'action="([^"]+)"', page.text)
        confirmed = self._session.post(action, {**fields, "logout": "yes"}, timeout=20)
        assert confirmed.status_code == 200, confirmed.text

    def _follow(self, url: str, user: str) -> requests.Response:
        if "/interaction/" in url:
            form = {"prompt": "login", "login": user, "password": "any"}
            return self._session.post(url, form, allow_redirects=False, timeout=20)
        return self._session.get(url, allow_redirects=False, timeout=20)
