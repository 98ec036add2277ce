"""Tests for the periodic work. tests/bench/test_portal.py measures the return of memory with 5,000 connections."""

import asyncio
import contextlib
import platform
import subprocess
import sys
from datetime import timedelta

import pytest
from fleet_records import NOW, fleet_record, vm_id_of
from fold_kit import add, all_events
from portal_databases import settings_of

from bridge.clock import format_time
from bridge.portal import maintenance
from bridge.portal.ingest import VmLimits
from bridge.portal.maintenance import Maintenance
from bridge.portal.schema import audit, properties, vms
from bridge.portal.store.database import StoreThreads
from bridge.testing import ManualClock

SCRIPT = """
from pathlib import Path
from bridge.portal.maintenance import return_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

before = resident()
blocks = [bytes(50_000) for _ in range(4_000)]
pinned = blocks[::50]
del blocks
with_holes = resident()
return_free_memory()
print(with_holes - before, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc needs this function")
def test_memory_of_holes_in_the_heap_returns_to_the_system():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    with_holes, afterwards = map(int, done.stdout.split())
    assert with_holes > 10_000
    assert afterwards < 0.3 * with_holes


def test_first_round_does_all_periodic_work(database, store, monkeypatch):
    add(store, fleet_record(0, event_id="old"), at=format_time(NOW - timedelta(days=401)))
    add(store, fleet_record(1, event_id="new"))
    store.write(lambda c: c.execute(vms.update().where(vms.c.vm_key == vm_id_of(1)).values(stored_bytes=42_000_000)))
    clock = ManualClock(NOW).clock
    limits, calls = VmLimits(120, clock=clock), []
    limits.note_refusal(vm_id_of(66), "rate")
    monkeypatch.setattr(maintenance, "return_free_memory", lambda: calls.append("return_free_memory"))
    threads = StoreThreads(store)
    work = Maintenance(settings_of(database.table), store=threads, vm_limits=limits, clock=clock)

    async def one_round():
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(work.follow(), timeout=3)

    asyncio.run(one_round())
    threads.close()
    assert calls == ["return_free_memory"]
    assert [event.event.event_id for event in all_events(store).values()] == ["new"]
    [vm] = store.read(lambda c: c.execute(vms.select()).all())
    assert 0 < vm.stored_bytes < 100_000
    [entry] = store.read(lambda c: c.execute(audit.select()).all())
    assert (entry.actor, entry.action) == (vm_id_of(66), "records_refused")
    assert "alive_at" in store.read(lambda c: c.execute(properties.select()).scalars().all())
