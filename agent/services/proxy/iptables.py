"""The iptables backend: chains of its own in the node's network namespace, as kube-proxy has them.

The state is a set of chains, of which the differences are restored: one `iptables-restore` for each
family, atomic for each table. Chains that select endpoints are named after their content, so a
service that does not change is never written again.
"""

import asyncio
import collections
import hashlib
import socket
from collections.abc import Mapping, Sequence

from agent.linux.nft_monitor import Deleted
from agent.services.client.diff import Change, Differ
from agent.services.linux import iptables
from agent.services.linux.iptables import IptablesVariant
from agent.services.proxy import conntrack
from agent.services.proxy.backend import BackendError
from agent.services.proxy.frontends import Frontend, FrontendChange
from bpf.abi import IPNetwork
from bpf.services.tables import ServiceAddress

_PREFIX = "PODGATE-"
_NODE, _OUTSIDE, _MASK, _MASQUERADE, _HAIRPIN = (
    f"{_PREFIX}{name}" for name in ("NODE", "OUTSIDE", "MASK", "MASQUERADE", "HAIRPIN")
)
_SOURCES, _REJECT, _CHECK, _CHECK_OUTSIDE = (
    f"{_PREFIX}{name}" for name in ("SOURCES", "REJECT", "CHECK", "CHECK-OUTSIDE")
)
# Packets to be masqueraded, as with kube-proxy; the mark is removed again.
_MARK = "-j MARK --or-mark 0x4000"
_NEW = "-m conntrack --ctstate NEW"

# What leads from the kernel's own chains to ours, in each table. Mangle comes before the
# translation, so source ranges are checked there.
_JUMPS = {
    "mangle": (f"PREROUTING {_NEW} -j {_SOURCES}", f"OUTPUT {_NEW} -j {_SOURCES}"),
    "nat": (
        f"PREROUTING -j {_OUTSIDE}",
        f"OUTPUT -j {_NODE}",
        f"POSTROUTING -j {_MASQUERADE}",
    ),
    "filter": (
        f"INPUT ! -i lo {_NEW} -j {_CHECK_OUTSIDE}",
        f"FORWARD {_NEW} -j {_CHECK_OUTSIDE}",
        f"OUTPUT {_NEW} -j {_CHECK}",
    ),
}

# Table and name of a chain, and its rules; None: unknown ones.
_Chain = tuple[str, str]
_Rules = tuple[str, ...]
_Chains = dict[_Chain, _Rules | None]
_Jumps = Mapping[str, Sequence[str]]

_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_SCTP: "sctp"}


