"""The facts in force on this node, as programs read them: typed, and without I/O."""

import dataclasses
from collections.abc import Mapping

from bpf import abi
from bpf.abi import IPAddress
from bpf.host_egress_tables import EgressTable
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule
from bpf.verdicts import Mode


@dataclasses.dataclass(frozen=True, slots=True)
class GateFacts:
    """One gate's configuration. addresses: all that it lists, claimed ones included; confirmed:
    those that other programs use for the pod."""

    ifindex: int
    interface: str
    mode: Mode
    addresses: frozenset[IPAddress]
    rules: tuple[Rule, ...] = ()
    has_any_address: bool = False
    has_fallback: bool = True
    identified_kubelet: bool = False
    grace_until_ns: int = 0
    is_attached: bool = True
    confirmed: tuple[IPAddress, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RelayFacts:
    """The relay's maps. is_hooked: whether its connect hooks are attached."""

    targets: Mapping[tuple[IPAddress, int], IPAddress] = dataclasses.field(default_factory=dict)
    pods: Mapping[IPAddress, IPAddress] = dataclasses.field(default_factory=dict)
    """The pod that each of the relay's addresses represents."""
    interfaces: Mapping[IPAddress, int] = dataclasses.field(default_factory=dict)
    """The host's end of the relay's pair, by the relay's address."""
    beat_ns: int = 0
    is_hooked: bool = False

    def is_alive(self, now_ns: int) -> bool:
        """`is_relay_alive` of bpf/src/proxied.h."""
        return max(0, now_ns - self.beat_ns) < abi.RELAY_BEAT_LIMIT_NS

    def address_of(self, pod: IPAddress, port: int) -> IPAddress | None:
        """`find_relay` of bpf/src/proxied.h."""
        relay = self.targets.get((pod, port)) or self.targets.get((pod, 0))
        return relay if relay is not None and self.pods.get(relay) == pod else None


@dataclasses.dataclass(frozen=True, slots=True)
class DefaultDenyFacts:
    """The default-deny table. classified: interfaces in one of its sets; is_alive: whether its own
    heartbeat is recent; tracks: whether it covers protocols other than TCP; kubelet: the path of
    the cgroup that it admits, empty for none; admits_priority: whether it admits the priority that
    hooks give the kubelet's sockets; is_open: whether it admits TCP of all processes outside pods.
    """

    classified: frozenset[int]
    is_alive: bool = True
    tracks: bool = True
    kubelet: str = ""
    admits_priority: bool = False
    is_open: bool = False

    def is_kubelet(self, cgroup: Cgroup) -> bool:
        """Whether it admits the cgroup as the kubelet's: that one, and below it."""
        return bool(self.kubelet) and f"{cgroup.path}/".startswith(f"{self.kubelet}/")


@dataclasses.dataclass(frozen=True, slots=True)
class EgressFacts:
    """HostEgressPolicies in force. names: by number; hooks: names of the programs that are attached
    to the root cgroup; is_nodes: whether the target is an address of the node."""

    table: EgressTable
    names: Mapping[int, str]
    hooks: frozenset[str]
    is_nodes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """All of them. owners: the map `addresses`, 0 for an address of several pods; hooks: names of
    those attached to the root cgroup; route: the interface by which the node sends to the target,
    0 if it is not known; is_veth: whether that is one of a veth pair; denied_host_probes: the map
    of that name; egress: None without HostEgressPolicies."""

    node: NodeFacts
    gates: Mapping[int, GateFacts]
    owners: Mapping[IPAddress, int]
    relay: RelayFacts = dataclasses.field(default_factory=RelayFacts)
    hooks: frozenset[str] = frozenset()
    default_deny: DefaultDenyFacts | None = None
    route: int = 0
    is_veth: bool = False
    denied_host_probes: frozenset[tuple[IPAddress, int]] = frozenset()
    egress: EgressFacts | None = None

    def gate_of(self, address: IPAddress) -> GateFacts | None:
        """The gate that sees packets to this address: of the interface by which they leave, or
        behind a bridge that of the pod with this address."""
        if self.route in self.gates:
            return self.gates[self.route]
        if owner := self.owners.get(address):
            return self.gates.get(owner)
        listed = [gate for gate in self.gates.values() if address in gate.addresses]
        return listed[0] if len(listed) == 1 else None


HOST, KERNEL, POD, OUTSIDE = "host", "kernel", "pod", "outside"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A source of packets. cgroup: of its sockets; None for the kernel's own packets, those of
    others, and a host process of which only the address is known."""

    origin: str
    text: str
    cgroup: Cgroup | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """What the source sends: a new flow to this address, or with `reply` a reply.

    protocol: IP protocol number; port: the pod's, 0 for protocols without. reply: None unless the
    source's port was named; then whether the pod opened a flow from `port` to that port.
    """

    address: IPAddress
    protocol: int
    port: int
    reply: bool | None = None
