"""The first process of a machine of a cluster: `python -m tests.cluster.machine_init NAME`.

It starts in new namespaces (mount, network, PID, UTS, IPC), gives them the file systems of a node,
writes "ready", and ends with its standard input; with it end all of the machine's processes.
Meanwhile it reaps what loses its parent, as an init does.
"""

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

from tests.cluster.kubelet import TUNABLES

_CGROUPS = "/sys/fs/cgroup"
_OWN_TMPFS = ("/run", "/var/lib", "/var/log")
_DIRECTORIES = ("/run/netns", "/run/lock", "/run/cni/net.d", "/run/cni/bin", "/var/log/pods")
_SYSCTLS = {
    "net/ipv4/ip_forward": 1,
    "net/ipv6/conf/all/forwarding": 1,
    # A router would take no address by itself; duplicates do not exist here.
    "net/ipv6/conf/default/accept_dad": 0,
}
_REAP_SECONDS = 0.2
_MNT_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def _mount_file_systems() -> None:
    """Processes, devices and BPF are the machine's own; cgroups are those of the kernel."""
    kept = pathlib.Path("/mnt")
    _run("mount", "--rbind", _CGROUPS, str(kept))
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "sysfs", "sysfs", "/sys")
    _run("mount", "--rbind", str(kept), _CGROUPS)
    _libc.umount2(os.fsencode(kept), _MNT_DETACH)
    _run("mount", "-t", "bpf", "bpf", "/sys/fs/bpf")
    # Namespaces of others would live as long as this machine.
    lines = pathlib.Path("/proc/mounts").read_bytes().splitlines()
    for mounted in reversed([line.split()[1] for line in lines]):
        if mounted.startswith(b"/run/netns"):
            _libc.umount2(mounted, _MNT_DETACH)
    for path in _OWN_TMPFS:
        _run("mount", "-t", "tmpfs", "tmpfs", path)
    for path in _DIRECTORIES:
        pathlib.Path(path).mkdir(parents=True)
    _mount_tunables()
    _run("mount", "--make-rshared", "/")


def _mount_tunables() -> None:
    """Files in the place of the sysctls that the kubelet sets: the kernel keeps its own."""
    for name, value in TUNABLES.items():
        file = pathlib.Path("/run/tunables", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n", encoding="utf-8")
        _run("mount", "--bind", str(file), f"/proc/sys/{name}")


def _configure_network() -> None:
    _run("ip", "link", "set", "lo", "up")
    for name, value in _SYSCTLS.items():
        pathlib.Path("/proc/sys", name).write_text(str(value))


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    socket.sethostname(sys.argv[1])
    _mount_file_systems()
    _configure_network()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        with contextlib.suppress(ChildProcessError):
            os.wait()
            continue
        time.sleep(_REAP_SECONDS)


if __name__ == "__main__":
    main()
