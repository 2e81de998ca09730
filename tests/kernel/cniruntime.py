"""CNI calls of a container runtime: a list of plugins, called one after the other."""

import contextlib
import ipaddress
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

from agent.lab.lab import LabPod
from bpf.abi import IPAddress
from probes.netns import Netns
from tests.cni import calling

PLUGINS = pathlib.Path("/usr/lib/cni")
BRIDGE = "pgcni0"
IFNAME = "eth0"
# Others than the lab's own pods have; host-local gives the first to the first pod.
_RANGES = ("198.18.32.0/20", "fd00:18:0:20::/64")
FIRST = {4: "198.18.32.2", 6: "fd00:18:0:20::2"}


class AddFailed(Exception):
    """A plugin of the chain failed with `answer`."""

    def __init__(self, answer: calling.Answer) -> None:
        super().__init__(answer.output.decode(), answer.stderr)
        self.answer = answer


class Network:
    """One conflist: a network of `kind` (ptp or bridge), and podgate-cni behind it."""

    def __init__(
        self,
        directory: pathlib.Path,
        kind: str,
        plugin: pathlib.Path,
        *,
        version: str = "1.0.0",
        **conf: object,
    ) -> None:
        """directory: for host-local; conf: of podgate-cni."""
        ranges = [[{"subnet": subnet}] for subnet in _RANGES]
        ipam = {
            **{"type": "host-local", "ranges": ranges, "dataDir": str(directory / "ipam")},
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
        }
        first: dict[str, object] = {"type": kind, "ipam": ipam}
        if kind == "bridge":
            first |= {"bridge": BRIDGE, "isGateway": True}
        self.version = version
        self.stderr = ""
        """The last stderr of podgate-cni."""
        self._chain = [
            (PLUGINS / kind, first),
            (plugin, {"type": "podgate-cni", **conf}),
        ]
        self._results: dict[str, Any] = {}

    def add(self, container: str, netns: str) -> Any:
        """The chain's result. Raises `AddFailed`."""
        result: Any = None
        for plugin, conf in self._chain:
            answer = self._call(plugin, "ADD", conf, container, netns, result)
            if answer.status:
                raise AddFailed(answer)
            result = answer.result
            self.stderr = answer.stderr
        self._results[container] = result
        return result

    def gate(self, container: str, netns: str) -> None:
        """podgate-cni alone once more. Raises `AddFailed`."""
        plugin, conf = self._chain[-1]
        answer = self._call(plugin, "ADD", conf, container, netns, self._results[container])
        if answer.status:
            raise AddFailed(answer)

    def check(self, container: str, netns: str) -> calling.Answer:
        """podgate-cni's answer."""
        plugin, conf = self._chain[-1]
        return self._call(plugin, "CHECK", conf, container, netns, self._results[container])

    def delete(self, container: str, netns: str, *, knows_result: bool = True) -> None:
        """All plugins, the last first; each must succeed."""
        result = self._results.get(container) if knows_result else None
        for plugin, conf in reversed(self._chain):
            answer = self._call(plugin, "DEL", conf, container, netns, result)
            assert answer.status == 0, answer

    def collect(self) -> calling.Answer:
        """podgate-cni's GC."""
        plugin, conf = self._chain[-1]
        conf = {**conf, "cniVersion": "1.1.0", "name": "pods", "cni.dev/valid-attachments": []}
        return calling.call(plugin, "GC", conf)

    def _call(
        self,
        plugin: pathlib.Path,
        command: str,
        conf: dict[str, object],
        container: str,
        netns: str,
        result: Any,
    ) -> calling.Answer:
        whole = {**conf, "cniVersion": self.version, "name": "pods"}
        if result is not None:
            whole["prevResult"] = result
        variables = {
            **calling.POD,
            "CNI_CONTAINERID": container,
            "CNI_NETNS": netns,
            "CNI_IFNAME": IFNAME,
            "CNI_PATH": str(PLUGINS),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        return calling.call(plugin, command, whole, variables)


@contextlib.contextmanager
def sandbox(name: str) -> Iterator[str]:
    """Creates a network namespace as runtimes do for a pod; yields its path."""
    subprocess.run(["ip", "netns", "add", name], check=True)
    path = f"/run/netns/{name}"
    try:
        # No duplicate address detection, for which plugins wait.
        script = "for f in all default; do echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; done"
        subprocess.run(["nsenter", f"--net={path}", "sh", "-c", script], check=True)
        yield path
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def addresses_in(path: str) -> tuple[IPAddress, ...]:
    """The pod's own addresses, as it sees them."""
    shown = subprocess.run(
        ["nsenter", f"--net={path}", "ip", "-json", "address", "show", "dev", IFNAME],
        check=True,
        capture_output=True,
    ).stdout
    return tuple(
        ipaddress.ip_address(entry["local"])
        for link in json.loads(shown)
        for entry in link.get("addr_info", [])
    )


def node_side(path: str) -> tuple[str, int]:
    """The host's end of the pod's veth, found by the interface indexes that both ends show."""
    shown = subprocess.run(
        ["nsenter", f"--net={path}", "ip", "-json", "link", "show", "dev", IFNAME],
        check=True,
        capture_output=True,
    ).stdout
    ifindex = json.loads(shown)[0]["link_index"]
    links = subprocess.run(["ip", "-json", "link", "show"], check=True, capture_output=True).stdout
    return next(
        (link["ifname"], link["ifindex"])
        for link in json.loads(links)
        if link["ifindex"] == ifindex
    )


def pod_in(path: str, name: str, *, bridged: bool = False) -> LabPod:
    """A `LabPod` of a pod that plugins have connected."""
    interface, ifindex = node_side(path)
    addresses = tuple(sorted(addresses_in(path), key=lambda a: (a.is_link_local, a.version)))
    return LabPod(name, Netns.open(path), interface, ifindex, addresses, bridged)
