"""kube-router on the node of a cluster, as its policy engine and for the addresses of pods: without
its service proxy, which needs IPVS."""

import json
import os
import pathlib
import signal
import subprocess

from agent.lab.lab import NODE_IPV4, NODE_IPV6
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api, Json
from tests.cluster.daemons import Daemon
from tests.cluster.one_node import NAME, OneNode
from tests.networks import health, traffic, uplink

PROGRAMS = ("kube-router", "VERSION")
"""In the directory `kube-router` of NETWORKS; VERSION: one line, for the record. It runs Debian's
ipset and iptables."""
POD_NETWORKS = ("198.18.16.0/24", "fd00:18:0:10::/112")
_HEALTH_PORT = 20244
_RESERVED = pathlib.Path("/var/lib/cni/networks/kubernetes")


class KubeRouter:
    """kube-router of one cluster: a `Network`."""

    families = 2
    has_programs = False
    translates = False

    def __init__(self, node: OneNode, programs: pathlib.Path) -> None:
        self.version = (programs / "VERSION").read_text(encoding="utf-8").strip()
        self._node = node
        mounted = cgroup2_mount()
        assert mounted is not None
        self.cgroup = mounted / node.runtime.name
        self._conflist = node.runtime.cni_directory / "00-kube-router.conflist"
        environment = {
            "KUBE_ROUTER_CNI_CONF_FILE": str(self._conflist),
            "NODE_NAME": NAME,
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
        self.engine = Daemon(
            [
                *("env", "-i", *(f"{name}={value}" for name, value in environment.items())),
                str(programs / "kube-router"),
                f"--kubeconfig={node.control_plane.kubeconfig('admin')}",
                *("--run-router=true", "--run-firewall=true", "--run-service-proxy=false"),
                *("--enable-ipv6=true", "--enable-overlay=false"),
                "--disable-source-dest-check=false",
                *("--service-cluster-ip-range=198.18.200.0/24,fd00:18:200::/112",),
                f"--health-port={_HEALTH_PORT}",
            ],
            self.cgroup / "kube-router",
            node.runtime.directory / "kube-router.log",
            name="kube-router",
        )

    @property
    def api(self) -> Api:
        return self._node.api

    @property
    def programmer(self) -> Daemon:
        return self.engine

    def pod_addresses(self) -> set[str]:
        """By the reservations of host-local: a bridge has no route for each."""
        names = (file.name for file in _RESERVED.iterdir()) if _RESERVED.exists() else ()
        return {name for name in names if traffic.is_pod_address(name)}

    def install(self) -> None:
        uplink.add()
        # The node's addresses of both families: without the second it ends.
        self._node.kubelet.restart_at(str(NODE_IPV4), str(NODE_IPV6))
        polling.wait_until("the node has both addresses", self._has_both)
        spec = {"podCIDR": POD_NETWORKS[0], "podCIDRs": list(POD_NETWORKS)}
        self.api.patch(f"/api/v1/nodes/{NAME}", {"spec": spec})
        # kube-router adds the networks. The first by its name is in force.
        self._conflist.write_text(json.dumps(_CONFLIST))
        (self._node.runtime.cni_directory / "10-pods.conflist").unlink()

    def start(self) -> None:
        self.engine.start()
        self.wait_until_ready()

    def restart(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.engine.stop(number)
        self.start()

    def flush(self) -> None:
        """All of its rules, as a firewall's reload does."""
        for program in ("iptables", "ip6tables"):
            for table in ("filter", "mangle", "nat"):
                _run(program, "-t", table, "-F")

    def wait_until_ready(self) -> None:
        polling.wait_until("kube-router is ready", self._is_ready)

    def remove(self) -> None:
        self.engine.kill()
        uplink.remove()
        _run("nft", "flush", "ruleset")
        _run("ip", "link", "delete", "kube-bridge")

    def _has_both(self) -> bool:
        found = self.api.get(f"/api/v1/nodes/{NAME}")["status"].get("addresses", [])
        return {str(NODE_IPV4), str(NODE_IPV6)} <= {one["address"] for one in found}

    def _is_ready(self) -> bool:
        self.engine.check()
        url = f"http://127.0.0.1:{_HEALTH_PORT}/healthz"
        return health.is_healthy(url) and "subnet" in self._conflist.read_text()


_CONFLIST: Json = {
    "cniVersion": "0.3.0",
    "name": "kubernetes",
    "plugins": [
        {
            "name": "kubernetes",
            "type": "bridge",
            "bridge": "kube-bridge",
            "isDefaultGateway": True,
            "ipam": {"type": "host-local"},
        }
    ],
}


def missing(programs: pathlib.Path) -> str:
    """One sentence of what is missing in NETWORKS, or nothing."""
    lost = [name for name in PROGRAMS if not (programs / name).exists()]
    if lost:
        return f"{programs} has no {', '.join(lost)}; build kube-router from its sources."
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
