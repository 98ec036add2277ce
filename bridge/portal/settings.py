"""Reads and validates the portal's configuration file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from bridge.config.approval import KeySettings
from bridge.config.loader import parsed
from bridge.config.mistakes import Problems
from bridge.config.secret_keys import readable_secrets, secret_files
from bridge.config.toml import Check, convert
from bridge.config.trusted_keys import key_mistakes
from bridge.errors import ConfigurationError, SecretUnavailable
from bridge.portal import setting_checks
from bridge.portal.grants import Grant, Role, scope_group
from bridge.portal.notify_settings import NotifySettings
from bridge.portal.setting_checks import AUTHORITIES_URLS
from bridge.system.secrets import Secret

CONFIG_VARIABLE = "SCHEDULED_EVENTS_PORTAL_CONFIG"
SYSTEM_CONFIG = Path("/etc/scheduled-events-portal/portal.toml")
_SYSTEM_STATE = Path("/var/lib/scheduled-events-portal")
#: `check_secrets` skips certificates, and the signing key, because `DecisionSigner` checks the mode of the key.
_EXEMPT_FILES = (".cert_file", ".roots_file", ".intermediates_file", ".private_key_file")
_Text = Annotated[str, Meta(min_length=1)]
_Listen = Annotated[str, setting_checks.LISTEN]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[server]``: the listener for agents, people, and programs."""

    listen: _Listen = "127.0.0.1:8443"
    """Address and port. Agents use plain HTTP for loopback addresses only. For other addresses, set a certificate, or
    put a proxy with TLS in front of the portal."""
    cert_file: _Text | None = None
    """A PEM file with the certificate of the server and its chain. Default: plain HTTP."""
    key_file: _Text | None = None
    """A PEM file with the private key of `cert_file`."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together. Set both, or neither for plain HTTP.")


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[operator]``: the listener for health checks and metrics, without authentication."""

    listen: _Listen = "127.0.0.1:9465"
    """Address and port."""


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[database]``: an SQLite file or a PostgreSQL database."""

    file: _Text | None = None
    """The SQLite database. Default: portal.db in $STATE_DIRECTORY, else in /var/lib/scheduled-events-portal."""
    url: _Text | None = None
    """The URL of a PostgreSQL database without a password, for several processes behind a load balancer. Example:
    `postgresql://portal@db.example.net/portal?sslmode=verify-full`. Needs the `portal-postgresql` extra."""
    password_file: _Text | None = None
    """A file with the password for `url`. The portal reads the file for each connection. Without a password, libpq
    uses its own defaults, such as `~/.pgpass`."""
    password_env: _Text | None = None
    """The environment variable with the password."""
    retention_days: Annotated[int, Meta(ge=1, le=36_500)] = 400
    """The number of days after which the portal deletes records, and events for which no new records arrive. The portal
    keeps the audit."""

    def __post_init__(self) -> None:
        self.password()  # raises ValueError if two sources are set
        if self.file is not None and self.url is not None:
            raise ValueError("file and url are both set. Keep one.")
        if self.url is None and (self.password_file or self.password_env):
            raise ValueError("A password is set without url. Set url, or remove the password.")
        if self.url is not None and (mistake := _mistake_of(self.url)):
            raise ValueError(mistake)

    def password(self) -> Secret:
        """Return the password for `url`."""
        return Secret(key="database.password", file=self.password_file, env=self.password_env)


def _mistake_of(url: str) -> str | None:
    """Return a sentence about the error in *url*, or None.

    The text never quotes *url*, because *url* can contain a password.
    """
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None or "password" in parts.query.casefold()
    except ValueError:
        return "url is not a valid URL."
    if parts.scheme not in {"postgresql", "postgres"} or parts.fragment:
        return "url must begin with postgresql:// and have no #."
    return "url contains a password. Use password_file or password_env instead." if has_password else None


class AttestedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[agents.attested]``: agents exchange an attested document for a one-hour token."""

    subscriptions: Annotated[tuple[Annotated[str, Check(setting_checks.uuid)], ...], Meta(min_length=1)]
    """The subscriptions whose VMs can get a token. The list is required, because anyone with an Azure account can get a
    genuine document."""
    secret_file: _Text | None = None
    """A file with the secret that signs challenges and tokens, at least 32 characters. To rotate the secret,
    add the new secret as the first line. The portal signs with the first secret and accepts all secrets in the file.
    The portal reloads the file when it changes. All processes of a portal need the same secret."""
    secret_env: _Text | None = None
    """The environment variable with the secret."""
    nonce: Literal["required", "preferred"] = "required"
    """required: a document must contain a challenge of this portal, and is accepted once. preferred: a document with
    another nonce is also accepted, because a metadata service might return the document of an earlier request. A copy
    of such a document is valid for five minutes."""
    roots_file: _Text | None = None
    """A PEM file with the trusted root certificates for the signers of documents. Default: the roots of Azure."""
    intermediates_file: _Text | None = None
    """A PEM file with intermediate certificates, for a portal that cannot download them. The portal does not trust them
    as roots."""
    intermediates_urls: tuple[Annotated[str, Check(setting_checks.authorities_url)], ...] = AUTHORITIES_URLS
    """The portal downloads intermediate certificates only below these URLs. An empty list disables downloads."""

    def __post_init__(self) -> None:
        if (self.secret_file is None) == (self.secret_env is None):
            raise ValueError("Set either secret_file or secret_env, but not both.")

    def secret(self) -> Secret:
        """Return the secrets that sign challenges and tokens."""
        return Secret(key="agents.attested.secret", file=self.secret_file, env=self.secret_env)


class AgentsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[agents]``: the credentials of agents. At least one kind is required."""

    token_file: _Text | None = None
    """A file with the bearer tokens of agents, one per line. The portal rereads the file when it changes. A VM with
    such a token can send records for every VM."""
    token_env: _Text | None = None
    """The environment variable with the token."""
    webhook_secret_file: _Text | None = None
    """A file with the secrets (`whsec_...`), one per line, for records that are signed as Standard Webhooks."""
    webhook_secret_env: _Text | None = None
    """The environment variable with the secret."""
    attested: AttestedSettings | None = None
    """Attested documents (recommended). The VM needs no secret, and no VM can send records for another VM."""

    def __post_init__(self) -> None:
        self.token()  # raises ValueError if two sources are set
        self.webhook_secret()
        if not any(getattr(self, name) for name in self.__struct_fields__):
            raise ValueError(
                "No agent can authenticate. Add [agents.attested], or set token_file, token_env, webhook_secret_file, "
                "or webhook_secret_env."
            )

    def token(self) -> Secret:
        """Return the tokens of agents."""
        return Secret(key="agents.token", file=self.token_file, env=self.token_env)

    def webhook_secret(self) -> Secret:
        """Return the secrets of signed records."""
        return Secret(key="agents.webhook_secret", file=self.webhook_secret_file, env=self.webhook_secret_env)


class ReadersSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[readers]``: the tokens of programs that read events and the audit."""

    token_file: _Text | None = None
    """A file with the bearer tokens of readers, one per line. The portal rereads the file when it changes."""
    token_env: _Text | None = None
    """The environment variable with the token."""

    def __post_init__(self) -> None:
        self.token()  # raises ValueError if two sources are set

    def token(self) -> Secret:
        """Return the tokens of readers."""
        return Secret(key="readers.token", file=self.token_file, env=self.token_env)


class OidcGroup(msgspec.Struct, frozen=True, kw_only=True):
    """``[[people.oidc.groups]]``: the role of the members of an OpenID Connect group."""

    group: _Text
    """A value of the claim that `groups_claim` names. For Entra ID, the object ID of the group."""
    role: Role
    """viewer, approver, or operator."""
    scope: tuple[Annotated[str, setting_checks.SCOPE], ...] = ()
    """The VMs for which the role applies, as `resource_group:NAME` or `labels.NAME:VALUE`. Default: all VMs."""


class OidcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[people.oidc]``: login through an OpenID Connect provider."""

    issuer: Annotated[str, Check(setting_checks.issuer)]
    """The issuer, exactly as the provider spells it in its configuration and in each ID token."""
    client_id: _Text
    """The ID of the portal at the provider. The redirect URI is `ORIGIN/login/callback`."""
    client_secret_file: _Text | None = None
    """A file with the secret of the client. The portal rereads the file for each login."""
    client_secret_env: _Text | None = None
    """The environment variable with the secret."""
    scopes: tuple[_Text, ...] = ("openid", "profile")
    """The requested scopes. For Entra ID, add `offline_access`. Otherwise, each session has only the role viewer
    after 15 minutes."""
    groups_claim: _Text = "groups"
    """The claim of the ID token that lists the groups."""
    name_claim: _Text = "preferred_username"
    """The claim with the displayed name. The portal identifies a person by the issuer and the subject only."""
    ca_file: _Text | None = None
    """A PEM file with the trusted authorities for the provider's certificate. Default: the authorities of certifi."""
    groups: Annotated[tuple[OidcGroup, ...], Meta(min_length=1)]
    """A user must be a member of at least one of these groups to log in."""

    def __post_init__(self) -> None:
        if (self.client_secret_file is None) == (self.client_secret_env is None):
            raise ValueError("Set either client_secret_file or client_secret_env, but not both.")

    def client_secret(self) -> Secret:
        """Return the secret of the client."""
        return Secret(key="people.oidc.client_secret", file=self.client_secret_file, env=self.client_secret_env)

    def grants(self, groups: Collection[object]) -> tuple[Grant, ...]:
        """Return the grants of a member of *groups*."""
        mapped = [each for each in self.groups if each.group in groups]
        return tuple(Grant(role=each.role, scope=tuple(map(scope_group, each.scope))) for each in mapped)


class PeopleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[people]``: sign-in and approval rules for the users of the pages."""

    required_approvals: Annotated[int, Meta(ge=1, le=9)] = 1
    """The number of different people who must approve an event. One person is enough for a hold."""
    session_hours: Annotated[float, Meta(gt=0, le=168)] = 8.0
    """The lifetime of a session."""
    idle_minutes: Annotated[float, Meta(gt=0, le=10_080)] = 60.0
    """A session also ends after this time without a request. Automatic updates of an open page do not count."""
    oidc: OidcSettings | None = None
    """OpenID Connect. With this table, local users can log in only from `local_login_from`."""
    local_login_from: tuple[Annotated[str, setting_checks.NETWORK], ...] = ()
    """The addresses or networks from which local users can log in when `oidc` is set, such as `10.1.0.0/24`."""
    origin: Annotated[str, Check(setting_checks.origin)] | None = None
    """The origin of the portal in a browser, such as `https://portal.example.net`. Default: from the Host header. Set
    this if a proxy changes that header."""
    proxy_header: _Text | None = None
    """The header with the name of the user whom a proxy has authenticated, such as `X-Forwarded-User` of oauth2-proxy.
    The proxy must remove this header from incoming requests."""
    proxy_addresses: tuple[Annotated[str, setting_checks.ADDRESS], ...] = ()
    """The addresses of the proxies. The portal accepts `proxy_header` only from these addresses. To count wrong
    passwords for each client, the portal also reads the `X-Forwarded-For` header from these addresses."""
    proxy_role: Literal["viewer", "approver"] = "viewer"
    """The role of a user whom the proxy authenticates but who has no local account."""

    def __post_init__(self) -> None:
        if self.proxy_header and not self.proxy_addresses:
            raise ValueError("proxy_header needs proxy_addresses.")
        if self.oidc is not None and self.origin is None:
            raise ValueError("oidc needs origin, which is the address of the portal in a browser.")


class SigningSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[signing]``: the key that signs the decisions of people."""

    kid: _Text
    """The name of the key on the VMs, in `[[approval.remote.keys]]`."""
    approver: _Text = "portal"
    """The approver that the VMs assign to the key, in `[[approval.remote.keys]]`."""
    private_key_file: _Text
    """The private key from `scheduled-events-bridge keygen`."""


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[limits]``: the limits of one VM, so that no VM can fill the page or the database."""

    record_bytes: Annotated[int, Meta(ge=65_536, le=1_048_576)] = 262_144
    """The maximum size of a record. The portal responds to a larger record with 413."""
    records_per_minute: Annotated[int, Meta(ge=60, le=100_000)] = 120
    """The maximum number of records per minute. The portal responds to further records with 429 and Retry-After. A
    record counts once more for every 16 KiB, and for every 10 events that it changes. A refused request counts
    like a record."""
    open_events: Annotated[int, Meta(ge=20, le=100_000)] = 200
    """The maximum number of open events. For further events, the portal keeps only the state. The records and events
    of a VM use at most `open_events` x `record_bytes`. At three quarters, the portal deletes the VM's oldest
    records and ended events. Beyond the limit, it stores only the state of events."""

    @property
    def vm_bytes(self) -> int:
        """Return the maximum size of the stored data of one VM."""
        return self.open_events * self.record_bytes


class InventorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[inventory]``: a list of VMs that determines their names, scopes, and groups."""

    file: _Text | None = None
    """A CSV or JSON file with the columns vmId, name, resourceGroup, and labels. The portal rereads the file when
    it changes. A VM that is not in the file is in no scope and no group."""


class PortalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration file. The class of each table describes the table."""

    server: ServerSettings = ServerSettings()
    operator: OperatorSettings = OperatorSettings()
    database: DatabaseSettings = DatabaseSettings()
    agents: AgentsSettings
    readers: ReadersSettings = ReadersSettings()
    people: PeopleSettings = PeopleSettings()
    signing: SigningSettings | None = None
    limits: LimitSettings = LimitSettings()
    inventory: InventorySettings = InventorySettings()
    keys: tuple[KeySettings, ...] = ()
    """The public keys for decisions that are signed outside the portal. The VMs must also trust these keys."""
    notify: Annotated[tuple[NotifySettings, ...], Meta(max_length=16)] = ()
    """The webhooks that receive notifications. Each webhook has one table."""

    def __post_init__(self) -> None:
        mistakes = key_mistakes([key.trusted() for key in self.keys])
        if len({each.name for each in self.notify}) < len(self.notify):
            mistakes += ("Two tables [[notify]] have the same name. Change one of the names.",)
        if self.notify and self.people.origin is None:
            mistakes += ("[[notify]] needs people.origin, such as https://portal.example.net, for its links.",)
        if mistakes:
            raise ValueError(" ".join(mistakes))


def check_secrets(settings: PortalSettings) -> None:
    """Raise ConfigurationError if a secret is unreadable or if other users can read it."""
    agents, attested, oidc = settings.agents, settings.agents.attested, settings.people.oidc
    files = secret_files(msgspec.to_builtins(settings))
    mistakes = [*readable_secrets(each for each in files if not each[0].endswith(_EXEMPT_FILES))]
    secrets = [agents.token(), agents.webhook_secret(), settings.readers.token(), settings.database.password()]
    secrets += [] if attested is None else [attested.secret()]
    secrets += [] if oidc is None else [oidc.client_secret()]
    for secret in secrets:
        try:
            secret.values()
        except SecretUnavailable as error:
            mistakes.append(str(error))
    mistakes += [mistake for target in settings.notify for mistake in target.file_mistakes()]
    if mistakes:
        raise ConfigurationError(*mistakes)


def read(table: Mapping[str, Any]) -> PortalSettings:
    """Return the settings of a parsed file. Raise ConfigurationError with all errors."""
    problems = Problems()
    settings = convert(table, PortalSettings, "", problems)
    if problems.sentences or settings is None:
        raise ConfigurationError(*problems.sentences)
    return settings


def load(path: Path | None) -> PortalSettings:
    """Return the settings of the file at *path*. Raise ConfigurationError with all errors.

    If *path* is None, use the path in the environment variable CONFIG_VARIABLE, or SYSTEM_CONFIG if it is not set.
    """
    return read(parsed(path or Path(os.environ.get(CONFIG_VARIABLE) or SYSTEM_CONFIG)))


def database_file(settings: PortalSettings, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the SQLite database. The file might not exist."""
    directory = environ.get("STATE_DIRECTORY", "").split(":")[0] or _SYSTEM_STATE
    return Path(settings.database.file or Path(directory, "portal.db"))
