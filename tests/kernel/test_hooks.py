"""Hooks at the root cgroup: calls of host processes that fail at once, and calls that pass."""

import ctypes
import errno
import functools
import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from agent.gates import worker
from agent.gates.gate_thread import GateThread
from agent.gates.worker import GateWorker
from agent.lab import attempts
from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins, program_specs, syscalls
from bpf.drop_events import DropEvent, DropEventReader
from bpf.drop_sources import DropSources
from bpf.gates import GateConfig, Gates
from bpf.hooks import Hooks, HookState
from bpf.node_config import NodeConfig
from bpf.pinning import Origin, Outcome
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import offers
from tests.kernel.cgroups import cgroup
from tests.kernel.counting import Counting

pytestmark = pytest.mark.kernel

PORT, TUNNEL_PORT = 8080, 8472
SOL_PACKET, PACKET_QDISC_BYPASS, PACKET_AUXDATA = 263, 20, 8
AF_XDP, SOL_XDP, XDP_UMEM_REG = 44, 283, 4
IP_MSFILTER = 41
SO_BINDTODEVICE = 25
BPF_PROG_ATTACH, BPF_PROG_DETACH = 8, 9
REFUSED = attempts.REFUSED
REJECTED = "this kernel does not accept the program"
BOTH = pytest.mark.parametrize("family", ["IPv4", "IPv6"])


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    offers.need_netns_cookie()
    made = NodeConfig(loaded)
    made.set_netns(netns_cookie())
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def hooks(
    loaded: loader.Loaded, installation: pins.Pins, config: NodeConfig
) -> Iterator[list[HookState]]:
    mount = cgroup2_mount()
    assert mount is not None
    made = Hooks(loaded, installation, mount)
    yield made.attach()
    made.detach()


@pytest.fixture
def pod(lab: labs.Lab, hooks: list[HookState]) -> Iterator[labs.LabPod]:
    made = lab.add_pod("hooked", 1)
    with made.listen(PORT):
        yield made


def guard(gates: Gates, pod: labs.LabPod, mode: Mode, *rules: Rule) -> Counting:
    gates.install(pod.ifindex, GateConfig(mode, pod.addresses, rules))
    return Counting(gates, pod.ifindex)


def connect(pod: labs.LabPod, family: str) -> str:
    return attempts.connect_from_node(pod, family, PORT, is_rejected=False)


def read_events(loaded: loader.Loaded) -> list[DropEvent]:
    events = DropEventReader(loaded)
    try:
        return events.read()
    finally:
        events.close()


def begin_events(loaded: loader.Loaded) -> None:
    """No events yet, and none suppressed because of the previous test."""
    budget = loaded.map(map_specs.EVENT_BUDGET)
    budget.set(bytes(4), bytes(budget.value_size))
    read_events(loaded)


def count_suppressed(loaded: loader.Loaded) -> int:
    events = DropEventReader(loaded)
    try:
        return events.lost()
    finally:
        events.close()


def test_every_hook_is_in_force(hooks: list[HookState]) -> None:
    assert [hook for hook in hooks if hook.problem] == []
    assert len(hooks) == len(program_specs.HOOKS)


def problems(loaded: loader.Loaded) -> list[str | None]:
    """Of each hook while all are attached whose program the kernel accepts."""
    return [None if hook.name in loaded.programs else REJECTED for hook in program_specs.HOOKS]


def are_reported(states: list[HookState], loaded: loader.Loaded, problem: str) -> bool:
    """Whether each has this problem, and those without a program that."""
    return all(
        (expected or problem) in (state.problem or "")
        for expected, state in zip(problems(loaded), states, strict=True)
    )


