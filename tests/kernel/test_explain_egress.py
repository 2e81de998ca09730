"""The verdict of `podgate explain` on what a host process sends is that of the programs of
HostEgressPolicies."""

import errno
import ipaddress
import pathlib
import socket
import time
from collections.abc import Iterator, Sequence

import pytest

from agent.lab import lab as labs
from agent.operate.explain import evaluation, flows, reading
from agent.operate.explain.evaluation import Evaluation
from agent.operate.explain.facts import Facts, Flow
from agent.operate.explain.model import EgressAnswer, Explanation
from agent.operate.explain.sources import SourceName
from agent.operate.pinned import installation as pinned_installation
from bpf import host_egress, loader, pins
from bpf.host_egress_tables import EgressRule, EgressSubject, EgressTable
from bpf.node_addresses import NodeAddressMap
from bpf.node_config import NodeConfig
from bpf.verdicts import Reason, Verdict
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_explain import SourceProcess, process_in
from tests.kernel.test_host_egress import POLICY, PORT, Egress, config, egress

__all__ = ["config", "egress"]
pytestmark = pytest.mark.kernel

TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
OTHER_PORT = PORT + 1
DENY, COUNT, LOOPBACK = "deny", "count", "loopback"
NAMES = (DENY, COUNT, LOOPBACK)
PASSES = Verdict.PASS, None, ""

Outcome = tuple[Verdict, Reason | None, str]
"""The verdict, its reason, and the policy."""


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("etcd", 1)
    with made.listen(PORT), made.listen(OTHER_PORT):
        assert traffic.node_reaches(made, 4, PORT)
        assert traffic.node_reaches(made, 6, PORT)
        yield made


@pytest.fixture
def groups(isolated: None) -> Iterator[dict[str, Cgroup]]:
    """Below the subject: a container, one that is excepted, and the kubelet's."""
    with (
        cgroups.cgroup() as subject,
        cgroups.cgroup("app", below=subject) as container,
        cgroups.cgroup("trusted", below=subject) as excepted,
        cgroups.cgroup("kubelet", below=subject) as kubelet,
        cgroups.cgroup() as stranger,
    ):
        yield {
            "subject": subject,
            "container": container,
            "excepted": excepted,
            "kubelet": kubelet,
            "stranger": stranger,
        }


def rules(numbers: dict[str, int], pod: labs.LabPod) -> tuple[EgressRule, ...]:
    """Two policies overlap at the pod's TCP port, of which the one in audit comes first."""
    networks = [ipaddress.ip_network(address) for address in pod.addresses]
    deny, count, loopback = (numbers[name] for name in NAMES)
    return (
        *(EgressRule(count, network) for network in networks),
        *(
            EgressRule(deny, network, protocol=TCP, first_port=PORT, last_port=PORT)
            for network in networks
        ),
        EgressRule(loopback, is_nodes=True, protocol=UDP),
        EgressRule(loopback, is_nodes=True, protocol=TCP, first_port=PORT, last_port=OTHER_PORT),
        EgressRule(loopback, ipaddress.ip_network("0.0.0.0/0"), protocol=132),
    )


def outcome_of(found: Evaluation, numbers: dict[str, int]) -> Outcome:
    policies = {number: name for name, number in numbers.items()}
    policy = policies[found.egress_rule.policy] if found.egress_rule else ""
    return found.verdict, found.reason, policy


def outcome_seen(egress: Egress, before: dict[tuple[str, Verdict], int], error: int) -> Outcome:
    """What the programs have counted since, and whether the call failed."""
    moved = {key for key, count in egress.tables.counts().items() if count > before[key]}
    assert (error == errno.EPERM) is any(verdict is Verdict.DROP for _, verdict in moved)
    if not moved:
        return PASSES
    [(policy, verdict)] = moved
    return verdict, Reason.HOST_EGRESS, policy


def read(installation: pins.Pins, addresses: Sequence[str]) -> dict[str, Facts]:
    with pinned_installation.opened(installation) as loaded:
        return {
            address: reading.read(installation, loaded, ipaddress.ip_address(address))
            for address in addresses
        }


