"""kube-proxy on each node of a cluster."""

import json
import pathlib

from tests import polling
from tests.cluster.daemons import Daemon
from tests.cluster.machine import Machine
from tests.cluster.several_nodes import POD_NETWORKS, SeveralNodes

MODES = ("iptables", "nftables")
"""ipvs: not in the kernel of the machine of the tests."""


class ServiceProxy:
    """kube-proxy of one cluster, in one of its modes."""

    def __init__(
        self, cluster: SeveralNodes, binaries: pathlib.Path, mode: str, directory: pathlib.Path
    ) -> None:
        """directory: exists, and all machines see it."""
        self._cluster = cluster
        pki = cluster.control_plane.pki
        pki.sign("kube-proxy", user="system:kube-proxy")
        settings = directory / "kube-proxy.json"
        settings.write_text(
            json.dumps(_settings(mode, cluster.control_plane.kubeconfig("kube-proxy")))
        )
        self.daemons = {
            machine.name: self._daemon(machine, binaries / "kube-proxy", settings)
            for machine in cluster.machines
        }

    def start(self) -> None:
        for daemon in self.daemons.values():
            daemon.start()
        polling.wait_until("kube-proxy is ready on all nodes", self._are_ready)

    def update(self) -> None:
        """Services and endpoints have changed: it follows by itself."""

    def restart(self, name: str) -> None:
        """On one node."""
        self.daemons[name].stop()
        self.daemons[name].start()
        polling.wait_until("kube-proxy is ready on all nodes", self._are_ready)

    def _are_ready(self) -> bool:
        return all(self._is_ready(machine) for machine in self._cluster.machines)

    def _is_ready(self, machine: Machine) -> bool:
        """By its rules: the API server's service translates."""
        self.daemons[machine.name].check()
        rules = machine.run("nft", "list", "ruleset") + machine.run("iptables-save")
        return "kubernetes:https" in rules or "kubernetes/tcp/https" in rules

    def _daemon(self, machine: Machine, program: pathlib.Path, settings: pathlib.Path) -> Daemon:
        return machine.daemon(
            [str(program), f"--config={settings}", f"--hostname-override={machine.name}"]
        )


def _settings(mode: str, kubeconfig: pathlib.Path) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "clusterCIDR": ",".join(POD_NETWORKS),
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        # Those of connection tracking are the kernel's, not the machine's.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def missing(binaries: pathlib.Path) -> str:
    """One sentence of what is missing in BIN, or nothing."""
    if (binaries / "kube-proxy").is_file():
        return ""
    return f"BIN={binaries} has no kube-proxy; build it from the sources of the kubelet beside it."
