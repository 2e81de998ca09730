"""A pod with a VLAN of its own on its veth pair talks to its node in it, and is gated there.

Programs at both ends set and remove the tag as VLAN interfaces do: beside the frame, not in it.
tests/kernel/devices/test_vlan_trunk.py has VLAN interfaces, which not every kernel has.
"""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from agent.lab.lab import Lab, LabPod
from bpf import syscalls
from bpf.attachment import Attachment
from tests.kernel import assembly, foreign, offers, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.test_replies import VERSIONS, enforce
from tests.kernel.trunks import Trunk, expect_gated

pytestmark = pytest.mark.kernel

_ETHERTYPE, _VLAN = socket.htons(0x8100), 7


def _set_tag() -> int:
    a = assembly
    return foreign.load(
        *(a.move(2, _ETHERTYPE), a.move(3, _VLAN), a.call(a.VLAN_PUSH)),
        *(a.move(0, foreign.TC_ACT_UNSPEC), a.leave()),
    )


def _remove_tag() -> int:
    a = assembly
    return foreign.load(a.call(a.VLAN_POP), a.move(0, foreign.TC_ACT_UNSPEC), a.leave())


@contextlib.contextmanager
def _tagged(pod: LabPod) -> Iterator[None]:
    """Both directions: the node's end sets tags before the gate, and removes them after it."""
    egress, ingress = syscalls.BPF_TCX_EGRESS, syscalls.BPF_TCX_INGRESS
    with contextlib.ExitStack() as stack:

        def attach(program_fd: int, ifindex: int, where: int, flags: int = 0) -> None:
            stack.enter_context(foreign.attached_program(program_fd, ifindex, flags, where=where))

        def attach_inside() -> None:
            inside = socket.if_nametoindex("eth0")
            attach(_set_tag(), inside, egress)
            attach(_remove_tag(), inside, ingress)

        attach(_set_tag(), pod.ifindex, egress, syscalls.BPF_F_BEFORE)
        attach(_remove_tag(), pod.ifindex, ingress)
        pod.netns.run_inside(attach_inside)
        yield


@VERSIONS
def test_pod_with_a_vlan_talks_to_its_node_and_is_gated(
    make_gates: MakeGates, lab: Lab, version: int
) -> None:
    offers.need_tcx()
    pod = lab.add_pod("trunk", 1)
    gates = make_gates(Attachment.TCX)
    enforce(gates, pod)
    with _tagged(pod):
        node, address = traffic.NODE[version], traffic.address(pod, version)
        expect_gated(Trunk(pod, gates, version, node, address))
