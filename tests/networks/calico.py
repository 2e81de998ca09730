"""Calico on the node of a cluster, by hand: CNI plugin, definitions, address pools, and felix.

No image and no operator: the programs are in a directory, `make test-networks` has what it needs.
"""

import enum
import json
import os
import pathlib
import shutil
import signal
import subprocess
from typing import Any

import yaml

from agent.lab.lab import NODE_IPV4, NODE_IPV6
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.daemons import Daemon
from tests.cluster.one_node import NAME, OneNode
from tests.networks import health, traffic, uplink

PROGRAMS = ("calico-felix", "calico", "calico-ipam", "bpf/tc_preamble_ingress.o", "crd", "VERSION")
"""In the directory `calico` of NETWORKS. crd: libcalico-go/config/crd of the sources; VERSION: one
line, for the record."""
POOLS = {"pool4": ("198.18.16.0/20", 24), "pool6": ("fd00:18:0:10::/64", 120)}
"""Of pods: network, and the size of the blocks of nodes."""
API = "/apis/crd.projectcalico.org/v1"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_READINESS = "http://127.0.0.1:9099/readiness"
# felix knows no other place (felix/bpf/bpfdefs, ObjectDir), so it gets it by a mount of its own.
_LIBRARIES = pathlib.Path("/usr/lib")
_EBPF_LINK = "bpfin.cali"


class DataPlane(enum.Enum):
    """How felix enforces, by its settings."""

    IPTABLES = "iptables"
    NFTABLES = "nftables"
    EBPF = "ebpf"

    @property
    def settings(self) -> dict[str, str]:
        is_ebpf = self is DataPlane.EBPF
        made = {
            "NFTABLESMODE": "Enabled" if self is DataPlane.NFTABLES else "Disabled",
            "BPFENABLED": str(is_ebpf).lower(),
        }
        if is_ebpf:
            made |= {
                "BPFDATAIFACEPATTERN": f"^{uplink.NAME}$",
                "BPFKUBEPROXYIPTABLESCLEANUPENABLED": "false",
                # Linux 6.18 rejects this optional program, and felix would never be ready.
                "BPFIPFRAGMENTREASSEMBLYENABLED": "false",
                "BPFLOGLEVEL": "Off",
            }
        return made


