"""What agents print, as the plugin gets it: made by the agents' own code."""

import json
from typing import Any

import msgspec

from agent.admin.observations import Observations, ObservedFlows
from agent.operate.cli.views.suggestions import SuggestOutput
from agent.policy.review import FlowFilter, Review
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.policy.observing import node

NAMESPACE = "shop"


def output(*nodes: Observations) -> dict[str, Any]:
    """As `podgate suggest --output json` prints it."""
    review = Review(nodes, FlowFilter())
    made = SuggestOutput(
        nodes=list(nodes),
        flows=review.flows(),
        policies=[
            msgspec.to_builtins(one.policy)
            for one in review.suggestions()
            if one.policy and not one.doubt
        ],
    )
    found: dict[str, Any] = json.loads(msgspec.json.encode(made))
    return found


class Nodes:
    """Agents that have observed flows, by node."""

    def __init__(self, kubectl: KubectlStandin, *names: str) -> None:
        self._kubectl = kubectl
        self.names = names
        self.observed = {name: node(name=name) for name in names}
        self.created = dict.fromkeys(names, "2025-12-01T00:00:00Z")
        kubectl.serve_nodes(*names)
        kubectl.respond("get", "pods", "--all-namespaces", output={"items": []})
        self.serve()

    def serve(self) -> None:
        nodes = [
            {"metadata": {"name": name, "creationTimestamp": self.created[name]}}
            for name in self.names
        ]
        self._kubectl.respond("get", "nodes", output={"items": nodes})
        for name, seen in self.observed.items():
            self._kubectl.respond("exec", f"agent-{name}", "suggest", output=output(seen))
        merged = output(*self.observed.values())
        for name in self.names:
            self._kubectl.respond("exec", f"agent-{name}", "--from=-", output="merged\n")
            self._kubectl.respond(
                "exec", f"agent-{name}", "--from=-", "--output=json", output=merged
            )

    def see(self, name: str, *flows: ObservedFlows, **further: Any) -> None:
        """From now on, this node has observed these flows and no others."""
        self.observed[name] = node(*flows, name=name, **further)
        self.serve()
