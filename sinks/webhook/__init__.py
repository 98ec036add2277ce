"""The sink `webhook`: records by HTTP POST, as CloudEvents, alerts for Alertmanager or PagerDuty, or by a template.

Public: `sink` (WebhookSink), `config` (WebhookConfig). `format` is the interface that the four formats fill in.
"""
