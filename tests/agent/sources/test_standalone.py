"""The pods of a kubelet without an API server: joined with sandboxes, saved, and confirmed."""

import asyncio
import pathlib

import msgspec
import pytest

from agent import labels
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import KUBELET
from agent.pods.conditions import Conditions
from agent.pods.pod_modes import NODE, PodModes
from agent.pods.store import PodStore
from agent.settings import Settings
from agent.sources.standalone import StandalonePods, StandaloneSource
from bpf.verdicts import Mode
from tests.agent.kube.apiserver import pod
from tests.agent.sources.test_cluster import NETNS, SANDBOX


def made(directory: pathlib.Path) -> tuple[StandaloneSource, PodStore]:
    """With a runtime that has `SANDBOX`."""
    settings = Settings(
        is_standalone=True,
        run_directory=directory,
        cri_socket=directory / "no-runtime.sock",
        nri_socket=None,
    )
    store = PodStore(Conditions())
    source = StandaloneSource(settings, store, PodModes(Mode.ENFORCE, pods_decide=True))
    source.sandboxes.current = {"uid-web": SANDBOX}
    source.sandboxes.relists = 2
    source.sandboxes.problem = ""
    return source, store


def static(mode: str = "") -> ApiPod:
    thing = pod("web")
    thing["metadata"]["labels"] = {labels.MODE_LABEL: mode} if mode else {}
    return msgspec.convert(thing, ApiPod)


async def test_kubelets_pod_and_its_sandbox_are_joined(tmp_path: pathlib.Path) -> None:
    source, store = made(tmp_path)
    source.start()
    source.pods.set_pod(KUBELET, static())
    source.start()
    assert store.pods["uid-web"].pod.netns_path == NETNS.path
    assert store.pods["uid-web"].pod.mode is Mode.ENFORCE


@pytest.mark.parametrize(("label", "mode"), [("off", Mode.OFF), ("strict", Mode.STRICT)])
async def test_label_of_a_static_pod_decides(
    tmp_path: pathlib.Path, label: str, mode: Mode
) -> None:
    source, store = made(tmp_path)
    source.pods.set_pod(KUBELET, static(label))
    source.start()
    assert store.pods["uid-web"].pod.mode is mode


async def test_next_agent_has_the_pods_while_the_kubelet_is_away(tmp_path: pathlib.Path) -> None:
    source, _ = made(tmp_path)
    source.pods.set_pod(KUBELET, static("strict"))
    await source.pods.saver.save()
    following, store = made(tmp_path)
    following.kubelet_pods.problem = "connection refused"
    following.kubelet_pods.answered.set()
    following.start()
    assert store.pods["uid-web"].pod.mode is Mode.STRICT
    assert store.pods["uid-web"].pod.has_spec
    assert following.unready_reason is None
    (problem,) = following.status().problems
    assert problem.text == "The kubelet's pods API does not respond: connection refused"


async def test_agent_that_has_never_had_a_list_is_not_ready(tmp_path: pathlib.Path) -> None:
    source, _ = made(tmp_path)
    source.start()
    assert source.unready_reason == "kubelet has not listed its pods yet"
    source.kubelet_pods.problem = "connection refused"
    source.kubelet_pods.answered.set()
    reason = source.unready_reason
    assert reason == "The kubelet's pods API does not respond: connection refused"
    source.kubelet_pods.is_listed = True
    source.start()
    assert source.unready_reason is None


async def test_saved_pod_that_the_kubelet_has_no_more_is_gone_once_its_list_is_complete(
    tmp_path: pathlib.Path,
) -> None:
    saved = StandalonePods(PodModes(Mode.AUDIT), tmp_path / "pods.json")
    saved.set_pod(KUBELET, static())
    await saved.saver.save()
    restored = StandalonePods(PodModes(Mode.AUDIT), tmp_path / "pods.json")
    restored.restore()
    assert set(restored.current) == {"uid-web"}
    restored.complete_kubelet_list()
    assert not restored.current


async def test_state_of_a_cluster_is_not_used(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pods.json"
    file.write_text('{"node_name": "node1", "pods": [], "kubelet": []}')
    restored = StandalonePods(PodModes(Mode.AUDIT), file)
    restored.restore()
    assert not restored.is_synced


@pytest.mark.parametrize("name", [NODE, SANDBOX.pod_namespace, "other"])
async def test_sandbox_without_a_pod_follows_the_modes_of_node_and_namespace(
    tmp_path: pathlib.Path, name: str
) -> None:
    source, _ = made(tmp_path)
    source.start()
    following = asyncio.create_task(source._follow_modes())
    source._changed_modes.mark(name)
    await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert source._changed.take() == ([] if name == "other" else ["uid-web"])


async def test_pod_follows_the_modes_of_node_and_namespace(tmp_path: pathlib.Path) -> None:
    modes = PodModes(Mode.AUDIT)
    settings = Settings(is_standalone=True, run_directory=tmp_path, nri_socket=None)
    source = StandaloneSource(settings, PodStore(Conditions()), modes)
    source.sandboxes.current = {}
    source.pods.set_pod(KUBELET, static())
    following = asyncio.create_task(source._follow_modes())
    found = []
    for namespace, mode in (
        ("other", "strict"),
        ("default", "strict"),
        ("default", ""),
        ("", "off"),
    ):
        given = {labels.MODE_LABEL: mode} if mode else {}
        if namespace:
            modes.set_namespace(namespace, given)
        else:
            modes.set_node(given)
        await asyncio.sleep(0.01)
        found.append(source.pods.current["uid-web"].mode)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert found == [Mode.AUDIT, Mode.STRICT, Mode.AUDIT, Mode.OFF]
