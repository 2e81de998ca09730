"""Status of policies from nodes' reports, on an API server and in fake time."""

import asyncio
import datetime
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog.testing
from aiohttp import web

from agent.controller.policies import (
    HOST_ACCESS,
    HOST_EGRESS,
    NAMESPACES,
    POLICIES,
    REPORTS,
    PolicyStatusWriter,
    ReportedKind,
)
from agent.kube import node_report
from agent.kube.client import ApiClient
from agent.kube.node_report import NodeReport
from agent.kube.objects import ObjectMetadata
from agent.logs import Event
from tests.agent.controller.leases import recorded
from tests.agent.kube.apiserver import NODES, ApiServer, Json

pytestmark = pytest.mark.looptime
START = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)


class Cluster:
    """Nodes, policies and reports of an API server that answers as recorded."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.writes: list[tuple[str, Json]] = []
        self._generations: dict[str, int] = {}
        server.faults.append(self._answer)

    def node(self, name: str, **labels: str) -> None:
        self.server.put({"metadata": {"name": name, "uid": name, "labels": labels}}, path=NODES)

    def namespace(self, name: str) -> None:
        self.server.put({"metadata": {"name": name, "uid": name}}, path=NAMESPACES.path)

    def policy(self, name: str, **spec: Any) -> None:
        """Create a policy, or change it."""
        self._generations[name] = self._generations.get(name, 0) + 1
        body: Json = {
            "metadata": {
                "name": name,
                "uid": f"uid-{name}",
                "generation": self._generations[name],
            },
            "spec": {"pods": {"podSelector": {}}, "from": [{"kernel": {}}], **spec},
        }
        if self._generations[name] > 1:
            body["status"] = self.server.get(name, namespace="", path=POLICIES.path).get("status")
        self.server.put(body, path=POLICIES.path)

    def revision(self) -> str:
        return node_report.revision(
            ObjectMetadata(name=name, uid=f"uid-{name}", generation=generation)
            for name, generation in self._generations.items()
        )

    def report(self, node: str, *failed: Json, revision: str = "", effects: str = "") -> None:
        """A node has these policies; the newest ones without a revision."""
        policies = {"revision": revision or self.revision(), "failed": list(failed)}
        if effects:
            policies["effects"] = effects
        self.server.put(
            {"metadata": {"name": node, "uid": f"r-{node}"}, "status": {"policies": policies}},
            path=REPORTS.path,
        )

    def status(self, name: str) -> Json:
        found: Json = self.server.get(name, namespace="", path=POLICIES.path).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        (found,) = (one for one in self.status(name)["conditions"] if one["type"] == kind)
        return found["status"], found["reason"]

    async def _answer(self, request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH":
            return None
        assert request.path.startswith(POLICIES.path)
        name = request.path.split("/")[-2]
        body = json.loads(await request.read())
        current = self.server.get(name, namespace="", path=POLICIES.path)
        if body["metadata"]["resourceVersion"] != current["metadata"]["resourceVersion"]:
            found = recorded("policy-status-409")
            return web.json_response(found["body"], status=found["http"])
        assert body["status"].keys() == recorded("policy-status-patch")["body"]["status"].keys()
        self.writes.append((name, body["status"]))
        return web.json_response(
            self.server.put(current | {"status": body["status"]}, path=POLICIES.path)
        )


@pytest.fixture
def cluster(server: ApiServer) -> Cluster:
    return Cluster(server)


@asynccontextmanager
async def running(
    api: ApiClient, *, kind: ReportedKind = HOST_ACCESS
) -> AsyncIterator[list[datetime.datetime]]:
    """The times at which it compares what is and what should be."""
    loop = asyncio.get_running_loop()
    passes: list[datetime.datetime] = []

    def now() -> datetime.datetime:
        passes.append(START + datetime.timedelta(seconds=loop.time()))
        return passes[-1]

    made = PolicyStatusWriter(api, kind=kind, now=now, jitter=lambda: 0.5)
    task = asyncio.create_task(made.run())
    try:
        yield passes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_policy_is_programmed_when_all_nodes_have_it(
    cluster: Cluster, api: ApiClient
) -> None:
    for name in ("one", "two", "three"):
        cluster.node(name)
    cluster.policy("backup")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Accepted") == ("True", "Valid")
        assert cluster.condition("backup", "Programmed") == ("False", "Pending")
        assert cluster.status("backup")["nodes"] == {"selected": 3, "programmed": 1, "failed": 0}
        assert "three, two" in json.dumps(cluster.status("backup"))
        cluster.report("two")
        cluster.report("three")
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Programmed") == ("True", "Programmed")
        assert cluster.status("backup")["observedGeneration"] == 1
        count = len(cluster.writes)
        await asyncio.sleep(3600)
    assert len(cluster.writes) == count, "a status that is right is not written"


async def test_policy_that_expires_is_no_longer_programmed(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("backup", expires="2026-11-22T13:00:00+01:00")  # at START
    cluster.policy("longer", expires="2026-11-22T12:01:00Z")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Accepted") == ("True", "Valid")
        assert cluster.condition("backup", "Programmed") == ("False", "Expired")
        assert "expired at 2026-11-22T12:00:00Z" in json.dumps(cluster.status("backup"))
        assert cluster.condition("longer", "Programmed") == ("True", "Programmed")
        await asyncio.sleep(180)
        assert cluster.condition("longer", "Programmed") == ("False", "Expired")


async def test_policy_with_action_audit_is_staged_until_it_allows(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("backup", action="Audit")
    cluster.report("one", effects="0")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Accepted") == ("True", "Valid")
        assert cluster.condition("backup", "Programmed") == ("False", "Staged")
        cluster.policy("backup", action="Allow")
        cluster.report("one")
        await asyncio.sleep(60)
        assert cluster.condition("backup", "Programmed") == ("True", "Programmed")


@pytest.mark.parametrize(
    ("effects", "reason", "words"),
    [
        (("00,2", "00,0"), "NoPodSelected", "it selects no pod of these."),
        (("01,2", "02,2"), "NoSourceFound", "source or port of: the kernel, TCP 80."),
        (("12,2", "21,2"), "Programmed", "In force on all 2 selected nodes."),
        (("01,2", ""), "Programmed", "In force on all 2 selected nodes."),
        (("01,2", "01"), "Programmed", "In force on all 2 selected nodes."),
        (("01,2", "0,2"), "Programmed", "In force on all 2 selected nodes."),
        (("01,2", "0x,2"), "Programmed", "In force on all 2 selected nodes."),
    ],
)
async def test_policy_without_an_effect_on_any_node_is_not_programmed(
    cluster: Cluster, api: ApiClient, effects: tuple[str, str], reason: str, words: str
) -> None:
    """Its rules are by port: two of the first policy, one of the second."""
    ports = [{"port": 80}, {"port": 90}]
    cluster.policy("backup", ports=ports)
    cluster.policy("other")
    for name, reported in zip(("one", "two"), effects, strict=True):
        cluster.node(name)
        cluster.report(name, effects=reported)
    async with running(api):
        await asyncio.sleep(20)
        is_programmed = reason == "Programmed"
        assert cluster.condition("backup", "Programmed") == (str(is_programmed), reason)
        accepted = "Valid" if is_programmed else reason
        assert cluster.condition("backup", "Accepted") == ("True", accepted)
        (message,) = (
            one["message"]
            for one in cluster.status("backup")["conditions"]
            if one["type"] == "Programmed"
        )
        assert message.endswith(words)
        # Nodes that are behind by a change of another policy change nothing.
        count = sum(name == "backup" for name, _ in cluster.writes)
        cluster.policy("other")
        await asyncio.sleep(20)
        assert sum(name == "backup" for name, _ in cluster.writes) == count
        for name in ("one", "two"):
            cluster.report(name, effects="22,2")
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Programmed") == ("True", "Programmed")
        assert cluster.condition("backup", "Accepted") == ("True", "Valid")


async def test_namespace_that_does_not_exist_is_named(cluster: Cluster, api: ApiClient) -> None:
    cluster.node("one")
    cluster.namespace("shop")
    source = {"hostNetworkPods": {"namespaces": ["infra"]}}
    cluster.policy("backup", pods={"namespaces": ["shop", "shpo"]}, **{"from": [source]})
    cluster.report("one", effects="2")
    async with running(api):
        await asyncio.sleep(20)
        # It is in force in the namespace that exists.
        assert cluster.condition("backup", "Programmed") == ("True", "Programmed")
        assert cluster.condition("backup", "Accepted") == ("True", "NamespaceMissing")
        accepted, _ = cluster.status("backup")["conditions"]
        assert accepted["message"] == "The spec is valid; namespaces infra, shpo do not exist."
        cluster.report("one", effects="0")
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Programmed") == ("False", "NoPodSelected")
        assert cluster.condition("backup", "Accepted") == ("True", "NamespaceMissing")
        cluster.namespace("infra")
        cluster.namespace("shpo")
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Accepted") == ("True", "NoPodSelected")


async def test_no_namespace_is_missing_if_the_right_to_list_them_is(
    cluster: Cluster, api: ApiClient
) -> None:
    async def forbid(request: web.Request) -> web.StreamResponse | None:
        is_concerned = request.path == NAMESPACES.path
        return web.json_response({"message": "no"}, status=403) if is_concerned else None

    cluster.server.faults.append(forbid)
    cluster.node("one")
    cluster.policy("backup", pods={"namespaces": ["shop"]})
    cluster.report("one", effects="2")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("backup", "Accepted") == ("True", "Valid")


async def test_change_of_one_policy_does_not_affect_the_others(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("a")
    cluster.policy("b")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        cluster.writes.clear()
        cluster.policy("b", ports=[{"port": 80}])
        await asyncio.sleep(20)
        assert cluster.condition("b", "Programmed") == ("False", "Pending")
        assert cluster.status("b")["observedGeneration"] == 2
        cluster.report("one")
        await asyncio.sleep(20)
        assert cluster.condition("b", "Programmed") == ("True", "Programmed")
    assert {name for name, _ in cluster.writes} == {"b"}


async def test_only_selected_nodes_count(cluster: Cluster, api: ApiClient) -> None:
    cluster.node("one", pool="edge")
    cluster.node("two")
    cluster.policy("edge", nodeSelector={"matchLabels": {"pool": "edge"}})
    cluster.policy("none", nodeSelector={"matchLabels": {"pool": "gpu"}})
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.status("edge")["nodes"] == {"selected": 1, "programmed": 1, "failed": 0}
        assert cluster.condition("none", "Programmed") == ("False", "NoNodeSelected")
        cluster.node("two", pool="gpu")
        await asyncio.sleep(20)
        assert cluster.status("none")["nodes"] == {"selected": 1, "programmed": 0, "failed": 0}


async def test_problem_of_a_node_is_in_the_status(cluster: Cluster, api: ApiClient) -> None:
    cluster.node("one")
    cluster.node("two")
    cluster.policy("wide")
    cluster.report("one")
    cluster.report("two", {"name": "wide", "generation": 1, "message": "9 rules have no room."})
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("wide", "Programmed") == ("False", "Failed")
        assert cluster.status("wide")["nodes"] == {"selected": 2, "programmed": 1, "failed": 1}
        assert "two: 9 rules have no room." in json.dumps(cluster.status("wide"))
        # A problem of an older generation is none of the new one.
        cluster.policy("wide", ports=[{"port": 1}])
        await asyncio.sleep(20)
        assert cluster.condition("wide", "Programmed") == ("False", "Pending")


async def test_invalid_policy_is_not_accepted_with_the_agents_sentence(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("bad", ports=[{"port": 70000}])
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.condition("bad", "Accepted") == ("False", "Invalid")
        assert "port" in json.dumps(cluster.status("bad")["conditions"][0]["message"])
        assert cluster.condition("bad", "Programmed") == ("False", "NotAccepted")


async def test_time_of_a_condition_is_that_of_its_last_change(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("a")
    async with running(api):
        await asyncio.sleep(300)
        first = cluster.status("a")["conditions"]
        cluster.report("one")
        await asyncio.sleep(300)
        then = cluster.status("a")["conditions"]
    assert first[0]["lastTransitionTime"] == then[0]["lastTransitionTime"]
    assert first[1]["lastTransitionTime"] < then[1]["lastTransitionTime"]


async def test_new_leader_does_not_lower_a_status_before_nodes_had_time_to_report(
    cluster: Cluster, api: ApiClient
) -> None:
    """It does not know what older revisions mean."""
    cluster.node("one")
    cluster.policy("a")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
    old = cluster.revision()
    cluster.policy("b")
    cluster.report("one", revision=old)
    cluster.writes.clear()
    async with running(api):
        await asyncio.sleep(60)
        assert cluster.condition("a", "Programmed") == ("True", "Programmed")
        assert cluster.condition("b", "Programmed") == ("False", "Pending")
        await asyncio.sleep(200)
        # By then it is a fact that this node does not follow.
        assert cluster.condition("a", "Programmed") == ("False", "Pending")


async def test_policy_that_changes_while_its_status_is_written_is_evaluated_again(
    cluster: Cluster, api: ApiClient
) -> None:
    cluster.node("one")
    cluster.policy("a")
    changed: list[str] = []

    async def change_first(request: web.Request) -> web.StreamResponse | None:
        if request.method == "PATCH" and not changed:
            changed.append(request.path)
            cluster.policy("a", ports=[{"port": 80}])
        return None

    cluster.server.faults.insert(0, change_first)
    async with running(api):
        await asyncio.sleep(20)
        assert cluster.status("a")["observedGeneration"] == 2
    assert [status["observedGeneration"] for _, status in cluster.writes] == [2]


@pytest.mark.parametrize(
    ("code", "is_tried_again"), [(403, True), (422, True), (404, False), (409, False)]
)
async def test_status_that_is_not_written_is_tried_again_unless_the_policy_is_another(
    cluster: Cluster, api: ApiClient, code: int, is_tried_again: bool
) -> None:
    """Of a policy that was deleted or changed, an event follows."""
    attempts: list[str] = []

    async def fail(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH":
            return None
        attempts.append(request.path)
        if len(attempts) > 3:
            return None
        return web.json_response({"message": "no"}, status=code)

    cluster.server.faults.insert(0, fail)
    cluster.node("one")
    cluster.policy("a")
    cluster.report("one")
    with structlog.testing.capture_logs() as lines:
        async with running(api):
            await asyncio.sleep(60)
            assert len(attempts) == (4 if is_tried_again else 1)
            assert bool(cluster.status("a")) is is_tried_again
            # Each outage is logged once.
            attempts.clear()
            cluster.policy("a")
            await asyncio.sleep(60)
    logged = [line["code"] for line in lines if line["event"] is Event.POLICY_STATUS_NOT_WRITTEN]
    assert logged == ([code] * 2 if is_tried_again else [])


async def test_nodes_that_come_and_go_count(cluster: Cluster, api: ApiClient) -> None:
    cluster.node("one")
    cluster.policy("a")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        cluster.node("two")
        await asyncio.sleep(20)
        assert cluster.status("a")["nodes"] == {"selected": 2, "programmed": 1, "failed": 0}
        cluster.server.delete("two", namespace="", path=NODES)
        await asyncio.sleep(20)
        assert cluster.status("a")["nodes"] == {"selected": 1, "programmed": 1, "failed": 0}


@pytest.mark.parametrize("path", [NODES, REPORTS.path])
async def test_status_waits_for_the_first_lists(
    cluster: Cluster, api: ApiClient, path: str
) -> None:
    is_listed = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse | None:
        if request.path == path:
            await is_listed.wait()
        return None

    cluster.server.faults.insert(0, hold)
    cluster.node("one")
    cluster.policy("a")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(10)
        assert cluster.writes == []
        is_listed.set()
        await asyncio.sleep(10)
    ((name, status),) = cluster.writes
    assert (name, status["nodes"]) == ("a", {"selected": 1, "programmed": 1, "failed": 0})


async def test_node_may_report_each_set_of_policies_that_there_was(
    cluster: Cluster, api: ApiClient
) -> None:
    """Also one that was the newest for less than the time between two passes."""
    cluster.node("one")
    cluster.policy("a")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
        cluster.policy("b")
        between = cluster.revision()
        cluster.policy("c")
        cluster.report("one", revision=between)
        await asyncio.sleep(20)
        found = {name: cluster.condition(name, "Programmed")[1] for name in "abc"}
        assert found == {"a": "Programmed", "b": "Programmed", "c": "Pending"}


async def test_writes_of_nodes_and_namespaces_that_change_no_status_cause_no_work(
    cluster: Cluster, api: ApiClient
) -> None:
    """The kubelet writes each node all the time; what expires is found within two minutes."""
    cluster.node("one")
    cluster.namespace("shop")
    cluster.policy("a")
    cluster.report("one")
    async with running(api) as passes:
        await asyncio.sleep(30)
        count = len(passes)
        cluster.node("one")
        cluster.namespace("shop")
        await asyncio.sleep(30)
        assert len(passes) == count
        await asyncio.sleep(125)
        assert len(passes) == count + 1
        cluster.node("one", pool="edge")
        await asyncio.sleep(10)
        assert len(passes) == count + 2
        cluster.namespace("other")
        await asyncio.sleep(10)
        assert len(passes) == count + 3
        cluster.server.delete("other", namespace="", path=NAMESPACES.path)
        await asyncio.sleep(10)
        assert len(passes) == count + 4


async def test_many_statuses_are_written_at_a_bounded_rate(
    cluster: Cluster, api: ApiClient
) -> None:
    """Each is an event for every node."""
    cluster.node("one")
    for number in range(60):
        cluster.policy(f"p{number}")
    cluster.report("one")
    async with running(api):
        await asyncio.sleep(20)
    times = [one.at for one in cluster.server.patches()]
    assert len(times) == 60
    assert times[49] - times[0] < 0.1
    assert times[59] - times[49] == pytest.approx(0.5, abs=0.1)


async def test_egress_policies_have_a_status_from_what_nodes_report_of_them(
    cluster: Cluster, api: ApiClient
) -> None:
    path = HOST_EGRESS.query.path
    metadata = {"name": "metadata", "uid": "uid-metadata", "generation": 2}
    pods = {"namespaces": ["shpo"]}
    subjects = [{"hostNetworkPods": pods}]
    spec = {"subjects": subjects, "deny": [{"preset": "Metadata"}], "action": "Enforce"}
    revision = node_report.revision([msgspec.convert(metadata, ObjectMetadata)])

    async def answer(request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH" or not request.path.startswith(path):
            return None
        current = cluster.server.get("metadata", namespace="", path=path)
        cluster.server.put(current | {"status": (await request.json())["status"]}, path=path)
        return web.json_response({})

    def report(programmed: str) -> None:
        status = {"policies": {"revision": "x"}, "egressPolicies": {"revision": programmed}}
        cluster.server.put(
            {"metadata": {"name": "one", "uid": "r-one"}, "status": status}, path=REPORTS.path
        )

    cluster.server.faults.insert(0, answer)
    cluster.node("one")
    cluster.server.put({"metadata": metadata, "spec": spec}, path=path)
    report("x")
    async with running(api, kind=HOST_EGRESS):
        await asyncio.sleep(10)
        found = cluster.server.get("metadata", namespace="", path=path)["status"]
        assert found["observedGeneration"] == 2
        assert [one["reason"] for one in found["conditions"]] == ["NamespaceMissing", "Pending"]
        report(revision)
        await asyncio.sleep(10)
        found = cluster.server.get("metadata", namespace="", path=path)["status"]
        reasons = [one["reason"] for one in found["conditions"]]
        assert reasons == ["NamespaceMissing", "Programmed"]


def test_recorded_report_is_read() -> None:
    found = msgspec.convert(recorded("node-report")["body"], NodeReport)
    assert found.status.policies is not None
    assert found.status.policies.count == 1
    assert found.status.policies.failed[0].name == "x"
