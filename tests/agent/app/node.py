"""A node in memory: network namespaces, gates as `bpf.gates` keeps them, and a reconciler."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import ipaddress
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any, ParamSpec, TypeVar

import pytest

from agent.admin.report import PodSourceStatus
from agent.app.reconciler import Reconciler
from agent.gates import pending_flows, pod_gates
from agent.gates.chain_order import ChainOrder
from agent.gates.crowds import Crowds
from agent.gates.grace_periods import GracePeriods
from agent.gates.metrics import GateMetrics
from agent.gates.pod_gates import PodGates
from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.changes import Changes
from agent.pods.conditions import TRUE, Conditions
from agent.pods.container_runs import PodContainers
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims, Admission, PodState
from agent.pods.store import PodStore
from bpf.errors import AttachError
from bpf.gates import Attachment, GateConfig
from bpf.replies import ReplyFlow
from bpf.rules import Rule
from bpf.verdicts import Mode
from probes.netns import Netns, NetnsGoneError

P = ParamSpec("P")
T = TypeVar("T")

ENFORCED = (TRUE, "Enforced")
RESYNC_SECONDS = 300.0


class Gates:
    """Gates as `bpf.gates.Gates` keeps them. What was done to them is in `calls`, in order."""

    attachment = Attachment.TCX

    def __init__(self, node: "Node") -> None:
        self._node = node
        self.gates: dict[int, GateConfig | None] = {}
        self.links: set[int] = set()
        self.unsettled: set[int] = set()
        self.with_replies: set[int] = set()
        self.displaced: set[int] = set()
        self.failing: dict[str, Exception] = {}
        """By name of the call: what it raises."""
        self.problem = ""
        """What gates have no room for."""
        self.calls: list[str] = []
        self.before_call: Callable[[str], None] = lambda call: None
        self.is_clean = True

    def _call(self, name: str, ifindex: int) -> None:
        call = f"{name} {self._node.names.get(ifindex, ifindex)}"
        self.before_call(call)
        self.calls.append(call)
        if error := self.failing.get(name):
            raise error

    def installed(self) -> dict[int, GateConfig | None]:
        return dict(self.gates)

    def install(
        self, ifindex: int, config: GateConfig, *, grace_seconds: float, quickly: bool
    ) -> str:
        self._call("install", ifindex)
        self.gates[ifindex] = config
        if quickly and ifindex not in self.links:
            self.unsettled.add(ifindex)
        else:
            self._link(ifindex)
        return self.problem

    def settle(self, ifindex: int) -> None:
        self._call("settle", ifindex)
        self._link(ifindex)

    def _link(self, ifindex: int) -> None:
        self.links.add(ifindex)
        self.unsettled.discard(ifindex)

    def configure(self, ifindex: int, config: GateConfig) -> str:
        self._call("configure", ifindex)
        self.gates[ifindex] = config
        return self.problem

    def remove(self, ifindex: int) -> None:
        self._call("remove", ifindex)
        self.gates.pop(ifindex, None)
        self.links.discard(ifindex)
        self.unsettled.discard(ifindex)
        self.with_replies.discard(ifindex)

    def is_attached(self, ifindex: int) -> bool:
        return ifindex in self.gates

    def is_in_chain(self, ifindex: int) -> bool:
        return ifindex in self.gates

    def start_reply_tables(
        self, ifindexes: Collection[int], *, quickly: bool
    ) -> dict[int, bool | AttachError]:
        return {ifindex: self._start_reply_table(ifindex) for ifindex in ifindexes}

    def _start_reply_table(self, ifindex: int) -> bool | AttachError:
        if ifindex in self.with_replies:
            return False
        try:
            self._call("start replies", ifindex)
        except AttachError as error:
            return error
        self.with_replies.add(ifindex)
        return True

    def fill_reply_table(self, ifindex: int, flows: Collection[ReplyFlow]) -> bool:
        return True

    def end_grace(self, ifindex: int, at_ns: int) -> None:
        self._call("end grace", ifindex)

    def breathe(self) -> None:
        """There is nothing to repair."""

    def is_first(self, ifindex: int) -> bool:
        if error := self.failing.get("is first"):
            raise error
        return ifindex not in self.displaced

    def move_first(self, ifindex: int) -> None:
        self._call("move first", ifindex)
        self.displaced.discard(ifindex)


class Worker:
    """The gate worker without its thread: one call at a time."""

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.seconds = {"fill_reply_table": 0.0}
        """By name of the method: how long it takes, if not as long as an attach by tcx."""
        self._is_busy = False
        self._urgent: collections.deque[asyncio.Future[None]] = collections.deque()
        self._usual: collections.deque[asyncio.Future[None]] = collections.deque()

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(self._usual, functools.partial(function, *args, **kwargs))

    async def run_first(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(self._urgent, functools.partial(function, *args, **kwargs))

    async def _call(
        self, queue: collections.deque[asyncio.Future[None]], call: functools.partial[T]
    ) -> T:
        if self._is_busy:
            turn = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._next()
                raise
        self._is_busy = True
        try:
            result = call()
            await asyncio.sleep(self.seconds.get(call.func.__name__, 0.01))
            return result
        finally:
            self._next()

    def _next(self) -> None:
        while queue := self._urgent or self._usual:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_busy = False

    async def move_first(self, ifindex: int) -> None:
        await self.run(self.gates.move_first, ifindex)

    async def remove(self, ifindex: int) -> None:
        await self.run(self.gates.remove, ifindex)

    async def remove_stale(self) -> bool:
        self.gates.calls.append("collect")
        return self.gates.is_clean


class Source:
    """A pod source that the test speaks for."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.unready_reason: str | None = None
        self.read_at = 0.0

    def start(self) -> None: ...

    async def run(self) -> None: ...

    def hint(self) -> None: ...

    def containers_of(self, uid: str) -> PodContainers | None:
        return None

    def status(self) -> PodSourceStatus:
        return PodSourceStatus(pods_from="a test")


