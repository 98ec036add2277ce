"""Logs the settings at startup, and warns about sinks that are no longer configured."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from bridge.config.loader import Settings
from bridge.events.otel_resource import own_version

logger = logging.getLogger(__name__)


def log_running(settings: Settings, directory: Path, *, vm_name: str | None, imds: str) -> None:
    """Log that the agent is running, with its settings and the address of IMDS."""
    logger.info(
        "The agent is running.",
        extra={
            "version": own_version(),
            "configuration": str(settings.file or "none, so the defaults"),
            "vm": vm_name,
            "imds": imds,
            "state_directory": str(directory),
            "sinks": [sink.name for sink in settings.sinks],
        },
    )
    if settings.file is None:
        logger.info(
            "The agent uses the defaults, because no configuration file exists. The first request turns Scheduled "
            "Events on for this VM. A reboot or redeploy that you request may then wait up to 15 minutes for an "
            "approval."
        )


def warn_unconfigured_sinks(settings: Settings, pending: Mapping[str, int]) -> None:
    """Log a warning for each sink that has undelivered records but is not configured."""
    configured = {sink.name for sink in settings.sinks}
    for name, count in pending.items():
        if name not in configured and count:
            logger.warning(
                "A sink that is not in the configuration has undelivered records. Configure the sink again, move "
                "the records with `outbox move %s NEW`, or discard them with `outbox discard --sink %s`.",
                name,
                name,
                extra={"sink": name, "pending": count},
            )
