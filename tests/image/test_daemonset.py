"""The DaemonSet's pod on a real container runtime: what it does there, and what outlives it."""

import pathlib
import socket
from collections.abc import Iterator

import pytest

from agent.admin.report import PodStatus
from agent.operate.kubectl import debug_pods
from tests.image import manifests, podspec
from tests.image.manifests import Json
from tests.image.node import BPFFS, NAME, PORT, AgentPod, Node
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.standin import KubeletStub

pytestmark = pytest.mark.kernel


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    """A cgroup of the node, in which no container is."""
    with cgroups.cgroup() as group:
        yield group


def _connects(pod: PodStatus) -> bool:
    """Whether a process of the node, this one, reaches the pod."""
    try:
        socket.create_connection((pod.addresses[0], PORT), 1).close()
    except (PermissionError, TimeoutError):
        return False
    return True


async def test_as_applied_it_audits_pods_that_come_later(node: Node) -> None:
    agent = await node.start(node.pod())
    await node.ready(agent)
    await node.run_pod("web", mode="")
    pod = await node.gated(agent, "web", "Audit")
    # The namespace's name is mounted on the node after the agent's container was started.
    assert pod.netns is not None
    assert pod.netns.startswith("/run/netns/")
    assert _connects(pod)
    await node.gated(agent, "web", "ProbesPassing")


async def test_it_serves_without_a_compiler_within_its_limit_and_a_read_only_root(
    node: Node,
) -> None:
    agent = await node.start(node.pod())
    await node.ready(agent)
    report = await node.report()
    assert report is not None
    assert report.programs == "prebuilt"
    most, limit = _memory(agent, "max_usage_in_bytes"), _memory(agent, "limit_in_bytes")
    print(f"{most >> 20} MiB of {limit >> 20}")  # noqa: T201
    assert limit == podspec.memory_limit(node.pod()["spec"]["containers"][0])
    assert _memory(agent, "failcnt") == 0
    assert not await node.succeeds(agent, "test", "-w", "/usr/local/bin")
    assert await node.succeeds(agent, "test", "-w", "/tmp")


async def test_gates_and_the_kubelet_s_way_outlive_the_container(
    node: Node, kubelet: Cgroup
) -> None:
    await node.run_pod("web", mode="enforce")
    agent = await node.start(node.pod(args=("--mode=enforce",)))
    pod = await node.gated(agent, "web", "Enforced")
    standin = KubeletStub(kubelet, "kubelet", [f"http,{pod.addresses[0]},{PORT}"])
    try:
        await node.until("the kubelet found", agent, lambda: node.knows(kubelet))
        assert not _connects(pod)
        assert set(*standin.probe().values()) == {""}

        await node.kill(agent)
        assert await node.report() is None
        assert not _connects(pod)
        assert set(*standin.probe().values()) == {""}

        agent = await node.start_container(agent.sandbox, attempt=1)
        await node.ready(agent)
        report = await node.until("the agent responds", agent, node.report)
        assert report.programs == "pinned"
        assert report.kubelet == kubelet.path
        assert not _connects(pod)
    finally:
        standin.end()


async def test_strict_carries_the_kubelet_from_within_the_container(
    node: Node, kubelet: Cgroup
) -> None:
    await node.run_pod("web", mode="strict")
    agent = await node.start(node.pod(args=("--mode=strict",)))
    pod = await node.gated(agent, "web", "Strict")
    standin = KubeletStub(kubelet, "kubelet", [f"http,{pod.addresses[0]},{PORT}"])
    try:
        await node.until("the kubelet found", agent, lambda: node.knows(kubelet))
        assert set(*standin.probe().values()) == {""}
        assert not _connects(pod)
        await node.until("a proxied connection", agent, node.is_proxying)

        # The relay ends with its container, and the gate admits the kubelet.
        await node.kill(agent)
        assert set(*standin.probe().values()) == {""}
        assert not _connects(pod)
    finally:
        standin.end()


def _enforcing(kubelet: Cgroup, *more: str) -> tuple[str, ...]:
    return ("--mode=enforce", f"--kubelet=cgroup:{kubelet.path}", *more)


async def _is_held_by(node: Node, agent: AgentPod) -> bool:
    report = await node.report()
    return report is not None and report.pid == agent.pid


