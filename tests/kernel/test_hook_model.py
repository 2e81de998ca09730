"""The hooks agree with their specification (tests/model/hooks.py) on calls with each kind of socket
option, and the gate with its own on what these calls send. The seed is printed, as for frames."""

import dataclasses
import errno
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from bpf import abi, loader, map_specs, pins, syscalls
from bpf.hooks import Hooks
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.verdicts import Mode, Reason
from tests.kernel import frames, offers
from tests.kernel.gate_runs import GateRuns
from tests.kernel.gate_stage import MARK
from tests.model import facts, flows, gate, generator, hooks, packet, seeds
from tests.model.facts import Gate, Kind, Sent, Socket, State
from tests.model.generator import CLIENTS, NODES, OTHERS, PODS, PORTS, REMOTE, SERVICES, SHARED
from tests.model.hooks import Call
from tests.nodes import node

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

CALLS = int(os.environ.get("PODGATE_TEST_FRAMES", "10000")) // 10
SEED = seeds.seed()
CALLS_OF_A_STATE = 50
TUNNEL_PORT = 8472
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
IP_TRANSPARENT, IPV6_TRANSPARENT, SO_COOKIE = 19, 75, 57


@pytest.fixture(scope="module")
def runs(loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup) -> Iterator[GateRuns]:
    offers.need_tcx()
    offers.need_netns_cookie()
    assert node.current is not None
    attached = Hooks(loaded, installation, node.current.cgroup)
    with GateRuns(loaded, installation, cgroup) as made:
        assert [hook for hook in attached.attach() if hook.problem] == []
        yield made
        attached.detach()


def states(cgroup: Cgroup, seed: str, count: int) -> Iterator[tuple[random.Random, State]]:
    """With ports of tunnels, and hosts that probes may not name."""
    chosen, made = random.Random(seed), generator.Generator(seed, cgroup)
    for _ in range(count):
        state = made.state(time.monotonic_ns())
        tunnel_ports = frozenset(chosen.sample((TUNNEL_PORT, 53, 4789), chosen.randrange(3)))
        state.node = dataclasses.replace(state.node, tunnel_ports=tunnel_ports)
        everyone = (*PODS[4], *PODS[6], *CLIENTS.values())
        state.denied_host_probes = frozenset(
            (chosen.choice(everyone), chosen.choice(PORTS[1:])) for _ in range(chosen.randrange(20))
        )
        yield chosen, state


def text(address: bytes) -> str:
    return str(abi.unpack_address(address))


def test_connect_agrees_with_the_specification(
    runs: GateRuns, loaded: loader.Loaded, cgroup: Cgroup
) -> None:
    wanted = {Reason.TUNNEL, Reason.NODE, hooks.DENIED, hooks.ALLOWED}
    seen: Counter[Reason | str | None] = Counter()
    for chosen, state in states(cgroup, SEED, 4 * CALLS // CALLS_OF_A_STATE):
        if seen.total() >= CALLS and seen.keys() >= wanted:
            break
        runs.apply(state)
        for _ in range(CALLS_OF_A_STATE):
            family = chosen.choice((4, 6))
            call = Call(
                cgroup,
                chosen.choice((packet.TCP, packet.TCP, packet.TCP, packet.UDP)),
                chosen.choice((*PODS[family], OTHERS[family], SHARED[family], CLIENTS[family])),
                chosen.choice((*PORTS[1:], TUNNEL_PORT)),
                has_interface=chosen.random() < 0.2,
            )
            is_mapped = family == 4 and chosen.random() < 0.3
            specified = hooks.evaluate(hooks.CONNECT, call, state, time.monotonic_ns())
            before = counts(runs, loaded)
            is_rejected = connect(call, 6 if is_mapped else family, is_mapped=is_mapped)
            after = counts(runs, loaded)
            moved = [reason for reason in before if after[reason] != before[reason]]
            assert is_rejected == (specified != hooks.ALLOWED), (SEED, call, state)
            assert moved == ([specified] if isinstance(specified, Reason) else []), (SEED, call)
            seen[specified] += 1
    sys.stdout.write(f"seed {SEED}: connect: {dict(seen)}\n")
    assert seen.keys() == wanted


def counts(runs: GateRuns, loaded: loader.Loaded) -> dict[Reason, int]:
    """Of hooks: on a gate's slot, or on the node's."""
    found = Counter[Reason]()
    for slot in (abi.HOST_SLOT, *runs.slots):
        value = loaded.map(map_specs.COUNTERS).get(struct.pack("=I", slot))
        assert value is not None
        for reason in (Reason.NODE, Reason.TUNNEL):
            found[reason] += abi.CCounters.from_buffer_copy(value).packets[reason]
    return {reason: found[reason] for reason in (Reason.NODE, Reason.TUNNEL)}


def connect(call: Call, family: int, *, is_mapped: bool) -> bool:
    """Whether it was rejected."""
    kind = socket.SOCK_STREAM if call.protocol == packet.TCP else socket.SOCK_DGRAM
    with socket.socket(FAMILIES[family], kind | socket.SOCK_NONBLOCK) as made:
        if call.has_interface:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"pod0")
        to = f"::ffff:{text(call.to)}" if is_mapped else text(call.to)
        result = made.connect_ex((to, call.port))
    assert result in (0, errno.EPERM, errno.EINPROGRESS, errno.ENETUNREACH, errno.EHOSTUNREACH)
    return result == errno.EPERM


