"""Where the kubelet cannot reach a pod in enforce, the relay proxies its probes and hooks."""

import functools
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import lab as labs
from agent.lab.agent_process import Launch, condition_of, pod_of
from agent.lab.lab import LabPod
from bpf import pins
from tests import polling
from tests.kernel import cgroups, fleet, links, nodeclient
from tests.kernel.nodeclient import NodeClient
from tests.kernel.strictnode import RANGE4, RANGE6, Node, strict_node

pytestmark = pytest.mark.kernel

HTTPS_HOOK = {"preStop": {"httpGet": {"path": "/bye", "port": fleet.HTTPS, "scheme": "HTTPS"}}}
HTTP_HOOK = {"postStart": {"httpGet": {"path": "/hi", "port": fleet.HTTP}}}


@pytest.fixture
def node(
    lab: labs.Lab, launch: Launch, installed: pins.Pins, tmp_path: pathlib.Path
) -> Iterator[Node]:
    with strict_node(lab, tmp_path, launch, installed) as made:
        yield made


@pytest.fixture
def kubelet(node: Node) -> Iterator[NodeClient]:
    with nodeclient.node_client(node.kubelet) as made:
        yield made


def declare(node: Node, pod: LabPod, container: dict[str, Any], *addresses: str) -> None:
    node.operator.write_manifest(pod, mode="enforce", container=container, addresses=addresses)


def start(node: Node, *extra: str) -> None:
    node.operator.start(
        *("--kubelet", f"cgroup:{node.kubelet.path}"),
        *("--relay-range4", RANGE4, "--relay-range6", RANGE6),
        *extra,
    )


def has_reason(pod: LabPod, reason: str, report: AgentReport) -> bool:
    condition = condition_of(report, pod.name, labels.ISOLATION_READY)
    return condition is not None and condition.reason == reason


def message(report: AgentReport, pod: LabPod) -> str:
    """Of a condition that is Enforced."""
    condition = condition_of(report, pod.name, labels.ISOLATION_READY)
    return condition.message if condition and condition.reason == "Enforced" else ""


def is_proxied(pod: LabPod, report: AgentReport) -> bool:
    return "so the relay proxies the kubelet's connections" in message(report, pod)


def targets(pod: LabPod, *kinds: tuple[str, int]) -> list[str]:
    return [f"{kind},{host},{port}" for kind, port in kinds for host in (pod.ipv4, pod.ipv6)]


def peers(node: Node, pod: LabPod, count: int) -> set[str]:
    """The addresses from which the pod was reached, once there are that many."""
    seen: set[str] = set()

    def has_enough() -> bool:
        seen.update(node.fleet.peers().get(pod.name, ()))
        return len(seen) >= count

    polling.wait_until(f"{count} peers of {pod.name}", has_enough)
    return seen


def test_hooks_arrive_in_pods_that_the_node_cannot_reach(node: Node, kubelet: NodeClient) -> None:
    pod = node.lab.add_pod("web", 1)
    node.fleet.serve(pod, fleet.USUAL)
    declare(node, pod, {"lifecycle": {**HTTP_HOOK, **HTTPS_HOOK}})
    hooks = targets(pod, ("http", fleet.HTTP), ("https", fleet.HTTPS))
    with links.blocked(pod):
        start(node)
        report = node.operator.wait_for(
            "proxied",
            lambda report: "the relay proxies the kubelet's connections" in message(report, pod),
        )
        assert f"The kubelet cannot reach {pod.ipv4}, {pod.ipv6}" in message(report, pod)
        assert kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.OK)
        # From inside the pod: its own addresses are the peers.
        assert peers(node, pod, 2) == {pod.ipv4, pod.ipv6}
        # Other host processes are still blocked.
        with cgroups.cgroup() as other, nodeclient.node_client(other) as intruder:
            refused = set(intruder.probe(hooks).values())
        assert refused <= {nodeclient.FORBIDDEN, nodeclient.UNANSWERED}


def test_new_pods_need_not_wait_for_their_path_test(node: Node, kubelet: NodeClient) -> None:
    first, second = node.lab.add_pod("first", 1), node.lab.add_pod("second", 2)
    with links.blocked(first, second):
        declare(node, first, {"lifecycle": HTTP_HOOK})
        start(node)
        node.operator.wait_for("proxied", functools.partial(is_proxied, first))
        node.fleet.serve(second, [fleet.HTTP])
        declare(node, second, {"lifecycle": HTTP_HOOK})
        hooks = targets(second, ("http", fleet.HTTP))
        polling.wait_until(
            "hooks of the new pod",
            lambda: kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.OK),
        )


