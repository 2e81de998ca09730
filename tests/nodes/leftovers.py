"""What a test leaves on its node: found by comparing the node before and after the test.

Each object is one line, `KIND NAME`, as an operator would search for it.
"""

import contextlib
import gc
import os
import pathlib
import re
import socket
from collections import Counter
from collections.abc import Iterator

from agent.lab import lab as labs
from bpf import netlink
from tests import polling
from tests.nodes import node

# include/uapi/linux/netlink.h, netfilter/nfnetlink.h, netfilter/nf_tables.h
_NETLINK_NETFILTER = 12
_NFNL_SUBSYS_NFTABLES, _NFT_MSG_GETTABLE, _NFTA_TABLE_NAME = 10, 1, 1
_NFGENMSG = bytes(4)  # struct nfgenmsg of any family
# What goes by itself: processes that end, and links of a namespace whose last process has ended,
# some grace periods of RCU later.
_GOING = ("link ", "process ")
_SECONDS = polling.PATIENCE_SECONDS / 10
# Of the kernel, in each namespace where a module for tunnels or FOU was loaded; and a bond.
_OF_THE_KERNEL = {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip6gre0"}
# What the interpreter and gRPC open once and keep.
_ONCE = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/urandom", "/dev/null")


_lasting: list[None] = []
_inherited: set[str] = set()
"""Numbers of descriptors that the process had before its tests."""
_sockets: dict[str, str] = {}
"""Their names, by inode."""


def begin() -> None:
    """What this process has open now is of no test."""
    names = os.listdir("/proc/self/fd")
    # Not the one of listdir, whose number is free again.
    _inherited.update(name for name in names if os.path.lexists(f"/proc/self/fd/{name}"))


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Fail at the end of the block with the name of each object that it leaves on the node."""
    if node.current is None or _lasting:
        yield
        return
    before = found()
    yield
    if _lasting:
        return
    remaining = left(before)
    assert not remaining, f"the test left on its node: {', '.join(remaining)}"


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """For what tests of a file share and change, as a node with an agent: what is left is checked
    at the end of the block, not after each test."""
    with checked():
        _lasting.append(None)
        try:
            yield
        finally:
            _lasting.pop()


def found() -> Counter[str]:
    """Everything that is on this process' node now."""
    made = node.current
    assert made is not None
    lines = _processes_and_cgroups(made)
    lines += [f"link {name}" for _, name in socket.if_nameindex() if name not in _OF_THE_KERNEL]
    lines += [f"network namespace {path}" for path in _named_namespaces()]
    lines += [f"pin {path}" for path in _pins()]
    lines += [f"nftables table {name}" for name in _nft_tables()]
    lines += [f"descriptor of {target}" for target in _descriptors()]
    return Counter(lines)


def left(before: Counter[str]) -> list[str]:
    """What exists now and did not before. Waits for what goes by itself."""
    if not found() - before:
        return []
    gc.collect()

    def is_over() -> bool:
        return not any(line.startswith(_GOING) for line in found() - before)

    with contextlib.suppress(polling.TimedOutError):
        polling.wait_until("nothing is left", is_over, seconds=_SECONDS)
    return sorted((found() - before).elements())


def _processes_and_cgroups(made: node.Node) -> list[str]:
    lines = []
    for path, _, _ in os.walk(made.cgroup):
        name = os.path.relpath(path, made.cgroup)
        if name not in (".", *node.OWN_CGROUPS):
            lines.append(f"cgroup {name}")
        lines += [f"process {_command(pid)}" for pid in node.pids(path) if pid != os.getpid()]
    return lines


def _named_namespaces() -> list[str]:
    paths = (labs.LAB_DIRECTORY / "netns", pathlib.Path("/run/netns"))
    return [str(path) for directory in paths if directory.is_dir() for path in directory.iterdir()]


def _pins() -> list[str]:
    """Files, and not directories: an empty one is none of the kernel's objects. Without the index
    of an interface: a relay that an agent starts again has another pair."""
    top = labs.BPFFS
    paths = [os.path.join(path, name) for path, _, names in os.walk(top) for name in names]
    return [re.sub(r"-\d+$", "-IFINDEX", path) for path in paths]


def _nft_tables() -> list[str]:
    try:
        netfilter = netlink.RequestSocket(_NETLINK_NETFILTER)
    except OSError:  # the kernel has no netfilter
        return []
    try:
        kind = _NFNL_SUBSYS_NFTABLES << 8 | _NFT_MSG_GETTABLE
        tables = netfilter.dump(kind, _NFGENMSG)
    except netlink.NetlinkError:  # ... or no nf_tables
        return []
    finally:
        netfilter.close()
    at = netlink.HEADER_BYTES + len(_NFGENMSG)
    return [netlink.text(netlink.attributes(table, at)[_NFTA_TABLE_NAME]) for table in tables]


def _descriptors() -> list[str]:
    # `probes.netns` keeps the namespace to which threads return.
    kept = (*_ONCE, os.readlink("/proc/thread-self/ns/net"))
    targets = []
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in {*os.listdir(directory)} - _inherited:
            with contextlib.suppress(OSError):  # the one of listdir
                target = os.readlink(name, dir_fd=directory)
                targets.append(_socket(int(name), target) if target[:7] == "socket:" else target)
    finally:
        os.close(directory)
    return [target for target in targets if target and not target.startswith(kept)]


def _socket(descriptor: int, target: str) -> str:
    """Empty for one end of a pair: event loops have these, and gRPC keeps one."""
    if target not in _sockets:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            family = socket.AddressFamily(found.family).name.removeprefix("AF_")
            address = found.getsockname()
        _sockets[target] = f"{family} socket {address}" if address or family != "UNIX" else ""
    return _sockets[target]


def _command(pid: int) -> str:
    try:
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "that ends"
    return command.replace(b"\0", b" ").decode(errors="replace").strip() or "that ends"
