"""The example of docs/rules.md is one that podgate takes."""

import pathlib

import yaml

from agent.policy import api_types

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "rules.md"


def test_the_example_is_a_policy() -> None:
    example = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    policy = api_types.read(yaml.safe_load(example), source="rules.md")
    assert len(policy.rules) == 4
