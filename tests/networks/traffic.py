"""Connections from the node, from pods and from outside."""

import contextlib
import ctypes
import dataclasses
import ipaddress
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator

from agent.lab.lab import NODE_IPV4
from tests.cluster.api import Json
from tests.cluster.workloads import PORT
from tests.kernel.raw_syns import RawSyns
from tests.networks.network import Network
from tests.networks.uplink import OUTSIDE
from tests.runtime import node_cgroups

_CLONE_NEWNET = 0x40000000
_NETNS = pathlib.Path("/run/netns")
_CONNECT_SECONDS = 1.0
_DIAL = (
    "import socket, sys\n"
    f"try: socket.create_connection((sys.argv[1], int(sys.argv[2])), {_CONNECT_SECONDS}).close()\n"
    "except OSError as error: print(type(error).__name__)\n"
)
_libc = ctypes.CDLL(None, use_errno=True)


def addresses(pod: Json) -> list[str]:
    return [one["ip"] for one in pod["status"]["podIPs"]]


def netns_of(pod: Json) -> pathlib.Path:
    """The runtime's network namespace with the pod's address."""
    for path in _NETNS.glob("cni-*"):
        command = ["ip", "-n", path.name, "-j", "address"]
        listed = subprocess.run(command, check=False, capture_output=True, timeout=30)
        if listed.returncode == 0:
            for link in json.loads(listed.stdout):
                if any(one["local"] == pod["status"]["podIP"] for one in link["addr_info"]):
                    return path
    raise AssertionError(f"no network namespace has {pod['status']['podIP']}")


def filters(interface: str) -> list[str]:
    """The names of BPF filters of an interface, in the order in which they run, without podgate's:
    of egress, then of ingress."""
    found = []
    for parent in ("egress", "ingress"):
        command = ["tc", "-j", "filter", "show", "dev", interface, parent]
        done = subprocess.run(command, check=False, capture_output=True, timeout=30)
        # Without a clsact qdisc it fails.
        for one in json.loads(done.stdout or b"[]") if done.returncode == 0 else []:
            name = one.get("options", {}).get("bpf_name", "")
            if name and not name.startswith("podgate/"):
                found.append(name)
    return found


def outside() -> pathlib.Path:
    return _NETNS / OUTSIDE


def dial(address: str, port: int = PORT, netns: pathlib.Path | None = None) -> str:
    """Connect from a network namespace, by default the node's; the error's name, or nothing."""
    found: list[str] = []

    def connect() -> None:
        found.append(_dial(address, port, netns))

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    return found[0]


def dial_as_node(cgroup: pathlib.Path, address: str, port: int) -> str:
    """Connect as a process below the cgroup to which the network's connect hooks are attached."""
    own = cgroup / f"dial-{os.getpid()}"
    own.mkdir(exist_ok=True)
    dial = [sys.executable, "-c", _DIAL, address, str(port)]
    command = node_cgroups.command_in(own, dial)
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    return done.stdout.decode().strip()


def _dial(address: str, port: int, netns: pathlib.Path | None) -> str:
    """In a thread that ends with this: it stays in that namespace."""
    if netns is not None:
        descriptor = os.open(netns, os.O_RDONLY)
        if _libc.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering {netns}")
        os.close(descriptor)
    try:
        socket.create_connection((address, port), _CONNECT_SECONDS).close()
    except OSError as error:
        return type(error).__name__
    return ""


def syns(network: Network) -> RawSyns:
    """To each pod that gets its addresses from now on."""
    return RawSyns(network.pod_addresses, source=str(NODE_IPV4), port=PORT, ignore_first=True)


def routed_addresses(interface_prefix: str) -> set[str]:
    """Addresses of pods, by the routes that the network plugin makes for each of them.

    interface_prefix: of the names of pods' interfaces on the node.
    """
    found = set()
    for family in ("-4", "-6"):
        command = ["ip", family, "-j", "route", "show", "table", "main"]
        listed = subprocess.run(command, check=True, capture_output=True, timeout=30).stdout
        for route in json.loads(listed or b"[]"):
            if route.get("dev", "").startswith(interface_prefix) and is_pod_address(route["dst"]):
                found.add(route["dst"])
    return found


def is_pod_address(destination: str) -> bool:
    try:
        address = ipaddress.ip_address(destination)
    except ValueError:  # a network, or the default route
        return False
    return not address.is_link_local and not address.is_multicast


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """Connections that are expected to succeed or not, ten a second for each address."""

    name: str
    is_open: bool
    addresses: Collection[str]
    netns: pathlib.Path | None = None


class Watch:
    """Connects along paths until its end, and counts what was not as expected."""

    def __init__(self, *paths: Path) -> None:
        self.connects = {path.name: 0 for path in paths}
        self.wrong: dict[str, list[str]] = {path.name: [] for path in paths}
        self._is_over = threading.Event()
        self._began = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, args=(path, address))
            for path in paths
            for address in path.addresses
        ]

    def _run(self, path: Path, address: str) -> None:
        netns = path.netns
        while not self._is_over.wait(0.1):
            at = time.monotonic() - self._began
            problem = _dial(address, PORT, netns)
            netns = None  # this thread is there
            self.connects[path.name] += 1
            if (problem == "") != path.is_open:
                self.wrong[path.name].append(f"{at:.2f} s {address} {problem or 'connected'}")

    @property
    def summary(self) -> str:
        """For the record."""
        return ", ".join(
            f"{name}: {len(self.wrong[name])} wrong of {count}"
            for name, count in self.connects.items()
        )

    @contextlib.contextmanager
    def running(self) -> Iterator["Watch"]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()


def holds_for(seconds: float, problem: Callable[[], str]) -> str:
    """The first problem within this time, or nothing."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        if found := problem():
            return found
        time.sleep(0.2)
    return ""
