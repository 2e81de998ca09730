"""The relay's programs agree with their specification (tests/model/relay.py) on made frames and on
connects of real sockets. The seed is printed, as for the gate's frames."""

import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from bpf import abi, loader, map_specs, pins, program_specs, sources, syscalls
from bpf.gate_config import GateConfig
from bpf.gate_table import GateTable
from bpf.rule_evaluation import Cgroup
from bpf.verdicts import Mode, Reason
from tests.kernel import foreign, frames, gate_stage, links, offers
from tests.kernel.gate_runs import GateRuns
from tests.model import packet, relay, seeds
from tests.model.facts import Sent, State
from tests.model.generator import CLIENTS, OTHERS, PODS, PORTS, SHARED, Generator, relay_address
from tests.model.hooks import Call
from tests.model.relay import Held
from tests.nodes import node

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

FRAMES = int(os.environ.get("PODGATE_TEST_FRAMES", "10000"))
SEED = seeds.seed()
CALLS_OF_A_STATE = 50
SCHED_CLS = 3
PAIR = 1
"""Stands for the host's end of the pair, whose gate counts: a test run needs an interface."""
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
TCP_REPAIR, SO_COOKIE = 19, 57


@contextlib.contextmanager
def running(loaded: loader.Loaded, program: str) -> Iterator[Callable[[Sent, int], bool]]:
    """Runs the program on a frame at an interface: whether it passes."""
    with contextlib.ExitStack() as undo:
        called = syscalls.map_create(gate_stage.PROG_ARRAY, 4, 4, 1)
        undo.callback(os.close, called)
        syscalls.map_update(called, bytes(4), struct.pack("=I", loaded.programs[program]))
        launcher = syscalls.program_load(SCHED_CLS, gate_stage.launcher(called))
        undo.callback(os.close, launcher)

        def run(sent: Sent, ifindex: int) -> bool:
            done = gate_stage.run_frame(launcher, sent, ifindex)
            assert done in (foreign.TC_ACT_UNSPEC, foreign.TC_ACT_SHOT), done
            return done == foreign.TC_ACT_UNSPEC

        yield run


def made_frames(cgroup: Cgroup, count: int) -> Iterator[Sent]:
    """To pods and to groups, of each kind that the gate knows; some changed."""
    made = Generator(SEED, cgroup)
    for _ in range(count):
        _, sent = made.sent(made.frame(()))
        yield sent


def test_what_passes_into_the_relay_agrees_with_the_specification(
    loaded: loader.Loaded, cgroup: Cgroup
) -> None:
    offers.need_ingress_in_test_runs()
    seen: Counter[Held] = Counter()
    with running(loaded, program_specs.HOLD_SYNS) as run:
        for sent in made_frames(cgroup, FRAMES):
            held = relay.hold(sent.frame, is_tagged=sent.is_tagged)
            assert run(sent, 1) == held.passes, (SEED, held, sent)
            seen[held] += 1
    counts = {held.name: count for held, count in seen.items()}
    sys.stdout.write(f"seed {SEED}: {FRAMES} frames: {counts}\n")
    assert seen.keys() == set(Held)


def test_what_passes_to_the_relay_agrees_with_the_specification(
    loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup
) -> None:
    """And is counted at the pair's gate."""
    offers.need_ingress_in_test_runs()
    seen: Counter[bool] = Counter()
    table = GateTable(loaded, installation.maps)
    with contextlib.closing(table), running(loaded, program_specs.DROP_FORWARDED) as run:
        for at, sent in enumerate(made_frames(cgroup, FRAMES)):
            has_gate = bool(at & 1024)
            if has_gate:
                table.set(PAIR, GateConfig(Mode.ENFORCE, ()), 0)
            else:
                table.delete(PAIR)
            passes = relay.is_from_host(sent)
            before = dropped(loaded)
            assert run(sent, PAIR) == passes, (SEED, sent)
            assert dropped(loaded) - before == (has_gate and not passes), (SEED, sent)
            seen[passes] += 1
        table.delete(PAIR)
    sys.stdout.write(f"seed {SEED}: {FRAMES} frames: {dict(seen)}\n")
    assert seen.keys() == {True, False}


def dropped(loaded: loader.Loaded) -> int:
    """By the pair's gate, as a way past NetworkPolicy."""
    slot = struct.pack("=I", abi.FIRST_SLOT + PAIR % abi.MAX_GATES)
    value = loaded.map(map_specs.COUNTERS).get(slot)
    assert value is not None
    return int(abi.CCounters.from_buffer_copy(value).packets[Reason.RELAY])


