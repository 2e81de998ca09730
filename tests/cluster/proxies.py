"""podgate's proxies in the place of kube-proxy, and a network beyond the node."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from tests import polling
from tests.cluster.api import Json
from tests.cluster.control_plane import SERVICE_NETWORKS
from tests.cluster.daemons import Daemon
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode

OUTSIDE = "198.18.100.2"
OUTSIDE_IPV6 = "fd00:18:100::2"
OUTSIDE_NETNS = "/run/netns/outside"
UPLINK = "198.18.100.1"
"""The node's address on the network of OUTSIDE."""
UPLINK_IPV6 = "fd00:18:100::1"
_PODS = ("198.18.16.0/20", "fd00:18:0:10::/64")
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_ROLE: Json = {
    "metadata": {"name": "services"},
    "rules": [
        {"apiGroups": [""], "resources": ["services"], "verbs": ["list", "watch"]},
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ],
}
_BINDING: Json = {
    "metadata": {"name": "services"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "services"},
    "subjects": [{"kind": "ServiceAccount", "name": "podgate", "namespace": "podgate"}],
}


@contextlib.contextmanager
def published_endpoints(node: OneNode, podgate: Deployment) -> Iterator[None]:
    """The agent publishes endpoints, with the rights that docs/deploy.md names."""
    node.api.create(f"{_RBAC}/clusterroles", _ROLE)
    node.api.create(f"{_RBAC}/clusterrolebindings", _BINDING)
    podgate.set_arguments(["--service-endpoints"])
    yield
    podgate.set_arguments([])
    node.api.delete(f"{_RBAC}/clusterrolebindings/services")
    node.api.delete(f"{_RBAC}/clusterroles/services")


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """A network namespace beyond the node's uplink, with an address of each family."""
    _ip("netns", "add", "outside")
    _ip("link", "add", "uplink", "type", "veth", "peer", "name", "eth0", "netns", "outside")
    try:
        _ip("link", "set", "uplink", "up")
        _ip("-n", "outside", "link", "set", "lo", "up")
        _ip("-n", "outside", "link", "set", "eth0", "up")
        for here, there, length in ((UPLINK, OUTSIDE, 24), (UPLINK_IPV6, OUTSIDE_IPV6, 64)):
            # Without duplicate address detection, which takes seconds.
            _ip("address", "add", f"{here}/{length}", "dev", "uplink", *_at_once(here))
            _ip(
                "-n",
                "outside",
                "address",
                "add",
                f"{there}/{length}",
                "dev",
                "eth0",
                *_at_once(here),
            )
            # As on nodes: a service's address has a route, which a proxy changes the target of.
            _ip("route", "add", "default", "via", there)
            _ip("-n", "outside", "route", "add", "default", "via", here)
        # A service without a proxy is unreachable at once, and not after a timeout.
        for service_network in SERVICE_NETWORKS:
            _ip("-n", "outside", "route", "add", "unreachable", service_network)
        for setting in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
            enter = ("nsenter", f"--net={OUTSIDE_NETNS}", "sysctl", "-qw", f"{setting}=1")
            subprocess.run(enter, check=True)
        yield
    finally:
        _ip("link", "del", "uplink")
        _ip("netns", "del", "outside")


class RunningProxy:
    """`podgate proxy`, which translates for this cluster's processes only."""

    def __init__(self, node: OneNode, backend: str, directory: pathlib.Path) -> None:
        """directory: empty."""
        self.backend = backend
        self._started = directory / "started"
        self._command = [sys.executable, "-m", "agent", "proxy", f"--backend={backend}"]
        top = node.kubelet.daemon.cgroup.parent
        scope = [f"--pod-network={network}" for network in _PODS]
        if backend == "ebpf":
            scope = [f"--cgroup={top}"]
        command = [*self._command, *scope, f"--started-file={self._started}"]
        self.daemon = Daemon(command, top / "proxy", directory / "proxy.log")

    def start(self) -> None:
        """Returns when the first state is in the kernel."""
        self._started.unlink(missing_ok=True)
        self.daemon.start()
        polling.wait_until("the proxy has written its first state", self._has_started)

    def remove(self) -> None:
        """Stop it and remove what it has installed."""
        self.daemon.stop()
        subprocess.run([*self._command, "--cleanup"], check=True, timeout=60)

    def _has_started(self) -> bool:
        self.daemon.check()
        return self._started.exists()


@contextlib.contextmanager
def running(node: OneNode, backend: str, directory: pathlib.Path) -> Iterator[RunningProxy]:
    """A running proxy; directory: empty."""
    proxy = RunningProxy(node, backend, directory)
    try:
        proxy.start()
        yield proxy
    finally:
        proxy.remove()


def _at_once(address: str) -> tuple[str, ...]:
    return ("nodad",) if ":" in address else ()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
