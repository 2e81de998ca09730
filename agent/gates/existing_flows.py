"""Existing flows: connections that the host opened before enforcement. They stay open, because a
gate drops new flows only.

They are found among the host's sockets, which are listed periodically. An existing flow was opened
by the host, to an enforced pod, from a source that the gate would not admit today. The listening
side shows which end opened it: the pod listens on its port, and the host does not on its own. Where
this is no longer true, the flow is not counted, since counted flows may be closed.
"""

import asyncio
import contextlib
import dataclasses
import enum
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import structlog
from prometheus_client import core

from agent.linux.cgroups import ancestors, cgroup2_mount, cgroup_paths
from agent.logs import Event
from agent.metrics import MetricFamily, labelled, single
from agent.pods.changes import Subscription
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf import abi
from bpf.replies import ReplyFlow, ReplyTables
from bpf.rule_evaluation import Cgroup, NewFlow, NodeFacts, find_rule, is_destination
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from probes import sock_diag
from probes.netns import Netns, NetnsGoneError

log = structlog.get_logger(__name__)

# While gates enforce, the number only falls; this period bounds how long it is too high. A hint (a
# pod is enforced now) starts a scan at once, at most one per second.
_PERIOD_SECONDS = 15.0
_PAUSE_SECONDS = 1.0

# A host that has closed its side sends nothing more.
_OPEN_STATES = {
    socket.IPPROTO_TCP: sock_diag.ESTABLISHED | sock_diag.CLOSE_WAIT,
    socket.IPPROTO_UDP: sock_diag.ESTABLISHED,
}
_SERVING_STATES = {socket.IPPROTO_TCP: sock_diag.LISTEN, socket.IPPROTO_UDP: sock_diag.CLOSE}


EXISTING_FLOWS = MetricFamily(
    "podgate_existing_flows",
    "gauge",
    "Open flows between host and pod that started before enforcement.",
    ("namespace", "pod"),
)
EXISTING_FLOWS_CLOSED = MetricFamily(
    "podgate_existing_flows_closed_total",
    "counter",
    "Existing flows closed by --close-existing-flows.",
)


class Access(enum.Enum):
    """Whether a gate would admit the source of a flow today."""

    ADMITTED = enum.auto()
    DROPPED = enum.auto()
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class EnforcedPod:
    """An enforced pod, as it is at the time of a scan."""

    pod: Pod
    netns: Netns
    gates: tuple[int, ...]
    addresses: tuple[bytes, ...]
    rules: tuple[Rule, ...]

    @classmethod
    def of(cls, state: PodState) -> "EnforcedPod | None":
        """None for a pod whose gates are missing, or pass everything."""
        if state.gated_netns is None or state.admission is None:
            return None
        if not state.gates or state.pod.mode not in (Mode.ENFORCE, Mode.STRICT):
            return None
        return cls(
            state.pod,
            state.gated_netns,
            tuple(state.gates),
            tuple(abi.pack_address(address) for address in state.claims.confirmed),
            state.admission.rules,
        )


@dataclasses.dataclass(slots=True)
class FlowCount:
    """Existing flows of one pod in one scan: those left open, and those closed by it."""

    open: int = 0
    closed: int = 0


