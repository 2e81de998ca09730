"""What a pod's reply table holds: answers that the pod awaits."""

import pytest

from agent.lab import lab as labs
from bpf.gates import Gates
from bpf.verdicts import Reason, Verdict
from tests.kernel import links, questions
from tests.kernel.test_replies import PORT, VERSIONS, count, enforce, node_udp

pytestmark = pytest.mark.kernel


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def pod(request: pytest.FixtureRequest, lab: labs.Lab) -> labs.LabPod:
    made = lab.add_pod("asker", 1, bridged=request.param)
    if made.is_bridged:
        links.wait_for_port(made.interface)
    return made


@VERSIONS
def test_no_answer_is_lost_while_a_thousand_are_outstanding(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server:
        answered = questions.send(pod, server, version, total=30_000, outstanding=1000)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == answered
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0
