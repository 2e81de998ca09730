"""Targets: the pod addresses to which the relay proxies, each with a relay address of its own."""

import collections
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable

from agent.errors import PodgateError
from agent.relay.answers import TargetAnswers
from agent.relay.messages import RelayTargetSpec, Sharing
from agent.relay.shared_requests import SharedPorts
from bpf.abi import IPAddress, IPNetwork
from probes.netns import Netns

FIRST_HOST = 16
"""Lower host numbers are for the two ends of the pair, and in reserve."""

# How long the address of a deleted sandbox stays unused. The kernel retransmits a SYN for 127 s at
# most (tcp_syn_retries is 6); the sandbox's connections are reset at once.
_QUARANTINE_SECONDS = 300.0
# An IPv6 subnet has too many addresses to use all.
_MAX_HOSTS = 1 << 20


class AddressPoolExhaustedError(PodgateError):
    """All addresses of the relay are in use, or were until a moment ago."""


class RelayTarget:
    """One address of one sandbox."""

    __slots__ = (
        "_shared",
        "address",
        "answers",
        "claims",
        "dialled",
        "family",
        "key",
        "netns",
        "ports",
        "relay",
        "sharing",
        "user",
    )

    def __init__(self, spec: RelayTargetSpec, relay: IPAddress) -> None:
        self.key = spec.key
        self.netns = Netns(spec.netns_path, spec.netns_device, spec.netns_inode)
        self.address = ipaddress.ip_address(spec.address)
        self.dialled = str(self.address)
        self.family = socket.AF_INET if self.address.version == 4 else socket.AF_INET6
        self.relay = relay
        self.ports = spec.ports
        self.user = spec.user
        self.answers = TargetAnswers()
        self.answers.set_answers(spec.answers)
        self.claims = frozenset(spec.claims)
        self.sharing: Sharing | None = None
        self._shared: SharedPorts | None = None

    def set_sharing(self, sharing: Sharing | None) -> None:
        """Replace what other pods with the address share; the same one keeps its state."""
        if sharing != self.sharing:
            self.sharing = sharing
            self._shared = SharedPorts(self.address, sharing) if sharing else None

    def shared_at(self, port: int) -> SharedPorts | None:
        """What decides which pod gets a connection to this port, if that is not always this one."""
        shared = self._shared
        if shared is None:
            return None
        is_shared = port in shared.ports or (0 in shared.ports and port not in self.claims)
        return shared if is_shared else None

    def has_same_netns(self, spec: RelayTargetSpec) -> bool:
        return (self.netns, str(self.address)) == (
            Netns(spec.netns_path, spec.netns_device, spec.netns_inode),
            spec.address,
        )

    def admits(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.ports)


class AddressPool:
    """Allocates the addresses of one subnet in turn, so that each is reused as late as possible."""

    def __init__(self, subnet: IPNetwork, now: Callable[[], float]) -> None:
        self._subnet = subnet
        self._now = now
        self._end = min(subnet.num_addresses - 1, _MAX_HOSTS)
        self._next = FIRST_HOST
        self._quarantined: collections.deque[tuple[float, int]] = collections.deque()
        self._unavailable: set[int] = set()

    def allocate(self) -> IPAddress:
        """Raises `AddressPoolExhaustedError`."""
        while self._quarantined and self._quarantined[0][0] <= self._now():
            self._unavailable.discard(self._quarantined.popleft()[1])
        if len(self._unavailable) >= self._end - FIRST_HOST:
            raise AddressPoolExhaustedError(
                f"all {self._end - FIRST_HOST} relay addresses in {self._subnet} are in use; "
                "configure a larger range"
            )
        while self._next in self._unavailable:
            self._advance()
        host = self._next
        self._advance()
        self._unavailable.add(host)
        return self._subnet[host]

    def release(self, address: IPAddress) -> None:
        host = int(address) - int(self._subnet.network_address)
        self._quarantined.append((self._now() + _QUARANTINE_SECONDS, host))

    def _advance(self) -> None:
        self._next = self._next + 1 if self._next + 1 < self._end else FIRST_HOST


class Targets:
    """All targets, by the agent's key and by the relay address."""

    def __init__(
        self, subnets: Iterable[IPNetwork], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = {subnet.version: AddressPool(subnet, now) for subnet in subnets}
        self._by_key: dict[str, RelayTarget] = {}
        self._by_relay: dict[bytes, RelayTarget] = {}

    def __iter__(self) -> "collections.abc.Iterator[RelayTarget]":
        return iter(list(self._by_key.values()))

    def find(self, relay: bytes) -> RelayTarget | None:
        """The target of a relay address, packed."""
        return self._by_relay.get(relay)

    def get(self, key: str) -> RelayTarget | None:
        return self._by_key.get(key)

    def add(self, spec: RelayTargetSpec) -> RelayTarget:
        """Raises `AddressPoolExhaustedError`, or `ValueError` for an invalid address."""
        version = ipaddress.ip_address(spec.address).version
        target = RelayTarget(spec, self._pools[version].allocate())
        self._by_key[target.key] = target
        self._by_relay[target.relay.packed] = target
        return target

    def remove(self, target: RelayTarget) -> None:
        del self._by_key[target.key]
        del self._by_relay[target.relay.packed]
        self._pools[target.relay.version].release(target.relay)
