"""A cluster of one node, in the network and mount namespace that this process is in.

Nothing of it is left when this process ends, however that ends: all its processes are in cgroups
that `tests.runtime.reaper` ends, and its files and mounts are in the process's own mount namespace.
"""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

from agent import VERSION
from agent.lab.lab import NODE_IPV4
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.cluster.api import Api
from tests.cluster.control_plane import SERVICE_ADDRESS, ControlPlane
from tests.cluster.daemons import Daemon
from tests.cluster.kubelet import TUNABLES, Kubelet
from tests.conftest import fresh_lab
from tests.image.node import as_on_a_node
from tests.runtime import containerd, containerd2, crio, node_cgroups
from tests.runtime.containerd import Containerd

NAME = "node1"
# The image's name in deploy/manifests.
IMAGE = f"localhost/podgate:{VERSION}"


class OneNode:
    """A running cluster."""

    def __init__(self, runtime: Containerd, control_plane: ControlPlane, kubelet: Kubelet) -> None:
        self.runtime = runtime
        self.control_plane = control_plane
        self.kubelet = kubelet

    @property
    def api(self) -> Api:
        return self.control_plane.api

    def lose_containers(self) -> None:
        """As by a reboot: all processes of pods end at once, then the runtime starts again."""
        cgroup2 = cgroup2_mount()
        assert cgroup2 is not None
        # Below the kubelet's root. The runtime's `pods_cgroup` is for tests that play the kubelet.
        pods = cgroup2 / self.runtime.name / "kubepods"
        (pods / "cgroup.kill").write_text("1")
        polling.wait_until(
            "all containers have ended",
            lambda: "populated 0" in (pods / "cgroup.events").read_text(),
        )
        self.runtime.boot()

    def label(self, key: str, value: str | None) -> None:
        """Set a label of the node, or remove it."""
        self.api.patch(f"/api/v1/nodes/{NAME}", {"metadata": {"labels": {key: value}}})


@contextlib.contextmanager
def running(binaries: pathlib.Path, image: pathlib.Path) -> Iterator[OneNode]:
    """Start a cluster of these binaries; it has podgate's image and no podgate yet."""
    with _machine(binaries) as (runtime, cgroup), contextlib.ExitStack() as undo:
        # A server without nodes may have had it.
        _run("ip", "address", "replace", f"{SERVICE_ADDRESS}/32", "dev", "lo")
        runtime.import_archive(image)
        directory = runtime.directory / "cluster"
        control_plane = ControlPlane(
            binaries, directory / "control-plane", cgroup / "control-plane", str(NODE_IPV4)
        )
        kubelet = _kubelet(binaries, runtime, cgroup, control_plane)
        # A kubelet that runs while containers are ended would start them again.
        undo.callback(_end, kubelet.daemon, *reversed(control_plane.daemons))
        undo.callback(control_plane.api.close)
        control_plane.start()
        kubelet.start()
        kubelet.wait_until_ready()
        yield OneNode(runtime, control_plane, kubelet)


@contextlib.contextmanager
def standalone(binaries: pathlib.Path) -> Iterator[tuple[Containerd, Kubelet]]:
    """Start a kubelet without an API server."""
    with _machine(binaries) as (runtime, cgroup), contextlib.ExitStack() as undo:
        kubelet = _kubelet(binaries, runtime, cgroup, None)
        undo.callback(_end, kubelet.daemon)
        kubelet.start()
        yield runtime, kubelet


@contextlib.contextmanager
def _machine(binaries: pathlib.Path) -> Iterator[tuple[Containerd, pathlib.Path]]:
    """A container runtime on a node as kubelets find it, and the cgroup of all that runs there."""
    cgroup2 = cgroup2_mount()
    assert cgroup2 is not None, "cgroup v2 is not mounted"
    with contextlib.ExitStack() as undo:
        undo.enter_context(fresh_lab())
        undo.callback(_remove_kubelet_tables)
        # The kubelet knows no other place for links to containers' logs.
        _run("mount", "-t", "tmpfs", "tmpfs", "/var/log")
        undo.callback(_run, "umount", "--lazy", "/var/log")
        runtime = undo.enter_context(_runtime(binaries))
        directory = runtime.directory / "cluster"
        directory.mkdir()
        undo.enter_context(_tunables(directory / "tunables"))
        undo.enter_context(as_on_a_node(runtime))
        cgroup = cgroup2 / runtime.name
        node_cgroups.make(runtime.name)
        node_cgroups.move_into_slice(runtime.pid, cgroup / "daemon")
        yield runtime, cgroup


def _kubelet(
    binaries: pathlib.Path,
    runtime: Containerd,
    cgroup: pathlib.Path,
    control_plane: ControlPlane | None,
) -> Kubelet:
    return Kubelet(
        binaries / "kubelet",
        runtime.directory / "cluster" / "kubelet",
        control_plane,
        name=NAME,
        address=str(NODE_IPV4),
        socket=runtime.sockets / runtime.socket.name,
        cgroups=(cgroup / "kubelet.service", f"/{runtime.name}"),
    )


def _runtime(binaries: pathlib.Path) -> contextlib.AbstractContextManager[Containerd]:
    """CRI-O or containerd 2.x, with NRI, if its program is among the binaries, else Debian's
    containerd."""
    if (binaries / "crio").is_file():
        return crio.running(containerd.ptp(), binaries, has_nri=True)
    if (binaries / "containerd").is_file():
        return containerd2.running(containerd.ptp(), binaries)
    return containerd.running(containerd.ptp())


def _end(*daemons: Daemon) -> None:
    for daemon in daemons:
        daemon.kill()


def _remove_kubelet_tables() -> None:
    """Those that the kubelet writes its rules to by iptables, which leaves empty tables behind."""
    for family in ("ip", "ip6"):
        for name in ("filter", "mangle", "nat"):
            subprocess.run(
                ["nft", "delete", "table", family, name],
                check=False,
                capture_output=True,
                timeout=60,
            )


@contextlib.contextmanager
def _tunables(directory: pathlib.Path) -> Iterator[None]:
    """Files with the kubelet's values in the place of the machine's sysctls: the kubelet finds
    nothing to change, and the machine keeps its own."""
    with contextlib.ExitStack() as undo:
        for name, value in TUNABLES.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n", encoding="utf-8")
            target = f"/proc/sys/{name}"
            _run("mount", "--bind", str(file), target)
            undo.callback(_run, "umount", target)
        yield


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
