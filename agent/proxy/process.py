"""The proxy's process: installs what the service endpoints API publishes, until it is stopped.

The installed state stays in the kernel, as kube-proxy's rules do; the next process takes it over.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import signal
import threading
from collections.abc import AsyncIterator, Sequence

import structlog

from agent.client.services import ServicesClient, ServicesState
from agent.linux.link_monitor import LinkMonitor
from agent.logs import Event
from agent.proxy.backends import Backend, BackendError
from agent.proxy.frontends import FrontendChange, FrontendTable
from agent.proxy.node_addresses import NodeAddressSelection
from bpf.abi import IPAddress

log = structlog.get_logger(__name__)

# A failed change is retried after this.
_RETRY_SECONDS = 1.0


@dataclasses.dataclass(slots=True)
class _ProxyState:
    """The newest input. Created and used on the event loop only."""

    services: ServicesState | None = None
    addresses: tuple[IPAddress, ...] | None = None
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


async def run(
    backend: Backend,
    *,
    target: str,
    node_addresses: Sequence[IPAddress] = (),
    started_file: pathlib.Path | None = None,
) -> None:
    """Follow the API at `target` until SIGTERM or SIGINT.

    node_addresses: addresses for node ports; empty: all addresses of the node, as they change.
    started_file: created when the first state is in the kernel.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    state = _ProxyState(addresses=tuple(node_addresses) or None)
    async with asyncio.TaskGroup() as group, _follow_services(target, state):
        tasks = [group.create_task(_apply_updates(backend, state, started_file), name="updates")]
        if not node_addresses:
            tasks.append(group.create_task(_follow_addresses(state), name="addresses"))
        await stopped.wait()
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _follow_services(target: str, state: _ProxyState) -> AsyncIterator[None]:
    """Read services in a thread, since the client blocks until there is a new state."""
    loop = asyncio.get_running_loop()

    def set_services(services: ServicesState) -> None:
        state.services = services
        state.changed.set()

    def follow() -> None:
        for services in client:
            loop.call_soon_threadsafe(set_services, services)

    def warn(problem: str) -> None:
        log.warning(Event.SERVICES_STREAM_INTERRUPTED, problem=problem)

    client = ServicesClient(target, on_problem=warn)
    thread = threading.Thread(target=follow, name="localnet", daemon=True)
    thread.start()
    try:
        yield
    finally:
        client.cancel()
        await asyncio.to_thread(thread.join)
        client.close()


async def _follow_addresses(state: _ProxyState) -> None:
    changed = asyncio.Event()
    monitor = LinkMonitor(
        on_link_changed=changed.set, on_address_changed=lambda nsid: None, on_overrun=changed.set
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(monitor.run(), name="links")
        while True:
            changed.clear()
            addresses = await asyncio.to_thread(NodeAddressSelection().read)
            if addresses != state.addresses:
                state.addresses = addresses
                state.changed.set()
            await changed.wait()


async def _apply_updates(
    backend: Backend, state: _ProxyState, started_file: pathlib.Path | None
) -> None:
    table = FrontendTable()
    pending = FrontendChange({}, set())
    is_applied = is_failing = False
    loop = asyncio.get_running_loop()
    while True:
        await state.changed.wait()
        state.changed.clear()
        services, addresses = state.services, state.addresses
        if services is None or addresses is None:
            continue
        change = await asyncio.to_thread(table.update, services.services, addresses)
        pending = pending.then(change)
        if is_applied and not (pending.changed or pending.removed):
            continue
        try:
            await backend.apply(pending)
        except BackendError as error:
            if not is_failing:
                log.error(Event.SERVICES_NOT_APPLIED, error=str(error))
            is_failing = True
            loop.call_later(_RETRY_SECONDS, state.changed.set)
            continue
        if not is_applied:
            log.info(Event.SERVICES_APPLIED, count=len(services.services), rev=services.rev)
            if started_file is not None:
                await asyncio.to_thread(started_file.touch)
        is_applied, is_failing = True, False
        pending = FrontendChange({}, set())
