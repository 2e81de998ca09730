"""Existing flows: connections that the host opened before enforcement. They stay open, because a
gate drops new flows only.

They are found among the host's sockets, which are listed periodically. An existing flow was opened
by the host, to an enforced pod, from a source that the gate would not admit today. The listening
side shows which end opened it: the pod listens on its port, and the host does not on its own. Where
that is no longer so a flow is left out, since flows that are found may be closed.
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

from agent.linux.cgroups import cgroup_paths
from agent.logs import Event
from agent.metrics import MetricFamily, new_metric, single
from agent.pods.changes import Subscription
from agent.pods.pod import Pod
from agent.pods.pod_state import PodState
from agent.pods.store import PodStore
from bpf import abi
from bpf.replies import ReplyFlow, ReplyTables
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from probes import sock_diag
from probes.netns import Netns, NetnsGoneError

log = structlog.get_logger(__name__)

# Nothing new can come while gates enforce, so the number only falls; this bounds how long it is
# too high. A hint (a pod is enforced now) is followed at once, and no more often than each second.
_PERIOD_SECONDS = 15.0
_PAUSE_SECONDS = 1.0

# A node that has closed its side sends nothing more.
_GOING_ON = {
    socket.IPPROTO_TCP: sock_diag.ESTABLISHED | sock_diag.CLOSE_WAIT,
    socket.IPPROTO_UDP: sock_diag.ESTABLISHED,
}
_SERVING = {socket.IPPROTO_TCP: sock_diag.LISTEN, socket.IPPROTO_UDP: sock_diag.CLOSE}


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
    """Whether a gate would let a sender begin the same flow today."""

    OPEN = enum.auto()
    SHUT = enum.auto()
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
    def of(cls, guarded: PodState) -> "EnforcedPod | None":
        """None for a pod whose gates are missing, or pass everything."""
        if guarded.gated_netns is None or guarded.admission is None:
            return None
        if not guarded.gates or guarded.pod.mode not in (Mode.ENFORCE, Mode.STRICT):
            return None
        return cls(
            guarded.pod,
            guarded.gated_netns,
            tuple(guarded.gates),
            tuple(abi.pack_address(address) for address in guarded.claims.confirmed),
            guarded.admission.rules,
        )


@dataclasses.dataclass(slots=True)
class FlowCount:
    """Flows of one pod. going_on: how many there are; ended: how many there were before."""

    going_on: int = 0
    ended: int = 0


class ExistingFlows:
    """Counts older flows, and ends them where that is wanted."""

    def __init__(
        self,
        *,
        store: PodStore,
        kubelet_cgroup: Callable[[], int],
        replies: ReplyTables,
        ends: bool,
    ) -> None:
        """kubelet_cgroup: its id, 0 while it is not known; ends: whether to close found flows."""
        self._store = store
        self._wake = asyncio.Event()
        self._changes = store.in_force.subscribe(Subscription(self._wake))
        self._kubelet_cgroup = kubelet_cgroup
        self._replies = replies
        self._closed = 0
        self._ends = ends
        self._counts: dict[str, int] = {}

    def hint(self) -> None:
        """The kubelet may be another process."""
        self._wake.set()

    def count(self, uid: str) -> int:
        """How many were open at the last scan."""
        return self._counts.get(uid, 0)

    def collect(self) -> Iterator[core.Metric]:
        flows = new_metric(EXISTING_FLOWS)
        for pod in self._store.desired_pods():
            if count := self._counts.get(pod.uid):
                flows.add_metric((pod.namespace, pod.name), count)
        yield flows
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
                found = await asyncio.to_thread(self._look, targets)
            except OSError as error:
                log.error(Event.HOST_SOCKETS_UNREADABLE, error=str(error))
            else:
                self._tell(targets, found)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _tell(self, targets: Sequence[EnforcedPod], found: Mapping[str, FlowCount]) -> None:
        before = self._counts
        self._counts = {uid: flows.going_on for uid, flows in found.items()}
        for target in targets:
            flows = found.get(target.pod.uid, FlowCount())
            if flows.ended:
                self._closed += flows.ended
                log.info(Event.EXISTING_FLOWS_CLOSED, pod=target.pod.full_name, flows=flows.ended)
            if flows.going_on and flows.going_on != before.get(target.pod.uid, 0):
                log.info(
                    Event.EXISTING_FLOWS_OPEN,
                    pod=target.pod.full_name,
                    flows=flows.going_on,
                )

    def _look(self, targets: Sequence[EnforcedPod]) -> dict[str, FlowCount]:
        """Flows by pod uid."""
        found: dict[str, FlowCount] = {}
        if not targets:
            return found
        by_address = {address: target for target in targets for address in target.addresses}
        own = _own_inodes()
        with sock_diag.SockDiag() as node:
            for protocol, states in _GOING_ON.items():
                flows = [
                    flow
                    for flow in _sockets(node, protocol, states, by_address.keys())
                    if flow.inode not in own
                ]
                if flows:
                    begun = self._begun_by_node(node, protocol, flows, by_address)
                    self._judge(node, begun, by_address, found)
        return found

    def _begun_by_node(
        self,
        node: sock_diag.SockDiag,
        protocol: int,
        flows: Iterable[sock_diag.InetSocket],
        by_address: Mapping[bytes, EnforcedPod],
    ) -> list[sock_diag.InetSocket]:
        """Those that the host opened, and that the gate passes."""
        node_serves = _served_ports(node, protocol)
        pods_serve: dict[Netns, set[int]] = {}
        begun = []
        for flow in flows:
            target = by_address[flow.remote]
            if target.netns not in pods_serve:
                pods_serve[target.netns] = _ports_served_in(target.netns, protocol)
            if (
                flow.local_port not in node_serves
                and flow.remote_port in pods_serve[target.netns]
                and (protocol == socket.IPPROTO_TCP or self._is_remembered(flow, target))
            ):
                begun.append(flow)
        return begun

    def _is_remembered(self, flow: sock_diag.InetSocket, target: EnforcedPod) -> bool:
        """Whether what the node sends by this socket passes as an answer."""
        pod, node = abi.unpack_address(flow.remote), abi.unpack_address(flow.local)
        question = ReplyFlow(flow.protocol, pod, flow.remote_port, node, flow.local_port)
        now_ns = time.monotonic_ns()
        return any(self._replies.contains(gate, question, now_ns) for gate in target.gates)

    def _judge(
        self,
        node: sock_diag.SockDiag,
        flows: Sequence[sock_diag.InetSocket],
        by_address: Mapping[bytes, EnforcedPod],
        found: dict[str, FlowCount],
    ) -> None:
        """Count those whose source would not be admitted today, and close them where desired."""
        entrances = AccessCheck(self._kubelet_cgroup(), {flow.cgroup for flow in flows})
        for flow in flows:
            target = by_address[flow.remote]
            entrance = entrances.of(target.rules, flow)
            if entrance is Access.OPEN:
                continue
            counted = found.setdefault(target.pod.uid, FlowCount())
            if entrance is Access.SHUT and self._ends and self._end(node, flow):
                counted.ended += 1
            else:
                counted.going_on += 1

    def _end(self, node: sock_diag.SockDiag, flow: sock_diag.InetSocket) -> bool:
        try:
            return node.destroy(flow)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._ends = False
            log.error(Event.EXISTING_FLOWS_NOT_CLOSABLE)
            return False


class AccessCheck:
    """What gates would admit today: `find_rule` of bpf/src/rules.h, for existing sockets."""

    def __init__(self, kubelet_cgroup: int, cgroups: Iterable[int | None]) -> None:
        """cgroups: of all sources that will be checked."""
        self._kubelet_cgroup = kubelet_cgroup
        self._cgroups = {cgroup for cgroup in cgroups if cgroup is not None}
        self._paths: dict[int, str] = {}
        self._looked_for: set[int] = set()

    def of(self, rules: Iterable[Rule], flow: sock_diag.InetSocket) -> Access:
        entrance = Access.SHUT
        for rule in rules:
            if rule.protocol not in (0, flow.protocol):
                continue
            if not rule.first_port <= flow.remote_port <= rule.last_port:
                continue
            match self._is_sender(rule, flow.cgroup):
                case True:
                    return Access.OPEN
                case None:
                    entrance = Access.UNKNOWN
        return entrance

    def _is_sender(self, rule: Rule, cgroup: int | None) -> bool | None:
        """None where it cannot be determined."""
        match rule.source:
            case SourceKind.ANY:
                return True
            case SourceKind.KERNEL:
                return False
        if cgroup is None:
            return None
        match rule.source:
            case SourceKind.KUBELET:
                return cgroup == self._kubelet_cgroup if self._kubelet_cgroup else None
            case SourceKind.CGROUP:
                return cgroup == rule.cgroup
        return self._is_below(cgroup, rule.cgroup)

    def _is_below(self, cgroup: int, ancestor: int) -> bool | None:
        if ancestor not in self._looked_for:
            wanted = self._cgroups | {ancestor}
            self._paths |= cgroup_paths(wanted)
            self._looked_for |= wanted
        path, above = self._paths.get(cgroup), self._paths.get(ancestor)
        if path is None:
            return None
        return above is not None and f"{path}/".startswith(f"{above.rstrip('/')}/")


def _sockets(
    diag: sock_diag.SockDiag, protocol: int, states: int, remotes: Iterable[bytes] | None = None
) -> list[sock_diag.InetSocket]:
    wanted = None if remotes is None else frozenset(remotes)
    try:
        return list(diag.sockets(protocol, states, wanted))
    except OSError as error:
        # A kernel without CONFIG_INET_UDP_DIAG cannot list UDP.
        if error.errno != errno.ENOENT:
            raise
        return []


def _served_ports(diag: sock_diag.SockDiag, protocol: int) -> set[int]:
    """Ports where sockets accept new flows: listeners, or UDP sockets without a peer."""
    return {found.local_port for found in _sockets(diag, protocol, _SERVING[protocol])}


def _ports_served_in(netns: Netns, protocol: int) -> set[int]:
    """The same of a pod; nothing when it is gone."""
    try:
        diag = sock_diag.SockDiag.open_in(netns)
    except NetnsGoneError:
        return set()
    with diag:
        return _served_ports(diag, protocol)


def _own_inodes() -> set[int]:
    """Of this process's sockets."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(f"/proc/self/fd/{name}")
            if stat.S_ISSOCK(status.st_mode):
                inodes.add(status.st_ino)
    return inodes
