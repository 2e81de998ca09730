"""Watch of a namespace's drops after it was enforced: which are the kubelet's or of sources that
policies list, and so must not happen."""

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence

from agent.operate.kubectl import observed
from agent.operate.kubectl.cluster import Cluster, Object
from agent.operate.kubectl.observed import NodeObservations


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Traffic that was dropped since the watch started. harm: why it must not be, or empty."""

    text: str
    harm: str


class DropWatch:
    """Compares what nodes observe with what they had observed at the start.

    By each node's own clock, and by counts: a node may report old flows under a new name.
    """

    def __init__(self, cluster: Cluster, namespace: str, nodes: Iterable[NodeObservations]) -> None:
        """nodes: observations from before the step."""
        self._cluster = cluster
        self._namespace = namespace
        self._until: dict[str, datetime.datetime] = {}
        self._packets: dict[str, dict[str, int]] = {}
        for one in nodes:
            if one.output:
                self._start(one)
        self.unwatched: dict[str, str] = {}
        """Nodes that did not respond to the last query, with the problem."""

    def poll(self) -> list[Drop]:
        """All drops since the start. Raises `KubectlError`."""
        nodes = observed.collect(self._cluster, f"--namespace={self._namespace}")
        self.unwatched = {one.node: one.problem for one in nodes if one.problem}
        return [drop for one in nodes if one.output for drop in self._drops(one)]

    def _start(self, node: NodeObservations) -> None:
        assert node.output is not None
        (observations,) = node.output["nodes"]
        self._until[node.node] = datetime.datetime.fromisoformat(observations["until"])
        self._packets[node.node] = {
            _key(one["flows"]): one["flows"]["packets"] for one in node.flows
        }

    def _drops(self, node: NodeObservations) -> Sequence[Drop]:
        if node.node not in self._until:
            # It did not respond before, or is new.
            self._start(node)
        until, packets = self._until[node.node], self._packets[node.node]
        found = []
        for one in node.flows:
            flows = one["flows"]
            is_new = flows["packets"] > packets.get(_key(flows), 0)
            if is_new and datetime.datetime.fromisoformat(flows["last"]) > until:
                harm = ""
                if one["isKubelet"]:
                    harm = "it is the kubelet"
                elif one["isListed"]:
                    harm = "a policy lists this source"
                found.append(Drop(f"{one['text']} on {node.node}", harm))
        return found


def _key(flows: Object) -> str:
    pod = {**flows["pod"], "name": ""}
    source = flows.get("sourcePod") or flows["cgroup"]
    return json.dumps([pod, source, flows["protocol"], flows["port"]], sort_keys=True)
