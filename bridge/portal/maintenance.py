"""Runs periodic work: retention, limits, inventory, audit entries, and free memory."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import sys
from datetime import datetime, timedelta
from pathlib import Path

from bridge.clock import Clock, format_time
from bridge.errors import ConfigurationError
from bridge.logs import ThrottledLog
from bridge.portal.audit import Entry
from bridge.portal.ingest import VmLimits
from bridge.portal.inventory import read_inventory
from bridge.portal.settings import PortalSettings
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import StoreThreads, StoreUnavailable, note_alive
from bridge.portal.store.notifications import delete_notifications
from bridge.portal.store.retention import delete_old, trim_next_vm
from bridge.portal.store.vms import store_inventory

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 5.0
_TRIM_ROUNDS = 12
_HOUR_ROUNDS = 720
_malloc_trim = None
if sys.platform != "win32":
    with contextlib.suppress(OSError, AttributeError):
        _malloc_trim = ctypes.CDLL(None).malloc_trim


class Maintenance:
    """The periodic work of a portal process.

    Several portal processes can do this work at the same time.
    """

    def __init__(self, settings: PortalSettings, *, store: StoreThreads, vm_limits: VmLimits, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._vm_limits = vm_limits
        self._clock = clock
        self._log = ThrottledLog(logger, clock=clock)
        self._inventory_read: tuple[int, int] | None = None

    async def follow(self) -> None:
        """Work until the task is canceled."""
        for number in itertools.count():
            now = self._clock.now()
            await asyncio.to_thread(return_free_memory)
            try:
                await self._store.write(note_alive, format_time(now))
                await self._load_inventory()
                if number % _TRIM_ROUNDS == 0:
                    await self._trim_vms()
                if number % _HOUR_ROUNDS == 0:
                    await self._delete_old(now)
                    await self._audit_refusals(now)
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Old data is not deleted. {error}")
            else:
                self._log.recovered("store", "Old data is deleted again.")
            await asyncio.sleep(_ROUND_SECONDS)

    async def _load_inventory(self) -> None:
        """Store the inventory file if it has changed and is valid."""
        if self._settings.inventory.file is None:
            return
        file = Path(self._settings.inventory.file)
        try:
            found = await asyncio.to_thread(file.stat)
            version = found.st_mtime_ns, found.st_size
            if version == self._inventory_read:
                return
            entries = await asyncio.to_thread(read_inventory, file)
        except (OSError, ConfigurationError) as error:
            self._log.problem("inventory", logging.ERROR, f"The portal keeps the earlier inventory: {error}")
            return
        await self._store.write(store_inventory, entries)
        self._inventory_read = version
        self._log.recovered("inventory", "The inventory is valid again.")

    async def _trim_vms(self) -> None:
        key: str | None = ""
        while key is not None:
            key = await self._store.write(trim_next_vm, after=key, most_bytes=self._settings.limits.vm_bytes)

    async def _delete_old(self, now: datetime) -> None:
        before = format_time(now - timedelta(days=self._settings.database.retention_days))
        while await self._store.write(delete_old, before=before):
            pass
        await self._store.write(delete_notifications, before=format_time(now - timedelta(days=1)))

    async def _audit_refusals(self, now: datetime) -> None:
        """For each VM with refused requests, add one audit entry per reason for refusal."""
        found = self._vm_limits.take_refusals()
        new = [
            Entry(actor=vm_key, action="records_refused", subject="", details={"reason": reason, "requests": number})
            for (vm_key, reason), number in sorted(found.items())
        ]
        await self._store.write(add_entries, new, at=format_time(now))


def return_free_memory() -> None:
    """Return free memory to the operating system (malloc_trim(3)).

    Only glibc needs this function. Closed connections leave holes in its heap. Without this function, the holes keep
    their memory. Buffers of new TLS connections (256 KB each) fill them, and the heap grows each time that the fleet
    reconnects.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