def test_answer_is_the_verdict_of_every_source_destination_and_state(
    pod: labs.LabPod,
    egress: Egress,
    loaded: loader.Loaded,
    config: NodeConfig,
    installation: pins.Pins,
    groups: dict[str, Cgroup],
) -> None:
    """Of connects and datagrams over both families, to the pod, the loopback, no address and the
    node's own addresses, with the agent alive and missing."""
    nodes = NodeAddressMap(loaded)
    nodes.set(ipaddress.ip_network(address) for address in traffic.NODE.values())
    numbers = egress.tables.numbers(set(NAMES))
    all_of = sum(1 << number for number in numbers.values())
    enforced = all_of & ~(1 << numbers[COUNT])
    subject, excepted = groups["subject"], groups["excepted"]
    subjects = {
        subject.id: EgressSubject(subject.level, denied=all_of),
        excepted.id: EgressSubject(excepted.level, excepted=1 << numbers[DENY]),
    }
    config.set_kubelet(groups["kubelet"].id)
    config.set_limits(stale_after_seconds=15, dead_man_seconds=60)
    egress.tables.write(EgressTable(subjects, rules(numbers, pod), enforced))
    addresses = (pod.ipv4, pod.ipv6, "127.0.0.1", "::1", "0.0.0.0", "::", *traffic.NODE.values())
    seen: set[Outcome] = set()
    try:
        for age_seconds in (0, 70):
            past = time.monotonic_ns() - age_seconds * 10**9
            NodeConfig(loaded, now_ns=lambda past=past: past).beat()  # type: ignore[misc]
            facts = read(installation, addresses)
            for name, group in groups.items():
                with process_in(group) as process:
                    for address, found in facts.items():
                        where = (age_seconds, name, address)
                        seen |= agreed(egress, process, address, found, numbers, where)
    finally:
        nodes.set(())
    reason = Reason.HOST_EGRESS
    assert seen == {
        PASSES,
        (Verdict.DROP, reason, DENY),
        (Verdict.WOULD_DROP, reason, COUNT),
        (Verdict.DROP, reason, LOOPBACK),
    }


def agreed(
    egress: Egress,
    process: SourceProcess,
    address: str,
    facts: Facts,
    numbers: dict[str, int],
    where: tuple[object, ...],
) -> set[Outcome]:
    """The outcomes, on which both agree, for each protocol and port."""
    found = set()
    for protocol in (TCP, UDP):
        for port in (PORT, OTHER_PORT):
            before = egress.tables.counts()
            [error] = process.send([(address, protocol, port)])
            flow = Flow(ipaddress.ip_address(address), protocol, port)
            answer = evaluation.evaluate(facts, process.source, flow, time.monotonic_ns())
            outcome = outcome_of(answer, numbers)
            at = (*where, protocol, port)
            assert (*at, outcome_seen(egress, before, error)) == (*at, outcome)
            found.add(outcome)
    return found


def test_answer_names_the_policy_and_its_rule_and_how_to_admit_the_source(
    pod: labs.LabPod,
    egress: Egress,
    installation: pins.Pins,
    groups: dict[str, Cgroup],
    tmp_path: pathlib.Path,
) -> None:
    """Without an agent."""
    rule = EgressRule(
        0, ipaddress.ip_network(pod.ipv4), protocol=TCP, first_port=PORT, last_port=PORT
    )
    egress.set(groups["subject"], rules=[rule], excepted=[groups["excepted"]])

    def explain(group: str, port: int) -> Explanation:
        name = SourceName("cgroup", groups[group].path)
        question = flows.Question(name, pod.ipv4, "tcp", port)
        return flows.explain(question, installation, tmp_path, flows.AgentAnswers())

    found = explain("container", PORT)
    denied = EgressAnswer(policy=POLICY, action="Enforce", destination=f"{pod.ipv4}/32 TCP {PORT}")
    assert (found.verdict, found.decided_by, found.reason) == ("drop", "host-egress", "host-egress")
    assert found.text == (
        f"HostEgressPolicy {POLICY} denies {denied.destination}: connect(2) fails with EPERM"
    )
    assert (found.egress_rule, found.egress_rules) == (denied, [denied])
    [change] = found.changes
    assert change.command == f"kubectl get hostegresspolicy {POLICY} -o yaml"
    for group, port, mismatch in (
        ("container", OTHER_PORT, "another port"),
        ("excepted", PORT, "the source is excepted"),
    ):
        found = explain(group, port)
        assert (found.verdict, found.egress_rule) == ("pass", None)
        assert [one.mismatch for one in found.egress_rules] == [mismatch]
    assert explain("stranger", PORT).egress_rules == []

    egress.set(groups["subject"], rules=[rule], is_enforced=False)
    found = explain("container", PORT)
    assert (found.verdict, found.decided_by) == ("would-drop", "host-egress")
    assert [step.name for step in found.steps if step.is_deciding] == ["host egress"]
    host_egress.detach(installation)
    assert explain("container", PORT).verdict == "pass"
