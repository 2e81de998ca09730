"""Specs of policies, valid and not, and what a real API server answers to each.

tests/cluster/test_policy_schema.py requests them and compares; the unit tests use the recording.
"""

import functools
import hashlib
import json
import pathlib
from typing import Any

from agent import labels
from agent.policy import definition
from tests.agent.policy.test_api_types import VALID, WRONG, document
from tests.agent.policy.test_rules_page import EXAMPLES

FILE = pathlib.Path(__file__).parent / "recorded" / "policies.json"

_Json = dict[str, Any]

MISSPELT: tuple[tuple[_Json, str], ...] = (
    ({"pods": {"podSelectr": {"matchLabels": {"app": "web"}}}}, "spec.pods.podSelectr"),
    (
        {"pods": {"podSelector": {"matchLabls": {"app": "web"}}}},
        "spec.pods.podSelector.matchLabls",
    ),
    ({"pods": {"namespaces": ["a"], "nsSelector": {}}}, "spec.pods.nsSelector"),
    ({"port": [{"port": 53}]}, "spec.port"),
    ({"nodeselector": {}}, "spec.nodeselector"),
    ({"ports": [{"prot": 53}]}, "spec.ports[0].prot"),
    ({"ports": [{"port": 53, "endport": 54}]}, "spec.ports[0].endport"),
    ({"from": [{"cgroup": {"path": "/a", "mtch": "exact"}}]}, "spec.from[0].cgroup.mtch"),
    ({"from": [{"kernel": {"x": 1}}]}, "spec.from[0].kernel.x"),
    ({"from": [{"systemdUnits": {"name": "a.service"}}]}, "spec.from[0].systemdUnits"),
    (
        {"from": [{"hostNetworkPods": {"podselector": {}}}]},
        "spec.from[0].hostNetworkPods.podselector",
    ),
)
"""Specs with a misspelt field, and the path that the server names."""


def specs() -> dict[str, _Json]:
    """All of them, each with a name."""
    made = {f"valid {number}": spec for number, spec in enumerate(VALID)}
    made |= {f"wrong {number}": spec for number, (spec, _) in enumerate(WRONG)}
    made |= {f"misspelt {number}": spec for number, (spec, _) in enumerate(MISSPELT)}
    documents = {name: document(**spec)["spec"] for name, spec in made.items()}
    return documents | {f"example {one['metadata']['name']}": one["spec"] for one in EXAMPLES}


@functools.cache
def recorded() -> Any:
    """The recording: the digest of the schema, and the answers by name."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def schema_digest(kind: str = labels.POLICY_KIND) -> str:
    """Of the spec's schema, without its descriptions."""
    spec = definition.schema(kind)["properties"]["spec"]
    return hashlib.sha256(json.dumps(_bare(spec), sort_keys=True).encode()).hexdigest()


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _bare(one)
            for key, one in value.items()
            if not (key == "description" and isinstance(one, str))
        }
    return [_bare(one) for one in value] if isinstance(value, list) else value
