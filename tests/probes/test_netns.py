"""A socket is created in the pod's namespace, and the calling thread never stays there."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from probes import netns
from tests.probes.conftest import Sandbox, sandbox_netns
from tests.processes import no_descriptors

OWN = "/proc/thread-self/ns/net"


def test_path_that_does_not_exist_is_gone(tmp_path: Path) -> None:
    with pytest.raises(netns.NetnsGoneError, match="does not exist"):
        netns.Netns.open(str(tmp_path / "none"))


def test_regular_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("no namespace")
    with pytest.raises(netns.NetnsError, match="is not a network namespace"):
        netns.Netns.open(str(path))


def test_fifo_is_an_error_without_waiting(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with pytest.raises(netns.NetnsError, match="is not a network namespace"):
        netns.Netns.open(str(path))


def test_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(netns.NetnsError, match="is not a network namespace"):
        netns.Netns.open(str(tmp_path))


def test_path_with_a_null_byte_is_an_error() -> None:
    with pytest.raises(netns.NetnsError, match=r"cannot be opened \(embedded null byte\)"):
        netns.Netns.open("/run/\0")


def test_namespace_of_another_kind_is_an_error() -> None:
    with pytest.raises(netns.NetnsError, match="is not a network namespace"):
        netns.Netns.open("/proc/self/ns/uts")


@pytest.mark.parametrize("name", ["uts", "net"])
def test_namespace_that_is_of_no_use_is_not_held(name: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(netns.NetnsError):
        netns.Netns.open(f"/proc/self/ns/{name}")
    assert set(os.listdir("/proc/self/fd")) == before


def test_own_namespace_is_an_error() -> None:
    with pytest.raises(netns.NetnsError, match="host's network namespace"):
        netns.Netns.open("/proc/self/ns/net")


def test_own_namespace_by_another_path_is_an_error() -> None:
    with pytest.raises(netns.NetnsError, match="host's network namespace"):
        netns.Netns.open(f"/proc/{os.getpid()}/ns/net")


def test_path_that_this_process_has_no_descriptor_for_is_unknown() -> None:
    path = "/proc/self/ns/net"
    with no_descriptors(), pytest.raises(netns.NetnsUnreadableError, match="Too many open files"):
        netns.Netns.open(path)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EIO])
def test_namespace_that_cannot_be_read_now_is_not_gone(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its gate and its pod's conditions would go with it."""

    def fail(path: str) -> os.stat_result:
        raise OSError(number, os.strerror(number), path)

    found = netns.Netns("/run/netns/web", device=1, inode=2)
    assert not found.exists()
    monkeypatch.setattr(os, "stat", fail)
    assert found.exists()


def test_namespace_exists_while_its_path_leads_to_it() -> None:
    status = os.stat("/proc/self/ns/net")
    device, inode = status.st_dev, status.st_ino
    for found, exists in (
        ((device, inode), True),
        ((device, inode + 1), False),
        ((device + 1, inode), False),
    ):
        assert netns.Netns("/proc/self/ns/net", *found).exists() is exists


@pytest.mark.kernel
def test_socket_is_in_the_namespace(sandbox: Sandbox) -> None:
    with sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((sandbox.v4, 0))  # only the sandbox has this address
        assert sock.getsockname()[0] == sandbox.v4


@pytest.mark.kernel
def test_setting_is_the_namespaces_own(sandbox: Sandbox) -> None:
    name = "ipv4/ip_default_ttl"
    own = Path("/proc/sys/net", name).read_text()
    sandbox.netns.set_sysctl(name, "77")
    inside = ["nsenter", f"--net={sandbox.netns.path}", "cat", f"/proc/sys/net/{name}"]
    assert subprocess.run(inside, check=True, capture_output=True).stdout == b"77\n"
    assert Path("/proc/sys/net", name).read_text() == own


@pytest.mark.kernel
def test_missing_setting_is_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        sandbox.netns.set_sysctl("ipv4/no_such_setting", "1")


@pytest.mark.kernel
def test_thread_stays_in_its_own_namespace(sandbox: Sandbox) -> None:
    before = os.stat(OWN).st_ino
    sandbox.netns.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    assert os.stat(OWN).st_ino == before


