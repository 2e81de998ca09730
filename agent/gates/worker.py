"""The gates, driven from the event loop: one worker thread makes the calls that wait for RTNL."""

import asyncio
import functools
import socket
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

import structlog

from agent.gates.gate_thread import GateThread, Repairs
from agent.linux.cgroups import cgroup2_mount, own_cgroup
from agent.logs import Event
from agent.settings import Settings
from bpf import host_egress, loader, pins, program_specs
from bpf.attachment import Attachment
from bpf.drop_events import DropEventReader
from bpf.errors import BpfError
from bpf.gates import Counts, Gates
from bpf.hooks import Hooks, HookState
from bpf.host_devices import HostDevicePrograms
from bpf.injectable import InjectableMap
from bpf.kubelet_unit import KubeletUnit
from bpf.node_addresses import NodeAddressMap
from bpf.node_config import NodeConfig
from bpf.path_tests import PathTestCounters
from bpf.pinning import Outcome
from bpf.raw_socket_policy import RawSocketPolicy
from bpf.raw_sockets import OldRawSockets
from bpf.verdicts import Reason
from probes import sock_diag
from probes.netns import netns_cookie

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Repairs)

log = structlog.get_logger(__name__)

_NO_COOKIES = (
    "this kernel has no netns cookies (Linux 5.14), which distinguish the host's sockets from pods'"
)

# An attach takes 10 ms, and other programs hold RTNL for seconds; longer means a hung kernel.
_TIMEOUT_SECONDS = 60


