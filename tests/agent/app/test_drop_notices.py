"""Events of dropped traffic: for the pod's owner, few, and with what would admit it."""

from typing import Any

import pytest

from agent.admin.observations import ObservedPod
from agent.app import drop_notices
from agent.app.drop_notices import DropNotices
from agent.drops.source_processes import CgroupName
from agent.pods.events import PodEvent, PodEvents
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod import Pod
from bpf.drop_sources import DropSource
from bpf.verdicts import Mode

UNIT = CgroupName(5, "/system.slice/scraper.service")


class Node:
    """Interfaces 7 and 8 are those of the pods shop/web and shop/cart."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events = PodEvents()
        self.notices = self.started()
        self.notices.record([])

    def started(self) -> DropNotices:
        """Of an agent that starts now."""
        processes: Any = None
        store: Any = self
        return DropNotices(
            processes, self.events, store=store, labels=ObjectLabels(), now=lambda: self.time
        )

    def pod_of_interface(self, ifindex: int) -> Pod | None:
        name = {7: "web", 8: "cart"}.get(ifindex)
        return (
            Pod(uid=f"uid-{name}", namespace="shop", name=name, labels={"app": name})
            if name
            else None
        )

    async def recorded(self, *seen: tuple[DropSource, CgroupName]) -> list[PodEvent]:
        self.notices.record(seen)
        self.events.record(PodEvent(None, "Last", "", action=""))
        return [one for one in await self.events.next() if one.reason != "Last"]


def dropped(
    count: int = 3,
    *,
    port: int = 8080,
    ifindex: int = 7,
    mode: Mode = Mode.ENFORCE,
    cgroup: CgroupName = UNIT,
) -> tuple[DropSource, CgroupName]:
    return DropSource(cgroup.cgroup, ifindex, 6, port, 1, 2, count, "curl", mode), cgroup


@pytest.fixture
def node() -> Node:
    return Node()


async def test_event_has_source_port_mode_and_the_policy_that_would_admit_it(node: Node) -> None:
    (event,) = await node.recorded(dropped())
    assert event.uid == "uid-web"
    assert event.reason == "TrafficDropped"
    assert event.message.startswith(
        "Mode enforce: dropped 3 packets from curl in unit scraper.service to tcp 8080."
    )
    assert '"systemdUnit":{"name":"scraper.service"}' in event.message
    assert '"port":8080' in event.message
    assert len(event.message.encode()) <= 1024


async def test_audit_reports_what_it_would_drop(node: Node) -> None:
    (event,) = await node.recorded(dropped(1, mode=Mode.AUDIT))
    assert event.reason == "TrafficWouldDrop"
    assert "would drop in enforce 1 packet from" in event.message


async def test_source_is_announced_again_only_after_half_an_hour(node: Node) -> None:
    assert len(await node.recorded(dropped(3))) == 1
    node.time = 1700
    assert await node.recorded(dropped(9)) == []
    node.time = 1900
    assert await node.recorded(dropped(9)) == []  # it has ended
    assert len(await node.recorded(dropped(10))) == 1


async def test_what_was_announced_lately_is_remembered_among_much_else(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_notices, "_MAX_ANNOUNCED", 1)
    assert len(await node.recorded(dropped(3))) == 1
    node.time = 1000
    assert len(await node.recorded(dropped(3), dropped(port=81))) == 1
    node.time = 1700
    seen = dropped(9), dropped(9, port=81)
    assert await node.recorded(*seen) == []
    node.time = 1900
    (event,) = await node.recorded(dropped(10), dropped(10, port=81))
    assert "to tcp 8080." in event.message


async def test_other_pods_ports_and_sources_have_events_of_their_own(node: Node) -> None:
    other = CgroupName(6, "/opt/other")
    seen = (dropped(), dropped(port=81), dropped(ifindex=8), dropped(cgroup=other))
    events = await node.recorded(*seen)
    assert len({(one.uid, one.about) for one in events}) == 4


async def test_scan_of_ports_is_one_event(node: Node) -> None:
    (event,) = await node.recorded(*(dropped(1, port=port) for port in range(1, 400)))
    assert "399 packets" in event.message
    assert "many ports" in event.message


async def test_node_has_a_budget_that_audit_does_not_take_from_enforce(node: Node) -> None:
    sources = [CgroupName(10 + n, f"/opt/{n}") for n in range(40)]
    audit = [dropped(mode=Mode.AUDIT, cgroup=one) for one in sources]
    enforce = [dropped(cgroup=one) for one in sources[:20]]
    events = await node.recorded(*audit, *enforce)
    assert [one.reason for one in events].count("TrafficDropped") == 20
    assert len(events) == 30


async def test_drops_of_a_previous_agent_are_not_announced(node: Node) -> None:
    node.notices = node.started()
    assert await node.recorded(dropped(3)) == []
    assert len(await node.recorded(dropped(4))) == 1


async def test_interface_without_a_pod_has_no_event(node: Node) -> None:
    assert await node.recorded(dropped(ifindex=99)) == []


async def test_hostnetwork_source_is_named_as_its_pod(node: Node) -> None:
    scraper = ObservedPod(namespace="ops", name="scraper-x", labels={"app": "s"}, host_network=True)
    (event,) = await node.recorded(dropped(cgroup=CgroupName(9, "/kubepods/x", scraper)))
    assert "curl in pod ops/scraper-x" in event.message
