"""The nftables entries of one frontend: map elements, and chains for affinity.

Frontends share entries: several have the same endpoints' chains, the same address, the same
hairpin. The owner of the ruleset counts the users of each entry.
"""

import dataclasses
import hashlib
import socket
from collections.abc import Generator, Iterator

from agent.services.proxy.frontends import Frontend
from bpf.services.tables import ServiceAddress

READY_COUNTS = 128
"""nft 1.0.6 accepts no rule with a lookup in a map of ports once that map is in the kernel, so the
chains for these numbers of endpoints are created with it. A service with more endpoints has the
whole table rewritten."""

AFFINITY_PREFIX = "to-"
"""Of the sets of clients with affinity, and of the chains to their endpoints."""

_PROTOCOLS = {
    socket.IPPROTO_TCP: "tcp",
    socket.IPPROTO_UDP: "udp",
    socket.IPPROTO_SCTP: "sctp",
}


@dataclasses.dataclass(frozen=True, slots=True)
class NftElement:
    """An element of a map or set. value: empty for a set."""

    container: str
    key: str
    value: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AffinitySet:
    """A set of clients with affinity to one endpoint."""

    name: str
    type: str
    seconds: int


@dataclasses.dataclass(frozen=True, slots=True)
class NftChain:
    """A chain. rank: higher than that of all chains it jumps to; is_late: can be added only with
    the whole table."""

    name: str
    rules: tuple[str, ...]
    rank: int = 0
    is_late: bool = False


Entry = NftElement | AffinitySet | NftChain


def entries_of(address: ServiceAddress, frontend: Frontend) -> Iterator[Entry]:
    """All entries for traffic to `address`."""
    family = address.address.version
    key = _key(address)
    if not frontend.is_external:
        yield NftElement(f"cluster_ips{family}", str(address.address))
    if frontend.sources:
        yield from _firewall(address, frontend)
    for local in frontend.local:
        yield NftElement(f"hairpin{family}", f"{local.address} . {local.address}")
    # From the node and its pods.
    if frontend.endpoints:
        target = yield from _dispatch(address, frontend, frontend.endpoints, f"endpoints{family}")
        yield NftElement(f"services{family}", key, f"goto {target}")
    else:
        yield NftElement(
            f"no_endpoints{family}", key, "drop" if frontend.drops else "goto reject_traffic"
        )
    if not frontend.is_external:
        return
    # From outside. Always in the map: otherwise the traffic would count as the node's.
    if not frontend.outside:
        yield NftElement(f"outside{family}", key, "accept")
        verdict = "drop" if frontend.drops else "goto reject_traffic"
        yield NftElement(f"no_endpoints_outside{family}", key, verdict)
    elif frontend.preserves_client_ip:
        container = f"outside_endpoints{family}"
        target = yield from _dispatch(address, frontend, frontend.outside, container)
        yield NftElement(f"outside{family}", key, f"goto {target}")
    else:
        target = yield from _dispatch(address, frontend, frontend.outside, f"endpoints{family}")
        masked = NftChain(
            f"masked-{target}", ("meta mark set meta mark | 0x4000", f"goto {target}"), 2
        )
        yield masked
        yield NftElement(f"outside{family}", key, f"goto {masked.name}")


def _dispatch(
    address: ServiceAddress,
    frontend: Frontend,
    endpoints: tuple[ServiceAddress, ...],
    container: str,
) -> Generator[Entry, None, str]:
    """Entries that select one of the endpoints; returns the chain's name."""
    if frontend.affinity_seconds:
        return (yield from _affinity(address, frontend, endpoints))
    for number, endpoint in enumerate(endpoints):
        yield NftElement(
            container, f"{_key(address)} . {number}", f"{endpoint.address} . {endpoint.port}"
        )
    chain = _chain(container, len(endpoints))
    if chain.is_late:
        yield chain
    return chain.name


def ready_chains() -> Iterator[NftChain]:
    """One for each likely number of endpoints, in every table."""
    for container in (f"{name}{v}" for name in ("endpoints", "outside_endpoints") for v in (4, 6)):
        for count in range(1, READY_COUNTS + 1):
            yield _chain(container, count)


def _chain(container: str, count: int) -> NftChain:
    """Selects one of `count` endpoints."""
    ip = _ip(int(container[-1]))
    key = f"{ip} daddr . meta l4proto . th dport . numgen random mod {count}"
    rule = f"meta l4proto {{ tcp, udp, sctp }} dnat {ip} to {key} map @{container}"
    return NftChain(f"{container}-{count}", (rule,), is_late=count > READY_COUNTS)


def _affinity(
    address: ServiceAddress, frontend: Frontend, endpoints: tuple[ServiceAddress, ...]
) -> Generator[Entry, None, str]:
    family, protocol = address.address.version, _PROTOCOLS[address.protocol]
    ip = _ip(family)
    names = []
    for endpoint in endpoints:
        at = f"[{endpoint.address}]" if family == 6 else str(endpoint.address)
        name = f"{AFFINITY_PREFIX}{_digest(frontend.port_id, endpoint, frontend.affinity_seconds)}"
        yield AffinitySet(name, f"ipv{family}_addr", frontend.affinity_seconds)
        yield NftChain(
            name,
            (
                f"update @{name} {{ {ip} saddr }}",
                f"meta l4proto {protocol} dnat {ip} to {at}:{endpoint.port}",
            ),
        )
        names.append(name)
    choices = ", ".join(f"{number} : goto {name}" for number, name in enumerate(names))
    chain = NftChain(
        f"affinity-{_digest(frontend.port_id, family, *names)}",
        (
            *(f"{ip} saddr @{name} goto {name}" for name in names),
            f"numgen random mod {len(names)} vmap {{ {choices} }}",
        ),
        1,
    )
    yield chain
    return chain.name


def _firewall(address: ServiceAddress, frontend: Frontend) -> Iterator[Entry]:
    family = address.address.version
    own = [str(network) for network in frontend.sources]
    chain = NftChain(
        f"sources-{_digest(family, *own)}",
        (
            *(f"{_ip(family)} saddr {network} return" for network in own),
            "drop",
        ),
    )
    yield chain
    yield NftElement(f"sources{family}", _key(address), f"goto {chain.name}")


def _key(address: ServiceAddress) -> str:
    return f"{address.address} . {_PROTOCOLS[address.protocol]} . {address.port}"


def _ip(family: int) -> str:
    return "ip6" if family == 6 else "ip"


def _digest(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
