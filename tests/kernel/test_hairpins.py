"""A process of the node connects to another machine, which sends its SYN back to a pod of the node:
by a node port or as a load balancer."""

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab import attempts
from agent.lab import lab as labs
from bpf import abi, loader, map_specs
from bpf.drop_events import DropEventReader
from bpf.drop_sources import DropSources
from bpf.gates import GateConfig, Gates
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.kernel import conversations, frames, links, traffic
from tests.kernel.cgroups import Cgroup, cgroup
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

NODE_PORT = 30080
PORT = conversations.TCP_PORT
VERSIONS = pytest.mark.parametrize("version", [4, 6])
DROPPED = (Verdict.DROP, Reason.HAIRPIN)
WOULD_DROP = (Verdict.WOULD_DROP, Reason.HAIRPIN)
IP_OPTIONS, SO_BINDTODEVICE, TCP_FASTOPEN_CONNECT, IPPROTO_MPTCP = 4, 25, 30, 262
NO_OPERATIONS = b"\1" * 4
SILENCE = "chain silence { type filter hook input priority 0; tcp dport 9 drop; }"

_CONNECT = """
import socket, sys
family, address, port, seconds = sys.argv[1:]
with socket.socket(int(family)) as sock:
    sock.settimeout(float(seconds))
    try:
        sock.connect((address, int(port)))
    except TimeoutError:
        sys.exit(1)
"""


@pytest.fixture
def other(lab: labs.Lab) -> labs.LabPod:
    """Another node: it forwards."""
    made = lab.add_pod("other", 9)
    links.let_forward(made)
    return made


@pytest.fixture
def web(lab: labs.Lab, other: labs.LabPod) -> Iterator[labs.LabPod]:
    """A pod of this node, behind a node port of the other one."""
    pod = lab.add_pod("web", 1)
    with contextlib.ExitStack() as undo:
        for version, family in ((4, "ip"), (6, "ip6")):
            target, own = traffic.address(pod, version), traffic.address(other, version)
            to = f"{target}:{PORT}" if version == 4 else f"[{target}]:{PORT}"
            undo.enter_context(links.table_inside(other, family, translation(family, own, to)))
        undo.enter_context(conversations.served_by(pod.open_socket))
        yield pod


def translation(family: str, own: str, to: str) -> str:
    """As kube-proxy and load balancers translate."""
    return (
        "chain translated { type nat hook prerouting priority -100; "
        f"{family} daddr {own} tcp dport {NODE_PORT} dnat to {to}; }}\n"
        "chain masqueraded { type nat hook postrouting priority 100; ct status dnat masquerade; }\n"
    )


def guard(gates: Gates, pod: labs.LabPod, *rules: Rule, mode: Mode = Mode.ENFORCE) -> Counting:
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses, rules))
    return Counting(gates, pod.ifindex)


def dial(sock: socket.socket, other: labs.LabPod, version: int, *, is_dropped: bool) -> str:
    """By the node port; a dropped SYN would be sent again after a second."""
    seconds = traffic.DROPPED_AFTER_SECONDS if is_dropped else traffic.LIMIT_SECONDS
    return attempts.connect(sock, traffic.address(other, version), NODE_PORT, seconds)


def dial_from(
    group: Cgroup, other: labs.LabPod, version: int, *, is_dropped: bool, port: int = NODE_PORT
) -> bool:
    """By a process in this cgroup: whether it connects."""
    seconds = traffic.DROPPED_AFTER_SECONDS if is_dropped else traffic.LIMIT_SECONDS
    arguments = [traffic.family(version), traffic.address(other, version), port, seconds]
    done = group.run([sys.executable, "-c", _CONNECT, *map(str, arguments)])
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


@VERSIONS
def test_node_port_of_another_node_leads_no_process_back(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod, version: int
) -> None:
    counting = guard(gates, web)
    sock = socket.socket(traffic.family(version))
    assert dial(sock, other, version, is_dropped=True) == attempts.DROPPED
    assert counting.moved_but_control() == {DROPPED: 1}


@VERSIONS
def test_each_syn_that_is_sent_again_is_dropped(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod, version: int
) -> None:
    """After a second, and after two more."""
    guard(gates, web)
    with socket.socket(traffic.family(version)) as sock:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect((traffic.address(other, version), NODE_PORT))
        polling.wait_until(
            "three SYNs are dropped",
            lambda: gates.counts()[web.ifindex].get(DROPPED, 0) >= 3,
        )
        assert sock.connect_ex((traffic.address(other, version), NODE_PORT)) != 0


@VERSIONS
def test_pods_and_others_pass_by_the_same_node_port(
    attached_hooks: None,
    gates: Gates,
    lab: labs.Lab,
    other: labs.LabPod,
    web: labs.LabPod,
    version: int,
) -> None:
    counting = guard(gates, web)
    client = lab.add_pod("client", 2)
    guard(gates, client)
    with client.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert dial(sock, other, version, is_dropped=False) == "connects"
    assert counting.moved_but_control() == {}


