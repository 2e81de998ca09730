"""The CustomResourceDefinition: an API server accepts what podgate accepts, and names mistakes.

Its answers are recorded: tests/cluster/test_policy_schema.py.
"""

from typing import Any

import pytest

from agent import labels
from agent.policy import api_types, definition
from agent.policy.kinds import PolicyError
from tests.agent.policy import answers
from tests.agent.policy.test_api_types import VALID, WRONG, document
from tests.agent.policy.test_rules_page import EXAMPLES

# Not expressed by the schema: U+0000 in a path, and more than 32 rules in a policy.
ONLY_THE_AGENT = ({"from": [{"cgroup": {"path": "/a\0"}}]},)


def answer(name: str) -> dict[str, Any]:
    found: dict[str, Any] = answers.recorded()["answers"][name]
    return found


def test_recording_is_of_this_schema() -> None:
    assert answers.recorded()["schema"] == answers.schema_digest(), (
        "record again: PODGATE_TEST_RECORD=1 make test-cluster BIN=DIR "
        "FILES=tests/cluster/test_policy_schema.py"
    )
    recorded = {name: found["spec"] for name, found in answers.recorded()["answers"].items()}
    assert recorded == answers.specs()


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_mistake_is_rejected_by_the_api_server(number: int) -> None:
    spec, where = WRONG[number]
    found = answer(f"wrong {number}")
    if spec in ONLY_THE_AGENT:
        assert "stored" in found
    else:
        assert found["code"] in (400, 422)
        field = where.split(":")[0].removesuffix(".match")
        assert field in found["message"], found["message"]


@pytest.mark.parametrize("number", range(len(answers.MISSPELT)))
def test_misspelt_field_is_named_by_the_api_server_and_by_the_agent(number: int) -> None:
    spec, path = answers.MISSPELT[number]
    found = answer(f"misspelt {number}")
    assert found["code"] == 400
    assert f'unknown field "{path}"' in found["message"]
    with pytest.raises(PolicyError, match="unknown field") as error:
        api_types.read(document(**spec), source="a.yaml")
    assert path.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize("number", range(len(VALID)))
def test_what_is_stored_means_what_was_written(number: int) -> None:
    stored = answer(f"valid {number}")["stored"]
    written = api_types.read(document(**VALID[number]), source="a.yaml")
    kept = api_types.read({**document(), "spec": stored}, source="a.yaml")
    assert (kept.pods, kept.rules, kept.nodes, kept.host_pods) == (
        *(written.pods, written.rules),
        *(written.nodes, written.host_pods),
    )


def test_examples_of_the_page_are_accepted() -> None:
    assert EXAMPLES
    for example in EXAMPLES:
        assert "stored" in answer(f"example {example['metadata']['name']}")


def test_what_is_left_of_a_misspelt_field_is_invalid_where_it_would_admit_more() -> None:
    """Clients that switch strict validation off have unknown fields pruned."""
    left: tuple[dict[str, Any], ...] = (
        {"pods": {}},
        {"from": [{}]},
        {"from": [{"hostNetworkPods": {}}]},
        {"ports": [{}]},
    )
    for spec in left:
        with pytest.raises(PolicyError):
            api_types.read(document(**spec), source="a.yaml")
        assert spec in [wrong for wrong, _ in WRONG]


def test_every_object_is_named_as_the_policies_are() -> None:
    made = definition.definition()
    (version,) = made["spec"]["versions"]
    assert f"{made['spec']['group']}/{version['name']}" == labels.POLICY_API_VERSION
    assert made["spec"]["names"]["kind"] == labels.POLICY_KIND
    assert made["metadata"]["name"] == f"{made['spec']['names']['plural']}.{made['spec']['group']}"
    assert made["spec"]["scope"] == "Cluster"
    assert version["subresources"] == {"status": {}}
