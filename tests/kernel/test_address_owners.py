"""Another gated pod, or the node, keeps the traffic to its address when a pod claims that."""

import contextlib
import dataclasses
import functools
import socket
from collections.abc import Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, are_all_isolated, drop_result, pod_of
from agent.lab.lab import Lab, LabPod
from tests.kernel import cgroups, fleet, nodeclient, offers, traffic
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import RANGE4, RANGE6
from tests.kernel.test_address_claims import (
    PORT,
    VERSIONS,
    arrives,
    claim,
    knows_claim,
    served_at,
)

pytestmark = pytest.mark.kernel

REASONS = {"audit": "Audit", "enforce": "Enforced", "strict": "Strict"}
FAMILIES = {4: "IPv4", 6: "IPv6"}


@dataclasses.dataclass(frozen=True, slots=True)
class Contest:
    """Two gated pods with a server each, of which "thief" may claim addresses of "owner"."""

    operator: AgentProcess
    kubelet: NodeClient
    owner: LabPod
    thief: LabPod
    listener: socket.socket
    """The owner's."""
    trap: socket.socket
    """The thief's."""

    def start(self, modes: dict[str, str]) -> AgentReport:
        """modes: by pod. Returns when they are in force."""
        if "strict" in modes.values():
            offers.need_netns_cookie()
        for pod in (self.owner, self.thief):
            content = fleet.manifest(pod, modes[pod.name], (fleet.tcp_probe(PORT),))
            self.operator.write_file(f"{pod.name}.yaml", content)
        self.operator.start("--relay-range4", RANGE4, "--relay-range6", RANGE6)
        for name, mode in modes.items():
            holds = functools.partial(are_all_isolated, names=[name], reason=REASONS[mode])
            report = self.operator.wait_for(f"{mode} of pod {name}", holds)
        return report

    def claim(self, address: str) -> None:
        """By the thief."""
        claim(self.thief, address)

    def wait_for_claim(self, address: str) -> None:
        self.operator.wait_for("the claim", lambda report: knows_claim(report, address))

    def probe(self, address: str) -> str:
        """The result of the kubelet's probe of this address."""
        target = f"tcp,{address},{PORT}"
        return self.kubelet.probe([target])[target]

    def has_trapped(self) -> bool:
        """Whether the thief has a connection that was not accepted yet."""
        self.trap.setblocking(False)
        try:
            self.trap.accept()[0].close()
        except BlockingIOError:
            return False
        finally:
            self.trap.settimeout(traffic.LIMIT_SECONDS)
        return True


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def contest(request: pytest.FixtureRequest, operator: AgentProcess, lab: Lab) -> Iterator[Contest]:
    owner, thief = (
        lab.add_pod(name, number, bridged=request.param)
        for number, name in enumerate(("owner", "thief"), 1)
    )
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(cgroups.cgroup())
        operator.kubelet = ("--kubelet", f"cgroup:{group.path}")
        made = Contest(
            operator,
            stack.enter_context(nodeclient.node_client(group)),
            owner,
            thief,
            stack.enter_context(owner.listen(PORT)),
            stack.enter_context(thief.listen(PORT)),
        )
        made.listener.settimeout(traffic.LIMIT_SECONDS)
        made.trap.settimeout(traffic.LIMIT_SECONDS)
        # On a bridge whose neighbours are not resolved either pod might answer first.
        for version in (4, 6):
            assert arrives(traffic.address(owner, version), made.listener)
        yield made


def accepted_from(listener: socket.socket) -> str:
    """The peer's address of the next connection, which is closed."""
    accepted, (address, *_) = listener.accept()
    accepted.close()
    return str(address).removeprefix("::ffff:")


@pytest.mark.parametrize("mode", ["enforce", "strict"])
@VERSIONS
def test_kubelet_reaches_the_owner_and_not_the_pod_that_claims_its_address(
    contest: Contest, version: int, mode: str
) -> None:
    address, other = (traffic.address(pod, version) for pod in (contest.owner, contest.thief))
    contest.claim(address)
    contest.start({"owner": mode, "thief": mode})
    contest.wait_for_claim(address)
    assert contest.probe(address) == nodeclient.OK
    # A relay connects from inside the owner's namespace.
    assert (accepted_from(contest.listener) == address) == (mode == "strict")
    assert not contest.has_trapped()
    assert contest.probe(other) == nodeclient.OK
    assert (accepted_from(contest.trap) == other) == (mode == "strict")


@pytest.mark.parametrize(
    ("owner_mode", "thief_mode"),
    [("audit", "enforce"), ("enforce", "audit"), ("strict", "audit")],
)
@VERSIONS
def test_owner_s_mode_decides_on_connects_of_host_processes(
    contest: Contest, version: int, owner_mode: str, thief_mode: str
) -> None:
    address = traffic.address(contest.owner, version)
    contest.claim(address)
    report = contest.start({"owner": owner_mode, "thief": thief_mode})
    contest.wait_for_claim(address)
    if owner_mode == "audit":
        assert arrives(address, contest.listener)
        verdict = "would-drop"
    else:
        result = attempts.connect_from_node(
            contest.owner, FAMILIES[version], PORT, is_rejected=True
        )
        assert result == drop_result(report)
        verdict = "drop"
    report = contest.operator.wait_for(
        "the count", lambda report: node_packets(report, "owner") == {verdict: 1}
    )
    assert node_packets(report, "thief") == {}
    assert not contest.has_trapped()


def node_packets(report: AgentReport, name: str) -> dict[str, int]:
    """Those that a pod's gate has dropped, or would have, as from host processes."""
    pod = pod_of(report, name)
    assert pod is not None
    (gate,) = pod.gates
    return {
        verdict: reasons["node"] for verdict, reasons in gate.packets.items() if "node" in reasons
    }


@VERSIONS
def test_node_keeps_its_own_address_beside_a_pod_in_strict_that_claims_it(
    contest: Contest, version: int
) -> None:
    own, other = traffic.gateway(contest.thief, version), traffic.address(contest.thief, version)
    contest.start({"owner": "strict", "thief": "strict"})
    contest.claim(own)
    contest.wait_for_claim(own)
    with served_at(own) as listener:
        assert arrives(own, listener)
        assert contest.probe(own) == nodeclient.OK
        listener.accept()[0].close()
    assert not contest.has_trapped()
    assert contest.probe(other) == nodeclient.OK
    assert accepted_from(contest.trap) == other