class Calico:
    """Calico of one cluster: a `Network`."""

    families = 2

    def __init__(self, node: OneNode, programs: pathlib.Path, data_plane: DataPlane) -> None:
        self.data_plane = data_plane
        self.version = (programs / "VERSION").read_text(encoding="utf-8").strip()
        self._node = node
        self._programs = programs
        mounted = cgroup2_mount()
        assert mounted is not None
        # Connect-time load balancing is for processes below it, not for the whole machine.
        self.cgroup = mounted / node.runtime.name
        self.engine = Daemon(
            self._command(),
            self.cgroup / "felix",
            node.runtime.directory / "felix.log",
            name="felix",
        )

    @property
    def api(self) -> Api:
        return self._node.api

    @property
    def programmer(self) -> Daemon:
        return self.engine

    @property
    def has_programs(self) -> bool:
        return self.data_plane is DataPlane.EBPF

    @property
    def translates(self) -> bool:
        return self.data_plane is DataPlane.EBPF

    def pod_addresses(self) -> set[str]:
        return traffic.routed_addresses("cali")

    def install(self) -> None:
        """What calico-node's start and its operator do."""
        # felix in eBPF wants an interface of the host.
        uplink.add()
        for name in ("calico", "calico-ipam"):
            shutil.copy(self._programs / name, self._node.runtime.plugins)
        # /var/lib is the tests' own.
        state = pathlib.Path("/var/lib/calico")
        state.mkdir()
        (state / "nodename").write_text(NAME, encoding="ascii")
        self._define()
        self.create("clusterinformations", "default", clusterType="k8s", datastoreReady=True)
        self.create("tiers", "default", order=1000000, defaultAction="Deny")
        for name, (network, size) in POOLS.items():
            self.create(
                "ippools",
                name,
                cidr=network,
                blockSize=size,
                natOutgoing=False,
                ipipMode="Never",
                vxlanMode="Never",
                nodeSelector="all()",
                allowedUses=["Workload", "Tunnel"],
            )
        addresses = {
            "projectcalico.org/IPv4Address": f"{NODE_IPV4}/32",
            "projectcalico.org/IPv6Address": f"{NODE_IPV6}/128",
        }
        self.api.patch(f"/api/v1/nodes/{NAME}", {"metadata": {"annotations": addresses}})
        # The first by its name is in force.
        directory = self._node.runtime.cni_directory
        (directory / "00-calico.conflist").write_text(json.dumps(self._conflist()))
        (directory / "10-pods.conflist").unlink()

    def create(self, plural: str, name: str, **spec: Any) -> None:
        """One of Calico's objects; `delete` removes it."""
        kind = {
            "clusterinformations": "ClusterInformation",
            "globalnetworkpolicies": "GlobalNetworkPolicy",
            "hostendpoints": "HostEndpoint",
            "ippools": "IPPool",
            "tiers": "Tier",
        }[plural]
        body: Json = {"apiVersion": "crd.projectcalico.org/v1", "kind": kind, "spec": spec}
        labels = spec.pop("labels", {})
        self.api.create(f"{API}/{plural}", {**body, "metadata": {"name": name, "labels": labels}})

    def delete(self, plural: str, name: str) -> None:
        self.api.delete(f"{API}/{plural}/{name}")

    def start(self) -> None:
        self.engine.start()
        self.wait_until_ready()

    def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.engine.stop(number)
        self.start()

    def remove(self) -> None:
        self.engine.kill()
        uplink.remove()
        run("nft", "flush", "ruleset")
        if self.data_plane is DataPlane.EBPF:
            run("ip", "link", "delete", _EBPF_LINK)  # and its peer

    def wait_until_ready(self) -> None:
        polling.wait_until("felix is ready", self._is_ready)

    def flush(self) -> None:
        """All of felix's rules, as a firewall's reload does; eBPF has some in iptables as well."""
        if self.data_plane is DataPlane.NFTABLES:
            for family in ("ip", "ip6"):
                run("nft", "flush", "table", family, "calico")
            return
        for program in ("iptables", "ip6tables"):
            for table in ("filter", "mangle", "raw", "nat"):
                run(program, "-t", table, "-F")

    def _is_ready(self) -> bool:
        self.engine.check()
        return health.is_healthy(_READINESS)

    def _define(self) -> None:
        names = []
        for path in sorted((self._programs / "crd").glob("*.yaml")):
            for thing in yaml.safe_load_all(path.read_text(encoding="utf-8")):
                if thing:
                    self.api.create(_CRDS, thing)
                    names.append(thing["metadata"]["name"])

        def are_established() -> bool:
            found = [self.api.get(f"{_CRDS}/{name}") for name in names]
            return all(
                any(
                    one["type"] == "Established" and one["status"] == "True"
                    for one in thing.get("status", {}).get("conditions", [])
                )
                for thing in found
            )

        polling.wait_until("Calico's definitions are established", are_established)

    def _conflist(self) -> Json:
        kubeconfig = str(self._node.control_plane.kubeconfig("admin"))
        plugin = {
            "type": "calico",
            "log_level": "warning",
            "log_file_path": str(self._node.runtime.directory / "calico-cni.log"),
            "datastore_type": "kubernetes",
            "nodename": NAME,
            "mtu": 1450,
            "ipam": {"type": "calico-ipam", "assign_ipv4": "true", "assign_ipv6": "true"},
            "policy": {"type": "k8s"},
            "kubernetes": {"kubeconfig": kubeconfig},
        }
        return {"name": "k8s-pod-network", "cniVersion": "1.0.0", "plugins": [plugin]}

    def _command(self) -> list[str]:
        settings = {
            "DATASTORETYPE": "kubernetes",
            "FELIXHOSTNAME": NAME,
            "IPV6SUPPORT": "true",
            "LOGSEVERITYSCREEN": "Info",
            "LOGFILEPATH": "none",
            "LOGSEVERITYFILE": "none",
            "LOGSEVERITYSYS": "none",
            "USAGEREPORTINGENABLED": "false",
            "IPINIPENABLED": "false",
            "VXLANENABLED": "false",
            "HEALTHENABLED": "true",
            "PROMETHEUSMETRICSENABLED": "false",
            "METADATAADDR": "none",
            "DEFAULTENDPOINTTOHOSTACTION": "Accept",
            "DEBUGBPFCGROUPV2": self._node.runtime.name,
            **self.data_plane.settings,
        }
        environment = {f"FELIX_{name}": value for name, value in settings.items()} | {
            "DATASTORE_TYPE": "kubernetes",
            "NODENAME": NAME,
            "KUBECONFIG": str(self._node.control_plane.kubeconfig("admin")),
            "KUBERNETES_SERVICE_HOST": str(NODE_IPV4),
            "KUBERNETES_SERVICE_PORT": "443",
            "PATH": os.environ["PATH"],
        }
        lower = f"{self._programs.parent}:{_LIBRARIES}"
        shell = f'mount -t overlay overlay -o lowerdir={lower} {_LIBRARIES} && exec "$0"'
        return [
            *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
            *("unshare", "--mount", "--propagation", "slave"),
            *("sh", "-c", shell, str(self._programs / "calico-felix")),
        ]


def missing(programs: pathlib.Path) -> str:
    """One sentence of what is missing in NETWORKS, or nothing."""
    lost = [name for name in PROGRAMS if not (programs / name).exists()]
    if lost:
        return f"{programs} has no {', '.join(lost)}; build Calico from its sources into it."
    return ""


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