class GateWorker:
    """Owns the loaded programs and maps.

    Methods of `gates`, `host_devices` and `injectable` wait for RTNL: call them by `run`.
    """

    def __init__(
        self,
        loaded: loader.Loaded,
        installation: pins.Pins,
        attachment: Attachment | None,
        thread: GateThread,
    ) -> None:
        """Set what the programs need from the start; attaches nothing. Call it in `thread`."""
        self._thread = thread
        self.installation = installation
        self.loaded = loaded
        self.gates = Gates(loaded, installation, attachment)
        self.host_devices = HostDevicePrograms(loaded, installation, self.gates.attachment)
        self.injectable = InjectableMap(loaded)
        self.injectable.inherit(installation)
        self.node_addresses = NodeAddressMap(loaded)
        self.config = NodeConfig(loaded)
        self.config.set_netns(netns_cookie())
        self.path_tests = PathTestCounters(loaded)
        self.events = DropEventReader(loaded)
        self.raw_socket_policy = RawSocketPolicy(loaded, installation, own_cgroup())
        cgroup = cgroup2_mount()
        self._hooks = None if cgroup is None else Hooks(loaded, installation, cgroup)
        self.hook_states: list[HookState] = []
        """Of the hooks that are attached, or should be."""
        self.kubelet_unit = KubeletUnit(loaded, installation, self.config)
        self.is_attached = False
        """Whether hooks and tracing programs are; not while podgate is off."""
        self.on_run: Callable[[], None] = lambda: None
        """Called after each call but checks, since it may have attached or detached programs."""
        self._moved: set[int] = set()

    @classmethod
    async def open(cls, settings: Settings, pinned: Outcome) -> "GateWorker":
        """Open the programs, and load what is not pinned any more. Raises `PinError` or
        `CompileError`."""
        installation = pins.Pins(settings.bpffs)
        loaded = await loader.load(installation, pinned, defers=True)
        log.info(
            Event.PROGRAMS_LOADED,
            programs=loaded.outcome.origin.value,
            load_ms=round(loaded.outcome.seconds * 1000, 1),
            reason=loaded.outcome.reason,
        )
        thread = GateThread()
        made = functools.partial(cls, loaded, installation, settings.attachment, thread)
        try:
            worker = await thread.run(made)
        except BaseException:
            thread.close()
            loaded.close()
            raise
        return worker

    async def attach(self) -> None:
        """Attach the programs that belong to no interface: hooks, and those that trace the kernel.

        Raises `TimeoutError`.
        """
        self.is_attached = True
        await self.run(self._attach)
        for hook in self.hook_states:
            if hook.problem:
                log.warning(Event.HOOK_NOT_ATTACHED, hook=hook.name, reason=hook.problem)

    async def detach(self) -> None:
        """Undo `attach`, also of another version or a previous agent.

        Raises `BpfError` or `TimeoutError`; then some may still be attached.
        """
        self.is_attached = False
        await self.run(self._detach)

    def _attach(self) -> None:
        self.raw_socket_policy.attach()
        self.hook_states = self._attach_hooks()
        self.kubelet_unit.attach()

    def _attach_hooks(self) -> list[HookState]:
        if self._hooks is None:
            return [HookState("all", "cgroup v2 is not mounted")]
        states = self._hooks.attach()
        if all(
            state.problem is None
            for state in states
            if state.name in program_specs.RAW_SOCKET_HOOKS
        ):
            record_raw_sockets(self.loaded)
        if not self.config.read().node_netns:
            return [HookState(state.name, state.problem or _NO_COOKIES) for state in states]
        return states

    def _detach(self) -> None:
        self.hook_states = []
        if self._hooks:
            self._hooks.detach()
        self.raw_socket_policy.detach()
        self.kubelet_unit.detach()

    @property
    def has_connect_hooks(self) -> bool:
        """Whether the hooks at connect are attached, and distinguish the host's sockets. True also
        while podgate is off, when no hook is needed."""
        if not self.is_attached:
            return True
        is_attached = [not hook.problem for hook in self.hook_states if "connect" in hook.name]
        return bool(is_attached) and all(is_attached)

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the worker thread, after earlier calls.

        Raises what the function raises, or `TimeoutError` after a minute.
        """
        try:
            return await self._call(functools.partial(function, *args, **kwargs), is_urgent=False)
        finally:
            self.on_run()

    async def run_first(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """The same before calls that wait, of which a crowd's pods make hundreds."""
        try:
            return await self._call(functools.partial(function, *args, **kwargs), is_urgent=True)
        finally:
            self.on_run()

    async def run_check(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """As `run_first`, for the check of what is attached."""
        return await self._call(functools.partial(function, *args, **kwargs), is_urgent=True)

    async def repair(self, make: Callable[[Gates, asyncio.AbstractEventLoop], R]) -> R:
        """Have the thread make these repairs from now on, before any call and between the steps
        of long ones."""
        loop = asyncio.get_running_loop()

        def begin() -> R:
            made = make(self.gates, loop)
            self._thread.repair(made)
            self.gates.breathe = self._thread.breathe
            return made

        return await self.run_first(begin)

    async def _call(self, call: Callable[[], T], *, is_urgent: bool) -> T:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            return await self._thread.run(call, is_urgent=is_urgent)

    async def move_first(self, ifindex: int) -> None:
        """As `Gates.move_first`; loads what that needs, so it raises `PinError` and
        `CompileError`, too.
        """
        if self.gates.attachment is Attachment.TCX:
            await loader.load_moving_copies(self.installation, self.loaded)
        await self.run(self._move_first, ifindex)

    def _move_first(self, ifindex: int) -> None:
        self.gates.move_first(ifindex)
        self._moved.add(ifindex)

    def take_moved(self) -> set[int]:
        """Interfaces whose gates `move_first` has moved since the last call. Call it in the
        thread, where moves are as well."""
        moved, self._moved = self._moved, set()
        return moved

    async def load_deferred(self, names: Collection[str]) -> None:
        """As `loader.load_deferred`, beside calls of the thread."""
        await loader.load_deferred(self.installation, self.loaded, names)

    async def remove(self, ifindex: int) -> None:
        """As `Gates.remove`."""
        await self.run(self.gates.remove, ifindex)

    async def remove_stale(self) -> bool:
        """As `Gates.remove_stale`, unless host devices or HostEgressPolicies still have another
        schema's programs."""

        def remove_stale() -> bool:
            has_others = self.host_devices.other_interfaces() or host_egress.is_of_another_schema(
                self.installation
            )
            return not has_others and self.gates.remove_stale()

        return await self.run(remove_stale)

    async def counts(self) -> dict[int, Counts]:
        """As `Gates.counts`, without our own path tests. Reads maps only, so it does not queue
        behind attaches.
        """
        counts = await asyncio.to_thread(self.gates.counts)
        return {ifindex: _without_path_tests(of_gate) for ifindex, of_gate in counts.items()}

    async def hooks_attached(self) -> dict[str, bool]:
        """By hook: whether it is attached now. Empty while podgate is off."""
        if self._hooks is None or not self.is_attached:
            return {}
        return await asyncio.to_thread(self._hooks.attached)

    async def host_drops(self) -> dict[str, int]:
        """What was dropped before an interface was chosen, by reason."""
        counts = await asyncio.to_thread(self.gates.host_counts)
        return {reason.label: count for (_, reason), count in counts.items()}

    async def aclose(self) -> None:
        """Close descriptors and the thread. Gates stay: they are pinned."""
        self.events.close()
        await self.run(self.gates.close)
        await self.run(self.host_devices.close)
        self._thread.close()
        self.loaded.close()


def record_raw_sockets(loaded: loader.Loaded) -> None:
    """Record raw sockets that the host's processes created before the hooks."""
    with sock_diag.SockDiag() as diag:
        try:
            found = [raw.cookie for raw in diag.sockets(socket.IPPROTO_RAW, sock_diag.ANY_STATE)]
        except OSError as error:
            log.warning(Event.RAW_SOCKETS_UNKNOWN, error=str(error))
            return
    try:
        OldRawSockets(loaded).add(found)
    except BpfError as error:  # there are more than the map holds
        log.warning(Event.RAW_SOCKETS_UNKNOWN, error=str(error))


def _without_path_tests(counts: Counts) -> Counts:
    return {key: count for key, count in counts.items() if key[1] is not Reason.PATH_TEST}
