"""An OpenID Connect provider that signs arbitrary tokens for tests."""

from __future__ import annotations

import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

CLIENT = "portal"


@functools.cache
def _keys() -> tuple[Any, Any, Any]:
    rsa = [RSAKey.generate_key(2048, {"kid": "k1"}) for _ in range(2)]
    return rsa[0], rsa[1], ECKey.generate_key("P-256", {"kid": "k2"})


class OidcStub:
    """A provider at `issuer`. *claims* replace the right claims, and *token* replaces the whole ID token."""

    def __init__(self) -> None:
        self.key, self.stranger, self.ec = _keys()
        self.claims: dict[str, Any] = {}
        self.token: str | None = None
        self.signs_with: Any = self.key
        self.header: dict[str, Any] = {"alg": "RS256", "kid": "k1"}
        self.nonce, self.groups, self.is_down = "", ["ops"], False
        self.forms: list[dict[str, str]] = []
        self.published_issuer: str | None = None
        self._codes: set[str] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.issuer = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop the provider."""
        self._server.shutdown()
        self._server.server_close()

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the table ``[people.oidc]``."""
        groups = [
            {"group": "ops", "role": "approver", "scope": ["labels.team:payments"]},
            {"group": "all", "role": "viewer"},
        ]
        table = {"issuer": self.issuer, "client_id": CLIENT, "client_secret_env": "OIDC_SECRET", "groups": groups}
        return {**table, **more}

    def id_token(self) -> str:
        """Return an ID token."""
        now = int(time.time())
        right = {"iss": self.issuer, "aud": CLIENT, "sub": "4711", "iat": now, "exp": now + 300, "nonce": self.nonce}
        right |= {"preferred_username": "ann", "groups": self.groups}
        claims = {name: value for name, value in {**right, **self.claims}.items() if value is not None}
        return self.token or jwt.encode(self.header, claims, self.signs_with)

    def _answer(self, path: str, form: dict[str, str]) -> tuple[int, Any]:
        if self.is_down:
            return 503, {}
        if path == "/.well-known/openid-configuration":
            urls = {name: f"{self.issuer}/{name}" for name in ("authorization_endpoint", "token_endpoint", "jwks_uri")}
            return 200, {
                "issuer": self.published_issuer or self.issuer,
                "end_session_endpoint": f"{self.issuer}/end",
                **urls,
            }
        if path == "/jwks_uri":
            return 200, {"keys": [self.key.as_dict(private=False), self.ec.as_dict(private=False)]}
        self.forms.append(form)
        code = form.get("code", "")
        if code in self._codes:
            return 400, {"error": "invalid_grant"}
        if code:
            self._codes.add(code)
        return 200, {"id_token": self.id_token(), "access_token": "a", "refresh_token": "r"}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                self._send({name: values[0] for name, values in parse_qs(body).items()})

            def _send(self, form: dict[str, str]) -> None:
                status, found = stub._answer(self.path, form)  # the same object
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        return Handler
