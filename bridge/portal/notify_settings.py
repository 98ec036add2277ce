"""The settings of the webhooks that receive notifications."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bridge.config.toml import Check, check_name, check_url
from bridge.errors import SecretUnavailable
from bridge.http.tls_files import tls_file_problems
from bridge.portal.webhook_signatures import usable_keys
from bridge.system.secrets import Secret

_Text = Annotated[str, Meta(min_length=1)]


class Kind(str, Enum):
    """The reason for a notification."""

    UNDECIDED = "undecided"
    SECOND_APPROVER = "second_approver"
    REFUSED = "refused"
    AGENT_DISCONNECTED = "agent_disconnected"


def _url(value: str) -> None:
    check_url(value, "an address such as https://example.net/hook. If the URL contains a secret, use url_file")


class NotifySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``[[notify]]``: a webhook that receives notifications when a person must act."""

    name: Annotated[str, Check(check_name)]
    """A unique name for logs and metrics. After a change, the portal sends current notifications again."""
    format: Literal["standard", "slack", "teams", "pagerduty"] = "standard"
    """The format of the body. standard: JSON as in the Standard Webhooks specification."""
    url: Annotated[str, Check(_url)] | None = None
    """The URL of the webhook. Default for pagerduty: the Events API v2."""
    url_file: _Text | None = None
    """A file with the URL. Use a file for Slack and Teams, because anyone who knows the URL can post messages."""
    secret_file: _Text | None = None
    """For standard, a file with the secrets (`whsec_...`) that sign each request, one per line. For pagerduty, a file
    with the integration key."""
    kinds: Annotated[tuple[Kind, ...], Meta(min_length=1)] = tuple(Kind)
    """undecided: an event is undecided shortly before its NotBefore. second_approver: an approval needs another
    approver. refused: an agent refused a decision. agent_disconnected: the agent of a VM with an announced event has
    been disconnected for at least a minute."""
    minutes: Annotated[float, Meta(gt=0, le=10_080)] = 10.0
    """The number of minutes before NotBefore for the kind undecided."""
    proxy: Annotated[str, Check(_url)] | None = None
    """The URL of an HTTP proxy."""
    ca_file: _Text | None = None
    """A PEM file with the trusted authorities for the server's certificate. Default: the authorities of certifi."""

    def __post_init__(self) -> None:
        if (self.url is None) == (self.url_file is None) and (self.format != "pagerduty" or self.url is not None):
            raise ValueError("Set either url or url_file, but not both.")
        if self.format == "pagerduty" and self.secret_file is None:
            raise ValueError('format = "pagerduty" needs secret_file, a file with the integration key of the service.')
        if self.format in {"slack", "teams"} and self.secret_file is not None:
            raise ValueError(f'format = "{self.format}" does not use secret_file. Remove secret_file.')

    def secret(self) -> Secret:
        """Return the secrets of `secret_file`."""
        return Secret(key=f"notify.{self.name}.secret", file=self.secret_file)

    def url_secret(self) -> Secret:
        """Return the URL of `url_file`."""
        return Secret(key=f"notify.{self.name}.url", file=self.url_file)

    def file_mistakes(self) -> Iterator[str]:
        """Yield the reasons why the files cannot be used."""
        yield from (f"notify.{self.name}.{key}: {why}" for key, why in tls_file_problems(ca_file=self.ca_file))
        try:
            for url in self.url_secret().values():
                if not url.startswith(("https://", "http://")):
                    yield f"notify.{self.name}.url_file: {self.url_file} must contain a URL such as https://example.net."
            secrets = self.secret().values()
        except SecretUnavailable as error:
            yield str(error)
            return
        if self.format == "standard" and len(usable_keys(secrets)) < len(secrets):
            yield (
                f"notify.{self.name}.secret_file: {self.secret_file} must contain whsec_ and the Base64 of 24 to 64 "
                'bytes on each line. To create a secret, run: echo "whsec_$(openssl rand -base64 32)"'
            )
