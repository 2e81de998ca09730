"""Counters of gates, all at once and one by one."""

import itertools

import pytest

from agent.lab import lab as labs
from agent.linux import packets
from bpf import loader, path_tests
from bpf.attachment import Attachment
from bpf.counters import Counters
from bpf.verdicts import Reason, Verdict
from tests.kernel import traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.test_attach import enforcing

pytestmark = pytest.mark.kernel

_OF_CPUS = {Reason.ESTABLISHED, Reason.NODE}


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