@dataclasses.dataclass(slots=True)
class Server:
    """A UDP socket and what its specification is by now."""

    made: socket.socket
    family: int
    port: int
    specified: Socket


def open_server(chosen: random.Random, family: int, cgroup: Cgroup) -> Server:
    """bound or not, also to what is not the node's."""
    made = socket.socket(FAMILIES[family], socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    level, option = (0, IP_TRANSPARENT) if family == 4 else (41, IPV6_TRANSPARENT)
    made.setsockopt(level, option, 1)
    choices = (None, None, NODES[family], SERVICES[family], REMOTE[family])
    bound = chosen.choice(choices)
    made.bind(("" if bound is None else text(bound), 0))
    port = made.getsockname()[1]
    cookie = struct.unpack("=Q", made.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0]
    return Server(made, family, port, Socket(Kind.UDP, cgroup, cookie, bound=bound))


def named_source(family: int, source: bytes | None) -> list[tuple[int, int, bytes]]:
    """IP_PKTINFO or IPV6_PKTINFO, without an interface."""
    if source is None:
        return []
    if family == 4:
        return [(0, 8, bytes(4) + source[12:] + bytes(4))]
    return [(41, 50, source + bytes(4))]


def test_sources_of_datagrams_agree_with_the_specification(
    runs: GateRuns, loaded: loader.Loaded, cgroup: Cgroup
) -> None:
    """Each server answers what the pod sent to several addresses, in one name after the other."""
    seen: Counter[str] = Counter()
    histories = loaded.map(map_specs.SOCKET_HISTORIES)
    for number in range(max(1, CALLS // 20)):
        chosen = random.Random(f"{SEED} {number}")
        state = answering_state(chosen)
        runs.apply(state)
        family = chosen.choice((4, 6))
        server = open_server(chosen, family, cgroup)
        with server.made:
            record_questions(runs, state, family, server.port)
            for _ in range(5):
                source = chosen.choice(
                    (None, NODES[family], SERVICES[family], REMOTE[family], CLIENTS[family])
                )
                port = chosen.choice((5353, 5353, 5353, TUNNEL_PORT))
                verdict = send(runs, server, state, source, port)
                value = syscalls.map_lookup(
                    histories.fd,
                    struct.pack("=i", server.made.fileno()),
                    histories.value_size,
                )
                history = abi.CSocketHistory.from_buffer_copy(value or bytes(24))
                wanted = server.specified
                assert history.foreign_sources == wanted.foreign_sources, (SEED, number)
                assert bytes(history.foreign_source) == (wanted.foreign_source or facts.NOWHERE)
                seen[verdict] += 1
    sys.stdout.write(f"seed {SEED}: datagrams: {dict(seen)}\n")
    assert {"pass reply", "drop node", "tunnel"} <= set(seen)


def answering_state(chosen: random.Random) -> State:
    addresses = frozenset({PODS[4][0], PODS[6][0]})
    return State(
        Gate(Mode.ENFORCE, addresses),
        NodeFacts(tunnel_ports=frozenset({TUNNEL_PORT})),
        own=(*NODES.values(), *(generator.OWN_RANGES.values() if chosen.random() < 0.3 else ())),
        is_own_listed=chosen.random() < 0.7,
        routed=generator.ROUTED,
    )


def record_questions(runs: GateRuns, state: State, family: int, port: int) -> None:
    pod = abi.unpack_address(PODS[family][0])
    for peer in (NODES, SERVICES, REMOTE, CLIENTS):
        ends = frames.Ends(pod, abi.unpack_address(peer[family]), source_port=5353, port=port)
        question = frames.packet(ends, frames.UDP, frames.udp(ends, bytes(20)))
        runs.record(question)
        flows.record(question, state, time.monotonic_ns())


def send(runs: GateRuns, server: Server, state: State, source: bytes | None, port: int) -> str:
    """Send by the server; what the gate, or else the hook, answered."""
    family = server.family
    name = source or server.specified.bound
    call = Call(server.specified.cgroup, packet.UDP, PODS[family][0], port, source=name)
    server.specified = hooks.record_source(server.specified, name, state)
    specified = hooks.evaluate(hooks.SEND, call, state, time.monotonic_ns())
    is_rejected = False

    def call_kernel() -> None:
        nonlocal is_rejected
        to = text(PODS[family][0]), port
        try:
            server.made.sendmsg([bytes(20)], named_source(family, source), 0, to)
        except PermissionError:
            is_rejected = True
        except OSError as error:
            assert error.errno == errno.ENOBUFS, error  # noqa: PT017 the gate dropped it

    found = runs.run_send(call_kernel)
    assert is_rejected == (specified == Reason.TUNNEL), (SEED, call)
    if is_rejected:
        assert found.verdict is None
        return "tunnel"
    ends = frames.Ends(
        abi.unpack_address(name or NODES[family]),
        abi.unpack_address(PODS[family][0]),
        source_port=server.port,
        port=port,
    )
    frame = frames.packet(ends, frames.UDP, frames.udp(ends, bytes(20)))
    answer = gate.evaluate(Sent(frame, socket=server.specified), state, time.monotonic_ns())
    assert found.verdict == answer.counted, (SEED, server.specified, source, state)
    assert found.verdict is not None
    return f"{found.verdict[0].label} {found.verdict[1].label}"
