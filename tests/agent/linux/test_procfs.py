"""Processes are read from /proc whatever their names and cgroups contain."""

import contextlib
import errno
import os
import pathlib
import resource
import socket

import pytest

from agent.linux import procfs
from agent.linux.procfs import Procfs
from probes.sock_diag import SockDiag


class Proc:
    """/proc with the process 42."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.procfs = Procfs(root)
        (root / "42" / "fd").mkdir(parents=True)
        (root / "42" / "net").mkdir()

    def write(self, name: str, text: str) -> None:
        (self.root / "42" / name).write_text(text, encoding="utf-8")


@pytest.fixture
def proc(tmp_path: pathlib.Path) -> Proc:
    return Proc(tmp_path)


def test_cgroups_path_may_have_colons(proc: Proc) -> None:
    proc.write("cgroup", "12:cpu,cpuacct:/a\n0::/system.slice/backup:daily.service\n")
    assert proc.procfs.cgroup(42) == "/system.slice/backup:daily.service"
    assert proc.procfs.cgroups(42)["12"] == "/a"


def test_removed_cgroup_and_ended_process_have_none(proc: Proc) -> None:
    proc.write("cgroup", "0::/a (deleted)\n")
    assert proc.procfs.cgroup(42) is None
    assert proc.procfs.cgroup(43) is None


def stat(name: str, state: str) -> str:
    fields = ["0"] * 30
    fields[0], fields[1], fields[19] = state, "7", "4711"
    return f"42 ({name}) {' '.join(fields)}\n"


@pytest.mark.parametrize("name", ["kubelet", "a b) S 1 (", "x)"])
def test_process_is_read_whatever_its_name_is(proc: Proc, name: str) -> None:
    proc.write("stat", stat(name, "S"))
    assert (proc.procfs.started(42), proc.procfs.parent(42)) == (4711, 7)


@pytest.mark.parametrize("state", ["Z", "X"])
def test_process_that_has_exited_has_no_start(proc: Proc, state: str) -> None:
    proc.write("stat", stat("kubelet", state))
    assert proc.procfs.started(42) is None
    assert proc.procfs.started(43) is None


def test_name_is_compared_as_the_kernel_cuts_it(proc: Proc) -> None:
    proc.write("comm", "kubelet-with-a-\n")
    assert proc.procfs.is_named(42, "kubelet-with-a-long-name")
    assert not proc.procfs.is_named(42, "kubelet")
    assert proc.procfs.name(42) == "kubelet-with-a-"
    assert proc.procfs.name(43) == ""


HEAD = "  sl  local_address rem_address   st tx_queue\n"


def connection(port: int, state: str, inode: int) -> str:
    return f"   0: 00000000:{port:04X} 00000000:0000 {state} 0:0 00:0 0 0 0 {inode} 1\n"


def test_process_listens_on_a_port_by_its_own_socket(proc: Proc) -> None:
    listening, connected = connection(10250, "0A", 1), connection(10251, "01", 2)
    proc.write("net/tcp", HEAD + listening + connected)
    proc.write("net/tcp6", HEAD + connection(10250, "0A", 3))
    assert proc.procfs.listeners(42, 10250) == {"socket:[1]", "socket:[3]"}
    assert proc.procfs.listeners(42, 10251) == set()
    os.symlink("socket:[2]", proc.root / "42" / "fd" / "3")
    assert not proc.procfs.is_listening(42, 10250)
    os.symlink("socket:[3]", proc.root / "42" / "fd" / "4")
    assert proc.procfs.is_listening(42, 10250)


def test_own_listeners_are_those_of_the_port_in_both_families() -> None:
    with socket.create_server(("127.0.0.1", 0)) as four, socket.create_server(("127.0.0.1", 0)):
        port = four.getsockname()[1]
        with socket.create_server(("::1", port), family=socket.AF_INET6) as six:
            links = {os.readlink(f"/proc/self/fd/{one.fileno()}") for one in (four, six)}
            assert Procfs().own_listeners(port) == links == Procfs().listeners("self", port)
        # A connection of the port is no listener.
        with socket.create_connection(("127.0.0.1", port)):
            assert Procfs().own_listeners(port) == Procfs().listeners("self", port)
    assert Procfs().own_listeners(port) == set()


def test_own_listeners_are_read_from_the_tables_without_sock_diag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> SockDiag:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))

    monkeypatch.setattr(procfs, "SockDiag", missing)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        link = os.readlink(f"/proc/self/fd/{sock.fileno()}")
        assert Procfs().own_listeners(sock.getsockname()[1]) == {link}


def test_capability_counts_in_the_same_user_namespace(proc: Proc) -> None:
    proc.write("status", "Name:\tx\nCapEff:\t0000000000002000\n")
    for process, namespace in (("42", "user:[1]"), ("self", "user:[1]")):
        (proc.root / process / "ns").mkdir(parents=True)
        os.symlink(namespace, proc.root / process / "ns" / "user")
    assert proc.procfs.has_capability(42, 13)
    assert not proc.procfs.has_capability(42, 12)
    (proc.root / "self" / "ns" / "user").unlink()
    os.symlink("user:[2]", proc.root / "self" / "ns" / "user")
    assert not proc.procfs.has_capability(42, 13)


def test_process_does_not_count_as_gone_where_no_descriptor_is_left(
    proc: Proc,
) -> None:
    """A kubelet that were gone would be replaced by all host processes after 15 s."""
    proc.write("comm", "kubelet\n")
    proc.write("stat", stat("kubelet", "S"))
    highest = os.open("/dev/null", os.O_RDONLY)
    os.close(highest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for read in (proc.procfs.started, proc.procfs.name, proc.procfs.cgroup):
            with pytest.raises(OSError, match="Too many open files"):
                read(42)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert proc.procfs.name(42) == "kubelet"


def test_namespace_is_none_for_an_ended_process_and_an_error_without_descriptors(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc.root / "42" / "ns").mkdir()
    (proc.root / "42" / "ns" / "net").symlink_to("net:[4026531840]")
    assert proc.procfs.namespace(42, "net") == "net:[4026531840]"
    assert proc.procfs.namespace(43, "net") is None

    def fail(path: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "readlink", fail)
    with pytest.raises(OSError, match="Too many open files"):
        proc.procfs.namespace(42, "net")
