"""Which rights the DaemonSet's pod needs, shown by going without."""

from collections.abc import Iterator

import pytest

from tests.agent.kube.apiserver import Json
from tests.chart import rendering
from tests.image.node import PORT, Node
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.standin import KubeletStub

pytestmark = pytest.mark.kernel

CAPABILITIES = ("NET_ADMIN", "NET_BROADCAST", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE")


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    with cgroups.cgroup() as group:
        yield group


def _unprivileged(pod: Json, capabilities: tuple[str, ...]) -> Json:
    """With the chart's `enforceOnly`, and these capabilities."""
    (daemon_set,) = (
        one for one in rendering.objects({"enforceOnly": True}) if one["kind"] == "DaemonSet"
    )
    (rendered,) = daemon_set["spec"]["template"]["spec"]["containers"]
    (container,) = pod["spec"]["containers"]
    container["securityContext"] = rendered["securityContext"]
    container["securityContext"]["capabilities"]["add"] = list(capabilities)
    return pod


async def test_five_capabilities_do_all_but_the_relay(node: Node, kubelet: Cgroup) -> None:
    await node.run_pod("web", mode="strict")
    agent = await node.start(_unprivileged(node.pod(args=("--mode=strict",)), CAPABILITIES))
    pod = await node.gated(agent, "web", "Enforced")
    # Whose settings below /proc/sys only a privileged container may write.
    await node.until("word", agent, lambda: "Read-only file system: '/proc/sys" in agent.lines())
    standin = KubeletStub(kubelet, "kubelet", [f"http,{pod.addresses[0]},{PORT}"])
    try:
        await node.until("the kubelet found", agent, lambda: node.knows(kubelet))
        assert set(*standin.probe().values()) == {""}
    finally:
        standin.end()


async def test_a_capability_that_is_missing_is_named(node: Node) -> None:
    agent = await node.start(_unprivileged(node.pod(), CAPABILITIES[1:]))
    await node.until("word", agent, lambda: "runs without CAP_NET_ADMIN;" in agent.lines())


async def test_without_the_node_s_processes_the_kubelet_is_not_found(
    node: Node, kubelet: Cgroup
) -> None:
    pod = node.pod()
    pod["spec"]["hostPID"] = False
    agent = await node.start(pod)
    standin = KubeletStub(kubelet, "kubelet", [])
    try:
        await node.ready(agent)
        report = await node.report()
        assert report is not None
        assert report.kubelet is None
        assert "hostPID" in report.kubelet_problem
    finally:
        standin.end()


async def test_start_needs_no_memory_for_a_compiler(node: Node) -> None:
    pod = node.pod()
    (container,) = pod["spec"]["containers"]
    container["resources"]["limits"]["memory"] = "160Mi"
    agent = await node.start(pod)
    await node.ready(agent)
    report = await node.report()
    assert report is not None
    assert report.programs == "prebuilt"
