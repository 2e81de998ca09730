"""Sources by name: units, hostNetwork pods, addresses."""

import ipaddress
import pathlib
import re
from collections.abc import Iterator

import pytest

from agent.kube.objects import ApiPod, ApiPodSpec, ObjectMetadata
from agent.kube.saved_pods import SavedPods
from agent.linux.procfs import Procfs
from agent.operate.explain import facts
from agent.operate.explain.pods import NamedPods, PodNotFoundError
from agent.operate.explain.sources import SourceError, SourceName, Sources
from bpf.rule_evaluation import ROOT_CGROUP, Cgroup

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


FORMS = "use one of pid:VALUE, cgroup:VALUE, unit:VALUE, pod:VALUE, ip:VALUE, or kernel"


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("kernel", "kernel", ""),
        ("pid:17", "pid", "17"),
        ("cgroup:/", "cgroup", "/"),
        ("unit:a.service", "unit", "a.service"),
        ("pod:shop/web", "pod", "shop/web"),
        ("ip:fd00::1", "ip", "fd00::1"),
    ],
)
def test_source_is_a_kind_and_its_value(text: str, kind: str, value: str) -> None:
    assert SourceName.parse(text) == SourceName(kind, value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", f"'' is no source; {FORMS}"),
        ("unit:", f"'unit:' is no source; {FORMS}"),
        ("a.service", f"'a.service' is no source; {FORMS}"),
        ("kernel:1", f"'kernel:1' is no source; {FORMS}"),
        ("pid:curl", "'curl' is no process id; use its number, as in pid:4711"),
        (
            "cgroup:system.slice",
            "'system.slice' is no cgroup; use its path from the root, as in /proc/PID/cgroup",
        ),
        ("ip:198.18.0", "'198.18.0' is no IP address"),
    ],
)
def test_mistake_in_a_source_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        SourceName.parse(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kernel", "the host kernel"),
        ("unit:backup.service", "unit backup.service"),
        ("cgroup:/system.slice/", "a process in cgroup /system.slice"),
        ("cgroup:/", "a process in cgroup /"),
        ("pod:agent", "hostNetwork pod kube-system/agent"),
        ("pod:web", "pod kube-system/web"),
        ("ip:198.18.1.1", "the pod with 198.18.1.1"),
        ("ip:127.0.0.1", "a host process without a rule of its own (127.0.0.1 is the node's)"),
        ("ip:192.0.2.1", "192.0.2.1"),
    ],
)
def test_source_in_words(sources: Sources, name: str, text: str) -> None:
    assert sources.find(SourceName.parse(name)).text == text


def test_host_process_that_only_an_address_names_is_in_no_cgroup_of_a_rule(
    sources: Sources,
) -> None:
    found = sources.find(SourceName.parse("ip:198.18.0.1")).cgroup
    assert found == Cgroup((1 << 64) - 1, "", (ROOT_CGROUP,))


def test_own_process_is_in_its_cgroup(tmp_path: pathlib.Path) -> None:
    own = OwnProcess()
    (tmp_path / "a").mkdir()
    made = Sources(
        NamedPods(None, None), own_addresses=frozenset(), owners={}, procfs=own, root=tmp_path
    )
    found = made.find(SourceName.parse("pid:17"))
    assert (found.origin, found.text) == (facts.HOST, "curl (pid 17) in cgroup /a")
    assert found.cgroup is not None
    assert found.cgroup.ancestors == (tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino)
    found = made.find(SourceName.parse("pid:18"))
    text = "curl (pid 18), in another network namespace than the host's"
    assert (found.origin, found.text, found.cgroup) == (facts.POD, text, None)
    for pid in (19, 20):
        with pytest.raises(SourceError, match=f"process {pid} does not exist, or its namespace"):
            made.find(SourceName.parse(f"pid:{pid}"))


def test_pod_is_found_by_its_process_below_an_unusual_cgroup_root(tmp_path: pathlib.Path) -> None:
    path = f"/x/y/kubepods/besteffort/pod{UID}"
    (tmp_path / path[1:]).mkdir(parents=True)
    pods = SavedPods(node_name="node", pods=[pod("agent", UID, host_network=True)])
    found = Sources(
        NamedPods(None, pods),
        own_addresses=frozenset(),
        owners={},
        procfs=PodProcess(),
        root=tmp_path,
        path_of=lambda number: _paths(tmp_path)[number],
    ).find(SourceName.parse("pod:agent"))
    assert found.cgroup is not None
    assert found.cgroup.path == path


class PodProcess(Procfs):
    """One process, in a container of the pod."""

    def pids(self) -> Iterator[int]:
        yield 17

    def cgroup(self, pid: int | str) -> str | None:
        return f"/x/y/kubepods/besteffort/pod{UID}/container"


class OwnProcess(Procfs):
    """Process 17 is the host's and 18 a pod's; of others one fact is missing."""

    def namespace(self, pid: int | str, kind: str) -> str | None:
        return {"17": "net:[1]", "self": "net:[1]", "18": "net:[2]", "19": "net:[1]"}.get(str(pid))

    def cgroup(self, pid: int | str) -> str | None:
        return None if pid == 19 else "/a"

    def name(self, pid: int) -> str:
        return "curl"
