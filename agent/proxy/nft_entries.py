"""What one place needs of the nftables ruleset: elements of its maps, and for affinity chains.

Places share: several have the same endpoints' chains, the same address, the same hairpin. Whoever
keeps the ruleset counts how many need each entry.
"""

import dataclasses
import hashlib
import socket
from collections.abc import Generator, Iterator

from agent.proxy.frontends import Frontend
from bpf.services.tables import ServiceAddress

READY_COUNTS = 128
"""nft 1.0.6 takes no rule that looks into a map of ports once that map is in the kernel, so these
come with it. A service with another number of endpoints has all of the table written anew."""

_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp"}


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """Of a map or set of the ruleset. value: empty for a set's."""

    container: str
    key: str
    value: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """A set of clients that have affinity to one endpoint."""

    name: str
    type: str
    seconds: int


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """rank: who goes to another chain has the higher one. is_late: only with the whole table."""

    name: str
    rules: tuple[str, ...]
    rank: int = 0
    is_late: bool = False


Entry = Element | Clients | Chain


def entries_of(place: ServiceAddress, frontend: Frontend) -> Iterator[Entry]:
    """All that what comes to `place` needs."""
    family = place.address.version
    key = _key(place)
    if not frontend.is_external:
        yield Element(f"cluster_ips{family}", str(place.address))
    if frontend.sources:
        yield from _firewall(place, frontend)
    for local in frontend.local:
        yield Element(f"hairpin{family}", f"{local.address} . {local.address}")
    # From the node and its pods.
    if frontend.endpoints:
        target = yield from _way(place, frontend, frontend.endpoints, f"endpoints{family}")
        yield Element(f"services{family}", key, f"goto {target}")
    else:
        yield Element(f"refused{family}", key, "drop" if frontend.drops else "goto refuse")
    if not frontend.is_external:
        return
    # From others. In the map in any case, or they would be taken for the node's.
    if not frontend.outside:
        yield Element(f"outside{family}", key, "accept")
        verdict = "drop" if frontend.drops else "goto refuse"
        yield Element(f"refused_outside{family}", key, verdict)
    elif frontend.keeps_client:
        target = yield from _way(place, frontend, frontend.outside, f"outside_endpoints{family}")
        yield Element(f"outside{family}", key, f"goto {target}")
    else:
        target = yield from _way(place, frontend, frontend.outside, f"endpoints{family}")
        masked = Chain(
            f"masked-{target}", ("meta mark set meta mark | 0x4000", f"goto {target}"), 2
        )
        yield masked
        yield Element(f"outside{family}", key, f"goto {masked.name}")


def _way(
    place: ServiceAddress, frontend: Frontend, endpoints: tuple[ServiceAddress, ...], container: str
) -> Generator[Entry, None, str]:
    """Entries that lead to one of the endpoints; returns the chain's name."""
    if frontend.affinity_seconds:
        return (yield from _affinity(place, frontend, endpoints))
    for number, endpoint in enumerate(endpoints):
        yield Element(
            container, f"{_key(place)} . {number}", f"{endpoint.address} . {endpoint.port}"
        )
    chain = _chain(container, len(endpoints))
    if chain.is_late:
        yield chain
    return chain.name


def ready_chains() -> Iterator[Chain]:
    """One for each number of endpoints that is likely, in every table."""
    for container in (f"{name}{v}" for name in ("endpoints", "outside_endpoints") for v in (4, 6)):
        for count in range(1, READY_COUNTS + 1):
            yield _chain(container, count)


def _chain(container: str, count: int) -> Chain:
    """Takes one of so many endpoints."""
    ip = _ip(int(container[-1]))
    key = f"{ip} daddr . meta l4proto . th dport . numgen random mod {count}"
    rule = f"meta l4proto {{ tcp, udp }} dnat {ip} to {key} map @{container}"
    return Chain(f"{container}-{count}", (rule,), is_late=count > READY_COUNTS)


def _affinity(
    place: ServiceAddress, frontend: Frontend, endpoints: tuple[ServiceAddress, ...]
) -> Generator[Entry, None, str]:
    family, protocol = place.address.version, _PROTOCOLS[place.protocol]
    ip = _ip(family)
    names = []
    for endpoint in endpoints:
        at = f"[{endpoint.address}]" if family == 6 else str(endpoint.address)
        name = f"to-{_digest(frontend.port_id, endpoint, frontend.affinity_seconds)}"
        yield Clients(name, f"ipv{family}_addr", frontend.affinity_seconds)
        yield Chain(
            name,
            (
                f"update @{name} {{ {ip} saddr }}",
                f"meta l4proto {protocol} dnat {ip} to {at}:{endpoint.port}",
            ),
        )
        names.append(name)
    choices = ", ".join(f"{number} : goto {name}" for number, name in enumerate(names))
    chain = Chain(
        f"affinity-{_digest(frontend.port_id, family, *names)}",
        (
            *(f"{ip} saddr @{name} goto {name}" for name in names),
            f"numgen random mod {len(names)} vmap {{ {choices} }}",
        ),
        1,
    )
    yield chain
    return chain.name


def _firewall(place: ServiceAddress, frontend: Frontend) -> Iterator[Entry]:
    family = place.address.version
    own = [str(network) for network in frontend.sources if network.version == family]
    chain = Chain(
        f"sources-{_digest(family, *own)}",
        (
            *(f"{_ip(family)} saddr {network} return" for network in own),
            "drop",
        ),
    )
    yield chain
    yield Element(f"sources{family}", _key(place), f"goto {chain.name}")


def _key(place: ServiceAddress) -> str:
    return f"{place.address} . {_PROTOCOLS[place.protocol]} . {place.port}"


def _ip(family: int) -> str:
    return "ip6" if family == 6 else "ip"


def _digest(*what: object) -> str:
    return hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()
