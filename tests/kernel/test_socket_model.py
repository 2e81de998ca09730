"""The hooks at setsockopt(2) and socket(2) agree with their specification (tests/model/hooks.py) on
options of every level, and on raw and packet sockets under every policy. The seed is printed, as
for frames."""

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
from bpf.raw_socket_policy import RawSocketPolicy
from bpf.rule_evaluation import Cgroup
from bpf.verdicts import Reason, Verdict
from tests.kernel import offers
from tests.kernel.gate_runs import GateRuns
from tests.model import hooks, seeds
from tests.model.facts import State
from tests.model.generator import Generator
from tests.nodes import node

pytestmark = [pytest.mark.kernel, pytest.mark.file_node]

CALLS = int(os.environ.get("PODGATE_TEST_FRAMES", "10000"))
SEED = seeds.seed()
CALLS_OF_A_STATE = 50
LEVELS = (
    *(socket.SOL_SOCKET, socket.IPPROTO_IP, socket.IPPROTO_TCP, socket.IPPROTO_UDP),
    *(socket.IPPROTO_IPV6, hooks.PACKET_OPTIONS, hooks.XDP_OPTIONS),
)
KINDS = (
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
    (socket.AF_PACKET, socket.SOCK_RAW, 0),
    (socket.AF_INET6, socket.SOCK_DGRAM, 0),
)


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


def states(runs: GateRuns, cgroup: Cgroup) -> Iterator[tuple[random.Random, State]]:
    """As many as `CALLS` take, in the maps."""
    chosen, made = random.Random(SEED), Generator(SEED, cgroup)
    for _ in range(CALLS // CALLS_OF_A_STATE):
        state = made.state(time.monotonic_ns())
        state.is_netns_known = chosen.random() < 0.9
        if chosen.random() < 0.5:
            level = chosen.randrange(len(cgroup.ancestors))
            state.node = dataclasses.replace(
                state.node, pods_cgroup=cgroup.ancestors[level], pods_level=level
            )
        state.denies_raw_sockets = chosen.random() < 0.5
        state.raw_socket_creators = {
            each: chosen.random() < 0.5 for each in cgroup.ancestors if chosen.random() < 0.1
        }
        runs.apply(state)
        yield chosen, state


def test_options_agree_with_the_specification(
    runs: GateRuns, loaded: loader.Loaded, cgroup: Cgroup
) -> None:
    """Each is set on sockets of each kind, most of which do not have it."""
    seen: Counter[str] = Counter()
    for chosen, state in states(runs, cgroup):
        with socket.socket(*chosen.choice(KINDS[2:])) as sock:
            for _ in range(CALLS_OF_A_STATE):
                level, option = chosen.choice(LEVELS), chosen.randrange(32)
                if chosen.random() < 0.3:
                    level, option = chosen.choice(sorted(hooks.EVASIONS))
                value = chosen.choice((b"", bytes(1), struct.pack("=i", 1), bytes(64), bytes(5000)))
                specified = hooks.set_option(level, option, state, time.monotonic_ns())
                before = evasions(loaded)
                error = set_option(sock, level, option, value)
                is_counted = evasions(loaded) != before
                is_rejected = specified == Reason.EVASION
                assert is_counted == is_rejected, (SEED, level, option, state)
                assert (error == errno.EPERM) == is_rejected, (SEED, level, option, error, state)
                seen["rejected" if is_rejected else f"allowed at level {level}"] += 1
    sys.stdout.write(f"seed {SEED}: options: {dict(seen)}\n")
    assert seen.keys() == {"rejected", *(f"allowed at level {level}" for level in LEVELS)}


def set_option(sock: socket.socket, level: int, option: int, value: bytes) -> int:
    """The errno, of a hook or of the option itself."""
    try:
        sock.setsockopt(level, option, value)
    except OSError as error:
        return error.errno or 0
    return 0


def evasions(loaded: loader.Loaded) -> int:
    value = loaded.map(map_specs.COUNTERS).get(struct.pack("=I", abi.HOST_SLOT))
    assert value is not None
    return int(abi.CCounters.from_buffer_copy(value).packets[Reason.EVASION])


def test_raw_and_packet_sockets_agree_with_the_specification(
    runs: GateRuns, loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup
) -> None:
    """And a process's raw socket has the mark of one; other sockets have none."""
    seen: Counter[str] = Counter()
    policy = RawSocketPolicy(loaded, installation, None)
    policy.attach()
    kinds = KINDS if not policy.packet_problem else [k for k in KINDS if k[0] != socket.AF_PACKET]
    histories = loaded.map(map_specs.SOCKET_HISTORIES)
    for chosen, state in states(runs, cgroup):
        for _ in range(CALLS_OF_A_STATE):
            kind = chosen.choice(kinds)
            specified = hooks.create_raw(cgroup, state, time.monotonic_ns())
            if kind[1] != socket.SOCK_RAW:
                specified = Verdict.PASS
            before = Counter(policy.counts())
            is_raw: bool | None = None
            try:
                with socket.socket(*kind) as made:
                    key = struct.pack("=i", made.fileno())
                    value = syscalls.map_lookup(histories.fd, key, histories.value_size)
                    is_raw = bool(value and abi.CSocketHistory.from_buffer_copy(value).is_raw)
            except PermissionError:
                pass
            moved = Counter(policy.counts()) - before
            is_hooked = kind[1] == socket.SOCK_RAW and kind[0] != socket.AF_PACKET
            is_marked = None if specified is Verdict.DROP else is_hooked and state.is_netns_known
            assert is_raw == is_marked, (SEED, kind, state)
            counted = {} if specified is Verdict.PASS else {(kind[0], specified): 1}
            assert moved == counted, (SEED, kind, state)
            seen[f"{kind[0].name} {specified.label}"] += 1
    policy.detach()
    sys.stdout.write(f"seed {SEED}: sockets: {dict(seen)}\n")
    raw = [kind for kind in kinds if kind[1] == socket.SOCK_RAW]
    wanted = {f"{kind[0].name} {verdict.label}" for kind in raw for verdict in Verdict}
    assert seen.keys() == wanted | {"AF_INET6 pass"}
