"""Sources by name: units, hostNetwork pods, addresses."""

import ipaddress
import pathlib

import pytest

from agent.kube.objects import ApiPod, ApiPodSpec, ObjectMetadata
from agent.kube.saved_pods import SavedPods
from agent.operate.explain import facts
from agent.operate.explain.pods import NamedPods, PodNotFoundError
from agent.operate.explain.sources import SourceError, SourceName, Sources

UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
NODE, POD = ipaddress.ip_address("198.18.0.1"), ipaddress.ip_address("198.18.1.1")


def pod(name: str, uid: str, *, host_network: bool) -> ApiPod:
    metadata = ObjectMetadata(name=name, namespace="kube-system", uid=uid)
    return ApiPod(metadata=metadata, spec=ApiPodSpec(host_network=host_network))


@pytest.fixture
def sources(tmp_path: pathlib.Path) -> Sources:
    (tmp_path / "system.slice" / "backup.service").mkdir(parents=True)
    (tmp_path / "kubepods" / "besteffort" / f"pod{UID}").mkdir(parents=True)
    pods = [pod("agent", UID, host_network=True), pod("web", "other", host_network=False)]
    return Sources(
        NamedPods(None, SavedPods(node_name="node", pods=pods)),
        own_addresses=frozenset({NODE}),
        owners={POD: 7},
        root=tmp_path,
        path_of=lambda number: _paths(tmp_path)[number],
    )


def _paths(root: pathlib.Path) -> dict[int, str]:
    return {path.stat().st_ino: f"/{path.relative_to(root)}" for path in root.rglob("*")}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("unit:backup.service", "/system.slice/backup.service"),
        ("cgroup:/system.slice/", "/system.slice"),
        ("pod:kube-system/agent", f"/kubepods/besteffort/pod{UID}"),
    ],
)
def test_source_of_the_host_has_its_cgroup_and_those_above(
    sources: Sources, tmp_path: pathlib.Path, name: str, path: str
) -> None:
    found = sources.find(SourceName.parse(name))
    assert found.origin == facts.HOST
    assert found.cgroup is not None
    assert found.cgroup.path == path
    assert found.cgroup.id == (tmp_path / path[1:]).stat().st_ino
    assert len(found.cgroup.ancestors) == path.count("/") + 1


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("pod:web", facts.POD),
        ("ip:198.18.1.1", facts.POD),
        ("ip:198.18.0.1", facts.HOST),
        ("ip:127.0.0.1", facts.HOST),
        ("ip:192.0.2.1", facts.OUTSIDE),
        ("kernel", facts.KERNEL),
    ],
)
def test_origin_of_a_source(sources: Sources, name: str, origin: str) -> None:
    assert sources.find(SourceName.parse(name)).origin == origin


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unit:missing.service", "has no cgroup: does it run?"),
        ("cgroup:/missing", "does not exist below"),
        ("pid:4194305", "process 4194305 does not exist"),
        ("pod:missing", "no pod missing is known on this node"),
    ],
)
def test_missing_source_is_one_sentence(sources: Sources, name: str, words: str) -> None:
    with pytest.raises((SourceError, PodNotFoundError), match=words.replace("?", r"\?")):
        sources.find(SourceName.parse(name))
