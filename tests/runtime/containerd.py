"""containerd with runc and CNI plugins, in the test's node and with nothing outside of it.

Its directories are below the lab's /run, which is a tmpfs of the test's own mount namespace; its
cgroups have a name of their own, and `tests.runtime.reaper` ends all that is in them.
"""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import grpc
import pyroute2

from agent.cri import runtime_pb2
from agent.linux.cgroups import cgroup2_mount
from tests import polling
from tests.runtime import images, node_cgroups

PLUGINS = pathlib.Path("/usr/lib/cni")
BRIDGE = "pgcni0"
_RUN = pathlib.Path("/run")
_NETNS = _RUN / "netns"
_MNT_DETACH = 2
_UNMOUNT_ROUNDS = 3
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)

# The addresses are others than the lab's own pods have.
_RANGES = ("198.18.16.0/20", "fd00:18:0:10::/64")


def ptp(*, dual_stack: bool = False) -> dict[str, Any]:
    """A network of routed pods. IPv6 costs each of them 1.5 s of duplicate address detection."""
    return {"type": "ptp", "ipMasq": False, "ipam": _ipam(dual_stack)}


def bridge(*, dual_stack: bool = False) -> dict[str, Any]:
    """A network of pods on one bridge."""
    return {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "ipam": _ipam(dual_stack),
    }


def _ipam(dual_stack: bool) -> dict[str, Any]:
    ranges = _RANGES if dual_stack else _RANGES[:1]
    routes = ("0.0.0.0/0", "::/0") if dual_stack else ("0.0.0.0/0",)
    return {
        "type": "host-local",
        "ranges": [[{"subnet": subnet}] for subnet in ranges],
        "routes": [{"dst": destination} for destination in routes],
    }