async def test_a_roll_out_never_leaves_the_node_alone(node: Node, kubelet: Cgroup) -> None:
    await node.run_pod("web", mode="enforce")
    first = await node.start(node.pod("podgate-a", args=_enforcing(kubelet)))
    pod = await node.gated(first, "web", "Enforced")
    await node.ready(first)
    assert not _connects(pod)

    second = await node.start(node.pod("podgate-b", args=_enforcing(kubelet)))
    # Its probe passes, so the old pod is deleted: the new one holds the node.
    await node.ready(second)
    assert await _is_held_by(node, second)
    # The DaemonSet controller would delete it at once if it were not.
    assert await node.is_ready(first)
    assert not _connects(pod)

    await node.end(first)
    assert not _connects(pod)
    assert await node.is_ready(second)
    assert await _is_held_by(node, second)


async def _fails_and_the_first_takes_the_node_back(
    node: Node, first: AgentPod, second: AgentPod
) -> None:
    await node.until("the end", second, lambda: "cannot listen on" in second.lines())
    await node.until("the first again", first, lambda: _is_held_by(node, first))
    await node.ready(first)


async def test_version_that_breaks_at_the_take_over_stops_the_roll_out(
    node: Node, kubelet: Cgroup
) -> None:
    """Its pod never becomes ready, so the old one is not deleted, and takes the node back."""
    await node.run_pod("web", mode="enforce")
    first = await node.start(node.pod("podgate-a", args=_enforcing(kubelet)))
    pod = await node.gated(first, "web", "Enforced")
    await node.ready(first)

    # No address of the node: it fails once it has the node.
    broken = _enforcing(kubelet, "--http-address=198.18.255.254:9650")
    second = await node.start(node.pod("podgate-b", args=broken))
    await _fails_and_the_first_takes_the_node_back(node, first, second)
    assert not _connects(pod)
    # As the kubelet restarts it.
    second = await node.start_container(second.sandbox, attempt=1)
    await _fails_and_the_first_takes_the_node_back(node, first, second)
    assert not _connects(pod)
    assert first.lines().count("standing by to take it back") == 2

    # The next version repairs it.
    await node.end(second)
    third = await node.start(node.pod("podgate-c", args=_enforcing(kubelet)))
    await node.ready(third)
    assert await _is_held_by(node, third)
    await node.end(first)
    assert not _connects(pod)


def _memory(agent: AgentPod, name: str) -> int:
    """Of the container's cgroup, in bytes or times."""
    for line in pathlib.Path(f"/proc/{agent.pid}/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":")
        if kinds == "memory":
            return int(pathlib.Path(f"/sys/fs/cgroup/memory{path}/memory.{name}").read_text())
    raise AssertionError("no memory cgroup")


async def test_cleanup_in_the_same_pod_leaves_nothing(node: Node, kubelet: Cgroup) -> None:
    await node.run_pod("web", mode="enforce")
    agent = await node.start(node.pod(args=_enforcing(kubelet)))
    pod = await node.gated(agent, "web", "Enforced")
    await node.end(agent)
    assert not _connects(pod)

    cleaning = node.pod("podgate-b")
    cleaning["spec"]["containers"][0]["args"] = ["cleanup"]
    cleaner = await node.start(cleaning)
    await node.until("the end", cleaner, lambda: "Removed " in cleaner.lines())
    assert not (BPFFS / "podgate").exists()
    assert _connects(pod)


async def test_debug_pod_of_the_plugin_opens_a_node_without_an_agent(
    node: Node, kubelet: Cgroup
) -> None:
    await node.run_pod("web", mode="enforce")
    agent = await node.start(node.pod(args=_enforcing(kubelet)))
    pod = await node.gated(agent, "web", "Enforced")
    await node.end(agent)
    assert not _connects(pod)

    debug = await node.start(_debug_pod(node))
    assert await node.succeeds(debug, "podgate", "status", "--output=json")
    assert not _connects(pod)
    assert await node.succeeds(debug, "podgate", "off", "--node", "--timeout=0")
    assert _connects(pod)
    await node.end(debug)


def _debug_pod(node: Node) -> Json:
    """The pod that `kubectl podgate` makes, as the API server completes it."""
    agent = node.pod("podgate-debug-a")
    made = debug_pods.manifest(manifests.of_kind("DaemonSet"), NAME)
    made["metadata"] = {**agent["metadata"], "labels": made["metadata"]["labels"]}
    (container,), (own,) = agent["spec"]["containers"], made["spec"]["containers"]
    own |= {"image": container["image"], "resources": container["resources"]}
    return made
