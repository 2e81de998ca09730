"""What the relay carries to, and the address of the relay's that stands for each."""

import collections
import ipaddress
import time
from collections.abc import Callable, Iterable

from agent.relay.messages import WantedTarget
from bpf.abi import IPAddress, IPNetwork
from probes.netns import Netns

FIRST_HOST = 16
"""Below it lie the two ends of the pair, and room for what may come."""

# An address of a sandbox that is gone means nothing for so long before it means another one. The
# kernel sends a SYN again for 127 s at most (tcp_syn_retries is 6), and connections end at once.
_QUARANTINE_SECONDS = 300.0
# A subnet of IPv6 has no end.
_MOST_HOSTS = 1 << 20


class NoAddressLeft(Exception):
    """All of the relay's addresses are in use, or were a moment ago."""


class Target:
    """One address of one sandbox."""

    __slots__ = ("address", "claims", "key", "netns", "ports", "relay")

    def __init__(self, wanted: WantedTarget, relay: IPAddress) -> None:
        self.key = wanted.key
        self.netns = Netns(wanted.netns_path, wanted.netns_device, wanted.netns_inode)
        self.address = ipaddress.ip_address(wanted.address)
        self.relay = relay
        self.ports = wanted.ports
        self.claims = frozenset(wanted.claims)

    def is_same_place(self, wanted: WantedTarget) -> bool:
        return (self.netns, str(self.address)) == (
            Netns(wanted.netns_path, wanted.netns_device, wanted.netns_inode),
            wanted.address,
        )

    def admits(self, port: int) -> bool:
        return any(first <= port <= last for first, last in self.ports)


class AddressPool:
    """Hands out the addresses of one subnet in turn, so that one comes back as late as can be."""

    def __init__(self, subnet: IPNetwork, now: Callable[[], float]) -> None:
        self._subnet = subnet
        self._now = now
        self._end = min(subnet.num_addresses - 1, _MOST_HOSTS)
        self._next = FIRST_HOST
        self._resting: collections.deque[tuple[float, int]] = collections.deque()
        self._unavailable: set[int] = set()

    def take(self) -> IPAddress:
        """Raises `NoAddressLeft`."""
        while self._resting and self._resting[0][0] <= self._now():
            self._unavailable.discard(self._resting.popleft()[1])
        if len(self._unavailable) >= self._end - FIRST_HOST:
            raise NoAddressLeft(
                f"the relay's {self._end - FIRST_HOST} addresses in {self._subnet} are all in "
                "use; give it a larger range"
            )
        while self._next in self._unavailable:
            self._advance()
        host = self._next
        self._advance()
        self._unavailable.add(host)
        return self._subnet[host]

    def give_back(self, address: IPAddress) -> None:
        host = int(address) - int(self._subnet.network_address)
        self._resting.append((self._now() + _QUARANTINE_SECONDS, host))

    def _advance(self) -> None:
        self._next = self._next + 1 if self._next + 1 < self._end else FIRST_HOST


class Targets:
    """All targets, by the agent's key and by the relay's address."""

    def __init__(
        self, subnets: Iterable[IPNetwork], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._pools = {subnet.version: AddressPool(subnet, now) for subnet in subnets}
        self._by_key: dict[str, Target] = {}
        self._by_relay: dict[bytes, Target] = {}

    def __iter__(self) -> "collections.abc.Iterator[Target]":
        return iter(list(self._by_key.values()))

    def find(self, relay: bytes) -> Target | None:
        """By the relay's address, packed."""
        return self._by_relay.get(relay)

    def get(self, key: str) -> Target | None:
        return self._by_key.get(key)

    def add(self, wanted: WantedTarget) -> Target:
        """Raises `NoAddressLeft`, or `ValueError` for an address that is none."""
        version = ipaddress.ip_address(wanted.address).version
        target = Target(wanted, self._pools[version].take())
        self._by_key[target.key] = target
        self._by_relay[target.relay.packed] = target
        return target

    def remove(self, target: Target) -> None:
        del self._by_key[target.key]
        del self._by_relay[target.relay.packed]
        self._pools[target.relay.version].give_back(target.relay)
