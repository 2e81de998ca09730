"""What a kernel may lack without podgate being wrong on it: detected by trying, and reported."""

import errno
import functools
import os
import pathlib
import socket
import subprocess
from collections.abc import Collection

import pytest

from agent.linux.cgroups import cgroup2_mount
from agent.linux.nft_cgroups import CgroupMatches
from agent.operate.pinned import bpftool
from agent.services.linux import ipvs
from bpf import errors, features, listeners, raw_socket_policy, syscalls, tcx
from probes import sock_diag
from probes.netns import netns_cookie
from tests.kernel import foreign
from tests.kernel.syns import FirstPacket, Target

# The kernel matrix counts tests that end with these words; any other skip is a failure there.
NOT_OFFERED = "not offered by this kernel: "


def need_tcx() -> None:
    """Ends the test where the kernel has no tcx; podgate attaches by clsact there."""
    if not tcx.TcxLinks.is_supported():
        pytest.skip(NOT_OFFERED + "tcx (Linux 6.6)")


def need_features(needed: Collection[features.Feature]) -> None:
    """Ends the test where the kernel rejects programs that use them."""
    offered = features.offered(list(needed))
    if missing := [one.macro for one in needed if one not in offered]:
        pytest.skip(NOT_OFFERED + ", ".join(missing))


def need_listener_lookups() -> None:
    """Ends the test where each tcp probe connects."""
    need_netns_cookie()
    need_features((features.KERNEL_READ,))


def need_netns_cookie() -> None:
    """Ends the test where namespaces have no number; hooks and listener events are off there."""
    if netns_cookie() is None:
        pytest.skip(NOT_OFFERED + "SO_NETNS_COOKIE (Linux 5.14)")


def need_default_deny() -> None:
    """Ends the test where nftables matches no sockets by cgroup; new pods are open there until
    they have a gate."""
    if not has_default_deny():
        pytest.skip(NOT_OFFERED + "sockets by cgroup in nftables (Linux 5.13)")


def has_default_deny() -> bool:
    """As `need_default_deny`."""
    mount = cgroup2_mount()
    assert mount is not None
    rule = f"{CgroupMatches(mount).match_none()} accept"
    script = f"table inet offered {{ chain c {{ {rule}; }}; }}"
    check = subprocess.run(
        ["nft", "--check", "-f", "-"], input=script, text=True, capture_output=True
    )
    return check.returncode == 0


def attempt(first_packet: FirstPacket, target: Target) -> None:
    """Ends the test where the kernel has no such socket."""
    try:
        first_packet.begin(target)
    except OSError as error:
        if error.errno in (errno.EPROTONOSUPPORT, errno.ENOSYS):
            pytest.skip(f"{NOT_OFFERED}{first_packet} ({error.strerror})")
        raise


def need_process_names() -> None:
    """Ends the test where a gate names the cgroup of a source only."""
    if not features.reports_task_name():
        pytest.skip(NOT_OFFERED + "process names in gates (Linux 6.16)")


def need_ipvs() -> None:
    """Ends the test where the kernel has no IPVS: Debian's has it as a module."""
    try:
        ipvs.IpvsTable().close()
    except ipvs.IpvsError as error:
        if "this kernel has no IPVS" not in str(error):
            raise
        pytest.skip(NOT_OFFERED + "IPVS (module ip_vs)")


def need_listed_cgroup() -> None:
    """Ends the test where bpftool does not list what is attached to the root cgroup: 7.1 on 5.10.

    It fails only if something is attached, so call it after the hooks are.
    """
    command = [bpftool.find(), "cgroup", "show", str(cgroup2_mount())]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip(NOT_OFFERED + "BPF_PROG_QUERY as bpftool 7.1 sends it")


def lists_raw_sockets() -> bool:
    """Whether the kernel lists raw sockets (raw_diag, CONFIG_INET_RAW_DIAG)."""
    try:
        with sock_diag.SockDiag() as diag:
            list(diag.sockets(socket.IPPROTO_RAW, sock_diag.ANY_STATE))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True


@functools.cache
def rejects_packet_sockets() -> bool:
    """Whether a program may reject them when they are created (Linux 5.15, with BTF)."""
    try:
        raw_socket_policy.try_to_reject()
    except errors.BpfError:
        return False
    return True


def need_adoption_of_listeners(directory: pathlib.Path) -> None:
    """Ends the test where programs cannot have a socket report; directory: of the pinned ones."""
    with socket.create_server(("127.0.0.1", 0)):
        adopted = listeners.adopt(directory, lambda act: act())
    if not adopted:
        pytest.skip(NOT_OFFERED + "TCP_BPF_SOCK_OPS_CB_FLAGS (Linux 6.12)")


def need_tracing_of_closes(directory: pathlib.Path) -> None:
    """Ends the test where the kernel rejects the program; directory: of the pinned ones."""
    if not os.path.lexists(directory / listeners.CLOSES):
        pytest.skip(NOT_OFFERED + "socket cookies in tracing programs (Linux 5.12, with BTF)")


def need_ingress_in_test_runs() -> None:
    """Ends the test where a test frame cannot have come in by an interface; live ones can."""
    if not _has_ingress_in_test_runs():
        pytest.skip(NOT_OFFERED + "ingress_ifindex in BPF_PROG_TEST_RUN")


@functools.cache
def _has_ingress_in_test_runs() -> bool:
    program = foreign.load_program(foreign.TC_ACT_OK)
    context = bytearray(192)
    context[36] = 1  # struct __sk_buff: ingress_ifindex
    try:
        syscalls.run_program(program, bytes(64), bytes(context))
    except errors.BpfError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(program)
    return True
