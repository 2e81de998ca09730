"""What the history of observed flows keeps: pods that end, restarts, full tables, reboots."""

import asyncio
import dataclasses
import datetime
import pathlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent import state_files
from agent.admin.observations import Observations, ObservedPod
from agent.drops import history, merging, source_processes
from agent.drops.history import SourceHistory
from agent.drops.source_processes import SourceProcesses
from agent.linux.pod_network import HostInterface
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf import abi
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode

pytestmark = pytest.mark.looptime

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SERVICE = "/system.slice/backup.service"
UID = "0123abcd-0123-4567-89ab-0123456789ab"
CONTAINER = f"/kubepods/burstable/pod{UID}/{'ab' * 32}"
WEB = Pod(uid="web", namespace="shop", name="web-1", labels={"app": "web"})


class Aggregate:
    """The kernel's aggregate."""

    def __init__(self) -> None:
        self.sources: list[DropSource] = []
        self.packets_lost = 0

    def add(
        self,
        cgroup: int,
        ifindex: int = 7,
        port: int = 80,
        *,
        at: float = 0,
        mode: Mode = Mode.AUDIT,
    ) -> None:
        at_ns = int(at * 1e9)
        self.sources.append(DropSource(cgroup, ifindex, 6, port, at_ns, at_ns, 1, "curl", mode))

    def read(self) -> list[DropSource]:
        return list(self.sources)

    def cgroups(self) -> set[int]:
        return {source.cgroup for source in self.sources}

    def lost(self) -> int:
        return self.packets_lost

    def forget(self, *interfaces: int) -> None:
        self.sources = [one for one in self.sources if one.ifindex not in interfaces]


