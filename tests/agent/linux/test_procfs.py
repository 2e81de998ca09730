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


def test_own_listeners_and_sockets_are_unknown_where_no_descriptor_is_left(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that no process served would be open to others."""

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(procfs, "SockDiag", fail)
    with pytest.raises(OSError, match="Too many open files"):
        Procfs().own_listeners(80)
    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(OSError, match="Too many open files"):
        proc.procfs.sockets(42)


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


def test_processes_are_the_numbers_in_the_directory(proc: Proc) -> None:
    for name in ("7", "self", "net", "4x"):
        (proc.root / name).mkdir()
    assert sorted(proc.procfs.pids()) == [7, 42]


@pytest.mark.parametrize(("cut", "is_read"), [(20, True), (19, False), (0, False)])
def test_file_that_is_not_as_the_kernel_writes_it_is_unknown(
    proc: Proc, cut: int, is_read: bool
) -> None:
    fields = stat("kubelet", "S").split()[2:][:cut]
    proc.write("stat", f"42 (kubelet) {' '.join(fields)}\n")
    found = (proc.procfs.started(42), proc.procfs.parent(42))
    assert found == ((4711, 7) if is_read else (None, None))


def test_numbers_that_are_none_are_unknown(proc: Proc) -> None:
    proc.write("stat", stat("kubelet", "S").replace("4711", "x").replace(" 7 ", " y "))
    assert (proc.procfs.started(42), proc.procfs.parent(42)) == (None, None)


def test_name_has_at_most_one_line_break_of_the_kernel_s(proc: Proc) -> None:
    proc.write("comm", "a\n\n")
    assert proc.procfs.is_named(42, "a\n")
    assert not proc.procfs.is_named(42, "a")
    assert proc.procfs.name(42) == "a\n"
    assert not proc.procfs.is_named(43, "")


def test_capability_is_the_effective_one(proc: Proc) -> None:
    for process in ("42", "self"):
        (proc.root / process / "ns").mkdir(parents=True)
        os.symlink("user:[1]", proc.root / process / "ns" / "user")
    assert not proc.procfs.has_capability(42, 0)
    for capabilities, found in (
        ("CapPrm:\t0000000000000003\nCapEff:\t0000000000000002", [False, True, False]),
        ("CapPrm:\t0000000000000003", [False, False, False]),
        ("CapEff:\tx", [False, False, False]),
    ):
        proc.write("status", f"Name:\tCapEff\n{capabilities}\nCapBnd:\t0000000000000007\n")
        assert [proc.procfs.has_capability(42, number) for number in range(3)] == found


def test_users_are_all_four_ids(proc: Proc) -> None:
    proc.write("status", "Name:\tx\nUid:\t1000\t0\t0\t7\nGid:\t5\t5\t5\t5\n")
    assert proc.procfs.users(42) == [1000, 0, 0, 7]
    proc.write("status", "Name:\tx\n")
    assert proc.procfs.users(42) == []
    assert proc.procfs.users(43) == []


def test_holders_of_a_lock_are_those_that_have_it(proc: Proc) -> None:
    (proc.root / "locks").write_text(
        "1: FLOCK  ADVISORY  WRITE 31 fd:0a:77 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 32 fd:0a:77 0 EOF\n"
        "2: POSIX  ADVISORY  WRITE 33 fd:0a:77 0 EOF\n"
        "3: FLOCK  ADVISORY  READ 34 fd:0a:78 0 EOF\n"
        "4: FLOCK  ADVISORY  READ 35 fd:0a:77 0 EOF\n"
        "5: FLOCK\n"
    )
    assert proc.procfs.lock_holders(0xFD, 0xA, 77) == {31, 35}
    (proc.root / "locks").unlink()
    assert proc.procfs.lock_holders(0xFD, 0xA, 77) == set()


def test_command_line_has_an_argument_before_each_zero(proc: Proc) -> None:
    proc.write("cmdline", "kubelet\0--config\0\0a b\0")
    assert proc.procfs.arguments(42) == ["kubelet", "--config", "", "a b"]
    proc.write("cmdline", "")
    assert proc.procfs.arguments(42) == []
    assert proc.procfs.arguments(43) == []


def test_sockets_are_links_of_descriptors(proc: Proc) -> None:
    os.symlink("socket:[2]", proc.root / "42" / "fd" / "3")
    os.symlink("/dev/null", proc.root / "42" / "fd" / "4")
    (proc.root / "42" / "fd" / "5").touch()  # closed after the directory was read
    os.symlink("socket:[7]", proc.root / "42" / "fd" / "6")
    assert proc.procfs.sockets(42) == {"socket:[2]", "socket:[7]", "/dev/null"}
    assert proc.procfs.sockets(43) == set()


def test_packet_sockets_are_in_the_last_column_after_the_head(proc: Proc) -> None:
    (proc.root / "self" / "net").mkdir(parents=True)
    head = "sk               RefCnt Type Proto  Iface R Rmem   User   Inode\n"
    lines = [f"ffff 3      3    0003   2     1 0      0      {inode}\n" for inode in (5, 6)]
    for content, found in (
        (head + lines[0] + "\n" + lines[1], {"socket:[5]", "socket:[6]"}),
        (head, set()),
        ("", set()),
    ):
        (proc.root / "self" / "net" / "packet").write_text(content)
        assert proc.procfs.packet_sockets() == found


def test_line_of_a_connection_that_is_cut_off_is_left_out(proc: Proc) -> None:
    whole = connection(10250, "0A", 1)
    proc.write("net/tcp", whole + whole.replace(" 1 1\n", "\n") + "\n" + connection(0, "0A", 3))
    proc.write("net/tcp6", HEAD + whole.replace(" 1 1\n", " 4\n"))
    assert proc.procfs.listeners(42, 10250) == {"socket:[4]"}
    assert proc.procfs.listeners(42, 0) == {"socket:[3]"}
    assert proc.procfs.listeners(43, 10250) == set()


def test_cgroup_without_a_path_is_left_out(proc: Proc) -> None:
    proc.write("cgroup", "12:cpu\n\n1:name=systemd:/b\n")
    assert proc.procfs.cgroups(42) == {"1": "/b"}
    assert proc.procfs.cgroup(42) is None


@pytest.mark.parametrize(
    ("number", "is_own"),
    [
        *((errno.EMFILE, True), (errno.ENFILE, True), (errno.ENOMEM, True)),
        *((errno.ENOBUFS, True), (errno.ENOENT, False), (errno.ESRCH, False)),
        (errno.EACCES, False),
    ],
)
def test_only_errors_of_this_process_are_raised(number: int, is_own: bool) -> None:
    error = OSError(number, os.strerror(number))
    raised = None
    try:
        procfs.raise_own(error)
    except OSError as caught:
        raised = caught
    assert raised is (error if is_own else None)