class ExistingFlows:
    """Counts existing flows, and closes them if this is enabled."""

    def __init__(
        self,
        *,
        store: PodStore,
        node: Callable[[], NodeFacts],
        replies: ReplyTables,
        closes: bool,
    ) -> None:
        """node: what gates compare now; closes: whether to close found flows."""
        self._store = store
        self._wake = asyncio.Event()
        self._changes = store.in_force.subscribe(Subscription(self._wake))
        self._node = node
        self._replies = replies
        self._closed = 0
        self._closes = closes
        self._counts: dict[str, int] = {}

    def hint(self) -> None:
        """The kubelet's process may have changed."""
        self._wake.set()

    def count(self, uid: str) -> int:
        """The number of open flows at the last scan."""
        return self._counts.get(uid, 0)

    def collect(self) -> Iterator[core.Metric]:
        yield labelled(
            EXISTING_FLOWS,
            (
                ((pod.namespace, pod.name), count)
                for pod in self._store.desired_pods()
                if (count := self._counts.get(pod.uid))
            ),
        )
        yield single(EXISTING_FLOWS_CLOSED, self._closed)

    async def run(self) -> None:
        """Scan periodically until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            self._changes.take()
            targets = [target for target in map(EnforcedPod.of, self._store.states()) if target]
            try:
                found = await asyncio.to_thread(self._scan, targets)
            except OSError as error:
                log.error(Event.HOST_SOCKETS_UNREADABLE, error=str(error))
            else:
                self._report(targets, found)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _report(self, targets: Sequence[EnforcedPod], found: Mapping[str, FlowCount]) -> None:
        before = self._counts
        self._counts = {uid: flows.open for uid, flows in found.items()}
        for target in targets:
            flows = found.get(target.pod.uid, FlowCount())
            if flows.closed:
                self._closed += flows.closed
                log.info(Event.EXISTING_FLOWS_CLOSED, pod=target.pod.full_name, flows=flows.closed)
            if flows.open and flows.open != before.get(target.pod.uid, 0):
                log.info(
                    Event.EXISTING_FLOWS_OPEN,
                    pod=target.pod.full_name,
                    flows=flows.open,
                )

    def _scan(self, targets: Sequence[EnforcedPod]) -> dict[str, FlowCount]:
        """Flows by pod uid."""
        found: dict[str, FlowCount] = {}
        if not targets:
            return found
        by_address = {address: target for target in targets for address in target.addresses}
        own = _own_inodes()
        with sock_diag.SockDiag() as host:
            for protocol, states in _OPEN_STATES.items():
                flows = [
                    flow
                    for flow in _sockets(host, protocol, states, by_address.keys())
                    if flow.inode not in own
                ]
                if flows:
                    opened = self._opened_by_host(host, protocol, flows, by_address)
                    self._count_flows(host, opened, by_address, found)
        return found

    def _opened_by_host(
        self,
        host: sock_diag.SockDiag,
        protocol: int,
        flows: Iterable[sock_diag.InetSocket],
        by_address: Mapping[bytes, EnforcedPod],
    ) -> list[sock_diag.InetSocket]:
        """Those that the host opened, and that the gate passes."""
        host_serves = _served_ports(host, protocol)
        pods_serve: dict[Netns, set[int]] = {}
        opened = []
        for flow in flows:
            target = by_address[flow.remote]
            if target.netns not in pods_serve:
                pods_serve[target.netns] = _ports_served_in(target.netns, protocol)
            if (
                flow.local_port not in host_serves
                and flow.remote_port in pods_serve[target.netns]
                and (protocol == socket.IPPROTO_TCP or self._is_recorded(flow, target))
            ):
                opened.append(flow)
        return opened

    def _is_recorded(self, flow: sock_diag.InetSocket, target: EnforcedPod) -> bool:
        """Whether packets that the host sends by this socket pass as replies."""
        pod, host = abi.unpack_address(flow.remote), abi.unpack_address(flow.local)
        reply_flow = ReplyFlow(flow.protocol, pod, flow.remote_port, host, flow.local_port)
        now_ns = time.monotonic_ns()
        return any(self._replies.contains(gate, reply_flow, now_ns) for gate in target.gates)

    def _count_flows(
        self,
        host: sock_diag.SockDiag,
        flows: Sequence[sock_diag.InetSocket],
        by_address: Mapping[bytes, EnforcedPod],
        found: dict[str, FlowCount],
    ) -> None:
        """Count those whose source would not be admitted today, and close them if enabled."""
        check = AccessCheck(self._node(), time.monotonic_ns(), _cgroups(flows))
        for flow in flows:
            target = by_address[flow.remote]
            access = check.of(target.rules, flow)
            if access is Access.ADMITTED:
                continue
            counted = found.setdefault(target.pod.uid, FlowCount())
            if access is Access.DROPPED and self._closes and self._close(host, flow):
                counted.closed += 1
            else:
                counted.open += 1

    def _close(self, host: sock_diag.SockDiag, flow: sock_diag.InetSocket) -> bool:
        try:
            return host.destroy(flow)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._closes = False
            log.error(Event.EXISTING_FLOWS_NOT_CLOSABLE)
            return False


@dataclasses.dataclass(frozen=True, slots=True)
class AccessCheck:
    """What gates would admit today, for existing sockets. Access is unknown where a rule would
    admit the source if it were the kubelet, or if its cgroup were still there or reported.

    now_ns: CLOCK_MONOTONIC; cgroups: by id, of sources whose cgroup still exists.
    """

    node: NodeFacts
    now_ns: int
    cgroups: Mapping[int, Cgroup]

    def of(self, rules: Sequence[Rule], flow: sock_diag.InetSocket) -> Access:
        cgroup, unsure = None, {SourceKind.KUBELET, SourceKind.CGROUP, SourceKind.ANCESTOR}
        if flow.cgroup is not None:
            cgroup = self.cgroups.get(flow.cgroup)
            unsure = set() if cgroup else {SourceKind.ANCESTOR}
            cgroup = cgroup or Cgroup(flow.cgroup, "", ())
            if self.node.may_be_kubelet(cgroup, self.now_ns):
                unsure.add(SourceKind.KUBELET)
        is_kubelet = self.node.is_kubelet_cgroup(cgroup)
        new_flow = NewFlow(flow.protocol, flow.remote_port, cgroup, is_kubelet)
        if find_rule(rules, new_flow):
            return Access.ADMITTED
        if any(rule.source in unsure and is_destination(rule, new_flow) for rule in rules):
            return Access.UNKNOWN
        return Access.DROPPED


def _cgroups(flows: Iterable[sock_diag.InetSocket]) -> dict[int, Cgroup]:
    """Those that exist. Walks over all cgroups."""
    root = cgroup2_mount()
    found = {}
    for cgroup, path in cgroup_paths({flow.cgroup for flow in flows if flow.cgroup}).items():
        above = ancestors(root, path) if root else []
        # Otherwise it was removed meanwhile.
        if above and above[-1] == cgroup:
            found[cgroup] = Cgroup(cgroup, path, tuple(above))
    return found


def _sockets(
    diag: sock_diag.SockDiag, protocol: int, states: int, remotes: Iterable[bytes] | None = None
) -> list[sock_diag.InetSocket]:
    selected = None if remotes is None else frozenset(remotes)
    try:
        return list(diag.sockets(protocol, states, selected))
    except OSError as error:
        # A kernel without CONFIG_INET_UDP_DIAG cannot list UDP.
        if error.errno != errno.ENOENT:
            raise
        return []


def _served_ports(diag: sock_diag.SockDiag, protocol: int) -> set[int]:
    """Ports where sockets accept new flows: listeners, or UDP sockets without a peer."""
    return {found.local_port for found in _sockets(diag, protocol, _SERVING_STATES[protocol])}


def _ports_served_in(netns: Netns, protocol: int) -> set[int]:
    """The same for a pod; empty if it no longer exists."""
    try:
        diag = sock_diag.SockDiag.open_in(netns)
    except NetnsGoneError:
        return set()
    with diag:
        return _served_ports(diag, protocol)


def _own_inodes() -> set[int]:
    """The inodes of this process's sockets."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(status.st_ino)
    return inodes
