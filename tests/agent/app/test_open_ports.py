"""Open ports are reported, logged when they open and close, and change conditions."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from agent.app.open_ports import OpenPorts
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf.verdicts import Mode
from probes.spec.specs import DeclaredPorts, PodSpec

pytestmark = pytest.mark.looptime

LISTENING = PodSpec(declared=DeclaredPorts(False, frozenset({80})))


@dataclasses.dataclass
class Kubelet:
    """Identity and admission."""

    has_cgroup: bool = False
    problem: str = "no process named kubelet on this node."


class Node:
    """Pods, and a kubelet."""

    def __init__(self) -> None:
        self.kubelet = Kubelet()
        self.store = PodStore(Conditions())
        self.ports = OpenPorts(
            store=self.store,
            kubelet=self.kubelet,  # type: ignore[arg-type]
            admission=self.kubelet,  # type: ignore[arg-type]
        )

    def add(self, name: str, mode: Mode = Mode.ENFORCE, spec: PodSpec = LISTENING) -> None:
        self.store.set_pod(Pod(uid=name, namespace="tests", name=name, mode=mode, spec=spec))
        self.store.in_force.mark(name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.ports.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def node() -> Node:
    return Node()


def problem_of(node: Node, name: str) -> str:
    state = node.store.get(name)
    assert state is not None
    return node.ports.problem_for(state)


async def test_only_pods_that_enforce_and_declare_ports_have_open_ports(node: Node) -> None:
    node.add("audit", Mode.AUDIT)
    node.add("off", Mode.OFF)
    node.add("silent", spec=PodSpec())
    async with node.running():
        await asyncio.sleep(1)
        assert node.ports.problem == ""
        node.add("strict", Mode.STRICT)
        await asyncio.sleep(1)
        assert node.kubelet.problem in node.ports.problem
    affected = [name for name in ("audit", "off", "silent", "strict") if problem_of(node, name)]
    assert affected == ["strict"]


async def test_conditions_follow_the_kubelet(node: Node) -> None:
    node.add("web")
    changes = node.store.in_force.subscribe()
    async with node.running():
        await asyncio.sleep(1)
        assert changes.take() == ["web"]
        await asyncio.sleep(1000)
        assert changes.take() == []
        node.kubelet.has_cgroup = True
        node.ports.hint()
        await asyncio.sleep(1)
        assert changes.take() == ["web"]


async def test_open_ports_are_logged_when_they_open_and_close(node: Node) -> None:
    node.add("web")
    with structlog.testing.capture_logs() as lines:
        async with node.running():
            await asyncio.sleep(3600)
            node.kubelet.has_cgroup = True
            node.store.in_force.mark("web")
            await asyncio.sleep(3600)
    assert [line["event"] for line in lines] == [
        Event.DECLARED_PORTS_OPEN,
        Event.DECLARED_PORTS_CLOSED,
    ]
