"""Paths to an interface that pass no gate at all: the options for them are rejected.

Each is shown to open a connection despite an enforcing gate while the hooks are not attached.
"""

import contextlib
import errno
import struct
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, pins
from bpf.gates import GateConfig, Gates
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import frames, links, offers, uring, wire, xsk
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
SOL_PACKET, PACKET_QDISC_BYPASS = 263, 20
EVASION = (Verdict.DROP, Reason.EVASION)

Send = Callable[[bytes], None]


@contextlib.contextmanager
def without_queue(interface: str) -> Iterator[Send]:
    with links.packet_socket(interface) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)
        yield lambda frame: wire.send(sock, frame)


@contextlib.contextmanager
def without_queue_by_ring(interface: str) -> Iterator[Send]:
    """The option set by io_uring instead of setsockopt(2)."""
    with uring.ring() as ring, links.packet_socket(interface) as sock:
        code = ring.set_option(sock, SOL_PACKET, PACKET_QDISC_BYPASS, struct.pack("=i", 1))
        if code == -errno.EOPNOTSUPP:
            pytest.skip(offers.NOT_OFFERED + "setsockopt by io_uring (Linux 6.7)")
        if code < 0:
            raise OSError(-code, "io_uring")
        yield lambda frame: wire.send(sock, frame)


@contextlib.contextmanager
def by_xdp(interface: str) -> Iterator[Send]:
    with xsk.xsk_socket(interface) as sender:
        yield sender.send


@pytest.fixture
def line(lab: labs.Lab, gates: Gates) -> Iterator[wire.Wire]:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), wire.Wire(pod) as made:
        made.warm_up()
        gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        yield made


@pytest.fixture
def attach_hooks(
    loaded: loader.Loaded, installation: pins.Pins, line: wire.Wire
) -> Iterator[Callable[[], None]]:
    offers.need_netns_cookie()
    mount = cgroup2_mount()
    assert mount is not None
    hooks = Hooks(loaded, installation, mount)
    NodeConfig(loaded).set_netns(netns_cookie())

    def attach() -> None:
        assert [hook.problem for hook in hooks.attach()] == [None] * len(abi.HOOKS)

    yield attach
    hooks.detach()
    loaded.map(abi.CONFIG).set(bytes(4), bytes(abi.CConfig()))


def errno_of(way: contextlib.AbstractContextManager[Send]) -> int:
    try:
        with way:
            return 0
    except OSError as error:
        return error.errno or 0


@pytest.mark.parametrize(
    "way", [without_queue, without_queue_by_ring, by_xdp], ids=lambda way: way.__name__
)
@VERSIONS
def test_option_that_bypasses_gates_is_rejected_from_attach_on(
    line: wire.Wire,
    gates: Gates,
    attach_hooks: Callable[[], None],
    way: Callable[[str], contextlib.AbstractContextManager[Send]],
    version: int,
) -> None:
    interface = line.pod.interface
    ends = line.ends(version)
    with way(interface) as send:
        send(frames.segment(ends, frames.SYN))
        assert line.flush().opened(ends)

        attach_hooks()
        counting = Counting(gates)
        assert errno_of(way(interface)) == errno.EPERM
        assert counting.moved() == {EVASION: 1}

        # Known limit: a socket that already has the option keeps it.
        ends = line.ends(version, source_port=20001)
        send(frames.segment(ends, frames.SYN))
        assert line.flush().opened(ends)


@VERSIONS
def test_packet_socket_without_the_option_passes_the_gate(
    line: wire.Wire, gates: Gates, attach_hooks: Callable[[], None], version: int
) -> None:
    attach_hooks()
    counting = Counting(gates, line.pod.ifindex)
    ends = line.ends(version)
    with links.packet_socket(line.pod.interface) as sock:
        wire.send(sock, frames.segment(ends, frames.SYN))
    assert not line.flush().opened(ends)
    assert counting.moved()[Verdict.DROP, Reason.NODE] == 1