def test_pod_in_audit_is_reached_and_the_attempt_counted(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod
) -> None:
    counting = guard(gates, web, mode=Mode.AUDIT)
    assert dial(socket.socket(), other, 4, is_dropped=False) == "connects"
    assert counting.moved_but_control() == {WOULD_DROP: 1}


def test_pod_in_off_is_reached_uncounted(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod
) -> None:
    counting = guard(gates, web, mode=Mode.OFF)
    assert dial(socket.socket(), other, 4, is_dropped=False) == "connects"
    assert counting.moved_but_control() == {}


@VERSIONS
def test_rules_admit_who_connects(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod, version: int
) -> None:
    with cgroup() as unit, cgroup("inner", below=unit) as inner, cgroup() as another:
        exact = Rule(SourceKind.CGROUP, 6, PORT, PORT, unit.id)
        counting = guard(gates, web, exact)
        assert dial_from(unit, other, version, is_dropped=False)
        assert not dial_from(inner, other, version, is_dropped=True)
        assert counting.moved_but_control() == {(Verdict.PASS, Reason.RULE): 1, DROPPED: 1}

        all_below = Rule(SourceKind.ANCESTOR, 6, PORT, PORT, unit.id, unit.level)
        guard(gates, web, all_below)
        assert dial_from(inner, other, version, is_dropped=False)
        assert not dial_from(another, other, version, is_dropped=True)

        guard(gates, web, Rule(SourceKind.CGROUP, 6, PORT + 1, PORT + 1, unit.id))
        assert not dial_from(unit, other, version, is_dropped=True)


@pytest.mark.parametrize("mode", [Mode.ENFORCE, Mode.STRICT])
def test_kubelet_is_admitted_in_enforce_only(
    attached_hooks: None,
    gates: Gates,
    loaded: loader.Loaded,
    other: labs.LabPod,
    web: labs.LabPod,
    mode: Mode,
) -> None:
    """A probe may name the node port of another node as its host and port."""
    guard(gates, web, Rule(SourceKind.KUBELET, 6, PORT, PORT), mode=mode)
    with cgroup() as kubelet, cgroup() as another:
        NodeConfig(loaded).set_kubelet(kubelet.id)
        is_strict = mode is Mode.STRICT
        assert dial_from(kubelet, other, 4, is_dropped=is_strict) is not is_strict
        assert not dial_from(another, other, 4, is_dropped=True)


def test_process_does_not_pass_as_a_kubelet_that_is_not_identified(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod
) -> None:
    guard(gates, web, Rule(SourceKind.KUBELET, 6, PORT, PORT))
    assert dial(socket.socket(), other, 4, is_dropped=True) == attempts.DROPPED


Open = Callable[[labs.LabPod], socket.socket]


def with_options(other: labs.LabPod) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.IPPROTO_IP, IP_OPTIONS, NO_OPERATIONS)
    return sock


def bound_to_an_interface(other: labs.LabPod) -> socket.socket:
    sock = socket.socket()
    name = socket.if_indextoname(other.ifindex)
    sock.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, name.encode())
    return sock


def bound_to_a_port(other: labs.LabPod) -> socket.socket:
    sock = socket.socket()
    sock.bind(("", 0))
    return sock


def with_more_paths(other: labs.LabPod) -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)


@pytest.mark.parametrize(
    "opened", [with_options, bound_to_an_interface, bound_to_a_port, with_more_paths]
)
def test_no_option_of_a_socket_leads_back(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod, opened: Open
) -> None:
    counting = guard(gates, web)
    assert dial(opened(other), other, 4, is_dropped=True) == attempts.DROPPED
    assert counting.moved_but_control() == {DROPPED: 1}


def test_syn_that_is_sent_with_the_first_data_is_dropped(
    attached_hooks: None, gates: Gates, other: labs.LabPod, web: labs.LabPod
) -> None:
    counting = guard(gates, web)
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)
        sock.connect_ex((other.ipv4, NODE_PORT))
        with contextlib.suppress(BlockingIOError):
            sock.send(b"GET /")
        moved = polling.wait_until("the SYN is dropped", counting.moved_but_control)
    assert moved == {DROPPED: 1}


def test_drop_names_the_process_that_connects(
    attached_hooks: None,
    gates: Gates,
    loaded: loader.Loaded,
    other: labs.LabPod,
    web: labs.LabPod,
) -> None:
    events, sources = DropEventReader(loaded), DropSources(loaded)
    events.read()
    guard(gates, web)
    with contextlib.closing(events), cgroup() as unit:
        assert not dial_from(unit, other, 4, is_dropped=True)
        (event,) = [one for one in events.read() if one.reason is Reason.HAIRPIN]
        assert (event.cgroup, event.ifindex, event.destination_port) == (unit.id, web.ifindex, PORT)
        assert str(event.source) == other.ipv4
        (source,) = [one for one in sources.read() if one.cgroup == unit.id]
        assert (source.ifindex, source.port, source.count) == (web.ifindex, PORT, 1)


def open_connects(loaded: loader.Loaded) -> set[bytes]:
    return {key for key, _ in loaded.map(map_specs.HOST_CONNECTS).items()}


