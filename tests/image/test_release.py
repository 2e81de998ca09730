"""The workflow that releases fits the Dockerfile and the chart. Others: tests/test_workflows.py."""

import re
from typing import Any

import yaml

from tests.image import building

_WORKFLOW = building.ROOT / ".github" / "workflows" / "release.yaml"


def _jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(_WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def _steps() -> list[dict[str, Any]]:
    return [step for job in _jobs().values() for step in job["steps"]]


def test_build_arguments_are_those_of_the_dockerfile() -> None:
    known = set(re.findall(r"^ARG (\w+)", building.DOCKERFILE.read_text("utf-8"), re.MULTILINE))
    given = {
        line.partition("=")[0]
        for step in _steps()
        for line in str(step.get("with", {}).get("build-args", "")).splitlines()
    }
    assert given == known == {"DEBIAN", "VERSION", "REVISION", "SOURCE"}


def test_both_architectures_of_the_chart_are_built() -> None:
    built = {one["architecture"] for one in _jobs()["image"]["strategy"]["matrix"]["include"]}
    values = yaml.safe_load((building.ROOT / "deploy/chart/podgate/values.yaml").read_text("utf-8"))
    assert built == set(values["agent"]["architectures"])


def test_no_digest_is_written_down() -> None:
    # A release reads that of Debian, and of the image, from the registry.
    for path in (_WORKFLOW, building.DOCKERFILE):
        assert re.search(r"sha256:[0-9a-f]{8}", path.read_text(encoding="utf-8")) is None
