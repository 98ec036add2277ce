"""The settings of the portal: one TOML file, read into frozen values with every mistake told at once.

A file of its own, because the portal is a server of its own. The rules are those of the agent's file: nothing unknown
is passed over, and a secret never stands in it. The text under a field is the reference of that setting.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from bridge.config.approval import KeySettings
from bridge.config.mistakes import Problems
from bridge.config.toml import Check, convert
from bridge.config.trusted_keys import key_mistakes
from bridge.errors import ConfigurationError, SecretUnavailable
from bridge.system.secrets import Secret

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

CONFIG_VARIABLE = "SCHEDULED_EVENTS_PORTAL_CONFIG"
SYSTEM_CONFIG = Path("/etc/scheduled-events-portal/portal.toml")
_SYSTEM_STATE = Path("/var/lib/scheduled-events-portal")
_HIGHEST_PORT = 65535
_Text = Annotated[str, Meta(min_length=1)]


def _listen(value: str) -> None:
    host, _, port = value.rpartition(":")
    is_port = re.fullmatch("[0-9]{1,5}", port) and int(port) <= _HIGHEST_PORT
    try:
        is_address = host == "localhost" or bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        is_address = False
    if not (is_port and is_address):
        raise ValueError(
            '"address:port", such as "127.0.0.1:8443", "0.0.0.0:8443" or "[::1]:8443"; port 0 takes a free one'
        )


#: Where Microsoft keeps the certificates of its authorities.
AUTHORITIES_URLS = ("https://www.microsoft.com/pkiops/certs", "https://www.microsoft.com/pki/mscorp")


def _authorities_url(value: str) -> None:
    try:
        parts = urlsplit(value)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and bool(parts.path.strip("/"))
    except ValueError:
        is_usable = False
    if not is_usable or "@" in value or "?" in value or "#" in value:
        raise ValueError(f"an address with a path, such as {AUTHORITIES_URLS[0]}")


def _uuid(value: str) -> None:
    if not re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", value):
        raise ValueError("the id of a subscription, a UUID")


def _address(value: str) -> None:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        raise ValueError('an IP address, such as "127.0.0.1"') from None


_Listen = Annotated[str, Check(_listen)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[server]``: where agents, people and programs reach the portal."""

    listen: _Listen = "127.0.0.1:8443"
    """Address and port. Agents speak plain http to a loopback address only: elsewhere give a certificate, or put a
    proxy that speaks TLS before it."""
    cert_file: _Text | None = None
    """The certificate of the server with its chain, PEM. Default: plain http."""
    key_file: _Text | None = None
    """The private key of `cert_file`, PEM."""

    def __post_init__(self) -> None:
        """Raise ValueError when only one half of a certificate is given."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together. Give both, or none for plain http.")


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[operator]``: /healthz, /readyz and /metrics, on a listener of their own that needs no token."""

    listen: _Listen = "127.0.0.1:9465"
    """Address and port."""


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[database]``: what the portal remembers, in a file of SQLite or a database of PostgreSQL."""

    file: _Text | None = None
    """The SQLite database. Default: portal.db in $STATE_DIRECTORY, else in /var/lib/scheduled-events-portal."""
    url: _Text | None = None
    """A database of PostgreSQL, for several processes behind a load balancer, such as
    `postgresql://portal@db.example.net/portal?sslmode=verify-full`; everything that libpq reads there, but no
    password. Needs the extra `portal-postgresql`."""
    password_file: _Text | None = None
    """A file with the password for `url`; read again for each connection. Default: as libpq finds one itself."""
    password_env: _Text | None = None
    """The environment variable that holds the password."""

    def __post_init__(self) -> None:
        """Raise ValueError for two databases, two places of the password, and a password in the address."""
        if self.file is not None and self.url is not None:
            raise ValueError("file and url are both set; keep one.")
        if self.password_file is not None and self.password_env is not None:
            raise ValueError("password_file and password_env are both set; keep one.")
        if self.url is None and (self.password_file or self.password_env):
            raise ValueError("there is a password, but no url to show it to. Set url, or take the password out.")
        if self.url is not None and (mistake := _mistake_of(self.url)):
            raise ValueError(mistake)

    def password(self) -> Secret:
        """Return the password for `url`."""
        return Secret(key="database.password", file=self.password_file, env=self.password_env)


def _mistake_of(url: str) -> str | None:
    """Return why *url* is no address of a database, without a word of it: somebody may have put a password there."""
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None or "password" in parts.query.casefold()
    except ValueError:
        return "url is no address that can be read."
    if parts.scheme not in {"postgresql", "postgres"} or parts.fragment:
        return "url must begin with postgresql:// and have no #."
    return "url has a password in it. Put that into password_file or password_env." if has_password else None


class AttestedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[agents.attested]``: agents whose VM Azure vouches for; each gets a token that counts for an hour."""

    subscriptions: Annotated[tuple[Annotated[str, Check(_uuid)], ...], Meta(min_length=1)]
    """The subscriptions whose VMs are let in. Anybody with an Azure account has genuine documents."""
    secret_file: _Text | None = None
    """A file with the secret that challenges and tokens are signed with, of 32 characters or more; several, one a line:
    the first signs, all count. Read again when it changes. Every process of a portal has the same."""
    secret_env: _Text | None = None
    """The environment variable that holds the secret."""
    nonce: Literal["required", "preferred"] = "required"
    """required: a document counts with a challenge of this portal in it, and once. preferred: another nonce does too,
    for a metadata service that goes on giving documents of earlier requests; whoever saw one can show it for five
    minutes."""
    roots_file: _Text | None = None
    """The roots, PEM, that a document's signer must lead to. Default: those of Azure."""
    intermediates_file: _Text | None = None
    """Certificates of authorities below the roots, PEM, for a portal that cannot fetch them. They are not trusted."""
    intermediates_urls: tuple[Annotated[str, Check(_authorities_url)], ...] = AUTHORITIES_URLS
    """Where the certificates of such authorities may be fetched: what a document names is asked for below these alone.
    An empty list: nowhere."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one place of the secret."""
        if (self.secret_file is None) == (self.secret_env is None):
            raise ValueError("set secret_file or secret_env, and one of them only.")

    def secret(self) -> Secret:
        """Return the secrets that challenges and tokens are signed with."""
        return Secret(key="agents.attested.secret", file=self.secret_file, env=self.secret_env)


class AgentsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[agents]``: how agents show who they are. One of its ways is needed."""

    token_file: _Text | None = None
    """A file with the bearer tokens that agents may show, one a line; read again when it changes. Any VM that has one
    may send records in any VM's name."""
    token_env: _Text | None = None
    """The environment variable that holds the token."""
    webhook_secret_file: _Text | None = None
    """A file with the secrets (`whsec_...`) by which records may be signed as Standard Webhooks says, one a line."""
    webhook_secret_env: _Text | None = None
    """The environment variable that holds the secret."""
    attested: AttestedSettings | None = None
    """Attested documents, the way to prefer: no secret on the VM, and no VM can speak for another."""

    def __post_init__(self) -> None:
        """Raise ValueError for two places of one secret, and when no agent could ever be let in."""
        for name in ("token", "webhook_secret"):
            if getattr(self, f"{name}_file") and getattr(self, f"{name}_env"):
                raise ValueError(f"{name}_file and {name}_env are both set; keep one.")
        if not any(getattr(self, name) for name in self.__struct_fields__):
            raise ValueError(
                "no agent could send a record. Write [agents.attested], or set token_file or token_env, or "
                "webhook_secret_file or webhook_secret_env."
            )

    def token(self) -> Secret:
        """Return the tokens that agents may show."""
        return Secret(key="agents.token", file=self.token_file, env=self.token_env)

    def webhook_secret(self) -> Secret:
        """Return the secrets by which records may be signed."""
        return Secret(key="agents.webhook_secret", file=self.webhook_secret_file, env=self.webhook_secret_env)


class ReadersSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[readers]``: programs that read events and the audit. Without the table nobody may."""

    token_file: _Text | None = None
    """A file with the bearer tokens that readers may show, one a line; read again when it changes."""
    token_env: _Text | None = None
    """The environment variable that holds the token."""

    def __post_init__(self) -> None:
        """Raise ValueError for two places of one secret."""
        if self.token_file and self.token_env:
            raise ValueError("token_file and token_env are both set; keep one.")

    def token(self) -> Secret:
        """Return the tokens that readers may show."""
        return Secret(key="readers.token", file=self.token_file, env=self.token_env)


class PeopleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[people]``: who may look and decide in a browser. `portal users add` makes those who sign in by a password."""

    required_approvals: Annotated[int, Meta(ge=1, le=9)] = 1
    """How many different people must approve an event before agents are told. One is enough for a hold."""
    session_hours: Annotated[float, Meta(gt=0, le=168)] = 12.0
    """For how long a person stays signed in."""
    origin: _Text | None = None
    """What a browser calls the portal, such as `https://portal.example.net`. Default: as the Host header says; set it
    where a proxy changes that header."""
    proxy_header: _Text | None = None
    """The header in which a proxy names the person, such as `X-Forwarded-User` of oauth2-proxy. The proxy must take the
    header away from what comes to it."""
    proxy_addresses: tuple[Annotated[str, Check(_address)], ...] = ()
    """The addresses of proxies before the portal. That header is believed from them alone, and so is what they put at
    the end of `X-Forwarded-For`: wrong passwords are counted by the address from which a person comes."""
    proxy_role: Literal["viewer", "approver"] = "viewer"
    """What somebody may do whom the proxy names and `portal users` does not know."""

    def __post_init__(self) -> None:
        """Raise ValueError when a header would be believed from nowhere."""
        if self.proxy_header and not self.proxy_addresses:
            raise ValueError("proxy_header is believed from proxy_addresses alone. Give these too.")


class SigningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[signing]``: the key by which the portal signs what people decide. Without it the portal only carries."""

    kid: _Text
    """The name under which the VMs trust the key, in `[[approval.remote.keys]]`."""
    approver: _Text = "portal"
    """The approver that the VMs give to the key."""
    private_key_file: _Text
    """The private key, as `scheduled-events-bridge keygen` makes one."""


class PortalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of the file."""

    server: ServerSettings = ServerSettings()
    """Where the portal is reached."""
    operator: OperatorSettings = OperatorSettings()
    """Health and metrics."""
    database: DatabaseSettings = DatabaseSettings()
    """What the portal remembers."""
    agents: AgentsSettings
    """How agents show who they are."""
    readers: ReadersSettings = ReadersSettings()
    """Programs that read."""
    people: PeopleSettings = PeopleSettings()
    """Who may look and decide."""
    signing: SigningSettings | None = None
    """The portal's own key."""
    keys: tuple[KeySettings, ...] = ()
    """Whose signed decisions the portal carries to the agents, one table each: the keys that the VMs trust."""

    def __post_init__(self) -> None:
        """Raise ValueError for two keys of one name, and for one key under two names."""
        mistakes = key_mistakes([key.trusted() for key in self.keys])
        if mistakes:
            raise ValueError(" ".join(mistakes))


#: Path of a table, and its struct.
TABLES: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("server", ServerSettings),
    ("operator", OperatorSettings),
    ("database", DatabaseSettings),
    ("agents", AgentsSettings),
    ("agents.attested", AttestedSettings),
    ("readers", ReadersSettings),
    ("keys", KeySettings),
    ("people", PeopleSettings),
    ("signing", SigningSettings),
)


def check_secrets(settings: PortalSettings) -> None:
    """Raise ConfigurationError with every secret that is configured and cannot be read.

    Later, while the portal runs, one that cannot be read refuses whoever needs it, and is read again.
    """
    mistakes = []
    agents, readers, database = settings.agents, settings.readers, settings.database
    for secret in (agents.token(), agents.webhook_secret(), readers.token(), database.password()):
        try:
            secret.values()
        except SecretUnavailable as error:
            mistakes.append(str(error))
    if mistakes:
        raise ConfigurationError(*mistakes)


def address_of(listen: str) -> tuple[str, int]:
    """Return the host of *listen*, without the brackets of IPv6, and its port."""
    host, _, port = listen.rpartition(":")
    return ("127.0.0.1" if host == "localhost" else host.strip("[]")), int(port)


def read(table: Mapping[str, Any]) -> PortalSettings:
    """Return the settings of a parsed file; raise ConfigurationError with every mistake of it."""
    problems = Problems()
    settings = convert(table, PortalSettings, "", problems)
    if problems.sentences or settings is None:
        raise ConfigurationError(*problems.sentences)
    return settings


def load(path: Path) -> PortalSettings:
    """Return the settings of the file at *path*; raise ConfigurationError with every mistake of it."""
    try:
        table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ConfigurationError(
            f"The portal's configuration {path} cannot be read: {error.strerror or error}. Mend that, or name another "
            "file with --config."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"The portal's configuration {path} is no valid TOML: {error}.") from error
    return read(table)


def find(explicit: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file to read: *explicit*, else the environment's, else the system's."""
    if explicit is not None:
        return explicit
    named = environ.get(CONFIG_VARIABLE, "")
    return Path(named) if named else SYSTEM_CONFIG


def database_file(settings: PortalSettings, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the SQLite database; it need not exist yet."""
    if settings.database.file is not None:
        return Path(settings.database.file)
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    return (Path(given) if given else _SYSTEM_STATE) / "portal.db"
