"""Which network plugin the node has, by facts, and what is known about gates beside it."""

import asyncio
import dataclasses
import json
import pathlib
from collections.abc import Collection, Iterator

from agent.admin import finding_kinds as kinds
from agent.admin.finding import found
from agent.linux import rtnetlink
from agent.linux.rtnetlink import Link
from agent.operate.doctor.results import Passed, Result

# Of the host: this process may be in a container that shares the host's pids.
_CONFIGURATION = pathlib.Path("/proc/1/root/etc/cni/net.d")
# libcni reads these, in the order of their names.
_SUFFIXES = (".conf", ".conflist", ".json")
_MAX_BYTES = 1 << 20
# Of Calico's plugin (cni-plugin/pkg/types): veth or netkit.
_DEVICE = "device_type"


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """links: of the host's namespace; pinned: names below the BPF file system, two levels;
    plugins: types in the first CNI configuration; device_types: kinds of devices that it
    requests."""

    links: Collection[Link] = ()
    pinned: Collection[str] = ()
    plugins: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ()

    def has_link(self, *prefixes: str) -> bool:
        return any(link.name.startswith(prefixes) for link in self.links)

    def has_kind(self, kind: str) -> bool:
        return any(link.kind == kind for link in self.links)

    def has_pin(self, *prefixes: str) -> bool:
        return any(name.startswith(prefixes) for name in self.pinned)


async def check(bpffs: pathlib.Path, configuration: pathlib.Path = _CONFIGURATION) -> list[Result]:
    links = await rtnetlink.read()
    pinned = await asyncio.to_thread(pinned_names, bpffs)
    entries = await asyncio.to_thread(configured, configuration)
    return list(findings(Facts(links, pinned, _texts(entries, "type"), _texts(entries, _DEVICE))))


def findings(facts: Facts) -> Iterator[Result]:
    """The plugin, or each problem that is documented for it."""
    problems = list(_problems(facts))
    name = _name(facts)
    if not problems:
        text = f"Network plugin: {name}." if name else "No network plugin is recognised."
        yield Passed("cni", text)
    yield from problems


# felix: dataplane/linux/dataplanedefs has the node's pair, bpf/bpfdefs where maps are pinned. Its
# bpf_redirect_peer takes no packet of the host past a gate (docs/guides/calico.md).
_CALICO_BPF = "Calico with its eBPF data plane"


def _name(facts: Facts) -> str:
    """By interfaces, which exist also where no configuration file can be read."""
    if facts.has_link("bpfin.cali", "bpfout.cali") or facts.has_pin("cali_"):
        return _CALICO_BPF
    for prefix, name in (
        ("cilium_", "Cilium"),
        ("cali", "Calico"),
        ("antrea-gw", "Antrea"),
        ("ovn-k8s-mp", "OVN-Kubernetes"),
        ("ovn0", "Kube-OVN"),
        ("flannel.", "flannel"),
        ("weave", "Weave"),
    ):
        if facts.has_link(prefix):
            return name
    return ", ".join(facts.plugins)


def _problems(facts: Facts) -> Iterator[Result]:
    # Cilium pins in a directory of its own, and maps in tc/globals (pkg/bpf, CiliumPath and
    # TCGlobalsPath).
    if facts.has_link("cilium_host", "cilium_net") or facts.has_pin("cilium"):
        yield found(
            kinds.NETWORK_UNTRIED,
            "Cilium routes by BPF: bpf_redirect_peer puts packets into a pod's namespace without "
            "its gate. Traffic of the host does not usually take that way; it was not tried.",
        )
    if facts.has_kind("openvswitch"):
        name = f" ({plugin})" if (plugin := _name(facts)) else ""
        yield found(
            kinds.NETWORK_UNTRIED,
            f"An Open vSwitch datapath is on this node{name}: it sends packets again without their "
            "socket, so packets without one pass if they lack the host's stamp, which flows that "
            "set a queue remove.",
        )
    without_gate = "which have no gate: their condition has reason NotSupported"
    if facts.has_kind("netkit"):
        yield found(kinds.NETKIT, f"Pods are connected by netkit devices, {without_gate}.")
    elif "netkit" in facts.device_types:
        yield found(
            kinds.NETKIT,
            f"The network's configuration connects new pods by netkit devices, {without_gate}.",
            remedy=f'Set "{_DEVICE}": "veth" in the network\'s configuration.',
        )


def pinned_names(bpffs: pathlib.Path) -> frozenset[str]:
    """Of the file system's root, and of tc/globals, where iproute2 and libbpf users pin maps."""
    found: set[str] = set()
    for directory in (bpffs, bpffs / "tc" / "globals"):
        try:
            found.update(entry.name for entry in directory.iterdir())
        except OSError:
            continue
    return frozenset(found)


def configured(directory: pathlib.Path) -> tuple[dict[str, object], ...]:
    """The plugins' entries in the configuration that a runtime uses: the first file, by name.

    Empty without one that can be read.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES)
    except OSError:
        return ()
    for path in paths:
        try:
            with path.open("rb") as file:
                content = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict):
            listed = content.get("plugins")
            entries = listed if isinstance(listed, list) else [content]
            return tuple(one for one in entries if isinstance(one, dict))
    return ()


def _texts(entries: Collection[dict[str, object]], key: str) -> tuple[str, ...]:
    return tuple(value for one in entries if isinstance(value := one.get(key), str))
