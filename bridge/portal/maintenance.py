"""Runs periodic work: retention, limits, inventory, and audit of refused requests."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from pathlib import Path

from bridge.clock import Clock, format_time
from bridge.logs import ThrottledLog
from bridge.portal.audit import Entry
from bridge.portal.inventory import InventoryInvalid, read_inventory
from bridge.portal.settings import PortalSettings
from bridge.portal.store.audit import add_entries
from bridge.portal.store.database import StoreThreads, StoreUnavailable, note_alive
from bridge.portal.store.notifications import delete_notifications
from bridge.portal.store.retention import delete_old, trim_vms
from bridge.portal.store.vms import store_inventory
from bridge.portal.vm_limits import VmLimits

logger = logging.getLogger(__name__)

_ROUND_SECONDS = 5.0
_TRIM_ROUNDS = 12
_HOUR_ROUNDS = 720


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
        rounds = 0
        while True:
            try:
                await self._store.write(note_alive, self._now())
                await self.load_inventory()
                if rounds % _TRIM_ROUNDS == 0:
                    await self._store.write(trim_vms, most_bytes=self._settings.limits.vm_bytes)
                if rounds % _HOUR_ROUNDS == 0:
                    await self.delete_old()
                    await self.audit_refusals()
            except StoreUnavailable as error:
                self._log.problem("store", logging.ERROR, f"Old data is not deleted. {error}")
            else:
                self._log.recovered("store", "Old data is deleted again.")
            rounds += 1
            await asyncio.sleep(_ROUND_SECONDS)

    async def load_inventory(self) -> None:
        """Store the inventory file if it has changed.

        If the file is invalid, keep the earlier inventory.
        """
        name = self._settings.inventory.file
        if name is None:
            return
        try:
            version = await asyncio.to_thread(_version_of, Path(name))
            if version == self._inventory_read:
                return
            entries = await asyncio.to_thread(read_inventory, Path(name))
        except (OSError, InventoryInvalid) as error:
            self._log.problem("inventory", logging.ERROR, f"The portal keeps the earlier inventory: {error}")
            return
        await self._store.write(store_inventory, entries)
        self._inventory_read = version
        self._log.recovered("inventory", "The inventory is valid again.")

    async def delete_old(self) -> None:
        """Delete the data that is older than the retention."""
        days = self._settings.database.retention_days
        before = format_time(self._clock.now() - timedelta(days=days))
        has_more = True
        while has_more:
            has_more = await self._store.write(delete_old, before=before)
        await self._store.write(delete_notifications, before=format_time(self._clock.now() - timedelta(days=1)))

    async def audit_refusals(self) -> None:
        """Add one audit entry per reason for each VM whose requests the portal refused."""
        found = self._vm_limits.take_refusals()
        new = [
            Entry(actor=vm_key, action="records_refused", subject="", details={"reason": reason, "requests": number})
            for (vm_key, reason), number in sorted(found.items())
        ]
        if new:
            await self._store.write(add_entries, new, at=self._now())

    def _now(self) -> str:
        return format_time(self._clock.now())


def _version_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size
