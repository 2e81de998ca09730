"""What a node with a container runtime has of each pod: containers, end, problems."""

import datetime
import pathlib
from typing import Any

import msgspec
import pytest

from agent.admin.report import PodSourceStatus, SourceProblem
from agent.cri.models import CriContainer, CriContainerState
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import API, KUBELET
from agent.pods.conditions import Conditions
from agent.pods.container_runs import ContainerRun, PodContainers
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.settings import Settings
from agent.sources.standalone import StandaloneSource
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import pod
from tests.agent.sources.test_cluster import SANDBOX
from tests.agent.sources.test_standalone import made

AT = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def web(phase: str = "Running", **status: Any) -> ApiPod:
    thing = pod("web")
    thing["status"] = {"phase": phase, **status}
    return msgspec.convert(thing, ApiPod)


def container(name: str, state: CriContainerState, **more: Any) -> CriContainer:
    return CriContainer(
        id=f"id-{name}",
        sandbox_id="one",
        name=name,
        attempt=0,
        state=state,
        created=AT,
        **more,
    )


@pytest.fixture
async def source(tmp_path: pathlib.Path) -> StandaloneSource:
    return made(tmp_path)[0]


async def test_containers_are_the_runtimes_with_what_only_the_kubelet_has(
    source: StandaloneSource,
) -> None:
    running, exited = CriContainerState.RUNNING, CriContainerState.EXITED
    source.sandboxes.containers = {
        "uid-web": (
            container("app", running, started=AT),
            container("side", exited, started=AT),
            container("again", running),
            container("new", CriContainerState.CREATED),
        )
    }
    source.pods.set_pod(
        KUBELET,
        web(
            containerStatuses=[
                {"name": "app", "containerID": "containerd://id-app", "started": True},
                {"name": "again", "containerID": "containerd://before", "started": True},
            ],
            initContainerStatuses=[
                {"name": "side", "containerID": "containerd://id-side", "started": False}
            ],
        ),
    )
    at = AT.timestamp()
    assert source.containers_of("uid-web") == PodContainers(
        containers={
            "app": ContainerRun("id-app", at, True, True),
            "side": ContainerRun("id-side", at, False, False),
            "again": ContainerRun("id-again", 0.0, True, None),
            "new": ContainerRun("id-new", 0.0, False, None),
        }
    )


async def test_containers_of_a_pod_that_only_the_runtime_has_are_restartable(
    source: StandaloneSource,
) -> None:
    app = container("app", CriContainerState.RUNNING)
    source.sandboxes.containers = {"uid-web": (app,)}
    assert source.containers_of("uid-web") == PodContainers(
        containers={"app": ContainerRun("id-app", 0.0, True, None)}
    )
    assert source.containers_of("uid-other") == PodContainers()


@pytest.mark.parametrize("policy", ["Always", "OnFailure", "Never"])
@pytest.mark.parametrize("is_deleting", [False, True])
async def test_containers_are_started_again_unless_the_pod_forbids_it(
    source: StandaloneSource, policy: str, *, is_deleting: bool
) -> None:
    thing = pod("web", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if is_deleting else {}))
    thing["spec"]["restartPolicy"] = policy
    source.pods.set_pod(KUBELET, msgspec.convert(thing, ApiPod))
    assert source.containers_of("uid-web") == PodContainers(
        is_restartable=policy != "Never", is_deleting=is_deleting
    )


@pytest.mark.parametrize(
    ("phases", "has_ended"),
    [
        ({}, True),
        ({KUBELET: "Running"}, False),
        ({KUBELET: "Pending"}, False),
        ({KUBELET: "Succeeded"}, True),
        ({KUBELET: "Failed"}, True),
        ({API: "Succeeded"}, True),
        ({API: "Running"}, False),
        ({API: "Succeeded", KUBELET: "Running"}, True),
        ({API: "Running", KUBELET: "Failed"}, True),
        ({API: "Running", KUBELET: "Running"}, False),
    ],
    ids=str,
)
async def test_pod_has_ended_where_one_of_its_origins_reports_it(
    source: StandaloneSource, phases: dict[str, str], *, has_ended: bool
) -> None:
    for origin, phase in phases.items():
        source.pods.set_pod(origin, web(phase))
    assert source.has_ended("uid-web") is has_ended