class IptablesBackend:
    """Maintains the chains of both families."""

    is_polled = True  # the legacy variant sends none

    def __init__(self, pod_networks: Sequence[IPNetwork], variant: IptablesVariant) -> None:
        """Use `open` instead."""
        self._pod_networks = tuple(pod_networks)
        self._variant = variant
        self._frontends: dict[ServiceAddress, Frontend] = {}
        # By family, and none for a family whose chains are not known.
        self._differs: dict[int, Differ[_Chain, _Rules | None]] = {}

    @classmethod
    async def open(
        cls,
        pod_networks: Sequence[IPNetwork] = (),
        variant: IptablesVariant = IptablesVariant.DEFAULT,
    ) -> "IptablesBackend":
        """pod_networks: as for nftables; variant: of the commands.

        Raises `BackendError` if the commands or what they need of the kernel are missing.
        """
        try:
            for version in (4, 6):
                await iptables.save(version, variant)
        except iptables.IptablesError as error:
            raise BackendError(
                f"{error}: install iptables, or use another --backend, such as nft"
            ) from error
        return cls(pod_networks, variant)

    async def apply(self, change: FrontendChange) -> None:
        self._frontends |= change.changed
        for address in change.removed:
            self._frontends.pop(address, None)
        try:
            for version in (4, 6):
                await self._restore(version)
        except iptables.IptablesError as error:
            raise BackendError(f"iptables cannot apply the services: {error}") from error
        await conntrack.follow(change)

    def is_concerned(self, deleted: Deleted) -> bool:
        """Of the nft variant; chains of single services are deleted by `apply` all the time."""
        own = {"", *(jump.split()[0] for jumps in _JUMPS.values() for jump in jumps)}
        return any(table in _JUMPS and chain in own for table, chain in deleted)

    async def repair(self) -> bool:
        is_repaired = False
        try:
            for version in (4, 6):
                if version in self._differs and not await self._is_intact(version):
                    del self._differs[version]
                    await self._restore(version)
                    is_repaired = True
        except iptables.IptablesError as error:
            raise BackendError(f"iptables cannot restore the services: {error}") from error
        return is_repaired

    async def _is_intact(self, version: int) -> bool:
        """Whether all chains are there, with as many rules, and what leads to them."""
        saved = await iptables.save(version, self._variant)
        _, jumps = installed(saved)
        if any(len(jumps.get(table, ())) < len(needed) for table, needed in _JUMPS.items()):
            return False
        found = collections.Counter(
            line.split(maxsplit=2)[1]
            for line in saved.splitlines()
            if line.startswith(f"-A {_PREFIX}")
        )
        expected = self._differs[version].applied
        return all(found[chain] == len(rules or ()) for (_, chain), rules in expected.items())

    async def close(self) -> None:
        """The backend has nothing open."""

    async def _restore(self, version: int) -> None:
        jumps: _Jumps = _JUMPS
        # After a failure the chains are unknown, and all of them are written.
        differ = self._differs.pop(version, None)
        if differ is None:
            chains, jumps = installed(await iptables.save(version, self._variant))
            differ = Differ(chains)
        after = await asyncio.to_thread(
            chains_of, dict(self._frontends), self._pod_networks, version
        )
        if change := differ.compare(after):
            await iptables.restore(version, self._variant, script(change, jumps, _JUMPS))
        differ.accept()
        self._differs[version] = differ


async def remove() -> None:
    """Remove the chains of both variants, also those of another process. Raises `BackendError`."""
    for variant in IptablesVariant:
        for version in (4, 6):
            try:
                chains, jumps = installed(await iptables.save(version, variant))
                if change := Differ(chains).compare({}):
                    await iptables.restore(version, variant, script(change, jumps, {}))
            except iptables.IptablesMissingError:
                continue
            except iptables.IptablesError as error:
                raise BackendError(
                    f"the proxy's iptables chains cannot be removed: {error}; "
                    f"remove what 'iptables{variant.value}-save' lists with {_PREFIX}"
                ) from error


def installed(saved: str) -> tuple[_Chains, dict[str, list[str]]]:
    """Our chains and what leads to them, in the output of iptables-save."""
    chains: _Chains = {}
    jumps: dict[str, list[str]] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:]
        elif line.startswith(f":{_PREFIX}"):
            chains[table, line[1:].split()[0]] = None
        elif line.startswith("-A ") and not line.startswith(f"-A {_PREFIX}"):
            rule = line.removeprefix("-A ")
            if f" -j {_PREFIX}" in rule:
                jumps.setdefault(table, []).append(rule)
    return chains, jumps