class Node:
    """The aggregate with the cgroups and pods that the test names, over restarts of the agent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path) -> None:
        self.aggregate = Aggregate()
        self.paths = {5: SERVICE}
        self.folder = folder
        self.boot = "first"
        self.now = 0.0
        monkeypatch.setattr(source_processes, "cgroup_paths", self._paths)
        monkeypatch.setattr(history, "boot_id", lambda: self.boot)
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self.now * 1e9))
        self._tasks: list[asyncio.Task[None]] = []
        self._start()

    async def restart(self) -> None:
        """A new agent, which has saved state and no pods yet."""
        await self.stop()
        self._start()

    def _start(self) -> None:
        aggregate: Any = self.aggregate
        self.store = PodStore(Conditions())
        self.processes = SourceProcesses(
            aggregate, state=self.folder / "names.json", store=self.store, labels=ObjectLabels()
        )
        self.history = SourceHistory(
            aggregate,
            self.processes,
            state=self.folder / "history.json",
            store=self.store,
            labels=ObjectLabels(),
            clock=lambda ns: START + datetime.timedelta(seconds=ns / 1e9),
        )

    def gate(self, pod: Pod = WEB, ifindex: int = 7) -> None:
        self.store.set_pod(pod)
        self.store.pods[pod.uid].gates[ifindex] = HostInterface(ifindex, f"veth{ifindex}")
        self.store.in_force.mark(pod.uid)

    def end(self, pod: Pod = WEB) -> None:
        """The pod ends: its gate is removed, and it is forgotten."""
        self.store.remove_pod(pod.uid)
        self.store.removed.pop(pod.uid)
        self.store.in_force.mark(pod.uid)

    async def run(self, seconds: float = 5) -> None:
        """The agent runs for a while."""
        if not self._tasks:
            running = (self.processes.run(), self.history.run())
            self._tasks = [asyncio.create_task(one) for one in running]
        await asyncio.sleep(seconds)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
        self._tasks = []

    def seen(self) -> Observations:
        return self.history.observations()

    def _paths(self, ids: set[int]) -> dict[int, str]:
        return {id: path for id, path in self.paths.items() if id in ids}


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> AsyncIterator[Node]:
    made = Node(monkeypatch, tmp_path)
    made.store.synced.set()
    yield made
    await made.stop()


def names(seen: Observations) -> list[tuple[str, str, int]]:
    return [(flows.pod.name, flows.cgroup, flows.packets) for flows in seen.flows]


async def test_flows_to_a_pod_that_is_gone_stay_and_leave_the_kernel_s_table(node: Node) -> None:
    node.gate()
    node.aggregate.add(5, at=60)
    await node.run()
    assert names(node.seen()) == [("web-1", SERVICE, 1)]
    node.end()
    await node.run()
    assert node.aggregate.sources == []
    (flows,) = node.seen().flows
    assert (flows.pod.labels, flows.cgroup, flows.process) == ({"app": "web"}, SERVICE, "curl")
    assert flows.first == flows.last == START + datetime.timedelta(minutes=1)


async def test_flows_to_a_pod_that_ended_without_an_agent_stay(node: Node) -> None:
    node.gate()
    await node.run()
    node.aggregate.add(5)  # while no agent runs
    await node.restart()
    node.gate(Pod(uid="new", namespace="shop", name="new"), ifindex=8)
    await node.run()
    assert len(node.aggregate.sources) == 1  # its pod may still be reconciled
    node.store.synced.set()
    await node.run()
    assert node.aggregate.sources == []
    assert names(node.seen()) == [("web-1", SERVICE, 1)]


async def test_flows_to_the_pods_of_a_workload_are_one_entry(node: Node) -> None:
    for number in (1, 2, 3):
        pod = Pod(
            uid=f"web-{number}",
            namespace="shop",
            name=f"web-{number}",
            labels={"app": "web", "pod-template-hash": str(number)},
        )
        node.gate(pod, ifindex=number)
        node.aggregate.add(5, number, at=number * 3600)
        await node.run()
        if number < 3:
            node.end(pod)
            await node.run()
    (flows,) = node.seen().flows
    assert (flows.packets, flows.pod.name) == (3, "web-3")
    assert flows.last - flows.first == datetime.timedelta(hours=2)


async def test_what_a_full_table_forgets_stays(node: Node) -> None:
    node.gate()
    node.aggregate.add(5, port=80)
    await node.run()
    node.aggregate.sources.clear()
    node.aggregate.add(5, port=81)
    assert sorted(flows.port for flows in node.seen().flows) == [80, 81]


async def test_busiest_flows_are_the_first(node: Node) -> None:
    node.gate()
    await node.run()
    for port, count in ((1, 1), (2, 3), (3, 2)):
        node.aggregate.add(5, port=port)
        seen = node.aggregate.sources.pop()
        node.aggregate.sources.append(dataclasses.replace(seen, count=count))
    found = [(flows.port, flows.packets) for flows in node.seen().flows]
    assert found == [(2, 3), (3, 2), (1, 1)]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]"])
def test_saved_pods_that_cannot_be_read_are_none(
    tmp_path: pathlib.Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "history.json").write_bytes(content)
    assert history.saved_pods(tmp_path / "history.json") == {}


async def test_saved_pods_are_those_of_this_boot(node: Node) -> None:
    node.gate()
    await node.run()
    file = node.folder / "history.json"
    saved = await asyncio.to_thread(history.saved_pods, file)
    assert {number: pod.name for number, pod in saved.items()} == {7: "web-1"}
    node.boot = "second"
    assert await asyncio.to_thread(history.saved_pods, file) == {}


async def test_new_source_has_its_name_in_the_same_reading(node: Node) -> None:
    node.gate()
    await node.run()
    node.aggregate.add(5)
    assert names(node.seen()) == [("web-1", SERVICE, 1)]


async def test_packets_of_all_modes_are_added_up(node: Node) -> None:
    """A policy is suggested from either: a namespace may be enforced before all has been seen."""
    node.gate()
    node.aggregate.add(5, at=1, mode=Mode.AUDIT)
    node.aggregate.add(5, at=2, mode=Mode.ENFORCE)
    await node.run()
    assert names(node.seen()) == [("web-1", SERVICE, 2)]


async def test_forgotten_and_new_packets_of_a_source_are_added_up(node: Node) -> None:
    node.gate()
    node.aggregate.add(5, at=1)
    await node.run()
    node.aggregate.sources.clear()
    node.aggregate.add(5, at=100)
    for _ in range(2):
        (flows,) = node.seen().flows
        assert flows.packets == 2
        assert flows.last - flows.first == datetime.timedelta(seconds=99)


async def test_a_restart_adds_nothing_and_loses_nothing(node: Node) -> None:
    node.gate()
    node.aggregate.add(5)
    await node.run()
    before = node.seen()
    node.now = 600
    await node.restart()
    node.gate()
    await node.run()
    after = node.seen()
    assert (after.flows, after.since) == (before.flows, before.since)
    assert after.unobserved_seconds == 600
    assert (after.since, after.until) == (START, START + datetime.timedelta(minutes=10))
    node.now = 700
    await node.restart()
    await node.run()
    assert node.seen().unobserved_seconds == 700
    # The clock was set back meanwhile.
    node.now = 650
    await node.restart()
    await node.run()
    assert node.seen().unobserved_seconds == 700


async def test_source_that_is_a_host_network_pod_keeps_its_labels_when_it_is_gone(
    node: Node,
) -> None:
    labels = {"app": "ingress"}
    node.paths[9] = CONTAINER
    node.gate()
    node.aggregate.add(9)
    await node.run()
    assert node.seen().flows[0].source_pod is None
    node.store.set_pod(
        Pod(uid=UID, namespace="edge", name="ingress-x", labels=labels, host_network=True)
    )
    await node.run()
    node.store.remove_pod(UID)
    await node.restart()
    node.gate()
    await node.run()
    (flows,) = node.seen().flows
    assert flows.source_pod == ObservedPod(
        namespace="edge",
        name="ingress-x",
        labels=labels,
        namespace_labels={"kubernetes.io/metadata.name": "edge"},
        host_network=True,
    )


async def test_pods_that_start_together_are_written_together(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = 0
    write = state_files.write

    def count(path: pathlib.Path, *arguments: Any, **keywords: Any) -> None:
        nonlocal writes
        writes += path.name == "history.json"
        write(path, *arguments, **keywords)

    monkeypatch.setattr(state_files, "write", count)
    await node.run()
    before = writes
    for number in range(100):
        node.gate(Pod(uid=f"web-{number}", namespace="shop", name=f"web-{number}"), 10 + number)
        await asyncio.sleep(0.1)
    await asyncio.sleep(10)
    assert 1 <= writes - before <= 4
    before = writes
    await asyncio.sleep(50)
    assert writes - before <= 1, "nothing has changed"
    saved = await asyncio.to_thread(history.saved_pods, node.folder / "history.json")
    assert len(saved) == 100


async def test_reboot_keeps_the_history_and_no_interface(node: Node) -> None:
    node.gate()
    node.aggregate.add(5)
    await node.run()
    node.end()
    await node.run()
    node.boot = "second"
    await node.restart()
    node.aggregate.add(5)  # of a pod of this boot, without a gate by now
    await node.run(200)
    assert names(node.seen()) == [("web-1", SERVICE, 1)]


async def test_entries_of_interfaces_without_a_pod_are_deleted(node: Node) -> None:
    node.aggregate.add(5, ifindex=99)
    await node.run(30)
    assert len(node.aggregate.sources) == 1  # its pod's record may be on its way
    await node.run(200)
    assert node.aggregate.sources == []


async def test_one_source_cannot_fill_the_history(node: Node) -> None:
    node.gate()
    node.paths[6] = "/system.slice/other.service"
    for port in range(2 * abi.CGROUP_SOURCES):
        node.aggregate.add(5, port=port)
    await node.run(30)
    node.end()
    await node.run(30)
    node.gate(Pod(uid="x", namespace="shop", name="x"), ifindex=8)
    node.aggregate.add(6, ifindex=8)
    await node.run(30)
    seen = node.seen()
    assert len(seen.flows) == abi.CGROUP_SOURCES + 1
    assert seen.lost == abi.CGROUP_SOURCES
    assert "/system.slice/other.service" in {flows.cgroup for flows in seen.flows}
    node.aggregate.packets_lost = 3
    assert node.seen().lost == abi.CGROUP_SOURCES + 3
    await node.restart()
    await node.run(30)
    assert node.seen().lost == abi.CGROUP_SOURCES + 3


@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (CONTAINER, UID),
        (
            "/kubepods.slice/kubepods-burstable.slice/"
            "kubepods-burstable-pod0123abcd_0123_4567_89ab_0123456789ab.slice/cri-containerd-x",
            UID,
        ),
        ("/kubepods/pod0123456789abcdef0123456789abcdef/x", "0123456789abcdef0123456789abcdef"),
        (f"/kubelet{CONTAINER}", UID),
        (f"/user.slice/user-1000.slice/user@1000.service{CONTAINER}", ""),
        (SERVICE, ""),
        ("/", ""),
    ],
)
def test_uid_of_a_pod_is_read_from_its_cgroup(path: str, uid: str) -> None:
    assert merging.pod_uid(path) == uid
