"""The state of one pod, which the parts of the agent share through the store."""

import asyncio
import dataclasses
import datetime
import enum
import functools
import ipaddress
from collections.abc import Mapping

from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.pod import Pod
from bpf.abi import IPAddress
from bpf.rules import Rule
from bpf.verdicts import Mode
from probes.netns import Netns
from probes.redirection import InnerWays

_MAX_NAMED = 4
# Reserved (RFC 4291, 2.4). Istio gives each pod of two IP versions ::6, which only its proxy uses.
_OF_NO_NETWORK = ipaddress.IPv6Network("::/8")


@dataclasses.dataclass(frozen=True)
class AddressClaims:
    """The addresses of one pod's namespace, link-local ones left out.

    confirmed: the pod's own, IPv4 first; unconfirmed: why each of the others is not, in words that
    complete "198.18.0.1 is ..."; is_settling: whether another check may soon find more.
    """

    confirmed: tuple[IPAddress, ...] = ()
    unconfirmed: Mapping[IPAddress, str] = dataclasses.field(default_factory=dict)
    is_settling: bool = False

    @functools.cached_property
    def texts(self) -> tuple[str, ...]:
        """The confirmed ones as text."""
        return tuple(map(str, self.confirmed))

    @property
    def problem(self) -> str:
        """One sentence about unconfirmed addresses that will most likely stay so, or nothing."""
        if self.is_settling:
            return ""
        named = [
            f"{address} is {why}"
            for address, why in self.unconfirmed.items()
            if address not in _OF_NO_NETWORK
        ]
        if not named:
            return ""
        more = len(named) - _MAX_NAMED
        text = "; ".join(named[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return f"Addresses that only the pod itself claims count in its own gate alone: {text}."


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """The rules of one gate. problem: one sentence about rules that do not fit, or nothing;
    skipped: the policy of each of these rules."""

    rules: tuple[Rule, ...] = ()
    problem: str = ""
    skipped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class IsolationStatus:
    """The content of the condition `podgate.io/isolation-ready`."""

    status: str
    reason: str
    message: str


class PathTestResult(enum.StrEnum):
    """Result of a path test of one address."""

    CONFIRMED = "confirmed"
    BYPASSED = "bypassed"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class PathTestRecord:
    """What a path test found for a pod as it was then. tested_at: by `time.monotonic`."""

    netns: Netns
    mode: Mode
    gates: frozenset[int]
    results: dict[str, PathTestResult]
    """By address."""
    tested_at: float = 0.0
    probes_admitted: int = 0
    """Connections of the kubelet that the gates had admitted by then."""
    is_kubelet_seen: bool = False
    """Whether there was one since the test before: then the kubelet reaches the pod, whatever
    happened to the test's own packets."""

    @property
    def worst(self) -> PathTestResult | None:
        """None where there was no address to test."""
        found = set(self.results.values())
        order = (
            *(PathTestResult.BYPASSED, PathTestResult.FAILED),
            *(PathTestResult.UNREACHABLE, PathTestResult.CONFIRMED),
        )
        return next((result for result in order if result in found), None)

    def matches(self, state: "PodState") -> bool:
        """Whether the pod still is as it was tested."""
        return (
            self.netns == state.gated_netns
            and self.mode is state.pod.mode
            and self.gates == state.gates.keys()
            and self.results.keys() == set(state.own_addresses)
        )


@dataclasses.dataclass(slots=True)
class PodState:
    """A pod and what is in force for it. gates: the attached ones, by ifindex."""

    pod: Pod
    netns: Netns | None = None
    network: PodNetwork | None = None
    claims: AddressClaims = dataclasses.field(default_factory=AddressClaims)
    """Which of the network's addresses are the pod's own."""
    inner_ways: InnerWays | None = None
    """Those of its own addresses to which connections from inside are redirected or dropped; None
    until that was tried in this sandbox."""
    gates: dict[int, HostInterface] = dataclasses.field(default_factory=dict)
    admission: Admission | None = None
    """The rules of its gates."""
    gate_problem: str = ""
    """One sentence on what a gate has no room for, and so drops, or why it is not as desired."""
    has_failed: bool = False
    """Whether a gate that was attached before could not be brought into the desired state."""
    is_gate_lost: bool = False
    """Whether a gate is gone from its interface and cannot be attached again yet."""
    failed_at: float = 0.0
    """Since when, by the event loop's clock."""
    chain_problem: str = ""
    """One sentence where another program runs before a gate and cannot be moved."""
    gated_netns: Netns | None = None
    """The namespace for which the desired state was reached; it latches."""
    ungated_interfaces: frozenset[int] | None = None
    """Interfaces that have no gate on purpose (mode off), as of the last pass."""
    recheck_until: float = 0.0
    """Of the event loop's clock: until then podgate-cni may still gate an interface in mode off."""
    first_gated_at: datetime.datetime | None = None
    """When the agent attached the first gate of a sandbox that had none before."""
    status: IsolationStatus | None = None
    """Result of the last pass over its gates, without path test and relay."""
    path_test: PathTestRecord | None = None
    """The last path test, which may be of the pod as it was earlier: see `current_path_test`."""
    trusted_netns: Netns | None = None
    """The sandbox for which a path test did not find the gate bypassed; it latches."""

    @property
    def is_pending(self) -> bool:
        """Whether another pass may find what was missing: a namespace, an interface, a lock."""
        pod = self.pod
        return self.gated_netns is None and not pod.host_network and not pod.has_no_sandbox

    @property
    def awaits_plugin(self) -> bool:
        """Whether podgate-cni may still gate an interface of a pod in mode off."""
        until = self.recheck_until
        return bool(until) and asyncio.get_running_loop().time() < until

    @property
    def is_unsettled(self) -> bool:
        """Whether its addresses are new, or its gates failed: for as long as the pod likes."""
        return self.claims.is_settling or self.has_failed

    @property
    def needs_recheck(self) -> bool:
        """Whether another pass is due soon without a mark."""
        return self.is_pending or self.awaits_plugin or self.is_unsettled

    @property
    def is_path_tested(self) -> bool:
        """Whether its gates should drop a path test: they are attached, and enforce."""
        return (
            self.gated_netns is not None
            and bool(self.gates)
            and self.pod.mode in (Mode.ENFORCE, Mode.STRICT)
        )

    @property
    def current_path_test(self) -> PathTestRecord | None:
        """The last path test, if the pod still is as it was tested."""
        return self.path_test if self.path_test and self.path_test.matches(self) else None

    @property
    def sandbox_path_test(self) -> PathTestRecord | None:
        """The sandbox's last path test, also if its addresses or gates have changed since."""
        tested = self.path_test
        return tested if tested and tested.netns == self.gated_netns else None

    @property
    def own_addresses(self) -> tuple[str, ...]:
        """The confirmed ones, which others may use for the pod."""
        return self.claims.texts

    @property
    def probe_addresses(self) -> tuple[str, ...]:
        """Where probes dial, from inside the pod's namespace. While nothing is confirmed, what the
        namespace shows: from there only the pod itself answers."""
        shown = self.network.probe_addresses if self.network else ()
        return self.own_addresses or shown

    @property
    def interface_indexes(self) -> set[int]:
        """The host's sides of the pod's interfaces, gated or (mode off) not."""
        current = self.network.interfaces if self.network else ()
        return {interface.ifindex for interface in current} | self.gates.keys()