class Containerd:
    """One runtime. `start` it; `end` takes it and its containers away."""

    sockets: ClassVar = pathlib.Path("/run/containerd")
    """Where nodes have its socket."""
    namespaces: ClassVar[tuple[str, ...]] = ("netns/cni-*",)
    """Its pods' in /run, as patterns."""

    def __init__(self, network: dict[str, Any]) -> None:
        self.name = f"podgate-runtime-{os.getpid()}-{next(_numbers)}"
        self.directory = pathlib.Path("/run", self.name)
        self.socket = self.directory / "socket" / "containerd.sock"
        """Alone in its directory, as agents mount it."""
        self.log = self.directory / "log"
        self.cni_directory = self.directory / "cni"
        self.plugins = self.directory / "bin"
        """What CNI plugins it has, and room for more."""
        self._process: subprocess.Popen[bytes] | None = None
        self._inherited = mounts().count(_NETNS)
        self.directory.mkdir()
        self.cni_directory.mkdir()
        self.plugins.mkdir()
        for plugin in PLUGINS.iterdir():
            (self.plugins / plugin.name).symlink_to(plugin)
        network["ipam"] |= {"dataDir": str(self.directory / "ipam")}
        conflist = {"cniVersion": "1.0.0", "name": "pods", "plugins": [network]}
        (self.cni_directory / "10-pods.conflist").write_text(json.dumps(conflist))
        (self.directory / "config.toml").write_text(self._config())
        self._reaper = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.reaper", self.name],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def pods_cgroup(self) -> str:
        """Above those of pods, as a kubelet's `kubepods`; deeper than where other tests' agents
        expect it."""
        return f"/{self.name}/node/kubepods"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until its CRI answers."""
        mount = cgroup2_mount()
        assert mount is not None, "cgroup v2 is not mounted"
        daemon = mount / self.name / "daemon"
        daemon.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                node_cgroups.command_in(daemon, self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process = self._process
        polling.wait_until(
            "an answer or the end of containerd",
            lambda: _answers(self.socket) or process.poll() is not None,
        )
        assert process.poll() is None, f"containerd ended: {self.last_lines()}"

    def import_images(self) -> None:
        """Bring in the images of `tests.runtime.images`."""
        archive = self.directory / "images.tar"
        images.write(archive, os.uname().machine)
        self.import_archive(archive)

    def import_archive(self, archive: pathlib.Path) -> None:
        """Bring in the images of an OCI archive."""
        subprocess.run(
            [
                *(binary("ctr"), "--address", str(self.socket), "--namespace", "k8s.io"),
                *("images", "import", str(archive)),
            ],
            check=True,
            capture_output=True,
            timeout=polling.PATIENCE_SECONDS,
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Stop the daemon only: shims and containers keep running."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(polling.PATIENCE_SECONDS)
        self._process = None

    def boot(self) -> None:
        """What it does after a boot, once its containers have ended: nothing that it does not do
        without one, as its shims have ended with them."""

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return " / ".join(lines[-5:])

    def end(self) -> None:
        """Take everything away, containers too."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        status = self._reaper.wait(polling.PATIENCE_SECONDS * 2)
        # Running processes would still write into what is removed below.
        assert status == 0, "cgroups or processes of the runtime are left"
        if self._process is not None:
            self._process.wait(polling.PATIENCE_SECONDS)
        self._remove_pod_links()
        unmount(self._mounts)
        self._remove_namespaces()
        shutil.rmtree(self.directory)
        with pyroute2.IPRoute() as netlink:
            for ifindex in netlink.link_lookup(ifname=BRIDGE):
                netlink.link("del", index=ifindex)

    def _remove_pod_links(self) -> None:
        """At once; with their namespaces the kernel removes them when it gets to it, which of many
        pods on a busy machine takes seconds."""
        for mount in filter(self._is_namespace, mounts()):
            if mount.parent == _NETNS:
                command = ["ip", "-netns", mount.name, "link", "delete", "eth0"]
                # A pod that failed has none.
                subprocess.run(command, check=False, capture_output=True, timeout=60)

    def _remove_namespaces(self) -> None:
        """The files that they were mounted on."""
        for pattern in self.namespaces:
            for name in _RUN.glob(pattern):
                name.unlink()

    def _mounts(self) -> list[pathlib.Path]:
        found = mounts()
        # `ip netns add` mounts the directory on itself, which hides the mounts from before; the
        # machine may have done so, too.
        of_netns = found.count(_NETNS) - self._inherited
        return [_NETNS] * of_netns + [
            mount
            for mount in found
            if self._is_namespace(mount) or mount.is_relative_to(self.directory)
        ]

    def _is_namespace(self, mount: pathlib.Path) -> bool:
        return any(mount.match(f"{_RUN}/{pattern}") for pattern in self.namespaces)

    def _command(self) -> list[str]:
        return [binary("containerd"), "--config", str(self.directory / "config.toml")]

    def _config(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""
version = 2
root = "{self.directory}/root"
state = "{self.directory}/state"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
address = "{self.socket}"

[{cri}]
sandbox_image = "{images.PAUSE}"
# Without CAP_SYS_RESOURCE no process may be made less likely to be killed.
restrict_oom_score_adj = true

[{cri}.cni]
bin_dir = "{self.plugins}"
conf_dir = "{self.cni_directory}"
"""


@contextlib.contextmanager
def running(network: dict[str, Any]) -> Iterator[Containerd]:
    """A runtime with images, in the lab that this process is in; gone afterwards."""
    with covered():
        made = Containerd(network)
        try:
            made.start()
            made.import_images()
            yield made
        finally:
            made.end()


@contextlib.contextmanager
def covered() -> Iterator[None]:
    """The CNI library caches what it did below /var/lib, for which it knows no other place."""
    problem = _mount_tmpfs("/var/lib")
    assert not problem, f"/var/lib cannot be covered: {problem}"
    try:
        yield
    finally:
        _libc.umount2(b"/var/lib", _MNT_DETACH)


def _mount_tmpfs(path: str) -> str:
    if _libc.mount(b"podgate", os.fsencode(path), b"tmpfs", 0, None) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def unmount(read: Callable[[], list[pathlib.Path]]) -> None:
    """Unmount what `read` finds, also what it misses at first: a reader of /proc/mounts misses
    entries that move meanwhile."""
    for _ in range(_UNMOUNT_ROUNDS):
        for mount in reversed(read()):
            _libc.umount2(os.fsencode(mount), _MNT_DETACH)
    assert not (left := read()), f"mounts of the runtime are left: {left}"


def mounts() -> list[pathlib.Path]:
    lines = pathlib.Path("/proc/mounts").read_text().splitlines()
    return [pathlib.Path(line.split()[1]) for line in lines]


def _answers(socket: pathlib.Path) -> bool:
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        call = channel.unary_unary(
            "/runtime.v1.RuntimeService/ListPodSandbox",
            request_serializer=runtime_pb2.ListPodSandboxRequest.SerializeToString,
            response_deserializer=runtime_pb2.ListPodSandboxResponse.FromString,
        )
        try:
            call(runtime_pb2.ListPodSandboxRequest(), timeout=1)
        except grpc.RpcError:
            return False
        return True


def binary(name: str) -> str:
    """The path of a program."""
    found = shutil.which(name)
    assert found is not None, f"{name} is missing; install the package of this name"
    return found
