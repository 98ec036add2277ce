"""The settings of the `webhook` sink."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from bridge.sink import Secret
from sinks.http.config import HttpConfig, check_header, check_token_stays_private, one_of
from sinks.http.urls import check_plain_url, http_url
from sinks.webhook import pagerduty
from sinks.webhook.alertmanager import REFRESH_SECONDS, AlertmanagerFormat
from sinks.webhook.format import CloudEventsFormat, Format
from sinks.webhook.pagerduty import PagerDutyFormat
from sinks.webhook.template import TemplateFormat, check_url_template, is_url_template

#: Keys that apply to only one format.
_KEYS_OF = {
    "alertmanager": ("tag_labels",),
    "pagerduty": ("routing_key_file", "routing_key_env", "urgent_as"),
    "template": ("template", "template_file", "content_type"),
}

#: The path below the portal's URL that accepts records.
_RECORDS = "/records"
#: The valid refresh interval in seconds. The lifetime of an alert is four intervals.
_REFRESH = msgspec.Meta(ge=0.1, le=24 * 3600.0)


class WebhookConfig(HttpConfig, frozen=True, kw_only=True):
    """The settings of the sink type `webhook`."""

    url: str | None = None
    """The destination of the POST requests. For alertmanager, the base URL is enough. Every format except
    pagerduty requires url, url_file, or url_env. With format template, the part after the host can be a template."""
    url_file: str | None = None
    """A file with the URL, for a URL with a secret path. The agent rereads the file when it changes."""
    url_env: str | None = None
    """An environment variable with the URL."""
    format: Literal["cloudevents", "alertmanager", "pagerduty", "template"] = "cloudevents"
    """The format of the body. alertmanager and pagerduty do not send heartbeats or the outcomes of approvals."""
    credential: Literal["attested"] | None = None
    """For an ops portal with a url that ends in /records. attested: send a token that the portal issues in exchange
    for Azure's attested document of this VM. The VM stores no secret."""
    secret_file: str | None = None
    """A file with Standard Webhooks secrets (whsec_...), one per line. Each secret signs every request, to support
    rotation. The agent rereads the file when it changes."""
    secret_env: str | None = None
    """An environment variable with a Standard Webhooks secret."""
    refresh_seconds: Annotated[float, _REFRESH] | None = None
    """Resend each active event at this interval, in seconds, with the same id, because a destination might lose its
    alerts. In Alertmanager, an alert ends four intervals after the last send. Default: 180 for alertmanager, and no
    refreshes for other formats. Not valid for pagerduty."""
    tag_labels: tuple[str, ...] = ()
    """alertmanager: the names of VM tags to add to alerts as labels."""
    routing_key_file: str | None = None
    """pagerduty: a file with the routing key of the service (Events API v2)."""
    routing_key_env: str | None = None
    """pagerduty: an environment variable with the routing key."""
    urgent_as: Literal["change", "alert"] = "change"
    """pagerduty: send Preempt and Terminate as change events, which page no one, or as alerts like other types."""
    template: str | None = None
    """template: the body as a Jinja2 template. The template can use `record` and all fields of the record. If the
    body is blank, the sink sends no request for the record."""
    template_file: str | None = None
    """template: a file with the template. The agent reads the file when the sink starts."""
    content_type: str = "application/json"
    """template: the Content-Type. For a JSON Content-Type, the body must be valid JSON."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_batch != 1:
            raise ValueError(
                f"max_batch is {self.max_batch}, but a webhook sends one record per request. Remove max_batch."
            )
        one_of(secret_file=self.secret_file, secret_env=self.secret_env)
        self._check_url()
        self._check_other_formats_keys()
        if self.credential is not None:
            if self.format != "cloudevents":
                raise ValueError(
                    f"credential is for a portal and needs format = 'cloudevents', but the format is {self.format!r}."
                )
            portal_of(self.url)
        if self.format == "pagerduty":
            one_of(routing_key_file=self.routing_key_file, routing_key_env=self.routing_key_env)
            if self.routing_key_file is None and self.routing_key_env is None:
                raise ValueError("routing_key_file or routing_key_env is missing. Set one for format = 'pagerduty'.")
            if self.refresh_seconds is not None:
                raise ValueError(
                    "refresh_seconds is not valid for format = 'pagerduty'. A refresh would reopen an incident that a "
                    "person has resolved. Remove refresh_seconds."
                )
        if self.format == "template":
            check_header("Content-Type", self.content_type, where="content_type")
            template_of(self)

    @property
    def token_key(self) -> str | None:
        """Return the name of the setting that requests a token for each request, or None."""
        return super().token_key if self.credential is None else "credential"

    def _ways(self) -> dict[str, str | None]:
        return {**super()._ways(), "credential": self.credential}

    def _check_url(self) -> None:
        one_of(url=self.url, url_file=self.url_file, url_env=self.url_env)
        if self.url is not None:
            self.check_url(self.url, is_secret=False)
            check_token_stays_private(self, self.url)
        elif self.url_file is None and self.url_env is None and self.format != "pagerduty":
            raise ValueError("url is missing. Set url. If the path of the URL is a secret, set url_file or url_env.")

    def check_url(self, url: str, *, is_secret: bool) -> None:
        """Raise ValueError if *url* is invalid, or if it contains a password and is not secret."""
        if self.format == "template" and is_url_template(url):
            check_url_template(url)
        elif is_secret:
            http_url(url, key="url")
        else:
            check_plain_url(url, key="url")
        if self.format == "pagerduty":
            pagerduty.check_url(url)

    def _check_other_formats_keys(self) -> None:
        defaults = {field.name: field.default for field in msgspec.structs.fields(self)}
        for name, keys in _KEYS_OF.items():
            given = [key for key in keys if getattr(self, key) != defaults[key]]
            if given and self.format != name:
                raise ValueError(f"{given[0]} is for format = {name!r}, but the format is {self.format!r}.")


def portal_of(url: str | None) -> str:
    """Return the URL of the portal that accepts records at *url*. Otherwise raise ValueError."""
    if url is None or not url.endswith(_RECORDS) or "?" in url or "#" in url:
        raise ValueError(
            "The setting credential works only with a portal, whose url ends in /records. Set url, for example "
            "https://portal.example.net/api/v1/records."
        )
    return url.removesuffix(_RECORDS)


def format_of(config: WebhookConfig) -> Format:
    """Return the format of *config*. Raise ValueError if the template is invalid."""
    if config.format == "alertmanager":
        refresh_seconds = config.refresh_seconds or REFRESH_SECONDS
        return AlertmanagerFormat(refresh_seconds=refresh_seconds, tag_labels=config.tag_labels)
    if config.format == "pagerduty":
        routing_key = Secret(key="routing_key", file=config.routing_key_file, env=config.routing_key_env)
        return PagerDutyFormat(routing_key, urgent_as=config.urgent_as)
    return template_of(config) if config.format == "template" else CloudEventsFormat()


def template_of(config: WebhookConfig) -> TemplateFormat:
    """Return the template of *config*. Raise ValueError if the template is invalid."""
    one_of(template=config.template, template_file=config.template_file)
    text = config.template
    if config.template_file is not None:
        try:
            text = Path(config.template_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is not valid UTF-8"
            raise ValueError(f"template_file {config.template_file} cannot be read: {reason}.") from None
    if text is None:
        raise ValueError("template or template_file is missing. Set one for format = 'template'.")
    return TemplateFormat(text, content_type=config.content_type)
