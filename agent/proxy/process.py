"""The proxy's process: what the API tells goes into the kernel, until somebody ends it.

What it put there stays when it ends, as kube-proxy's rules do; the next one takes over.
"""

import asyncio
import contextlib
import dataclasses
import pathlib
import signal
import threading
from collections.abc import AsyncIterator, Sequence

import structlog

from agent.client import services
from agent.linux.link_monitor import LinkWatch
from agent.proxy import node_addresses as proxy_node_addresses
from agent.proxy.backends import Backend, BackendError
from agent.proxy.frontends import Book, Change
from bpf.abi import IPAddress

log = structlog.get_logger(__name__)

# After a failure the same is tried again.
_RETRY_SECONDS = 1.0


@dataclasses.dataclass(slots=True)
class _News:
    """What has come and is not in the kernel yet. Made on the event loop, used there only."""

    state: services.ServicesState | None = None
    addresses: tuple[IPAddress, ...] | None = None
    awake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


async def run(
    backend: Backend,
    *,
    target: str,
    node_addresses: Sequence[IPAddress] = (),
    started_file: pathlib.Path | None = None,
) -> None:
    """Follow the API at `target` until SIGTERM or SIGINT.

    node_addresses: where node ports are; none: at all of the node's own, as they come and go.
    started_file: made when the first state is in the kernel.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    news = _News(addresses=tuple(node_addresses) or None)
    async with asyncio.TaskGroup() as group, _told(target, news):
        tasks = [group.create_task(_carry(backend, news, started_file), name="carry")]
        if not node_addresses:
            tasks.append(group.create_task(_follow_addresses(news), name="addresses"))
        await stopped.wait()
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _told(target: str, news: _News) -> AsyncIterator[None]:
    """Ask in a thread, since the client waits as long as nothing is new."""
    loop = asyncio.get_running_loop()

    def note(state: services.ServicesState) -> None:
        news.state = state
        news.awake.set()

    def ask() -> None:
        for state in follower:
            loop.call_soon_threadsafe(note, state)

    follower = services.ServicesClient(target, on_problem=lambda problem: log.warning(problem))
    thread = threading.Thread(target=ask, name="localnet", daemon=True)
    thread.start()
    try:
        yield
    finally:
        follower.cancel()
        await asyncio.to_thread(thread.join)
        follower.close()


async def _follow_addresses(news: _News) -> None:
    changed = asyncio.Event()
    watch = LinkWatch(
        on_node_change=changed.set, on_pod_change=lambda nsid: None, on_overrun=changed.set
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(watch.run(), name="links")
        while True:
            changed.clear()
            addresses = await asyncio.to_thread(proxy_node_addresses.read)
            if addresses != news.addresses:
                news.addresses = addresses
                news.awake.set()
            await changed.wait()


async def _carry(backend: Backend, news: _News, started_file: pathlib.Path | None) -> None:
    book = Book()
    pending = Change({}, set())
    has_begun = is_failing = False
    loop = asyncio.get_running_loop()
    while True:
        await news.awake.wait()
        news.awake.clear()
        state, addresses = news.state, news.addresses
        if state is None or addresses is None:
            continue
        change = await asyncio.to_thread(book.update, state.services, addresses)
        pending = pending.then(change)
        if has_begun and not (pending.changed or pending.gone):
            continue
        try:
            await backend.change(pending)
        except BackendError as error:
            if not is_failing:
                log.error("services stay as they were", reason=str(error))
            is_failing = True
            loop.call_later(_RETRY_SECONDS, news.awake.set)
            continue
        if not has_begun:
            log.info("services are served", services=len(state.services), rev=state.rev)
            if started_file is not None:
                await asyncio.to_thread(started_file.touch)
        has_begun, is_failing = True, False
        pending = Change({}, set())
