"""Reads of /proc about processes; None for a process that no longer exists.

Names of processes and cgroups are any bytes but zero and, in a cgroup's, "/" and a line break. So
files are split as the kernel writes them, at line breaks and spaces alone: `str.splitlines` and
`str.split` know more separators, with which a process could write a line of its own. A file that is
not as the kernel writes it is unknown, like one that is gone.

Methods raise `OSError` only where this process has no descriptor or memory left: then nothing is
known of another one, and one that counts as gone might be the kubelet.
"""

import errno
import os
import pathlib
import socket
from collections.abc import Iterator

from agent.errors import EXHAUSTED
from probes.sock_diag import LISTEN, SockDiag

_COMM_BYTES = 15  # TASK_COMM_LEN without the zero
_LISTENING = b"0A"  # TCP_LISTEN, as /proc/net/tcp prints it


_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The id of this boot, a UUID. A read of it does not block."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


class Procfs:
    """One /proc, or a directory with the same layout in tests. All methods may block."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/proc")) -> None:
        self._root = str(root)

    def pids(self) -> Iterator[int]:
        return (int(name) for name in os.listdir(self._root) if name.isdecimal())

    def is_named(self, pid: int, name: str) -> bool:
        """By the name in the kernel: the program's, cut to 15 bytes."""
        comm = self._read(f"{pid}/comm")
        return comm is not None and comm.removesuffix(b"\n") == os.fsencode(name)[:_COMM_BYTES]

    def started(self, pid: int) -> int | None:
        """Start time in ticks since boot; None when it has exited. With the pid it identifies a
        process."""
        fields = self._stat(pid)
        return None if fields is None or fields[0] in b"ZX" else _number(fields[19])

    def parent(self, pid: int) -> int | None:
        fields = self._stat(pid)
        return None if fields is None else _number(fields[1])

    def has_capability(self, pid: int, capability: int) -> bool:
        """Whether it is effective in this process's user namespace.

        capability: the bit's number. A process has every capability in a user namespace that it
        made itself, so those of other namespaces do not count.
        """
        if self.namespace(pid, "user") != self.namespace("self", "user"):
            return False
        for line in _lines(self._read(f"{pid}/status")):
            if line.startswith(b"CapEff:"):
                return bool((_number(line[7:].strip(), 16) or 0) >> capability & 1)
        return False

    def users(self, pid: int) -> list[int]:
        """Its user ids: the real one, the effective one and two more (credentials(7)); none when it
        has exited. Of a set-user-ID program only some are root's."""
        for line in _lines(self._read(f"{pid}/status")):
            if line.startswith(b"Uid:"):
                return [int(uid) for uid in line.split()[1:]]
        return []

    def lock_holders(self, major: int, minor: int, inode: int) -> set[int]:
        """Processes that hold a lock of flock(2) on this file, of those in this process' pid
        namespace (proc_locks(5))."""
        file = f"{major:02x}:{minor:02x}:{inode}".encode()
        lines = (line.split() for line in _lines(self._read("locks")))
        # A process that waits has an arrow before its kind.
        return {int(line[4]) for line in lines if line[1:2] == [b"FLOCK"] and line[5:6] == [file]}

    def cgroup(self, pid: int | str) -> str | None:
        """Its cgroup of version 2, "/a/b"; None when it has exited, or its cgroup was removed.

        pid: "self" for this process.
        """
        path = self.cgroups(pid).get("0")
        return None if path is None or path.endswith(" (deleted)") else path

    def cgroups(self, pid: int | str) -> dict[str, str]:
        """Its cgroups by the hierarchy's number, which is "0" for version 2. Bytes that are
        not UTF-8 are as in `os.fsdecode`."""
        parts = (line.split(b":", 2) for line in _lines(self._read(f"{pid}/cgroup")))
        return {os.fsdecode(part[0]): os.fsdecode(part[2]) for part in parts if len(part) == 3}

    def namespace(self, pid: int | str, kind: str) -> str | None:
        """The namespace it is in, such as "net:[4026531840]"; pid "self" for this process."""
        try:
            return os.readlink(f"{self._root}/{pid}/ns/{kind}")
        except OSError as error:
            raise_own(error)
            return None

    def name(self, pid: int) -> str:
        """Its name in the kernel, of 15 bytes, for people; empty when it has exited."""
        return (self._read(f"{pid}/comm") or b"").removesuffix(b"\n").decode(errors="replace")

    def arguments(self, pid: int) -> list[str]:
        """Its command line; empty when it has exited, and for threads of the kernel. The process
        may write there what it wants."""
        return os.fsdecode(self._read(f"{pid}/cmdline") or b"").split("\0")[:-1]

    def packet_sockets(self) -> set[str]:
        """The packet sockets of this process's network namespace, as `sockets` returns them."""
        fields = (line.split() for line in _lines(self._read("self/net/packet"))[1:])
        return {f"socket:[{os.fsdecode(found[-1])}]" for found in fields if found}

    def sockets(self, pid: int) -> set[str]:
        """What it has descriptors of: "socket:[INODE]" for sockets."""
        return set(self._descriptors(pid))

    def is_listening(self, pid: int, port: int) -> bool:
        """Whether the process holds a TCP socket that listens on this port."""
        return not self.listeners(pid, port).isdisjoint(self._descriptors(pid))

    def listeners(self, pid: int | str, port: int) -> set[str]:
        """The TCP sockets that listen on this port in the process's network namespace, as `sockets`
        returns them. pid: "self" for this process. Reads the tables of all connections."""
        found = set()
        for family in ("tcp", "tcp6"):
            for line in _lines(self._read(f"{pid}/net/{family}"))[1:]:
                fields = line.split()
                if len(fields) < 10 or fields[3] != _LISTENING:
                    continue
                if _number(fields[1].rpartition(b":")[2], 16) == port:
                    found.add(f"socket:[{os.fsdecode(fields[9])}]")
        return found

    def own_listeners(self, port: int) -> set[str]:
        """As `listeners`, of this process's namespace: by sock_diag, which lists listeners alone,
        where the tables have every connection of the node."""
        try:
            with SockDiag() as diag:
                found = diag.sockets(socket.IPPROTO_TCP, LISTEN, port=port)
                return {f"socket:[{one.inode}]" for one in found}
        except OSError as error:  # a kernel without inet_diag
            raise_own(error)
            return self.listeners("self", port)

    def _descriptors(self, pid: int) -> Iterator[str]:
        try:
            numbers = os.listdir(f"{self._root}/{pid}/fd")
        except OSError as error:
            raise_own(error)
            return
        for number in numbers:
            try:
                yield os.readlink(f"{self._root}/{pid}/fd/{number}")
            except OSError:
                continue

    def _stat(self, pid: int) -> list[bytes] | None:
        """The fields of /proc/PID/stat from the third, state, on: names may contain anything."""
        fields = (self._read(f"{pid}/stat") or b"").rpartition(b")")[2].split()
        return fields if len(fields) > 19 else None

    def _read(self, path: str) -> bytes | None:
        try:
            with open(f"{self._root}/{path}", "rb") as file:
                return file.read()
        except OSError as error:
            raise_own(error)
            return None


def raise_own(error: OSError) -> None:
    """Raise an error that is this process' own, and none of what it was to read."""
    if error.errno in (*EXHAUSTED, errno.ENOMEM, errno.ENOBUFS):
        raise error


def _lines(content: bytes | None) -> list[bytes]:
    return (content or b"").removesuffix(b"\n").split(b"\n")


def _number(text: bytes, base: int = 10) -> int | None:
    try:
        return int(text, base)
    except ValueError:
        return None