def script(change: Change[_Chain, _Rules | None], before: _Jumps, after: _Jumps) -> str:
    """The input of iptables-restore for a change.

    It deletes the jumps and inserts them again: they are the first rules, and the restore fails if
    another program removed them.
    """
    written = {**change.added, **change.changed}
    lines = []
    for table in _JUMPS:
        rules = {name: rules for (own, name), rules in written.items() if own == table}
        removed = [name for own, name in change.removed if own == table]
        lines.append(f"*{table}")
        # That creates a chain, or removes its rules.
        lines += (f":{name} - [0:0]" for name in (*rules, *removed))
        lines += (f"-D {jump}" for jump in before.get(table, ()))
        lines += (f"-I {jump}" for jump in after.get(table, ()))
        lines += (f"-A {name} {rule}" for name, own in rules.items() for rule in own or ())
        lines += (f"-X {name}" for name in removed)
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def chains_of(
    frontends: Mapping[ServiceAddress, Frontend], pod_networks: Sequence[IPNetwork], version: int
) -> _Chains:
    """All chains of one family."""
    pods = [str(network) for network in pod_networks if network.version == version]
    outside = [f"-s {network} -g {_NODE}" for network in pods]
    check_outside = [f"-s {network} -g {_CHECK}" for network in pods]
    node: list[str] = []
    check: list[str] = []
    sources: list[str] = []
    hairpins: dict[str, None] = {}
    chains: _Chains = {}
    for address, frontend in frontends.items():
        if address.address.version != version:
            continue
        match = _match(address)
        rejection = f"{match} " + ("-j DROP" if frontend.drops else f"-g {_REJECT}")
        hairpins |= dict.fromkeys(str(local.address) for local in frontend.local)
        if frontend.sources:
            own = (f"-s {network} -j RETURN" for network in frontend.sources)
            sources.append(f"{match} -j {_named(chains, 'mangle', (*own, '-j DROP'))}")
        # From the node and its pods.
        if frontend.endpoints:
            mark = f"-j {_MASK}" if pods and not frontend.is_external else ""
            target = _selection(chains, frontend, frontend.endpoints, mark)
            node.append(f"{match} -g {target}")
        else:
            check.append(rejection)
        # From outside. Always in the chain: otherwise the traffic would count as the node's.
        if frontend.is_external and frontend.outside:
            mark = "" if frontend.preserves_client_ip else _MARK
            target = _selection(chains, frontend, frontend.outside, mark)
            outside.append(f"{match} -g {target}")
        elif frontend.is_external:
            outside.append(f"{match} -j RETURN")
            check_outside.append(rejection)
    chains["nat", _NODE] = tuple(node)
    chains["nat", _OUTSIDE] = (*outside, f"-j {_NODE}")
    chains["nat", _MASK] = (*(f"-s {network} -j RETURN" for network in pods), _MARK)
    chains["nat", _HAIRPIN] = tuple(
        f"-s {local} -d {local} -j MASQUERADE --random-fully" for local in hairpins
    )
    chains["nat", _MASQUERADE] = (
        f"-m conntrack --ctstate DNAT -j {_HAIRPIN}",
        "-m mark ! --mark 0x4000/0x4000 -j RETURN",
        "-j MARK --and-mark 0xffffbfff",
        "-j MASQUERADE --random-fully",
    )
    chains["mangle", _SOURCES] = tuple(sources)
    chains["filter", _REJECT] = ("-p tcp -j REJECT --reject-with tcp-reset", "-j REJECT")
    chains["filter", _CHECK] = tuple(check)
    chains["filter", _CHECK_OUTSIDE] = (*check_outside, f"-j {_CHECK}")
    return chains


def _selection(
    chains: _Chains, frontend: Frontend, endpoints: Sequence[ServiceAddress], mark: str
) -> str:
    """The chain that selects one of the endpoints at random, or a client's own with affinity."""
    targets = [
        f"-p {_PROTOCOLS[one.protocol]} -j DNAT --to-destination {_text(one)}" for one in endpoints
    ]
    rules = [mark] if mark else []
    if frontend.affinity_seconds:
        for number, endpoint in enumerate(endpoints):
            clients = f"-m recent --name {_PREFIX}{_digest(frontend.port_id, endpoint)}"
            name = _named(chains, "nat", (f"{clients} --set {targets[number]}",))
            targets[number] = f"-g {name}"
            rules.append(
                f"{clients} --rcheck --seconds {frontend.affinity_seconds} --reap -g {name}"
            )
    rules += (
        f"-m statistic --mode random --probability {1 / left:.10f} {target}" if left > 1 else target
        for left, target in zip(range(len(targets), 0, -1), targets, strict=True)
    )
    return _named(chains, "nat", rules)


def _named(chains: _Chains, table: str, rules: Sequence[str]) -> str:
    """The chain with these rules, which is added; several services may use one."""
    name = _PREFIX + _digest(*rules)
    chains[table, name] = tuple(rules)
    return name


def _match(address: ServiceAddress) -> str:
    protocol = _PROTOCOLS[address.protocol]
    return f"-d {address.address} -p {protocol} -m {protocol} --dport {address.port}"


def _text(address: ServiceAddress) -> str:
    at = f"[{address.address}]" if address.address.version == 6 else str(address.address)
    return f"{at}:{address.port}"


def _digest(*values: object) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()