def test_connect_is_forgotten_once_it_is_answered(
    attached_hooks: None, gates: Gates, loaded: loader.Loaded, other: labs.LabPod, web: labs.LabPod
) -> None:
    before = open_connects(loaded)
    assert dial(socket.socket(), other, 4, is_dropped=False) == "connects"
    assert open_connects(loaded) <= before


def test_connect_is_remembered_when_its_socket_is_closed(
    attached_hooks: None, gates: Gates, loaded: loader.Loaded, other: labs.LabPod, web: labs.LabPod
) -> None:
    """Its SYN may be under way."""
    guard(gates, web)
    before = open_connects(loaded)
    begin((other.ipv4, NODE_PORT))
    assert len(open_connects(loaded) - before) == 1


def test_process_does_not_displace_its_connect_by_others(
    attached_hooks: None, gates: Gates, loaded: loader.Loaded, other: labs.LabPod, web: labs.LabPod
) -> None:
    """By 5,000, as while a far load balancer sends its SYN back."""
    counting = guard(gates, web)
    silent = (other.ipv4, 9)
    with links.table_inside(other, "ip", SILENCE):
        before = open_connects(loaded)
        begin(silent)
        (sequence,) = open_connects(loaded) - before
        for _ in range(5000):
            begin(silent)
        send_back(sequence, other, web)
        moved = polling.wait_until("the SYN is judged", counting.moved_but_control)
    assert moved == {DROPPED: 1}


def test_rule_admits_no_cgroup_that_others_have_displaced(
    attached_hooks: None, gates: Gates, loaded: loader.Loaded, other: labs.LabPod, web: labs.LabPod
) -> None:
    """It is admitted again by its next connect."""
    cgroups = loaded.map(map_specs.CONNECT_CGROUPS)
    with cgroup() as unit, links.table_inside(other, "ip", SILENCE):
        counting = guard(gates, web, Rule(SourceKind.CGROUP, 6, PORT, PORT, unit.id))
        before = open_connects(loaded)
        assert not dial_from(unit, other, 4, is_dropped=True, port=9)
        (sequence,) = open_connects(loaded) - before

        # As the kernel does for another one, whose choice depends on processors and reads.
        assert cgroups.delete(unit.id.to_bytes(8, sys.byteorder))
        send_back(sequence, other, web)
        moved = polling.wait_until("the SYN is judged", counting.moved_but_control)
        assert moved == {DROPPED: 1}
        assert dial_from(unit, other, 4, is_dropped=False)


def send_back(sequence: bytes, other: labs.LabPod, web: labs.LabPod) -> None:
    """A SYN of a connection of this node, by the other one."""
    ends = frames.Ends(frames.address(other.ipv4), frames.address(web.ipv4), port=PORT)
    syn = frames.tcp(ends, frames.SYN, sequence=int.from_bytes(sequence))
    with other.open_socket(socket.AF_INET, socket.SOCK_RAW, frames.TCP) as raw:
        raw.sendto(syn, (web.ipv4, 0))


def begin(to: tuple[str, int]) -> None:
    """A SYN that is under way when its socket is closed."""
    with socket.socket() as sock:
        sock.setblocking(False)
        assert sock.connect_ex(to) == errno.EINPROGRESS


def answers(raw: socket.socket, sequence: int) -> bool:
    """Whether a server acknowledges a SYN with this number. Raises `TimeoutError` for silence."""
    while True:
        segment = raw.recv(1 << 16)[20:]
        if struct.unpack_from("!I", segment, 8)[0] == sequence + 1:
            return bool(segment[13] & frames.SYN)


@pytest.mark.parametrize(("age_seconds", "is_dropped"), [(0.0, True), (9.0, True), (11.0, False)])
def test_syn_of_another_host_passes_once_the_connect_is_old(
    attached_hooks: None,
    gates: Gates,
    loaded: loader.Loaded,
    other: labs.LabPod,
    web: labs.LabPod,
    age_seconds: float,
    is_dropped: bool,
) -> None:
    counting = guard(gates, web)
    sequence = int.from_bytes(os.urandom(3))
    sent_ns = time.monotonic_ns() - int(age_seconds * 1e9)
    record = abi.CHostConnect(sent_ns=sent_ns, cgroup=1)
    loaded.map(map_specs.HOST_CONNECTS).set(struct.pack("!I", sequence), bytes(record))
    ends = frames.Ends(frames.address(other.ipv4), frames.address(web.ipv4), port=PORT)
    with other.open_socket(socket.AF_INET, socket.SOCK_RAW, frames.TCP) as raw:
        raw.settimeout(traffic.LIMIT_SECONDS)
        raw.sendto(frames.tcp(ends, frames.SYN, sequence=sequence), (web.ipv4, 0))
        if is_dropped:
            moved = polling.wait_until("the SYN is dropped", counting.moved_but_control)
            assert moved == {DROPPED: 1}
        else:
            assert answers(raw, sequence)
            assert counting.moved_but_control() == {}
