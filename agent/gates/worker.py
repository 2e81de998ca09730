"""The gates, driven from the event loop: one worker thread makes the calls that wait for RTNL."""

import asyncio
import concurrent.futures
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

import structlog

from agent.linux.cgroups import cgroup2_mount
from agent.logs import Event
from agent.settings import Settings
from bpf import gates, loader, pins
from bpf.drop_events import DropEventReader
from bpf.drop_sources import DropSources
from bpf.gates import Attachment, Counts, GateConfig
from bpf.hooks import Hooks, HookState
from bpf.host_devices import HostDevicePrograms
from bpf.injectable import InjectableMap
from bpf.node_config import NodeConfig
from bpf.path_tests import PathTestCounters
from bpf.replies import ReplyFlow
from bpf.verdicts import Reason

T = TypeVar("T")

log = structlog.get_logger(__name__)

_SO_NETNS_COOKIE = 71  # Linux 5.14

# Until a gate has its reply table, which takes seconds if some hundred pods start at once.
_GRACE_SECONDS = 30.0

# An attach takes 10 ms, and other programs hold RTNL for seconds; longer means a hung kernel.
_TIMEOUT_SECONDS = 60


class GateWorker:
    """Owns the loaded programs and maps. Every method waits at most a minute."""

    def __init__(
        self,
        loaded: loader.Loaded,
        opened: gates.Gates,
        host_devices: HostDevicePrograms,
        worker: concurrent.futures.ThreadPoolExecutor,
    ) -> None:
        self.loaded = loaded
        self._gates = opened
        self._worker = worker
        self._injectable = InjectableMap(loaded)
        self._drop_sources = DropSources(loaded)
        self._host_devices = host_devices
        self.config = NodeConfig(loaded)
        self.path_tests = PathTestCounters(loaded)
        self.events = DropEventReader(loaded)
        self.hook_states: list[HookState] = []

    @classmethod
    async def open(cls, settings: Settings) -> "GateWorker":
        """Load what is not pinned yet. Raises `PinError` or `CompileError`."""
        installation = pins.Pins(settings.bpffs)
        loaded = await loader.load(installation)
        # One thread: tcx attaches wait for each other under RTNL anyway.
        worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gates")
        try:
            loop = asyncio.get_running_loop()
            opened = await loop.run_in_executor(
                worker, gates.Gates, loaded, installation, settings.attachment
            )
            host_devices = await loop.run_in_executor(
                worker, HostDevicePrograms, loaded, installation, opened.attachment
            )
        except BaseException:
            worker.shutdown(wait=False)
            loaded.close()
            raise
        keeper = cls(loaded, opened, host_devices, worker)
        await keeper._call(lambda: keeper._injectable.inherit(installation))
        keeper.config.set_netns(netns_cookie())
        keeper.hook_states = await keeper._call(lambda: _attach_hooks(loaded, installation))
        for hook in keeper.hook_states:
            if hook.problem:
                log.warning(
                    Event.HOOK_NOT_ATTACHED,
                    hook=hook.name,
                    reason=hook.problem,
                )
        return keeper

    @property
    def attachment(self) -> Attachment:
        return self._gates.attachment

    async def aclose(self) -> None:
        """Close descriptors and the thread. Gates stay: they are pinned."""
        self.events.close()
        await self._call(self._gates.close)
        await self._call(self._host_devices.close)
        self._worker.shutdown(wait=False)
        self.loaded.close()

    async def install(
        self, ifindex: int, config: GateConfig, *, grace_seconds: float = _GRACE_SECONDS
    ) -> float:
        """As `Gates.install`; how many seconds it took."""

        def install() -> None:
            self._gates.install(ifindex, config, grace_seconds=grace_seconds)

        return await self._call(lambda: _timed(install))

    async def start_reply_table(self, ifindex: int) -> bool:
        """As `Gates.start_reply_table`."""
        return await self._call(lambda: self._gates.start_reply_table(ifindex))

    async def fill_reply_table(self, ifindex: int, flows: Collection[ReplyFlow]) -> bool:
        """As `Gates.fill_reply_table`."""
        return await self._call(lambda: self._gates.fill_reply_table(ifindex, flows))

    async def end_grace(self, ifindex: int, at_ns: int) -> None:
        """As `Gates.end_grace`."""
        await self._call(lambda: self._gates.end_grace(ifindex, at_ns))

    async def remove(self, ifindex: int) -> None:
        """As `Gates.remove`; its drop sources are deleted as well."""

        def remove() -> None:
            self._gates.remove(ifindex)
            self._drop_sources.forget(ifindex)

        await self._call(remove)

    async def is_attached(self, ifindex: int) -> bool:
        """As `Gates.is_attached`."""
        return await self._call(lambda: self._gates.is_attached(ifindex))

    async def installed(self) -> dict[int, GateConfig | None]:
        """As `Gates.installed`."""
        return await self._call(self._gates.installed)

    async def remove_stale(self) -> bool:
        """As `Gates.remove_stale`, and the programs on host devices as well."""

        def collect() -> bool:
            return not self._host_devices.other_interfaces and self._gates.remove_stale()

        return await self._call(collect)

    async def displaced(self) -> set[int]:
        """As `Gates.displaced`."""
        return await self._call(self._gates.displaced)

    async def is_first(self, ifindex: int) -> bool:
        """As `Gates.is_first`."""
        return await self._call(lambda: self._gates.is_first(ifindex))

    async def move_first(self, ifindex: int) -> None:
        """As `Gates.move_first`."""
        await self._call(lambda: self._gates.move_first(ifindex))

    async def counts(self) -> dict[int, Counts]:
        """As `Gates.counts`, without our own path tests. Reads maps only, so it does not queue
        behind attaches.
        """
        counts = await asyncio.to_thread(self._gates.counts)
        return {ifindex: _without_path_tests(of_gate) for ifindex, of_gate in counts.items()}

    async def host_counts(self) -> Counts:
        """As `Gates.host_counts`."""
        return await asyncio.to_thread(self._gates.host_counts)

    async def mark_injectable(self, marks: Mapping[int, bool]) -> None:
        """Set or clear interfaces' bits in the map of injectable interfaces."""

        def mark() -> None:
            for ifindex, is_node_sent in marks.items():
                self._injectable.mark(ifindex, is_node_sent=is_node_sent)

        await self._call(mark)

    async def ensure_bridges(self, ifindexes: set[int], *, are_all: bool) -> None:
        """As `HostDevicePrograms.ensure_bridges`."""
        await self._call(lambda: self._host_devices.ensure_bridges(ifindexes, are_all=are_all))

    async def ensure_pairs(self, ifindexes: set[int]) -> None:
        """As `HostDevicePrograms.ensure_pairs`."""
        await self._call(lambda: self._host_devices.ensure_pairs(ifindexes))

    async def ensure_tunnels(self, udp_ports: Iterable[int], *, are_guarded: bool) -> None:
        """As `HostDevicePrograms.ensure_tunnels`; also drops the host's datagrams to these ports.

        Raises `AttachError`, or `ValueError` for more ports than are guarded.
        """
        await self._call(lambda: self._host_devices.ensure_tunnels(are_guarded=are_guarded))
        self.config.set_tunnel_ports(udp_ports)

    async def marked_injectable(self) -> set[int]:
        return await self._call(self._injectable.marked)

    async def _call(self, function: Callable[[], T]) -> T:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await asyncio.get_running_loop().run_in_executor(self._worker, function)


def _timed(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def netns_cookie() -> int | None:
    """The cookie of the calling thread's network namespace; None where the kernel has none."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        contextlib.suppress(OSError),
    ):
        value = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        return int.from_bytes(value, sys.byteorder)
    return None


def _attach_hooks(loaded: loader.Loaded, installation: pins.Pins) -> list[HookState]:
    cgroup = cgroup2_mount()
    if cgroup is None:
        return [HookState("all", "cgroup v2 is not mounted")]
    return Hooks(loaded, installation, cgroup).attach()


def _without_path_tests(counts: Counts) -> Counts:
    return {key: count for key, count in counts.items() if key[1] is not Reason.PATH_TEST}
