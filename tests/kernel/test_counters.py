"""Counters of gates, all at once and one by one, and that they lose nothing."""

import contextlib
import itertools
import os
import subprocess

import pytest

from agent.lab import lab as labs
from agent.linux import packets
from bpf import loader, path_tests
from bpf.attachment import Attachment
from bpf.counters import Counters
from bpf.drop_events import DropEventReader
from bpf.drop_sources import DropSources
from bpf.gates import Gates
from bpf.verdicts import Reason, Verdict
from tests.kernel import traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.counting import Counting
from tests.kernel.test_attach import enforcing
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

_OF_CPUS = {Reason.ESTABLISHED, Reason.NODE}

PROCESSES, CONNECTS, PORT = 4, 500, 8080

# Waits for a line, then connects again and again; fails unless each connect is rejected.
_CONNECT = """
import errno, os, socket, sys
cpu, connects, address, port = sys.argv[1:]
os.sched_setaffinity(0, {int(cpu)})
with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
    print("ready", flush=True)
    sys.stdin.readline()
    results = {sock.connect_ex((address, int(port))) for _ in range(int(connects))}
sys.exit(results != {errno.EPERM})
"""


def test_each_counter_is_read_as_among_all(
    lab: labs.Lab, make_gates: MakeGates, loaded: loader.Loaded
) -> None:
    pod = lab.add_pod("web", 1)
    gates = make_gates(Attachment.CLSACT)
    with pod.listen(80):
        gates.install(pod.ifindex, enforcing(pod))
        for sequence, address in enumerate(pod.addresses):
            packets.send_syn(
                address, source_port=9650, port=path_tests.PORT, sequence=1000 + sequence
            )
        assert traffic.node_is_dropped(pod, 4)
    counters = Counters(loaded)
    counts = counters.of_gate(pod.ifindex)
    assert counts[Verdict.DROP, Reason.PATH_TEST] == 2
    assert path_tests.PathTestCounters(loaded).dropped_by([pod.ifindex]) == 2
    for verdict, reason in itertools.product(Verdict, set(Reason) - _OF_CPUS):
        if verdict is Verdict.WOULD_DROP or (verdict is Verdict.DROP) == reason.is_drop:
            found = counters.of_reason(pod.ifindex, verdict, reason)
            assert found == counts.get((verdict, reason), 0)


def test_interface_without_a_gate_has_counted_nothing(loaded: loader.Loaded) -> None:
    assert Counters(loaded).of_reason(2**31 - 1, Verdict.DROP, Reason.PATH_TEST) == 0


@pytest.mark.parametrize("version", [4, 6])
def test_concurrent_rejected_connects_are_counted_exactly(
    attached_hooks: None, gates: Gates, lab: labs.Lab, loaded: loader.Loaded, version: int
) -> None:
    """By the gate, by source, and as events that were sent or suppressed."""
    pod = lab.add_pod("web", 1)
    gates.install(pod.ifindex, enforcing(pod))
    with contextlib.closing(DropEventReader(loaded)) as events:
        events.read()
        suppressed_before = events.lost()
        counting = Counting(gates, pod.ifindex)
        connect_at_once(traffic.address(pod, version))
        assert counting.moved_but_control() == {(Verdict.DROP, Reason.NODE): PROCESSES * CONNECTS}
        suppressed = events.lost() - suppressed_before
        assert len(events.read()) + suppressed == PROCESSES * CONNECTS
    (source,) = [one for one in DropSources(loaded).read() if one.ifindex == pod.ifindex]
    assert (source.port, source.count) == (PORT, PROCESSES * CONNECTS)
    DropSources(loaded).forget(pod.ifindex)


def connect_at_once(address: str) -> None:
    """From `PROCESSES` processes, which all CPUs of this one share."""
    cpus = itertools.cycle(sorted(os.sched_getaffinity(0)))
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(PROCESSES):
            arguments = (str(next(cpus)), str(CONNECTS), address, str(PORT))
            process = subprocess.Popen(
                [*BARE_PYTHON, "-c", _CONNECT, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        assert [process.wait(traffic.LIMIT_SECONDS) for process in processes] == [0] * PROCESSES
