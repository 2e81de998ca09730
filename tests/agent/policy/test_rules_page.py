"""The examples of docs/rules.md are policies that podgate accepts, one for each source."""

import pathlib
from typing import Any

import pytest
import yaml

from agent.policy import api_types
from agent.policy.api_types import Policy

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "rules.md"
EXAMPLES: list[dict[str, Any]] = [
    document
    for block in PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]
    for document in yaml.safe_load_all(block.split("```")[0])
]


def read(document: dict[str, Any]) -> Policy:
    return api_types.read(document, source="rules.md")


@pytest.mark.parametrize("document", EXAMPLES, ids=lambda one: one["metadata"]["name"])
def test_example_is_a_policy(document: dict[str, Any]) -> None:
    assert read(document).rules


def test_every_kind_of_source_has_an_example() -> None:
    kinds = {rule.source.kind for document in EXAMPLES for rule in read(document).rules}
    assert kinds == {"any", "kernel", "subtree", "unit", "pods"}
