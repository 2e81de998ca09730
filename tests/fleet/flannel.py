"""flannel between the nodes of a cluster: flanneld on each of them, and its CNI plugin.

No image: the programs are in a directory, `make test-fleet` has what it needs.
"""

import enum
import json
import pathlib

from tests import polling
from tests.cluster.daemons import Daemon
from tests.cluster.machine import UPLINK, Machine
from tests.cluster.several_nodes import POD_NETWORKS, SeveralNodes

PROGRAMS = ("flanneld", "flannel-cni", "VERSION")
"""In the directory `flannel` of NETWORKS. flannel-cni: its CNI plugin `flannel`; VERSION: one line,
for the record."""
LINKS = ("cni0", "flannel.1", "flannel-v6.1")
_LEASE = pathlib.Path("/run/flannel/subnet.env")
_CONFLIST: dict[str, object] = {
    "name": "cbr0",
    "cniVersion": "0.3.1",
    "plugins": [
        {"type": "flannel", "delegate": {"hairpinMode": True, "isDefaultGateway": True}},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class Backend(enum.Enum):
    """How packets get to another node."""

    VXLAN = "vxlan"
    HOST_GW = "host-gw"


class Flannel:
    """flannel of one cluster."""

    def __init__(
        self,
        cluster: SeveralNodes,
        programs: pathlib.Path,
        backend: Backend,
        directory: pathlib.Path,
    ) -> None:
        """directory: exists, and all machines see it."""
        self._cluster = cluster
        self._plugin = programs / "flannel-cni"
        settings = directory / "flannel.json"
        settings.write_text(json.dumps(_settings(backend)), encoding="utf-8")
        self.daemons = {
            machine.name: self._daemon(machine, programs / "flanneld", settings)
            for machine in cluster.machines
        }

    def start(self) -> None:
        """On all nodes, which are Ready afterwards."""
        for machine in self._cluster.machines:
            machine.install_network(_CONFLIST, {"flannel": self._plugin})
            self.daemons[machine.name].start()
        self.wait_until_ready()
        self._cluster.wait_until_networked()

    def restart(self, name: str) -> None:
        """On one node."""
        daemon = self.daemons[name]
        daemon.stop()
        self._cluster.machine(name).path(_LEASE).unlink()
        daemon.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Each has the networks of its pods."""
        polling.wait_until("flannel has a lease on all nodes", self._has_leases)

    def _has_leases(self) -> bool:
        for daemon in self.daemons.values():
            daemon.check()
        return all(machine.path(_LEASE).exists() for machine in self._cluster.machines)

    def _daemon(self, machine: Machine, program: pathlib.Path, settings: pathlib.Path) -> Daemon:
        kubeconfig = self._cluster.control_plane.kubeconfig("admin")
        made = machine.daemon(
            [
                str(program),
                "--kube-subnet-mgr",
                f"--kubeconfig-file={kubeconfig}",
                f"--net-config-path={settings}",
                f"--iface={UPLINK}",
                "--ip-masq",
            ]
        )
        made.command = ["env", f"NODE_NAME={machine.name}", *made.command]
        return made


def _settings(backend: Backend) -> dict[str, object]:
    ipv4, ipv6 = POD_NETWORKS
    return {
        "Network": ipv4,
        "EnableIPv6": True,
        "IPv6Network": ipv6,
        "Backend": {"Type": backend.value},
    }


def version(programs: pathlib.Path) -> str:
    """For the record."""
    return (programs / "VERSION").read_text(encoding="utf-8").strip()


def missing(programs: pathlib.Path) -> str:
    """One sentence of what is missing in NETWORKS, or nothing."""
    lost = [name for name in PROGRAMS if not (programs / name).exists()]
    if lost:
        return f"{programs} has no {', '.join(lost)}; build flannel and its CNI plugin into it."
    return ""