async def test_hooks_that_cannot_distinguish_sockets_are_reported(
    fresh_pins: pins.Pins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are attached, but without effect."""
    monkeypatch.setattr(worker, "netns_cookie", lambda: None)
    loaded = await loader.load(fresh_pins)
    thread = GateThread()
    made = await thread.run(functools.partial(GateWorker, loaded, fresh_pins, None, thread))
    try:
        await made.attach()
        assert not made.has_connect_hooks
        assert len(made.hook_states) == len(program_specs.HOOKS)
        assert are_reported(made.hook_states, loaded, "no netns cookies")
    finally:
        await made.detach()
        await made.aclose()


def test_budget_that_two_hooks_used_up_at_once_sends_no_events(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded
) -> None:
    """Both took the last one: programs of cgroups are preempted."""
    guard(gates, pod, Mode.ENFORCE)
    begin_events(loaded)
    before = count_suppressed(loaded)
    budget = loaded.map(map_specs.EVENT_BUDGET)
    window = abi.CEventBudget(since_ns=time.monotonic_ns() + 10**12, remaining=-1)
    budget.set(bytes(4), bytes(window) * (budget.value_size // ctypes.sizeof(window)))
    assert connect(pod, "IPv4") == REFUSED
    assert read_events(loaded) == []
    assert count_suppressed(loaded) == before + 1
    begin_events(loaded)


@BOTH
def test_connect_of_a_host_process_gets_eperm_and_is_counted_and_named(
    gates: Gates, pod: labs.LabPod, loaded: loader.Loaded, family: str
) -> None:
    counting = guard(gates, pod, Mode.ENFORCE)
    begin_events(loaded)
    DropSources(loaded).forget(pod.ifindex)
    assert connect(pod, family) == REFUSED
    assert counting.moved_but_control() == {(Verdict.DROP, Reason.NODE): 1}
    (event,) = read_events(loaded)
    assert (event.reason, event.verdict) == (Reason.NODE, Verdict.DROP)
    assert (event.ifindex, event.destination_port) == (pod.ifindex, PORT)
    assert str(event.destination) == attempts.address_of(pod, family)
    assert event.pid == os.getpid()
    assert event.process_name == own_name()
    (caller,) = [one for one in DropSources(loaded).read() if one.ifindex == pod.ifindex]
    assert (caller.port, caller.count, caller.process_name) == (PORT, 1, own_name())


def own_name() -> str:
    with open("/proc/self/comm", encoding="utf-8") as comm:
        return comm.read().strip()


def test_mapped_address_is_the_same_pod(gates: Gates, pod: labs.LabPod) -> None:
    guard(gates, pod, Mode.ENFORCE)
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    assert attempts.connect(sock, f"::ffff:{pod.ipv4}", PORT, 3) == REFUSED


@BOTH
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.AUDIT])
def test_connect_succeeds_in_modes_that_reject_nothing(
    gates: Gates, pod: labs.LabPod, mode: Mode, family: str
) -> None:
    guard(gates, pod, mode)
    assert connect(pod, family) == "connects"


@BOTH
def test_source_with_a_rule_connects_and_others_get_eperm(
    gates: Gates, pod: labs.LabPod, family: str
) -> None:
    own = os.stat(f"{cgroup2_mount()}{own_cgroup()}").st_ino
    guard(gates, pod, Mode.ENFORCE, Rule(SourceKind.CGROUP, cgroup=own))
    assert connect(pod, family) == "connects"
    guard(gates, pod, Mode.ENFORCE, Rule(SourceKind.CGROUP, cgroup=own + 1))
    assert connect(pod, family) == REFUSED


def own_cgroup() -> str:
    with open("/proc/self/cgroup", encoding="utf-8") as lines:
        return next(line[3:].strip() for line in lines if line.startswith("0::"))


@BOTH
def test_connects_of_pods_succeed(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, family: str
) -> None:
    guard(gates, pod, Mode.ENFORCE)
    other = lab.add_pod("other", 2)
    address = attempts.address_of(pod, family)
    assert attempts.connect_from_pod(other, address, family, PORT) == "connects"


@BOTH
def test_two_pods_with_one_address_are_left_to_their_gates(
    lab: labs.Lab, gates: Gates, pod: labs.LabPod, family: str
) -> None:
    guard(gates, pod, Mode.ENFORCE)
    twin = lab.add_pod("twin", 2)
    gates.install(twin.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
    assert attempts.connect_from_node(pod, family, PORT, is_rejected=True) == "times out"
    gates.remove(twin.ifindex)
    assert connect(pod, family) == REFUSED


@pytest.mark.parametrize(("family", "answer"), [("IPv4", attempts.DROPPED), ("IPv6", REFUSED)])
def test_socket_bound_to_an_interface_is_left_to_the_gate_over_ipv4(
    gates: Gates, pod: labs.LabPod, family: str, answer: str
) -> None:
    """Over IPv6 a router may send it back, and no gate would drop it then."""
    guard(gates, pod, Mode.ENFORCE)
    sock = socket.socket(attempts.FAMILIES[family], socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, pod.interface.encode())
    assert attempts.connect(sock, attempts.address_of(pod, family), PORT, 0.4) == answer


@BOTH
def test_address_of_a_deleted_pod_is_free(gates: Gates, pod: labs.LabPod, family: str) -> None:
    guard(gates, pod, Mode.ENFORCE)
    gates.remove(pod.ifindex)
    assert connect(pod, family) == "connects"


def test_without_an_agent_for_too_long_it_connects(
    gates: Gates, pod: labs.LabPod, config: NodeConfig, loaded: loader.Loaded
) -> None:
    guard(gates, pod, Mode.ENFORCE)
    NodeConfig(loaded, now_ns=lambda: 1).beat()
    config.set_limits(stale_after_seconds=0, dead_man_seconds=1)
    assert connect(pod, "IPv4") == "connects"


def errno_of(call: object, *arguments: object) -> int:
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as error:
        return error.errno or 0
    return 0


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        (socket.AF_INET, "198.18.0.1"),
        (socket.AF_INET6, "fd00:18::1"),
        (socket.AF_INET6, "::ffff:198.18.0.1"),
        (socket.AF_INET, "198.18.0.2"),
    ],
)
def test_datagram_to_a_tunnel_port_is_rejected(
    pod: labs.LabPod, config: NodeConfig, gates: Gates, kind: socket.AddressFamily, address: str
) -> None:
    config.set_tunnel_ports([4789, TUNNEL_PORT])
    counting = Counting(gates)
    with socket.socket(kind, socket.SOCK_DGRAM) as sock:
        assert errno_of(sock.sendto, b"", (address, TUNNEL_PORT)) == errno.EPERM
        assert errno_of(sock.connect, (address, TUNNEL_PORT)) == errno.EPERM
        assert counting.moved() == {(Verdict.DROP, Reason.TUNNEL): 2}
        assert errno_of(sock.sendto, b"", (address, TUNNEL_PORT + 1)) != errno.EPERM
    config.set_tunnel_ports([])
    with socket.socket(kind, socket.SOCK_DGRAM) as sock:
        assert errno_of(sock.sendto, b"", (address, TUNNEL_PORT)) != errno.EPERM


def test_datagram_of_a_pod_to_a_tunnel_port_passes(pod: labs.LabPod, config: NodeConfig) -> None:
    config.set_tunnel_ports([TUNNEL_PORT])
    with pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert errno_of(sock.sendto, b"", (str(labs.NODE_IPV4), TUNNEL_PORT)) == 0


def test_more_tunnel_ports_than_are_guarded_is_one_sentence(config: NodeConfig) -> None:
    with pytest.raises(ValueError, match="tunnels on 9 UDP ports and podgate guards 8; give"):
        config.set_tunnel_ports(range(1, 10))


def test_packet_socket_may_not_skip_the_queue(
    pod: labs.LabPod, gates: Gates, loaded: loader.Loaded
) -> None:
    counting = Counting(gates)
    begin_events(loaded)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_AUXDATA, 1)
        assert errno_of(sock.setsockopt, SOL_PACKET, PACKET_QDISC_BYPASS, 1) == errno.EPERM
    assert counting.moved() == {(Verdict.DROP, Reason.EVASION): 1}
    (event,) = read_events(loaded)
    assert (event.reason, event.pid) == (Reason.EVASION, os.getpid())
    assert event.destination is None
    with pod.open_socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.setsockopt(SOL_PACKET, PACKET_QDISC_BYPASS, 1)


def test_xdp_socket_gets_no_memory(pod: labs.LabPod) -> None:
    registration = struct.pack("=QQIIII", 0, 4096, 4096, 0, 0, 0)
    with socket.socket(AF_XDP, socket.SOCK_RAW) as sock:
        assert errno_of(sock.setsockopt, SOL_XDP, XDP_UMEM_REG, registration) == errno.EPERM


def test_long_option_ends_as_it_would_have(hooks: list[HookState]) -> None:
    """Over a page a hook that leaves the length alone makes it EFAULT (before Linux 6.5)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        code = errno_of(sock.setsockopt, socket.IPPROTO_IP, IP_MSFILTER, bytes(8192))
        assert code not in (0, errno.EFAULT, errno.EPERM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 4096


def test_attaching_again_keeps_the_links(
    hooks: list[HookState], loaded: loader.Loaded, installation: pins.Pins
) -> None:
    before = link_ids(installation)
    mount = cgroup2_mount()
    assert mount is not None
    assert [hook.problem for hook in Hooks(loaded, installation, mount).attach()] == [None] * len(
        program_specs.HOOKS
    )
    assert link_ids(installation) == before


def link_ids(installation: pins.Pins) -> list[int]:
    found = []
    for hook in program_specs.HOOKS:
        fd = syscalls.open_pin(str(installation.links / hook.name))
        found.append(struct.unpack("=II", syscalls.object_info(fd, 8))[1])
        os.close(fd)
    return found


def test_program_that_excludes_the_hook_is_named(
    isolated: None, loaded: loader.Loaded, installation: pins.Pins
) -> None:
    """In a cgroup of the test's own, as at the root."""
    hook = program_specs.HOOKS[0]
    program = loaded.programs[hook.name]
    with cgroup() as own:
        directory = os.open(own.directory, os.O_RDONLY)
        exclusively = struct.pack("=IIII", directory, program, hook.attach_type, 0)
        try:
            syscalls.call(command(BPF_PROG_ATTACH), exclusively, what="attaching")
            states = Hooks(loaded, installation, own.directory)
            first, *others = states.attach()
            assert first.problem is not None
            assert f"program {syscalls.program_id(program)} is attached" in first.problem
            assert "without BPF_F_ALLOW_MULTI" in first.problem
            assert [other.problem for other in others] == problems(loaded)[1:]
            states.detach()
            syscalls.call(command(BPF_PROG_DETACH), exclusively, what="detaching")
            assert [state.problem for state in states.attach()] == problems(loaded)
            states.detach()
        finally:
            os.close(directory)


def command(number: int) -> syscalls.Command:
    return ctypes.c_uint(number).value  # type: ignore[return-value]


def test_missing_program_of_a_hook_is_reported(
    isolated: None, loaded: loader.Loaded, installation: pins.Pins
) -> None:
    lacking = loader.Loaded(
        {name: fd for name, fd in loaded.programs.items() if name != "hook_sockops"},
        loaded.open_maps,
        outcome=Outcome(Origin.PINNED),
    )
    with cgroup() as own:
        made = Hooks(lacking, installation, own.directory)
        assert made.attach()[-1].problem == "this kernel does not accept the program"
        made.detach()


def test_directory_that_is_no_cgroup_is_an_error(
    isolated: None, loaded: loader.Loaded, installation: pins.Pins
) -> None:
    states = Hooks(loaded, installation, "/proc").attach()
    assert are_reported(states, loaded, "attaching to the root cgroup: ")