@pytest.fixture(scope="module")
def runs(loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup) -> Iterator[GateRuns]:
    offers.need_tcx()
    offers.need_netns_cookie()
    with GateRuns(loaded, installation, cgroup) as made:
        links.ip("route add 198.18.0.0/16 dev pod0", "route add fd00:18::/32 dev pod0")
        yield made


@contextlib.contextmanager
def attached(installation: pins.Pins, name: str) -> Iterator[None]:
    """The hooks of both families."""
    assert node.current is not None
    hooks = [hook for hook in program_specs.RELAY_HOOKS if hook.name.startswith(name)]
    assert len(hooks) == len(FAMILIES)
    with contextlib.ExitStack() as undo:
        cgroup_fd = os.open(node.current.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, cgroup_fd)
        for hook in hooks:
            path = installation.programs / sources.fingerprint() / hook.name
            program = undo.enter_context(pins.opened(path))
            link = syscalls.link_create_cgroup(program, cgroup_fd, hook.attach_type)
            undo.callback(os.close, link)
        yield


def test_connects_to_the_relay_agree_with_the_specification(
    runs: GateRuns, loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup
) -> None:
    """And the peer that a process reads afterwards is the pod, once that is hooked as well."""
    chosen, made = random.Random(SEED), Generator(SEED, cgroup)
    seen: Counter[str] = Counter()
    with attached(installation, "relay_connect"):
        for number in range(FRAMES // CALLS_OF_A_STATE):
            state = made.state(time.monotonic_ns())
            state.is_netns_known = chosen.random() < 0.9
            runs.apply(state)
            is_named = number % 2 == 0
            with (
                attached(installation, "relay_getpeername")
                if is_named
                else contextlib.nullcontext()
            ):
                for _ in range(CALLS_OF_A_STATE):
                    seen[agree(loaded, state, chosen, cgroup, is_named=is_named)] += 1
    sys.stdout.write(f"seed {SEED}: {seen.total()} connects: {dict(seen)}\n")
    assert seen.keys() == {"to the relay", "past it", "by an interface", "without it"}


def agree(
    loaded: loader.Loaded, state: State, chosen: random.Random, cgroup: Cgroup, *, is_named: bool
) -> str:
    """is_named: with the hooks at getpeername(2). Returns what both have found."""
    family = chosen.choice((4, 6))
    call = Call(
        cgroup,
        chosen.choice((packet.TCP, packet.TCP, packet.TCP, packet.UDP)),
        chosen.choice(
            (*PODS[family][:2], *PODS[family], OTHERS[family], SHARED[family], CLIENTS[family])
        ),
        chosen.choice(PORTS[1:]),
        has_interface=chosen.random() < 0.2,
    )
    specified = relay.connect(call, state)
    is_mapped = family == 4 and chosen.random() < 0.3
    with opened(call, 6 if is_mapped else family) as sock:
        to = str(abi.unpack_address(call.to))
        sock.connect((f"::ffff:{to}" if is_mapped else to, call.port))
        peer, port = sock.getpeername()[:2]
        cookie = sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8)
    recorded = loaded.map(map_specs.RELAY_BYPASSES).get(cookie)
    found = abi.pack_address(frames.address(peer)), port, recorded
    expected = call.to
    if specified.is_to_relay and not (is_named and state.is_netns_known):
        expected = relay_of(call, state)
    assert found == (expected, call.port, specified.recorded), (SEED, call, state)
    if specified.is_to_relay:
        return "to the relay"
    if specified.recorded is None:
        return "without it"
    return "by an interface" if call.has_interface and not any(specified.recorded) else "past it"


def relay_of(call: Call, state: State) -> bytes:
    """The address that `GateRuns.apply` gives to the relay of this port."""
    numbers = {target: number for number, target in enumerate(state.proxied)}
    number = numbers.get((call.to, call.port), numbers.get((call.to, 0)))
    assert number is not None
    return relay_address(call.to, number)


@contextlib.contextmanager
def opened(call: Call, family: int) -> Iterator[socket.socket]:
    """Whose TCP connections are open without a packet (TCP_REPAIR)."""
    kind = socket.SOCK_STREAM if call.protocol == packet.TCP else socket.SOCK_DGRAM
    with socket.socket(FAMILIES[family], kind) as made:
        if call.has_interface:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"pod0")
        if kind == socket.SOCK_STREAM:
            made.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
        yield made
