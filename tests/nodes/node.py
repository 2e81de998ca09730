"""A node of the tests: network and mount namespaces, a cgroup, and a BPF file system.

A process enters it right after its fork, so all that it starts is inside: processes by the cgroup,
sockets, links and nftables by the network namespace, files of /run and pins by the mount namespace.
The kernel removes the namespaces with their last process.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import os
import pathlib
import select
import signal
import socket
import struct
import time

from agent.lab import lab as labs
from agent.linux import namespaces, network_setup
from agent.linux.cgroups import cgroup2_mount
from probes.netns import close_own_netns
from tests import polling

SHARED = labs.BPFFS / "shared"
"""Pins of the worker, for tests without an agent. All of its nodes have them."""
INSTALLED = labs.BPFFS / "installed"
"""Pins of the worker, for tests with an agent, which finds its programs there."""

OWN_CGROUPS = ("tests", "agents")
"""Below the node's: of the tests' process and what it starts, and of agents that are forked."""

_STAGE = labs.LAB_DIRECTORY / "stage"
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_MOVE, _MS_BIND = 0x2000, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
_IFREQ = struct.Struct("16sh22x")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """The node that this process is in. cgroup: the directory; path: as in /proc/PID/cgroup."""

    cgroup: pathlib.Path
    path: str


current: Node | None = None
"""None outside of nodes."""


def make_base() -> None:
    """Move the process to namespaces below which nodes are made. Raises `OSError`."""
    labs.isolate()
    for directory in (SHARED, INSTALLED, _STAGE):
        directory.mkdir()
    set_up_network()


def enter(name: str) -> Node:
    """Move the process, a fork of one in a base, into a new node. Raises `OSError`."""
    global current
    namespaces.unshare_network_and_mounts()
    namespaces.mount("tmpfs", _STAGE)
    inside = _STAGE / labs.LAB_DIRECTORY.relative_to("/run")
    for directory in (inside, inside / "netns", inside / "bpf"):
        directory.mkdir(mode=0o700)
    namespaces.mount("bpf", inside / "bpf")
    for pins in (SHARED, INSTALLED):
        (inside / "bpf" / pins.name).mkdir()
        _mount(pins, inside / "bpf" / pins.name, _MS_BIND)
    _mount(_STAGE, pathlib.Path("/run"), _MS_MOVE)
    set_up_network()
    mount = cgroup2_mount()
    assert mount is not None, "no cgroup v2 is mounted"
    made = Node(mount / name, f"/{name}")
    for below in OWN_CGROUPS:
        (made.cgroup / below).mkdir(parents=True)
    (made.cgroup / OWN_CGROUPS[0] / "cgroup.procs").write_text(str(os.getpid()))
    current = made
    return made


def leave() -> None:
    """Move the process, which has one thread, back to the base, where its parent is. Raises
    `OSError`."""
    global current
    assert current is not None
    directory = os.getcwd()
    join(os.getppid())
    os.chdir(directory)
    (current.cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))
    current = None


def join(pid: int) -> None:
    """Move the process, which has one thread, to another one's network and mount namespaces. Raises
    `OSError`."""
    pidfd = os.pidfd_open(pid)
    try:
        if _libc.setns(pidfd, _CLONE_NEWNET | _CLONE_NEWNS):  # of a pidfd since Linux 5.8
            number = ctypes.get_errno()
            raise OSError(number, f"cannot join namespaces ({os.strerror(number)})")
    finally:
        os.close(pidfd)
    close_own_netns()


def remove(name: str) -> None:
    """Kill all processes of a node, and remove its cgroups."""
    mount = cgroup2_mount()
    assert mount is not None
    top = mount / name
    if not top.is_dir():
        return
    remove_cgroup(top)


def remove_cgroup(top: pathlib.Path) -> None:
    """Kill all processes in and below a cgroup of the tests, and remove it."""
    with open(top / "cgroup.events", "rb", buffering=0) as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        deadline = time.monotonic() + polling.PATIENCE_SECONDS
        _kill_all(top)
        while b"populated 1" in os.pread(events.fileno(), 4096, 0):
            assert time.monotonic() < deadline, f"{top} does not become empty"
            poll.poll(200)
    for path, _, _ in os.walk(top, topdown=False):
        os.rmdir(path)


def _kill_all(top: pathlib.Path) -> None:
    """By one write where the kernel has that (Linux 5.14), else one by one until none is left."""
    kill = top / "cgroup.kill"
    if kill.exists():
        kill.write_text("1")
        return
    while pids := _pids_below(top):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids_below(top: pathlib.Path) -> list[int]:
    found: list[int] = []
    for path, _, _ in os.walk(top):
        found += pids(path)
    return found


def pids(cgroup: str) -> list[int]:
    """Of the processes in it, and not below it."""
    try:
        with open(f"{cgroup}/cgroup.procs", encoding="ascii") as file:
            return [*map(int, file.read().split())]
    except OSError:  # it is removed meanwhile
        return []


def _mount(source: pathlib.Path, target: pathlib.Path, flags: int) -> None:
    if _libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot mount {source} at {target} ({os.strerror(number)})")


def set_up_network() -> None:
    """As a machine has it: loopback is up. ICMP errors are not limited, since the pods of
    consecutive tests have the same addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        _, flags = _IFREQ.unpack(fcntl.ioctl(sock, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0)))
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))
    lift_limits()


def lift_limits() -> None:
    """ICMP errors of this namespace are not limited."""
    for version, name in ((4, "ipv4/icmp_ratelimit"), (6, "ipv6/icmp/ratelimit")):
        if network_setup.has_ip_version(version):
            network_setup.write_sysctl(name, "0")
