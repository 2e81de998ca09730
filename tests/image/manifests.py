"""deploy/manifests, as they are applied."""

import copy
import functools
import pathlib
from typing import Any

import yaml

Json = dict[str, Any]

DIRECTORY = pathlib.Path(__file__).parents[2] / "deploy" / "manifests"


def applied() -> list[Json]:
    """All objects, in the order of the kustomization."""
    (listed,) = read("kustomization.yaml")
    return [thing for name in listed["resources"] for thing in read(name)]


def read(name: str) -> list[Json]:
    """All objects of a file."""
    return copy.deepcopy(_read(name))


@functools.cache
def _read(name: str) -> list[Json]:
    text = (DIRECTORY / name).read_text(encoding="utf-8")
    return list(yaml.load_all(text, yaml.CSafeLoader))


def of_kind(kind: str, name: str = "podgate") -> Json:
    """One object; by default the agent's."""
    (found,) = (
        thing for thing in applied() if thing["kind"] == kind and thing["metadata"]["name"] == name
    )
    return found


def agent_pod(name: str) -> Json:
    """A pod of the DaemonSet, as its controller makes it."""
    daemon_set = of_kind("DaemonSet")
    template = copy.deepcopy(daemon_set["spec"]["template"])
    template["metadata"] |= {
        "name": name,
        "namespace": daemon_set["metadata"]["namespace"],
        "uid": f"uid-{name}",
    }
    return {"apiVersion": "v1", "kind": "Pod", **template}