class PathTests:
    """Records which pods would be tested."""

    def __init__(self, node: "Node") -> None:
        self._node = node

    def enqueue(self, state: PodState) -> None:
        call = f"path test {state.pod.name}"
        self._node.gates.before_call(call)
        self._node.gates.calls.append(call)


class Node:
    """Reader, authority and policy of the reconciler, too: each with the one method it needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: dict[int, str] = {}
        self.rules: tuple[Rule, ...] = ()
        self.networks: dict[str, PodNetwork] = {}
        self.read_seconds = 0.0
        """How long it takes to read one of them."""
        self.inodes: dict[str, int] = {}
        self.gates = Gates(self)
        self.source = Source()
        self.store = PodStore(Conditions())
        self.claims = AddressClaims()
        self.worker = Worker(self.gates)
        gate_worker: Any = self.worker
        this: Any = self
        path_tests: Any = PathTests(self)
        metrics = GateMetrics(self.store)
        self.crowds = Crowds(gate_worker, self.store)
        self.grace_periods = GracePeriods(gate_worker, self.store, self.crowds)
        self.chain_order = ChainOrder(gate_worker, metrics)
        self.reconciler = Reconciler(
            store=self.store,
            source=self.source,
            gate_worker=gate_worker,
            pod_gates=PodGates(
                store=self.store,
                gate_worker=gate_worker,
                reader=this,
                authority=this,
                admitter=this,
                chain_order=self.chain_order,
                crowds=self.crowds,
                metrics=metrics,
            ),
            grace_periods=self.grace_periods,
            path_tester=path_tests,
            resync_seconds=RESYNC_SECONDS,
        )
        monkeypatch.setattr(pod_gates, "Netns", this)
        monkeypatch.setattr(
            Netns, "exists", lambda netns: self.inodes.get(netns.path) == netns.inode
        )
        monkeypatch.setattr(
            pending_flows, "read", lambda netns, network: pending_flows.PendingFlows((), "")
        )

    def add_netns(self, name: str, *, ifindex: int, has_veth: bool = True) -> str:
        """A pod's namespace with one veth to the host; its path."""
        path = f"/run/netns/{name}"
        self.names[ifindex] = name
        self.inodes[path] = 1000 + ifindex
        address = ipaddress.ip_address(f"198.18.1.{ifindex}")
        veth = (HostInterface(ifindex, f"veth{ifindex}"),) if has_veth else ()
        self.networks[path] = PodNetwork(veth, (address,), (), nsid=ifindex)
        return path

    def add(self, name: str, ifindex: int, *, mode: Mode = Mode.ENFORCE) -> Pod:
        """A pod with its namespace, as a source adds it."""
        path = self.add_netns(name, ifindex=ifindex)
        pod = Pod(uid=name, namespace="demo", name=name, mode=mode, netns_path=path)
        self.store.set_pod(pod)
        return pod

    def set_addresses(self, name: str, *addresses: str) -> None:
        """Change the addresses in a pod's namespace, of which netlink sends a hint."""
        path = f"/run/netns/{name}"
        found = tuple(map(ipaddress.ip_address, addresses))
        network = self.networks[path] = dataclasses.replace(self.networks[path], addresses=found)
        assert network.nsid is not None
        self.store.mark_namespace(network.nsid)

    def remove(self, name: str) -> None:
        """The pod with its namespace and veth, as the kubelet removes it."""
        state = self.store.pods[name]
        assert state.pod.netns_path is not None
        del self.networks[state.pod.netns_path]
        self.store.remove_pod(name)

    def status(self, name: str) -> tuple[str, str] | None:
        """Status and reason of the last pass over a pod."""
        status = self.store.pods[name].status
        return (status.status, status.reason) if status else None

    def message(self, name: str) -> str:
        """Of the pod's status."""
        status = self.store.pods[name].status
        assert status is not None
        return status.message

    def gated_addresses(self, ifindex: int) -> list[str]:
        """Those that the gate has."""
        config = self.gates.gates[ifindex]
        assert config is not None
        return list(map(str, config.addresses))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(run())
            for run in (self.reconciler.run, self.grace_periods.run, self.crowds.run)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # Netns

    def open(self, path: str) -> Netns:
        if path not in self.inodes:
            raise NetnsGoneError(f"{path} does not exist.")
        return Netns(path, 4, self.inodes[path])

    # PodNetworkReader

    async def read(self, netns: Netns) -> PodNetwork:
        found = self.networks.get(netns.path)
        await asyncio.sleep(self.read_seconds)
        if found is None:
            raise NetnsGoneError(f"{netns.path} does not exist.")
        return found

    async def exists(self, ifindex: int) -> bool:
        return any(
            interface.ifindex == ifindex
            for network in self.networks.values()
            for interface in network.interfaces
        )

    # AddressAuthority

    async def check(self, pod: Pod, netns: Netns, network: PodNetwork) -> AddressClaims:
        return AddressClaims(network.addresses)

    def is_due(self, uid: str, claims: AddressClaims) -> bool:
        return False

    # PolicyController

    async def admit(self, pod: Pod) -> Admission:
        return Admission(self.rules)


BUSY = AttachError("attaching to interface 7: Device or resource busy")
FULL = AttachError("cannot attach the gate to interface 1: the map gates is full")
GONE = AttachError("attaching to interface 1: No such device")
