"""A cluster of several nodes, each of which is a `Machine`, joined by a bridge without uplink.

The control plane is beside them, as a managed one is, in the network namespace of this process,
which is also "outside" for clients. Nothing of it is left when this process ends: all its processes
are in cgroups that `tests.runtime.reaper` ends, and machines end with their standard input.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubelet import Kubelet
from tests.cluster.machine import SOCKET, UPLINK, Machine
from tests.cluster.workloads import condition
from tests.nodes import leftovers
from tests.runtime import images, node_cgroups

POD_NETWORKS = ("198.19.0.0/16", "fd00:18:1900::/56")
OUTSIDE = ("198.18.100.254", "fd00:18:100::fe")
"""The addresses of the bridge: of the control plane and of clients outside."""
_BRIDGE = "lan0"
_LENGTHS = (24, 64)


class SeveralNodes:
    """A running cluster. Its nodes are Ready once their network is."""

    def __init__(self, control_plane: ControlPlane, machines: Sequence[Machine]) -> None:
        self.control_plane = control_plane
        self.machines = list(machines)

    @property
    def api(self) -> Api:
        return self.control_plane.api

    def machine(self, name: str) -> Machine:
        return next(one for one in self.machines if one.name == name)

    def pod_networks(self, name: str) -> list[str]:
        """Of a node, one of each family; empty until it has them."""
        node = self.api.find(f"/api/v1/nodes/{name}") or {"spec": {}}
        found: list[str] = node["spec"].get("podCIDRs", [])
        return found

    def wait_until_networked(self) -> None:
        for machine in self.machines:
            machine.kubelet.wait_until_ready()

    def label(self, name: str, key: str, value: str | None) -> None:
        self.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {key: value}}})

    def is_ready(self, name: str) -> bool:
        node = self.api.get(f"/api/v1/nodes/{name}")
        return condition(node, "Ready").get("status") == "True"


@contextlib.contextmanager
def running(
    binaries: pathlib.Path, image: pathlib.Path, directory: pathlib.Path, names: Sequence[str]
) -> Iterator[SeveralNodes]:
    """Start a cluster of these binaries, with a node of each name; nodes have podgate's image, no
    network for pods and no service proxy. directory: empty, and seen from all mount namespaces."""
    cgroup2 = cgroup2_mount()
    assert cgroup2 is not None, "cgroup v2 is not mounted"
    name = f"podgate-cluster-{os.getpid()}"
    archive = directory / "images.tar"
    images.write(archive, os.uname().machine)
    with contextlib.ExitStack() as undo:
        undo.enter_context(leftovers.lasting())
        undo.enter_context(_reaped(name))
        for one in ("", *names):
            node_cgroups.make(f"{name}/{one}")
        undo.enter_context(_bridge())
        control_plane = ControlPlane(
            binaries,
            directory / "control-plane",
            cgroup2 / name / "control-plane",
            OUTSIDE[0],
            pod_networks=POD_NETWORKS,
        )
        undo.callback(_end, control_plane)
        machines = []
        for number, one in enumerate(names, start=1):
            addresses = (f"198.18.100.{number}", f"fd00:18:100::{number}")
            machine = Machine(one, addresses, directory / one, cgroup2 / name / one)
            machines.append(machine)
            undo.callback(machine.end)
            undo.enter_context(_joined(machine))
            machine.start_runtime()
            machine.import_images(archive, image)
        control_plane.start()
        for machine in machines:
            machine.start_kubelet(
                Kubelet(
                    binaries / "kubelet",
                    machine.directory / "kubelet",
                    control_plane,
                    name=machine.name,
                    address=",".join(machine.addresses),
                    socket=SOCKET,
                    cgroups=(machine.cgroup / "kubelet.service", f"/{name}/{machine.name}"),
                    within=machine.within,
                )
            )
        made = SeveralNodes(control_plane, machines)
        polling.wait_until(
            "all nodes have networks for pods", lambda: all(map(made.pod_networks, names))
        )
        yield made


def _end(control_plane: ControlPlane) -> None:
    control_plane.api.close()
    for daemon in reversed(control_plane.daemons):
        daemon.kill()


@contextlib.contextmanager
def _reaped(name: str) -> Iterator[None]:
    """Cgroups of this name, which end with this process at the latest."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.reaper", name],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        status = reaper.wait(polling.PATIENCE_SECONDS * 2)
        assert status == 0, "cgroups or processes of the cluster are left"


@contextlib.contextmanager
def _bridge() -> Iterator[None]:
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    try:
        _add_addresses(OUTSIDE, _BRIDGE, ())
        _run("ip", "link", "set", _BRIDGE, "up")
        yield
    finally:
        _run("ip", "link", "delete", _BRIDGE)


@contextlib.contextmanager
def _joined(machine: Machine) -> Iterator[None]:
    """It has an uplink at the bridge, and default routes to outside."""
    port = f"to-{machine.name}"
    pid = str(machine.pid)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", UPLINK, "netns", pid)
    _run("ip", "link", "set", port, "master", _BRIDGE, "up")
    _run(*machine.within, "ip", "link", "set", UPLINK, "up")
    _add_addresses(machine.addresses, UPLINK, machine.within)
    for family, address in zip(("-4", "-6"), OUTSIDE, strict=True):
        _run(*machine.within, "ip", family, "route", "add", "default", "via", address)
    yield
    # With the peer, which the kernel would delete some time after the machine's namespace.
    _run("ip", "link", "delete", port)


def _add_addresses(addresses: tuple[str, str], link: str, within: Sequence[str]) -> None:
    for address, length in zip(addresses, _LENGTHS, strict=True):
        options = ("nodad",) if ":" in address else ()
        _run(*within, "ip", "address", "add", f"{address}/{length}", "dev", link, *options)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
