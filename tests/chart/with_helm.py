"""Helm itself, by `make test-chart HELM=PATH`: it renders as our renderer does.

`python -m tests.chart.with_helm PATH` records its answers for tests/chart/test_template.py.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart import examples, rendering
from tests.chart.rendering import CHART, Json
from tests.chart.test_template import CASES, OTHER, RECORDED, case_values

_HELM = "PODGATE_TEST_HELM"


def helm(*arguments: str) -> str:
    done = subprocess.run(
        [os.environ[_HELM], *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _template(chart: pathlib.Path, values: Json, directory: pathlib.Path, *options: str) -> str:
    path = directory / "values.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    # The oldest Kubernetes that the chart is for.
    named = ("--namespace=elsewhere", "--kube-version=1.30.0", f"--values={path}")
    return helm("template", "podgate", str(chart), *named, *options)


def _sorted(things: Iterator[Any]) -> list[Json]:
    return sorted(
        filter(None, things), key=lambda thing: (thing["kind"], thing["metadata"]["name"])
    )


@pytest.mark.parametrize("name", examples.VALUES)
def test_helm_renders_the_same_objects(name: str, tmp_path: pathlib.Path) -> None:
    overrides = examples.VALUES[name]
    ours = _sorted(iter(rendering.objects(overrides, namespace="elsewhere")))
    assert _sorted(yaml.safe_load_all(_template(CHART, overrides, tmp_path))) == ours


@pytest.mark.parametrize("name", examples.VALUES)
def test_helm_prints_the_same_notes(name: str, tmp_path: pathlib.Path) -> None:
    # `helm template` leaves them out, and `helm install` needs a cluster.
    overrides = examples.VALUES[name]
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    notes = (chart / "templates" / rendering.NOTES).read_text(encoding="utf-8")
    (chart / "templates" / "shown.yaml").write_text(_as_json(notes), encoding="utf-8")
    answer = _template(chart, overrides, tmp_path, "--show-only=templates/shown.yaml")
    ours = rendering.texts(overrides, namespace="elsewhere")[rendering.NOTES]
    assert yaml.safe_load(answer)["text"].strip("\n") == ours.strip("\n")


@pytest.mark.parametrize("name", examples.VALUES)
def test_helm_finds_no_problem_in_the_chart(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(examples.VALUES[name]), encoding="utf-8")
    helm("lint", "--strict", str(CHART), f"--values={path}")


@pytest.mark.parametrize("setting", ["mode=enfroce", "imge.tag=1", "image.digest=sha256:1"])
def test_helm_rejects_wrong_values(setting: str) -> None:
    with pytest.raises(AssertionError, match="values don't meet the specifications"):
        helm("template", "podgate", str(CHART), "--kube-version=1.30.0", f"--set={setting}")


def test_recorded_answers_are_those_of_this_helm() -> None:
    assert _answers() == json.loads(RECORDED.read_text(encoding="utf-8"))


def _answers() -> dict[str, str]:
    """What Helm renders of each case."""
    with tempfile.TemporaryDirectory() as made:
        chart = pathlib.Path(made, "chart")
        (chart / "templates").mkdir(parents=True)
        (chart / "Chart.yaml").write_text("{apiVersion: v2, name: cases, version: 0.1.0}")
        found = {}
        for name, text in CASES.items():
            (chart / "templates" / "case.yaml").write_text(_as_json(text) + OTHER)
            answer = _template(chart, case_values(), pathlib.Path(made))
            found[name] = yaml.safe_load(answer)["text"]
        return found


def _as_json(text: str) -> str:
    """A template that renders a text as one JSON string, which Helm's parser of YAML keeps."""
    shown = 'text: {{ include "shown" . | toJson }}\n'
    return shown + f'{{{{- define "shown" }}}}{text}{{{{- end }}}}'


if __name__ == "__main__":
    os.environ[_HELM] = sys.argv[1]
    RECORDED.write_text(json.dumps(_answers(), indent=1) + "\n", encoding="utf-8")
