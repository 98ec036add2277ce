"""The keys of the sink `webhook`, the checks of their values, and the format that they choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bridge.sink import Secret
from sinks.http.config import HttpConfig, check_header, check_token_stays_private, one_of
from sinks.http.urls import plain_url
from sinks.webhook import pagerduty
from sinks.webhook.alertmanager import REFRESH_SECONDS, AlertmanagerFormat
from sinks.webhook.format import CloudEventsFormat, Format
from sinks.webhook.pagerduty import PagerDutyFormat
from sinks.webhook.samples import samples
from sinks.webhook.template import TemplateFormat, check_url_template, is_url_template

#: Keys that mean something to one format alone.
_KEYS_OF = {
    "alertmanager": ("tag_labels",),
    "pagerduty": ("routing_key_file", "routing_key_env", "urgent_as"),
    "template": ("template", "template_file", "content_type"),
}

#: Where a portal takes records, below its URL.
_RECORDS = "/records"
#: So often may an event be told again, in seconds: four times that is how long an alert lives.
_REFRESH = msgspec.Meta(ge=0.1, le=24 * 3600.0)


class WebhookConfig(HttpConfig, frozen=True, kw_only=True):
    """The keys of a ``[[sinks]]`` table of type webhook."""

    url: str | None = None
    """Where to POST; an address is enough for alertmanager, none is needed for pagerduty. Else url, url_file or
    url_env is required. What follows its host may be a template, with format template."""
    url_file: str | None = None
    """A file with the URL, whose path is often a secret; read again when it changes."""
    url_env: str | None = None
    """An environment variable with the URL."""
    format: Literal["cloudevents", "alertmanager", "pagerduty", "template"] = "cloudevents"
    """The shape of the body. alertmanager and pagerduty send nothing for heartbeats and outcomes of approvals."""
    credential: Literal["attested"] | None = None
    """For an ops portal, whose url ends in /records. attested: show a token that the portal gives for the document in
    which Azure says which VM this is; no secret is kept on the VM."""
    secret_file: str | None = None
    """A file of Standard Webhooks secrets (whsec_...), one a line: each signs, for rotation. Read again too."""
    secret_env: str | None = None
    """An environment variable with such a secret."""
    refresh_seconds: Annotated[float, _REFRESH] | None = None
    """An active event is told again every so many seconds, under the same id: a destination may forget. Default: 180
    for alertmanager, whose alerts end four times that after they were last told; else never. Not for pagerduty."""
    tag_labels: tuple[str, ...] = ()
    """alertmanager: the names of tags of the VM that become labels of its alerts."""
    routing_key_file: str | None = None
    """pagerduty: a file with the routing key of the service (Events API v2)."""
    routing_key_env: str | None = None
    """pagerduty: an environment variable with that key."""
    urgent_as: Literal["change", "alert"] = "change"
    """pagerduty: send Preempt and Terminate as change events, which page no one, or as alerts like the others."""
    template: str | None = None
    """template: the body in Jinja2, which may name `record` and each of its fields."""
    template_file: str | None = None
    """template: a file with that template; read when the sink starts."""
    content_type: str = "application/json"
    """template: the Content-Type. A body that is said to be JSON must be."""

    def __post_init__(self) -> None:
        """Raise ValueError with what is wrong."""
        super().__post_init__()
        if self.max_batch != 1:
            raise ValueError(f"max_batch is {self.max_batch}, but a webhook carries one record a request. Take it out.")
        one_of(secret_file=self.secret_file, secret_env=self.secret_env)
        self._check_url()
        self._check_other_formats_keys()
        if self.credential is not None:
            if self.format != "cloudevents":
                raise ValueError(f"credential is for a portal, and format = {self.format!r} is not. Take one out.")
            portal_of(self.url)
        if self.format == "pagerduty":
            self._check_routing_key()
            if self.refresh_seconds is not None:
                raise ValueError(
                    "refresh_seconds is not for format = 'pagerduty', which forgets nothing: an incident that a person "
                    "has resolved would open again. Take it out."
                )
        if self.format == "template":
            check_header("Content-Type", self.content_type, where="content_type")
            _template(self)

    @property
    def token_key(self) -> str | None:
        """Return the key that has a token got, and shown with each request; None when there is none."""
        return super().token_key if self.credential is None else "credential"

    def _ways(self) -> dict[str, str | None]:
        return {**super()._ways(), "credential": self.credential}

    def _check_url(self) -> None:
        one_of(url=self.url, url_file=self.url_file, url_env=self.url_env)
        if self.url is not None and self.format == "template" and is_url_template(self.url):
            check_url_template(self.url)
        elif self.url is not None:
            plain_url(self.url, key="url")
            check_token_stays_private(self, self.url)
            if self.format == "pagerduty":
                pagerduty.check_url(self.url)
        elif self.url_file is None and self.url_env is None and self.format != "pagerduty":
            raise ValueError("url is missing. Set url, or url_file or url_env when its path is a secret.")

    def _check_other_formats_keys(self) -> None:
        for name, keys in _KEYS_OF.items():
            given = [key for key in keys if getattr(self, key) != _default(key)]
            if given and self.format != name:
                raise ValueError(f"{given[0]} is for format = {name!r}, but the format is {self.format!r}.")

    def _check_routing_key(self) -> None:
        one_of(routing_key_file=self.routing_key_file, routing_key_env=self.routing_key_env)
        if self.routing_key_file is None and self.routing_key_env is None:
            raise ValueError("routing_key_file or routing_key_env is missing: format = 'pagerduty' needs one.")


def portal_of(url: str | None) -> str:
    """Return the URL of the portal that takes records at *url*; raise ValueError when that is none of a portal."""
    if url is None or not url.endswith(_RECORDS) or "?" in url or "#" in url:
        raise ValueError(
            "credential is for a portal, whose url ends in /records. Write it as url, such as "
            "https://portal.example.net/api/v1/records."
        )
    return url.removesuffix(_RECORDS)


def check_labels(config: WebhookConfig, labels: Mapping[str, str]) -> None:
    """Raise ValueError if a template cannot render a record with *labels*."""
    if config.format == "template":
        _template(config).try_out(samples(config, labels), config.url)


def refresh_seconds_of(config: WebhookConfig) -> float | None:
    """Return how often the sink with *config* is told again what is active, None for never."""
    default = REFRESH_SECONDS if config.format == "alertmanager" else None
    return default if config.refresh_seconds is None else config.refresh_seconds


def format_of(config: WebhookConfig) -> Format:
    """Return the format that *config* chooses; raise ValueError for a template that went wrong since."""
    if config.format == "alertmanager":
        refresh_seconds = config.refresh_seconds or REFRESH_SECONDS
        return AlertmanagerFormat(refresh_seconds=refresh_seconds, tag_labels=config.tag_labels)
    if config.format == "pagerduty":
        routing_key = Secret(key="routing_key", file=config.routing_key_file, env=config.routing_key_env)
        return PagerDutyFormat(routing_key, urgent_as=config.urgent_as)
    return _template(config) if config.format == "template" else CloudEventsFormat()


def _template(config: WebhookConfig) -> TemplateFormat:
    one_of(template=config.template, template_file=config.template_file)
    text = config.template
    if config.template_file is not None:
        try:
            text = Path(config.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise ValueError(f"template_file {config.template_file} cannot be read: {reason}.") from None
    if text is None:
        raise ValueError("template or template_file is missing: format = 'template' needs one.")
    return TemplateFormat(text, content_type=config.content_type)


def _default(key: str) -> Any:
    return next(field.default for field in msgspec.structs.fields(WebhookConfig) if field.name == key)
