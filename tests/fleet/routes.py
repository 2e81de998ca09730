"""The smallest network of several nodes: the CNI plugin bridge, and static routes between nodes.

It needs no programs but those of a distribution, so it is the one to develop tests with.
"""

import subprocess

from tests.cluster.machine import CNI_DIRECTORY, Machine
from tests.cluster.several_nodes import SeveralNodes

BRIDGE = "cni0"


class Routes:
    """Of one cluster."""

    def __init__(self, cluster: SeveralNodes) -> None:
        self._cluster = cluster

    def start(self) -> None:
        """On all nodes, which are Ready afterwards."""
        for machine in self._cluster.machines:
            machine.install_network(self._conflist(machine))
            self._set_routes(machine)
        self._cluster.wait_until_networked()

    def restart(self, name: str) -> None:
        """The routes of a node and its list of plugins are written again."""
        machine = self._cluster.machine(name)
        self._set_routes(machine)
        file = machine.path(CNI_DIRECTORY / "10-network.conflist")
        file.write_text(file.read_text())

    def _set_routes(self, machine: Machine) -> None:
        for family, network, address in self._others(machine):
            machine.run("ip", family, "route", "replace", network, "via", address)

    def _others(self, machine: Machine) -> list[tuple[str, str, str]]:
        """Family, network of pods and address of each other node."""
        return [
            ("-6" if ":" in network else "-4", network, address)
            for other in self._cluster.machines
            if other is not machine
            for network, address in zip(
                self._cluster.pod_networks(other.name), other.addresses, strict=True
            )
        ]

    def _conflist(self, machine: Machine) -> dict[str, object]:
        ranges = [[{"subnet": one}] for one in self._cluster.pod_networks(machine.name)]
        bridge = {
            "type": "bridge",
            "bridge": BRIDGE,
            "isDefaultGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": ranges},
        }
        portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"name": "pods", "cniVersion": "1.0.0", "plugins": [bridge, portmap]}


def version() -> str:
    """Of the CNI plugins, for the record."""
    command = ["dpkg-query", "-W", "-f=${Version}", "containernetworking-plugins"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout or "unknown"
