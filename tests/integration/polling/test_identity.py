import threading

import pytest
from waiting import until

from bridge.errors import ImdsStatus, ImdsUnreachable
from bridge.events.event import VmIdentity
from bridge.outbox import records
from bridge.polling.identity import IdentityResolver
from bridge.testing import ManualClock

ME = VmIdentity(name="vm_0", vm_id="AAAA", location="westeurope")


class Service:
    """Fails with `failure` until it is None."""

    def __init__(self, failure=None):
        self.failure = failure

    def identity(self):
        if self.failure is not None:
            raise self.failure
        return ME


@pytest.fixture
def outbox(kit):
    return kit.open(sinks=())


@pytest.fixture
def resolver_of(outbox):
    resolvers = []

    def make(service, configured=VmIdentity(), **options):  # noqa: B008  # frozen
        resolvers.append(IdentityResolver(service, outbox, configured, **options))
        resolvers[-1].start()
        # On a busy disk, the identity can be stored after the start stopped waiting for it.
        until(lambda: not (resolvers[-1].is_waiting and getattr(service, "failure", True) is None))
        return resolvers[-1]

    yield make
    for resolver in resolvers:
        resolver.stop()


def test_identity_from_imds_is_stored(resolver_of, outbox):
    resolver = resolver_of(Service())
    assert (resolver.vm, resolver.is_waiting) == (ME, False)
    assert outbox.read(lambda state: state.vm) == ME


def test_records_wait_until_the_first_identity_arrives(resolver_of, outbox):
    service = Service(ImdsUnreachable("silent"))
    resolver = resolver_of(service)
    assert resolver.is_waiting
    service.failure = None
    until(lambda: not resolver.is_waiting)
    assert outbox.read(lambda state: state.vm) == ME


def test_configured_name_is_sufficient_to_continue(resolver_of):
    resolver = resolver_of(Service(ImdsUnreachable("silent")), VmIdentity(name="vm_7"))
    assert (resolver.vm.name, resolver.is_waiting) == ("vm_7", False)


@pytest.mark.parametrize(
    ("failure", "waits_seconds"),
    [
        (ImdsUnreachable("silent"), 60),
        (ImdsStatus("busy", status=503), 60),
        (ImdsStatus("slow down", status=429), 60),
        (ImdsStatus("no such thing", status=404), 5),
    ],
    ids=["silent", "503", "429", "404"],
)
def test_wait_for_the_identity_depends_on_the_failure(resolver_of, failure, waits_seconds):
    time, service = ManualClock(), Service(failure)
    resolver = resolver_of(service, clock=time.clock)
    time.advance(waits_seconds - 1)
    resolver.wake()
    assert resolver.is_waiting
    time.advance(2)
    resolver.wake()
    until(lambda: not resolver.is_waiting)


class SilentService:
    """Responds after it is released."""

    def __init__(self):
        self.asked = threading.Event()
        self.released = threading.Event()

    def identity(self):
        self.asked.set()
        assert self.released.wait(30)
        return ME


def test_stop_request_ends_the_start_immediately(outbox):
    service = SilentService()
    resolver = IdentityResolver(service, outbox, VmIdentity())
    resolver.start(service.asked.is_set)  # its request ends only on release
    assert (resolver.vm, resolver.is_waiting) == (VmIdentity(), False)
    service.released.set()
    resolver.stop()


def test_identity_that_arrives_after_the_start_timeout_is_used(outbox):
    service = SilentService()
    resolver = IdentityResolver(service, outbox, VmIdentity())
    resolver.start(timeout_seconds=0.1)
    assert resolver.is_waiting
    service.released.set()
    until(lambda: not resolver.is_waiting)
    assert resolver.vm == ME
    assert outbox.read(lambda state: state.vm) == ME
    resolver.stop()


@pytest.fixture
def after_boot(kit):
    """Store the identity under an earlier boot. Return a function that opens the outbox under the next boot."""
    before = kit.open(sinks=())
    before.identify(ME)
    before.change(records.save_liveness, last_good_at=kit.time, boot_id="boot-1")
    before.close()
    return lambda **options: kit.open(sinks=(), **{"boot_id": "boot-2", **options})


def started(service, outbox, configured=VmIdentity(), **options):  # noqa: B008  # frozen
    resolver = IdentityResolver(service, outbox, configured, **options)
    resolver.start(timeout_seconds=0.5)
    return resolver


def test_stored_identity_counts_under_the_same_boot(after_boot):
    outbox = after_boot(boot_id="boot-1")
    resolver = started(Service(ImdsUnreachable("silent")), outbox)
    assert (resolver.vm, outbox.is_trusted) == (ME, True)
    resolver.stop()


def test_stored_identity_waits_for_imds_after_a_boot_without_limit(after_boot, caplog):
    outbox, time, service = after_boot(), ManualClock(), Service(ImdsUnreachable("silent"))
    resolver = started(service, outbox, clock=time.clock)

    def is_reported():
        time.advance(3)
        resolver.wake()
        return "Stored records are not sent" in caplog.text

    until(is_reported)
    assert (resolver.vm, outbox.is_trusted) == (VmIdentity(), False)
    service.failure = None

    def is_confirmed():
        time.advance(3)
        resolver.wake()
        return outbox.is_trusted

    until(is_confirmed)
    assert resolver.vm == ME
    resolver.stop()


def test_configured_vm_id_confirms_the_stored_identity(after_boot):
    outbox = after_boot(configured_vm_id="aaaa")
    resolver = started(Service(ImdsUnreachable("silent")), outbox, VmIdentity(vm_id="aaaa"))
    assert (resolver.vm.name, outbox.is_trusted) == (ME.name, True)
    resolver.stop()


def test_response_after_the_stop_is_ignored(outbox):
    service = SilentService()
    resolver = IdentityResolver(service, outbox, VmIdentity())
    resolver.start(timeout_seconds=0.1)
    resolver.stop(timeout_seconds=0.0)
    service.released.set()
    resolver.stop()
    assert resolver.vm == VmIdentity()
    assert outbox.read(lambda state: state.vm) is None


def test_identity_without_a_vm_id_confirms_no_stored_state(after_boot):
    outbox, service = after_boot(), Service()
    service.identity = lambda: VmIdentity(name="vm_1")
    resolver = IdentityResolver(service, outbox, VmIdentity())
    resolver.start()
    assert (outbox.is_trusted, resolver.is_found, resolver.vm.name) == (False, False, "vm_1")
    resolver.stop()