def test_pod_that_the_node_reaches_is_not_proxied(node: Node, kubelet: NodeClient) -> None:
    pod = node.lab.add_pod("web", 1)
    node.fleet.serve(pod, fleet.USUAL)
    declare(node, pod, {"lifecycle": HTTPS_HOOK})
    start(node)
    report = node.operator.wait_for("the gate", lambda report: bool(message(report, pod)))
    assert "relay" not in message(report, pod)
    hooks = targets(pod, ("https", fleet.HTTPS))
    assert kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.OK)
    assert not peers(node, pod, 2) & {pod.ipv4, pod.ipv6}
    assert node.relay_pids() == []


def test_without_its_feature_gate_an_https_hook_alone_starts_no_relay(
    node: Node, kubelet: NodeClient
) -> None:
    """As before: it does not arrive where the node is blocked. Others do."""
    pod, other = node.lab.add_pod("secure", 1), node.lab.add_pod("plain", 2)
    for each, hook in ((pod, HTTPS_HOOK), (other, HTTP_HOOK)):
        node.fleet.serve(each, fleet.USUAL)
        declare(node, each, {"lifecycle": hook})
    hooks = targets(pod, ("https", fleet.HTTPS))
    plain = targets(other, ("http", fleet.HTTP))
    with links.blocked(pod, other):
        start(node, "--feature-gates", "PodLifecycleHTTPS=false")
        report = node.operator.wait_for(
            "the plain hook's pod", functools.partial(is_proxied, other)
        )
        found = pod_of(report, pod.name)
        assert found is not None
        assert {path.result for path in found.paths} == {"unreachable"}
        assert "relay" not in message(report, pod)
        assert kubelet.probe(plain) == dict.fromkeys(plain, nodeclient.OK)
        assert kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.UNANSWERED)
        # The same pods once the gate is on again.
        node.operator.stop(signal.SIGTERM)
        start(node, "--feature-gates", "PodLifecycleHTTPS=true")
        node.operator.wait_for("the https hook's pod", functools.partial(is_proxied, pod))
        assert kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.OK)


def test_without_its_feature_gate_https_hooks_of_reachable_pods_arrive(
    node: Node, kubelet: NodeClient
) -> None:
    """A postStart hook that fails restarts its container, and the kubelet sends it all the same."""
    pod = node.lab.add_pod("web", 1)
    node.fleet.serve(pod, fleet.USUAL)
    declare(node, pod, {"lifecycle": HTTPS_HOOK})
    start(node, "--feature-gates", "PodLifecycleHTTPS=false")
    hooks = targets(pod, ("https", fleet.HTTPS))
    for mode, reason in (("enforce", "Enforced"), ("strict", "Strict")):
        node.operator.write_manifest(pod, mode=mode, container={"lifecycle": HTTPS_HOOK})
        node.operator.wait_for(mode, functools.partial(has_reason, pod, reason))
        assert kubelet.probe(hooks) == dict.fromkeys(hooks, nodeclient.OK)


def test_pod_behind_another_ones_address_is_proxied(node: Node, kubelet: NodeClient) -> None:
    """Two pods in enforce have one address, and the host's route leads to the first."""
    first, twin = node.lab.add_pod("first", 1), node.lab.add_pod("twin", 2)
    node.fleet.serve(first, [fleet.TCP])
    node.fleet.serve(twin, [fleet.RESETS])
    links.take_addresses(twin, first)
    for pod, port in ((first, fleet.TCP), (twin, fleet.RESETS)):
        probe = {"livenessProbe": {**fleet.tcp_probe(port), "periodSeconds": 3600}}
        declare(node, pod, probe, first.ipv4, first.ipv6)
    start(node)
    node.operator.wait_for("proxied", functools.partial(is_proxied, twin))
    probes = targets(first, ("tcp", fleet.TCP), ("tcp", fleet.RESETS))
    assert kubelet.probe(probes) == dict.fromkeys(probes, nodeclient.OK)
    assert peers(node, twin, 2) == {first.ipv4, first.ipv6}
