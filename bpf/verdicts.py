"""Modes, verdicts and reasons: the twins of the C enums in src/abi.h, with their labels."""

import enum


class Mode(enum.IntEnum):
    """What a gate does with packets that no rule admits."""

    OFF = 0
    AUDIT = 1
    ENFORCE = 2
    STRICT = 3

    @property
    def label(self) -> str:
        """As in Kubernetes labels, metrics and on the command line."""
        return self.name.lower()

    @classmethod
    def from_label(cls, label: str) -> "Mode":
        """The mode of this name. Raises `ValueError` whose text lists the modes."""
        for mode in cls:
            if mode.label == label:
                return mode
        modes = ", ".join(mode.label for mode in cls)
        raise ValueError(f"unknown mode {label!r}; use one of {modes}")


class Verdict(enum.IntEnum):
    """The decision on one packet."""

    PASS = 0
    DROP = 1
    WOULD_DROP = 2

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


class Reason(enum.IntEnum):
    """The reason of a verdict."""

    ARP = 0
    CONTROL = 1
    ESTABLISHED = 2
    REPLY = 3
    RULE = 4
    PROBE = 5
    GRACE = 6
    DEAD_MAN = 7
    UNPARSABLE = 8
    FRAGMENT = 9
    STRAY = 10
    NODE = 11
    KERNEL = 12
    TUNNEL = 13
    EVASION = 14
    PATH_TEST = 15
    SWITCH = 16
    FORWARDED = 17
    RELAY = 18
    STRICT = 19
    UNIDENTIFIED = 20
    STALE = 21
    HOST_EGRESS = 22
    HAIRPIN = 23

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")

    @property
    def is_drop(self) -> bool:
        """Whether packets with this reason are dropped."""
        return self in _DROPS

    @property
    def description(self) -> str:
        """One line, shown by docs/reference/reasons.md and `podgate status`."""
        return _DESCRIPTIONS[self]


_DROPS = frozenset(
    {
        *(Reason.UNPARSABLE, Reason.FRAGMENT, Reason.STRAY, Reason.NODE, Reason.KERNEL),
        *(Reason.TUNNEL, Reason.EVASION, Reason.PATH_TEST, Reason.RELAY, Reason.STRICT),
        *(Reason.HOST_EGRESS, Reason.HAIRPIN),
    }
)

_DESCRIPTIONS = {
    Reason.ARP: "address resolution",
    Reason.CONTROL: "ICMP errors, neighbour discovery, IGMP and MLD",
    Reason.ESTABLISHED: "TCP segment of a connection that the pod opened (no SYN)",
    Reason.REPLY: "reply to a flow of the pod, or a later packet of an admitted flow",
    Reason.RULE: "new flow admitted by a HostAccessPolicy",
    Reason.PROBE: "kubelet, to a port of a probe or hook; with an HTTP one, to any TCP port",
    Reason.GRACE: "possible reply to a flow from before the gate was attached",
    Reason.DEAD_MAN: "no agent for --dead-man-hours; all gates are open",
    Reason.UNPARSABLE: "transport header cannot be parsed",
    Reason.FRAGMENT: "fragment of TCP, or of a datagram whose first fragment did not pass",
    Reason.STRAY: "not an address of this pod: a copy flooded by a bridge",
    Reason.NODE: "new flow from a host process without a matching rule",
    Reason.KERNEL: "new flow without a socket: started by the host kernel",
    Reason.TUNNEL: "sent to a tunnel port of the node, to be forwarded after decapsulation",
    Reason.EVASION: (
        "socket option that lets packets bypass the gate (PACKET_QDISC_BYPASS, AF_XDP rings)"
    ),
    Reason.PATH_TEST: "path test of the agent (TCP to port 0)",
    Reason.SWITCH: "packet without a socket on a node with Open vSwitch",
    Reason.FORWARDED: "later IPv6 fragment of forwarded traffic, without an ingress interface",
    Reason.RELAY: "traffic to the relay from a pod or from outside; only the kubelet is admitted",
    Reason.STRICT: "kubelet, to a pod in strict, but not through the relay",
    Reason.UNIDENTIFIED: (
        "host process outside pods, to a port that the pod declares, while the kubelet is not "
        "identified"
    ),
    Reason.STALE: (
        "host process outside pods, to a port that the pod declares, while the agent's heartbeat "
        "is stale"
    ),
    Reason.HOST_EGRESS: "from a host process to a destination that a HostEgressPolicy denies",
    Reason.HAIRPIN: (
        "new flow from a host process to another machine (a node port, a load balancer), which "
        "sends it back to a pod of the node"
    ),
}
