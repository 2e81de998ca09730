"""Selects the addresses that a probe dials, and those of which a success is required.

KEP-4559 leaves open whether to name families or to use Happy Eyeballs; podgate has both, with the
words that Services use for their families.
"""

import ipaddress
from collections.abc import Mapping, Sequence

import msgspec

from probes.errors import ProbeError
from probes.spec.definitions import IpFamily, OtherNetwork, Probe

LOCALHOST = ("127.0.0.1", "::1")
"""In the pod's namespace: never the host's."""


class NoAddressError(ProbeError):
    """The pod has no address of the probe's family: a failure of the pod."""


class UnknownNetworkError(ProbeError):
    """The network of the probe is not known (yet), which proves nothing about the pod."""


def family_of(address: str) -> IpFamily:
    """The family of an address as text. Raises ValueError if it is none."""
    return "IPv6" if ipaddress.ip_address(address).version == 6 else "IPv4"


class PodInterfaces(msgspec.Struct, frozen=True):
    """The pod's interfaces, as its network namespace has them."""

    addresses: Mapping[str, tuple[str, ...]] = {}
    """By interface."""
    networks: Mapping[str, str] = {}
    """Interfaces by network."""

    def of(self, target: OtherNetwork) -> tuple[str, ...]:
        """The addresses of one. Raises UnknownNetworkError."""
        name = target.interface or self.networks.get(target.network, "")
        if not name:
            raise UnknownNetworkError(f'the pod has no interface of the network "{target.network}"')
        if name not in self.addresses:
            raise UnknownNetworkError(f'the pod has no interface "{name}" with an address')
        return self.addresses[name]


NO_INTERFACES = PodInterfaces()


def groups(
    probe: Probe, pod_addresses: Sequence[str], interfaces: PodInterfaces = NO_INTERFACES
) -> tuple[tuple[str, ...], ...]:
    """The addresses to dial, in groups: one success in each group is required.

    `pod_addresses` are those of status.podIPs, the preferred one first. Link-local ones are left
    out: they are not the pod's to serve on, and are meaningless without an interface.

    Without a policy there is one group of all addresses, or of all of `ip_family`. SingleStack is
    the first of these alone. Under PreferDualStack each of the pod's families must succeed; under
    RequireDualStack the pod must have both. Raises NoAddressError, UnknownNetworkError, and
    ValueError for invalid addresses.
    """
    match probe.target:
        case "pod":
            addresses = pod_addresses
        case "localhost":
            addresses = LOCALHOST
        case OtherNetwork():
            addresses = interfaces.of(probe.target)
    by_family: dict[IpFamily, list[str]] = {}
    usable: list[str] = []
    for address in dict.fromkeys(addresses):
        if not ipaddress.ip_address(address).is_link_local:
            usable.append(address)
            by_family.setdefault(family_of(address), []).append(address)
    if not usable:
        raise NoAddressError("the pod has no address to probe")
    match probe.ip_family_policy:
        case "PreferDualStack" | "RequireDualStack":
            if probe.ip_family_policy == "RequireDualStack":
                _require(by_family, "IPv4")
                _require(by_family, "IPv6")
            first = probe.ip_family or family_of(usable[0])
            ordered = sorted(by_family.items(), key=lambda item: item[0] != first)
            return tuple(tuple(found) for _, found in ordered)
        case policy:
            if probe.ip_family is not None:
                usable = _require(by_family, probe.ip_family)
            return (tuple(usable[:1] if policy == "SingleStack" else usable),)


def _require(by_family: dict[IpFamily, list[str]], family: IpFamily) -> list[str]:
    if family not in by_family:
        raise NoAddressError(f"the pod has no {family} address to probe")
    return by_family[family]
