"""Watching pods and writing conditions and events, in a real cluster."""

import json

import msgspec

from agent import labels as agent_labels
from agent.kube.client import ApiError
from agent.kube.condition_writer import ConditionWriter
from agent.kube.events import EventRecorder
from agent.kube.objects import ApiPod, MetadataOnly
from agent.kube.watcher import Query, Watcher
from agent.pods.conditions import FALSE, TRUE, TYPES, Conditions
from agent.pods.pod import Pod
from agent.policy import definition
from tests.cluster.cluster import Cluster, running, until


class Writing:
    """A writer with a watch of pods, like the agent's."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.conditions = Conditions()
        self.writer = ConditionWriter(
            cluster.api,
            conditions_of=self.conditions.of,
            sandbox_of=lambda uid: "sandbox-1",
            boot="boot-1",
            is_withdrawn=lambda uid, kind: False,
        )
        self.watcher = cluster.watcher(self._on_change)

    def _on_change(self, old: ApiPod | None, new: ApiPod | None) -> None:
        if new:
            self.writer.set_pod(new)
        elif old:
            self.writer.forget(old.uid)

    def know(self, pod: ApiPod, status: str, reason: str) -> None:
        told = Pod(uid=pod.uid, namespace=pod.metadata.namespace, name=pod.metadata.name)
        for kind in TYPES:
            self.conditions.set(told, kind, status, reason, "Said by a test.")
        self.writer.enqueue(pod.uid)

    def has(self, name: str, status: str) -> bool:
        """Whether the API shows both conditions with this status."""
        pod = self.cluster.find(self.watcher, name)
        found = [pod.condition(kind) if pod else None for kind in TYPES]
        return all(one is not None and one.status == status for one in found)


async def test_pods_come_and_go(cluster: Cluster) -> None:
    watcher = cluster.watcher(lambda old, new: None)
    async with running(watcher.run()):
        await until(watcher.synced.is_set)
        made = await cluster.make_pod("a")
        await until(lambda: cluster.find(watcher, "a"))
        seen = cluster.find(watcher, "a")
        assert seen is not None
        assert seen.uid == made["metadata"]["uid"]
        assert seen.spec.node_name == cluster.node_name
        await cluster.delete_pod("a")
        await until(lambda: not cluster.find(watcher, "a"))


async def test_namespaces_are_watched_as_metadata(cluster: Cluster) -> None:
    query = Query("namespaces", "/api/v1/namespaces", MetadataOnly, is_metadata_only=True)
    watcher = Watcher(cluster.api, query, on_change=lambda old, new: None)
    async with running(watcher.run()):
        await until(lambda: ("", cluster.namespace) in watcher.objects)
    labels = watcher.objects["", cluster.namespace].metadata.labels
    assert labels["kubernetes.io/metadata.name"] == cluster.namespace


async def test_conditions_are_written_and_corrected(cluster: Cluster) -> None:
    writing = Writing(cluster)
    async with running(writing.watcher.run(), writing.writer.run()):
        await cluster.make_pod("a")
        await until(lambda: cluster.find(writing.watcher, "a"))
        pod = cluster.find(writing.watcher, "a")
        assert pod is not None
        writing.know(pod, FALSE, "GateFailed")
        await until(lambda: writing.has("a", FALSE))
        writing.know(pod, TRUE, "Enforced")
        await until(lambda: writing.has("a", TRUE))
        await cluster.api.request(
            "PATCH",
            f"{cluster.pods_path}/a/status",
            body={
                "status": {
                    "conditions": [{"type": agent_labels.ISOLATION_READY, "status": "Unknown"}],
                }
            },
            content_type="application/strategic-merge-patch+json",
        )
        await until(lambda: writing.writer.patches_by_code.total() >= 3 and writing.has("a", TRUE))
    conditions = (await cluster.pod("a"))["status"]["conditions"]
    found = {one["type"]: one for one in conditions}
    assert found[agent_labels.ISOLATION_READY]["message"] == (
        "Said by a test. (sandbox sandbox-1, boot boot-1)"
    )
    assert found[agent_labels.ISOLATION_READY]["lastTransitionTime"]


async def test_new_pod_of_the_same_name_is_not_patched(cluster: Cluster) -> None:
    writing = Writing(cluster)
    async with running(writing.writer.run()):
        made = await cluster.make_pod("a")
        old = json.dumps(made).encode()
        await cluster.delete_pod("a")
        await cluster.make_pod("a")
        seen = decoded(old)
        writing.writer.set_pod(seen)
        writing.know(seen, TRUE, "Enforced")
        await until(
            lambda: writing.writer.patches_by_code.total() == 1 and not writing.writer.pending
        )
    conditions = (await cluster.pod("a"))["status"].get("conditions", [])
    assert not any(one["type"] == agent_labels.ISOLATION_READY for one in conditions)


async def test_events_are_accepted(cluster: Cluster) -> None:
    events = EventRecorder(cluster.api, node_name=cluster.node_name)
    pod = decoded(json.dumps(await cluster.make_pod("a")).encode())
    path = f"/apis/events.k8s.io/v1/namespaces/{cluster.namespace}/events"
    async with running(events.run()):
        events.record(pod, "GateLost", "Said by a test.", action="Guarding", container="app")
        await until(lambda: events.sent or events.dropped)
    found = json.loads(await cluster.api.request("GET", path))["items"]
    ours = [one for one in found if one.get("reportingController") == "podgate.io/agent"]
    assert [(one["reason"], one["note"]) for one in ours] == [("GateLost", "Said by a test.")]


def decoded(content: bytes) -> ApiPod:
    return msgspec.json.decode(content, type=ApiPod)


async def test_policy_definition_is_accepted(cluster: Cluster) -> None:
    """Nothing is stored. An existing one is reported after the new one was validated."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    try:
        body = definition.definition()
        await cluster.api.request("POST", path, query={"dryRun": "All"}, body=body)
    except ApiError as error:
        if error.code != 409:
            raise
