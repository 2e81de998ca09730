"""Open ports are reported by an Event about the node, again while they are open, and in the log."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
import structlog.testing

from agent.app.open_ports import REASON, OpenPorts
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.events import PodEvents
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
    """Pods, and the Events so far."""

    def __init__(self) -> None:
        self.kubelet = Kubelet()
        self.store = PodStore(Conditions())
        self.events: list[tuple[str | None, str, str]] = []
        queue = PodEvents()
        self.ports = OpenPorts(
            store=self.store,
            events=queue,
            kubelet=self.kubelet,  # type: ignore[arg-type]
            admission=self.kubelet,  # type: ignore[arg-type]
        )
        self._queue = queue

    def add(self, name: str, mode: Mode = Mode.ENFORCE, spec: PodSpec = LISTENING) -> None:
        self.store.set_pod(Pod(uid=name, namespace="tests", name=name, mode=mode, spec=spec))
        self.store.in_force.mark(name)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def read() -> None:
            while True:
                for event in await self._queue.next():
                    self.events.append((event.uid, event.reason, event.message))

        running = [asyncio.create_task(one) for one in (self.ports.run(), read())]
        try:
            yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


@pytest.fixture
async def node() -> Node:
    return Node()


def problem_of(node: Node, name: str) -> str:
    state = node.store.get(name)
    assert state is not None
    return node.ports.problem_for(state)


async def test_event_is_about_the_node_and_repeated_until_the_kubelet_is_found(node: Node) -> None:
    node.add("web")
    async with node.running():
        await asyncio.sleep(1)
        assert node.events == [(None, REASON, node.ports.problem)]
        assert node.kubelet.problem in node.ports.problem
        # Whatever pods do meanwhile.
        for number in range(100):
            node.add(f"web{number}")
            await asyncio.sleep(10)
        assert len(node.events) == 4
        node.kubelet.has_cgroup = True
        node.ports.hint()
        await asyncio.sleep(1000)
        assert len(node.events) == 4
        assert node.ports.problem == ""


async def test_another_reason_is_another_event(node: Node) -> None:
    node.add("web")
    async with node.running():
        await asyncio.sleep(1)
        node.kubelet.problem = "several processes could be the kubelet."
        node.ports.hint()
        await asyncio.sleep(1)
    assert [message for _, _, message in node.events] == [node.events[0][2], node.ports.problem]


async def test_only_pods_that_enforce_and_declare_ports_have_open_ports(node: Node) -> None:
    node.add("audit", Mode.AUDIT)
    node.add("off", Mode.OFF)
    node.add("silent", spec=PodSpec())
    async with node.running():
        await asyncio.sleep(1)
        assert node.ports.problem == ""
        assert node.events == []
        node.add("strict", Mode.STRICT)
        await asyncio.sleep(1)
    assert len(node.events) == 1
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
    assert len(node.events) > 1
