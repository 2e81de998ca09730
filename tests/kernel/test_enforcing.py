"""In a run in strict the gates of the suites of attacks are in strict, beside a relay."""

from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from bpf import loader, pins
from bpf.gates import Attachment
from bpf.redirect import Redirect
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, enforcing, guarded, redirecting, syns, traffic
from tests.kernel.guarded import PodState
from tests.kernel.test_strict_gate import redirect

pytestmark = pytest.mark.kernel

__all__ = ["redirect"]

VERSIONS = pytest.mark.parametrize("version", [4, 6])
ADMITTED = (Verdict.PASS, Reason.PROBE)
(RAW_SYN,) = (each for each in syns.FIRST_PACKETS if each.name == "raw-syn")


@pytest.fixture
def watched(
    lab: labs.Lab, redirect: Redirect, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[PodState]:
    gates = enforcing.StrictGates(redirect, loaded, installation, Attachment.CLSACT)
    with guarded.guarded(gates, lab.add_pod("web", 1), lab.add_pod("neighbour", 2)) as made:
        made.set_mode(Mode.ENFORCE)
        yield made
    for ifindex in gates.installed():
        gates.remove(ifindex)
    gates.close()


def verdicts(watched: PodState, version: int) -> set[tuple[Verdict, Reason]]:
    """On a SYN that the test sends itself; without those on the kernel's RST to an answer."""
    address = traffic.address(watched.pod, version)
    target = syns.Target(address, watched.pod.interface, guarded.TCP_PORT, guarded.UDP_PORT)
    RAW_SYN.begin(target)
    has_arrived = bool(watched.arrived())
    found = watched.moved().keys() - {(Verdict.PASS, Reason.ESTABLISHED)}
    assert has_arrived is (found == {ADMITTED})
    return found


@VERSIONS
def test_kubelet_is_dropped_while_the_relay_serves_and_others_always(
    watched: PodState, redirect: Redirect, loaded: loader.Loaded, version: int
) -> None:
    assert verdicts(watched, version) == {(Verdict.DROP, Reason.STRICT)}
    redirect.pause()
    assert verdicts(watched, version) == {ADMITTED}
    redirecting.beat(loaded)
    with cgroups.cgroup() as kubelet, redirecting.kubelet_config(loaded, kubelet.id):
        assert verdicts(watched, version) == {(Verdict.DROP, Reason.NODE)}
