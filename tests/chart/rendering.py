"""deploy/chart/podgate, rendered: as texts, and as objects."""

import copy
import functools
import pathlib
from collections.abc import Collection
from typing import Any

import yaml

from agent import VERSION
from tests.chart.template import Templates

Json = dict[str, Any]

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart" / "podgate"
NOTES = "NOTES.txt"


def default_values() -> Json:
    found: Json = yaml.load((CHART / "values.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return found


def with_values(overrides: Json) -> Json:
    """The chart's values with others, as Helm merges them: lists are replaced."""
    return _merged(default_values(), overrides)


def texts(
    overrides: Json | None = None,
    *,
    namespace: str = "podgate",
    service: str = "Helm",
    served: Collection[str] = (),
) -> dict[str, str]:
    """The rendered files by name, without empty ones.

    service: what manages the objects, which is in a label; served: kinds of the API server, which
    the chart looks for, with group and version.
    """
    root = {
        "Values": with_values(overrides or {}),
        "Release": {"Name": "podgate", "Namespace": namespace, "Service": service},
        "Chart": {"Name": "podgate", "Version": VERSION, "AppVersion": VERSION},
        "Capabilities": {"APIVersions": {"Has": lambda name: name in served}},
        "Files": {"Get": _file, "Glob": _files},
    }
    made = {name: _templates().render(name, root) for name in _names()}
    return {name: text.strip("\n") + "\n" for name, text in made.items() if text.strip()}


def objects(
    overrides: Json | None = None,
    *,
    namespace: str = "podgate",
    service: str = "Helm",
    served: Collection[str] = (),
) -> list[Json]:
    """As `texts`: all objects, in the order of the files' names."""
    found = texts(overrides, namespace=namespace, service=service, served=served)
    return [
        thing
        for name, text in found.items()
        if name != NOTES
        for thing in yaml.load_all(text, yaml.CSafeLoader)
        if thing
    ]


@functools.cache
def _templates() -> Templates:
    templates = Templates()
    for path in sorted((CHART / "templates").iterdir()):
        templates.add(path.name, path.read_text(encoding="utf-8"))
    return templates


def _names() -> list[str]:
    paths = (CHART / "templates").iterdir()
    return sorted(path.name for path in paths if not path.name.startswith("_"))


def _file(name: str) -> str:
    return (CHART / name).read_text(encoding="utf-8")


def _files(pattern: str) -> dict[str, str]:
    found = {str(path.relative_to(CHART)): path for path in CHART.glob(pattern)}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items()}


def _merged(one: Json, other: Json) -> Json:
    made = copy.deepcopy(one)
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(made.get(key), dict):
            made[key] = _merged(made[key], value)
        else:
            made[key] = copy.deepcopy(value)
    return made
