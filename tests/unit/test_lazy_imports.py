"""Large libraries are imported only by programs that use them, because they take memory and time."""

import subprocess
import sys

import pytest

AZURE = {"azure", "msal", "aiohttp", "cryptography"}
EVENT_HUB = "name='x', fully_qualified_namespace='ns.servicebus.windows.net', eventhub='hub'"
PROGRAMS = {
    "the help": (
        "from bridge.cli.commands import commands; commands.main(['--help'], standalone_mode=False)",
        {"requests", "prometheus_client", "msgspec", "ssl"},
    ),
    "the agent without telemetry": ("import bridge.agent.agent, bridge.cli.run", {"opentelemetry", "requests"}),
    "decisions before the first arrives": (
        "import bridge.approval.decision_token, bridge.approval.signing",
        {"cryptography", "jwt"},
    ),
    "a configuration without sinks": (
        "from bridge.config.loader import load; load(None)",
        {
            f"sinks.{name}"
            for name in ("apprise", "command", "eventhubs", "eventlog", "file", "http", "otlp", "webhook")
        },
    ),
    "the apprise sink": ("import sinks.apprise", {"apprise"}),
    "the eventhubs sink over HTTPS": (
        f"from sinks.eventhubs.sink import *; EventHubsSink(EventHubsConfig(transport='https', {EVENT_HUB}))",
        {"asyncio", *AZURE},
    ),
    "the eventhubs sink over AMQP": (
        f"from sinks.eventhubs.sink import *; EventHubsSink(EventHubsConfig(transport='amqp', {EVENT_HUB}))",
        AZURE,
    ),
    "the otlp sink": (
        "from sinks.otlp.sink import *; OtlpSink(OtlpConfig(name='x', entra_scope='api://x')).close()",
        {"google.protobuf", "opentelemetry", *AZURE},
    ),
    "the webhook sink": (
        "from sinks.webhook.sink import *; WebhookSink(WebhookConfig(url='https://a.invalid', entra_scope='api://x'))",
        AZURE,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_library_is_not_imported_before_it_is_used(agent_env, name):
    code, libraries = PROGRAMS[name]
    listing = [sys.executable, "-W", "error", "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(listing, env=agent_env, check=True, timeout=60, capture_output=True, text=True)
    assert libraries & set(done.stdout.splitlines()[-1].split()) == set()