@pytest.mark.kernel
def test_thread_returns_if_the_socket_cannot_be_created(sandbox: Sandbox) -> None:
    before = os.stat(OWN).st_ino
    with pytest.raises(OSError, match="supported") as caught:
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM, 250)
    assert caught.value.errno == errno.EPROTONOSUPPORT
    assert os.stat(OWN).st_ino == before


@pytest.mark.kernel
def test_several_sockets_are_in_the_namespace(sandbox: Sandbox) -> None:
    families = [socket.AF_INET, socket.AF_INET6]
    before = os.stat(OWN).st_ino
    made = sandbox.netns.bare_sockets(families, socket.SOCK_STREAM)
    try:
        assert [sock.family for sock in made] == families
        assert not any(os.get_inheritable(sock.fileno()) for sock in made)
        made[0].bind((sandbox.v4, 0))  # only the sandbox has these addresses
        made[1].bind((sandbox.v6, 0))
    finally:
        for sock in made:
            sock.close()
    assert os.stat(OWN).st_ino == before


@pytest.mark.kernel
def test_sockets_are_made_all_or_none(sandbox: Sandbox) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Address family not supported"):
        sandbox.netns.bare_sockets([socket.AF_INET, 250], socket.SOCK_STREAM)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.kernel
def test_socket_neither_blocks_nor_is_inherited(sandbox: Sandbox) -> None:
    with sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        assert sock.gettimeout() == 0.0
        assert not os.get_inheritable(sock.fileno())
        assert not os.get_blocking(sock.fileno())


@pytest.mark.kernel
def test_signal_mask_is_as_before(sandbox: Sandbox) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGUSR2}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.kernel
def test_no_descriptor_of_the_namespace_is_held(sandbox: Sandbox) -> None:
    sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM).close()
    held = {os.readlink(entry) for entry in _descriptors()}
    assert f"net:[{sandbox.netns.inode}]" not in held


@pytest.mark.kernel
def test_ended_namespace_is_gone() -> None:
    with sandbox_netns() as sandbox:
        pass
    with pytest.raises(netns.NetnsGoneError, match="is gone"):
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM)
    assert not sandbox.netns.exists()


@pytest.mark.kernel
def test_another_namespace_at_the_same_path_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "pod"
    with sandbox_netns() as first, sandbox_netns() as second:
        path.symlink_to(first.path)
        opened = netns.Netns.open(str(path))
        assert opened.exists()
        path.unlink()
        path.symlink_to(second.path)
        assert not opened.exists()
        with pytest.raises(netns.NetnsGoneError):
            opened.socket(socket.AF_INET, socket.SOCK_STREAM)


@pytest.mark.kernel
def test_each_thread_comes_back_to_its_own_namespace(sandbox: Sandbox) -> None:
    seen: list[int] = []

    def visit() -> None:
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        seen.append(os.stat(OWN).st_ino)

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [os.stat(OWN).st_ino] * 4


@pytest.mark.kernel
def test_thread_that_moved_by_itself_is_not_taken_back(sandbox: Sandbox) -> None:
    seen: list[int] = []

    def move(elsewhere: Sandbox) -> None:
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        descriptor = os.open(elsewhere.path, os.O_RDONLY)
        netns._setns(descriptor, netns.CLONE_NEWNET)
        os.close(descriptor)
        netns.close_own_netns()
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM).close()
        seen.append(os.stat(OWN).st_ino)

    with sandbox_netns() as elsewhere:
        thread = threading.Thread(target=move, args=(elsewhere,))
        thread.start()
        thread.join()
        assert seen == [elsewhere.netns.inode]


@pytest.mark.kernel
def test_process_dies_when_it_cannot_come_home(sandbox: Sandbox) -> None:
    code = (
        "import os, socket, sys\n"
        "from probes import netns\n"
        "pod = netns.Netns.open(sys.argv[1])\n"
        "pod.socket(socket.AF_INET, socket.SOCK_STREAM).close()\n"
        "os.dup2(os.open('/dev/null', os.O_RDONLY), netns._per_thread.own.descriptor)\n"
        "pod.socket(socket.AF_INET, socket.SOCK_STREAM)\n"
        "print('still here')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, sandbox.path], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 70
    assert "cannot return from a pod's network namespace" in done.stderr
    assert done.stdout == ""


def _descriptors() -> list[str]:
    folder = "/proc/self/fd"
    names = [f"{folder}/{name}" for name in os.listdir(folder)]
    return [name for name in names if os.path.lexists(name)]
