"""A kubelet that is the test itself, a pod, and other pods whose addresses are those of relays."""

import contextlib
import dataclasses
import os
import pathlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins, sources
from bpf.node_config import NodeConfig
from bpf.redirect import Redirect
from probes.netns import netns_cookie
from tests.kernel import offers, traffic

PORT, OTHER_PORT = 8080, 8081

_AN_HOUR_NS = 3600 * 10**9
_BEAT = struct.Struct("=Q")

_ENGAGE = """
import pathlib, sys
from bpf import pins, redirect as redirects, sources
redirect = redirects.Redirect.open(pins.Pins(sys.argv[1]), sources.fingerprint())
redirect.engage(pathlib.Path(sys.argv[2]))
print("engaged", flush=True)
sys.stdin.read()
"""


def root_cgroup() -> pathlib.Path:
    mount = cgroup2_mount()
    assert mount is not None
    return mount


def own_cgroup() -> int:
    """The id of the cgroup that the test runs in."""
    with open("/proc/self/cgroup", encoding="utf-8") as lines:
        path = next(line[3:].strip() for line in lines if line.startswith("0::"))
    return os.stat(f"{root_cgroup()}{path}").st_ino


@contextlib.contextmanager
def kubelet_config(loaded: loader.Loaded, cgroup: int | None = None) -> Iterator[NodeConfig]:
    """The node's configuration. cgroup: the kubelet's, by default that of the test itself."""
    offers.need_netns_cookie()
    made = NodeConfig(loaded)
    made.set_netns(netns_cookie())
    made.set_kubelet(cgroup or own_cgroup())
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@contextlib.contextmanager
def engaged(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Redirect]:
    """Hooks engaged at the root cgroup by this process, and beating."""
    with Redirect.open(installation, sources.fingerprint()) as made:
        made.engage(root_cgroup())
        beat(loaded)
        yield made
        made.keep_only([])
    for key, _ in list(loaded.map(map_specs.RELAY_PODS).items()):
        loaded.map(map_specs.RELAY_PODS).delete(key)
    beat(loaded, 0)


def beat(loaded: loader.Loaded, at_ns: int | None = None) -> None:
    """A beat of the relay; by default one that does not become stale on a busy machine."""
    when = time.monotonic_ns() + _AN_HOUR_NS if at_ns is None else at_ns
    loaded.map(map_specs.RELAY_BEAT).set(bytes(4), _BEAT.pack(when))


def last_beat_ns(loaded: loader.Loaded) -> int:
    value = loaded.map(map_specs.RELAY_BEAT).get(bytes(4))
    assert value is not None
    return int(_BEAT.unpack(value)[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Who may be reached, each with a server on PORT and on OTHER_PORT."""

    pod: labs.LabPod
    relay: labs.LabPod
    successor: labs.LabPod
    servers: dict[socket.socket, str]

    def publish(
        self, redirect: Redirect, relay: labs.LabPod | None = None, ports: tuple[int, ...] = (0,)
    ) -> None:
        """Have the addresses of `relay`, by default the first one, represent the pod's."""
        relay = relay or self.relay
        for own, other in zip(relay.addresses, self.pod.addresses, strict=True):
            redirect.publish(own, other, ports, relay.ifindex)

    def withdraw(
        self, redirect: Redirect, relay: labs.LabPod | None = None, ports: tuple[int, ...] = (0,)
    ) -> None:
        for own, other in zip((relay or self.relay).addresses, self.pod.addresses, strict=True):
            redirect.withdraw(own, other, ports)

    def reached(self, sock: socket.socket, address: str, port: int = PORT) -> str:
        """Connect, and return whose server has it: "pod", "relay" or "successor"."""
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((address, port))
        return self.who_has_it()

    def who_has_it(self) -> str:
        """Whose server has the one connection that was made."""
        ready, _, _ = select.select(list(self.servers), [], [], traffic.LIMIT_SECONDS)
        (server,) = ready
        server.accept()[0].close()
        return self.servers[server]

    def reached_from_node(self, version: int, port: int = PORT) -> str:
        """The same of a plain connection to the pod."""
        with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
            return self.reached(sock, traffic.address(self.pod, version), port)


@contextlib.contextmanager
def scene(lab: labs.Lab) -> Iterator[Scene]:
    made = {name: lab.add_pod(name, 1 + i) for i, name in enumerate(("pod", "relay", "successor"))}
    with contextlib.ExitStack() as stack:
        servers = {
            stack.enter_context(pod.listen(port)): name
            for name, pod in made.items()
            for port in (PORT, OTHER_PORT)
        }
        yield Scene(made["pod"], made["relay"], made["successor"], servers)


@contextlib.contextmanager
def child(script: str, *arguments: str, netns: str = "") -> Iterator["subprocess.Popen[bytes]"]:
    """A process that has done its part, and then waits to be killed.

    netns: the path of the namespace that it runs in, unless the node's.
    """
    enter = ["nsenter", f"--net={netns}"] if netns else []
    process = subprocess.Popen(
        [*enter, sys.executable, "-c", script, *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), "the process ended before it had done its part"
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """By SIGKILL, and wait for its end; it may have ended already."""
    process.kill()
    process.communicate(timeout=traffic.LIMIT_SECONDS)


@contextlib.contextmanager
def engaged_child(installation: pins.Pins) -> Iterator["subprocess.Popen[bytes]"]:
    """Another process with the hooks engaged at the root cgroup."""
    with child(_ENGAGE, str(installation.bpffs), str(root_cgroup())) as process:
        yield process