@pytest.mark.parametrize("name", ["nri.sock", None])
async def test_nri_is_used_where_it_has_a_socket(tmp_path: pathlib.Path, name: str | None) -> None:
    settings = Settings(
        is_standalone=True, run_directory=tmp_path, nri_socket=tmp_path / name if name else None
    )
    made = StandaloneSource(settings, PodStore(Conditions()), PodModes(Mode.AUDIT))
    assert (made.nri is not None) == (name is not None)
    made.sandboxes.problem = ""
    if made.nri:
        made.nri.problem = "NRI is disabled."
        found = SourceProblem(part="nri", text="NRI is disabled.")
        assert made.runtime_problems() == [found]
        made.sandboxes.problem = "connection refused"
        assert [one.part for one in made.runtime_problems()] == ["runtime"]


async def test_sandbox_is_awaited_of_pods_that_start(source: StandaloneSource) -> None:
    def awaits(thing: dict[str, Any]) -> bool:
        source.pods.set_pod(KUBELET, msgspec.convert(thing, ApiPod))
        return source._awaits_sandbox()

    assert not awaits(pod("web"))
    source.sandboxes.current = {}
    assert awaits(pod("web"))
    assert not awaits(pod("web", deletionTimestamp="2026-01-01T00:00:00Z"))
    assert not awaits({**pod("web"), "status": {"phase": "Succeeded"}})
    host = pod("web")
    host["spec"]["hostNetwork"] = True
    assert not awaits(host)


async def test_state_of_the_runtime_is_in_the_sources(
    tmp_path: pathlib.Path, source: StandaloneSource
) -> None:
    source.sandboxes.listed_at = 12.5
    assert source.read_at == 12.5
    assert [(one.name, one.samples[0].value) for one in source.collect()] == [
        ("podgate_sandboxes", 1.0)
    ]
    text = "kubelet without an API server; 1 sandboxes"
    assert source.status() == PodSourceStatus(pods_from=text, problems=[])
    source.sandboxes.problem = "connection refused"
    runtime = SourceProblem(part="runtime", text="Container runtime: connection refused")
    assert source.status() == PodSourceStatus(pods_from=text, problems=[runtime])
    source.kubelet_pods.problem = "no socket"
    kubelet = SourceProblem(
        part="kubelet", text="The kubelet's pods API does not respond: no socket"
    )
    assert source.status() == PodSourceStatus(pods_from=text, problems=[kubelet, runtime])


async def test_source_is_ready_once_all_sandboxes_are_listed_and_read(
    source: StandaloneSource,
) -> None:
    def reason() -> str | None:
        return source.runtime_unready_reason

    source.start()
    assert reason() is None
    source.sandboxes.changes.mark("uid-web")
    assert reason() == "pods that changed are being read"
    source.sandboxes.relists = 0
    assert reason() == "initial sandbox list not finished"
    source.sandboxes.problem = "connection refused"
    assert reason() == "connection refused"
    source.sandboxes.relists, source.sandboxes.problem = 2, ""
    source.start()
    assert reason() is None


async def test_pod_that_the_kubelet_has_deleted_leaves_the_store_with_its_sandbox(
    tmp_path: pathlib.Path,
) -> None:
    source, store = made(tmp_path)
    source.pods.set_pod(KUBELET, web())
    source.start()
    source.pods.remove_pod(KUBELET, "uid-web")
    source.start()
    assert store.pods["uid-web"].pod.is_deleting
    source.sandboxes.current = {}
    source.sandboxes.changes.mark("uid-web")
    source.start()
    assert store.get("uid-web") is None


async def test_namespace_of_a_sandbox_is_in_the_store_as_soon_as_it_is_added(
    tmp_path: pathlib.Path,
) -> None:
    source, store = made(tmp_path)
    source.sandboxes.changes.mark("uid-web")
    source.start()
    assert SANDBOX.netns is not None
    assert store.pods["uid-web"].pod.netns_path == SANDBOX.netns.path
    assert not store.pods["uid-web"].pod.has_spec
