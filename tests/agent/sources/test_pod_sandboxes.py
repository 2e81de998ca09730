"""Joining pods and sandboxes."""

import msgspec

from agent import labels
from agent.cri.models import Sandbox
from agent.kubelet.admitted_ports import kubelet_rules
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod, Problem
from agent.pods.pod_modes import PodModes
from agent.pods.store import PodStore
from agent.sources.pod_sandboxes import PodSandboxJoin
from bpf.verdicts import Mode
from probes.netns import Netns

_POD = Pod(uid="u1", namespace="shop", name="web", mode=Mode.ENFORCE, labels={"app": "web"})
_SANDBOX = Sandbox(
    id="s1",
    pod_uid="u1",
    pod_name="web",
    pod_namespace="shop",
    attempt=0,
    created=None,
    is_ready=True,
    netns=Netns("/run/netns/one", 4, 100),
)
_SECOND = msgspec.structs.replace(
    _SANDBOX, id="s2", attempt=1, netns=Netns("/run/netns/two", 4, 101)
)


class _Store(PodStore):
    def __init__(self) -> None:
        super().__init__(Conditions())
        self.published: list[Pod] = []
        self.forgotten: list[str] = []

    def set_pod(self, pod: Pod) -> None:
        super().set_pod(pod)
        self.published.append(pod)

    def remove_pod(self, uid: str) -> None:
        super().remove_pod(uid)
        self.forgotten.append(uid)


class _Published:
    def __init__(self) -> None:
        store = _Store()
        self.pods = store.published
        self.removed = store.forgotten
        self.modes = PodModes(Mode.AUDIT)
        self._join = PodSandboxJoin(store, self.modes)
        self._pods: dict[str, Pod] = {}
        self._sandboxes: dict[str, Sandbox] = {}

    def set_pod(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod
        self._update(pod.uid)

    def remove_pod(self, uid: str) -> None:
        del self._pods[uid]
        self._update(uid)

    def set_sandbox(self, sandbox: Sandbox) -> None:
        self._sandboxes[sandbox.pod_uid] = sandbox
        self._update(sandbox.pod_uid)

    def remove_sandbox(self, sandbox: Sandbox) -> None:
        del self._sandboxes[sandbox.pod_uid]
        self._update(sandbox.pod_uid)

    def label_namespace(self, mode: str) -> None:
        self.modes.set_namespace(_POD.namespace, {labels.MODE_LABEL: mode})
        self._update(_POD.uid)

    def _update(self, uid: str) -> None:
        self._join.update(uid, self._pods.get(uid), self._sandboxes.get(uid))


def test_pod_has_the_path_of_its_sandbox() -> None:
    published = _Published()
    published.set_sandbox(_SANDBOX)
    published.set_pod(_POD)

    assert published.pods[-1] == msgspec.structs.replace(_POD, netns_path="/run/netns/one")


def test_pod_without_a_sandbox_has_a_problem() -> None:
    published = _Published()
    published.set_pod(_POD)

    [pod] = published.pods
    assert pod.netns_path is None
    assert pod.manifest_problem is not None
    assert pod.manifest_problem.reason == "SandboxMissing"


def test_missing_namespace_is_added_to_the_pods_own_problem() -> None:
    published = _Published()
    published.set_sandbox(msgspec.structs.replace(_SANDBOX, netns=None, problem="It is nowhere."))
    published.set_pod(_POD)
    assert published.pods[-1].manifest_problem == Problem("NetnsNotFound", "It is nowhere.")

    wrong = Problem("InvalidLabel", "The label is wrong.")
    published.set_pod(msgspec.structs.replace(_POD, manifest_problem=wrong))
    assert published.pods[-1].manifest_problem == Problem(
        "InvalidLabel", "The label is wrong. It is nowhere."
    )


def test_second_sandbox_becomes_current() -> None:
    published = _Published()
    published.set_pod(_POD)
    published.set_sandbox(_SANDBOX)
    published.set_sandbox(_SECOND)

    assert [pod.netns_path for pod in published.pods] == [None, "/run/netns/one", "/run/netns/two"]
    assert not published.removed


def test_unchanged_pod_is_not_published() -> None:
    published = _Published()
    published.set_pod(_POD)
    published.set_sandbox(_SANDBOX)
    before = len(published.pods)
    published.set_pod(msgspec.structs.replace(_POD))
    published.set_sandbox(msgspec.structs.replace(_SANDBOX, is_ready=False))

    assert len(published.pods) == before


def test_sandbox_without_a_pod_is_gated_and_open_to_the_kubelet() -> None:
    published = _Published()
    published.set_sandbox(_SANDBOX)

    [pod] = published.pods
    assert (pod.full_name, pod.mode, pod.netns_path) == ("shop/web", Mode.AUDIT, "/run/netns/one")
    [rule] = kubelet_rules(pod.spec)
    assert rule.first_port == 0  # any


def test_sandbox_without_a_pod_has_the_mode_of_its_namespace() -> None:
    """Before the API has the pod, and where podgate-cni gated it in that mode."""
    published = _Published()
    published.label_namespace("enforce")
    published.set_sandbox(_SANDBOX)
    assert [pod.mode for pod in published.pods] == [Mode.ENFORCE]
    published.label_namespace("strict")
    assert published.pods[-1].mode is Mode.STRICT


def test_sandbox_before_its_pod_does_not_cost_the_last_label() -> None:
    """As after a restart, when the runtime responds before the API server."""
    published = _Published()
    published.modes.of_pod("u1", "shop", {labels.MODE_LABEL: "enforce"})
    published.set_sandbox(_SANDBOX)
    assert published.pods[-1].mode is Mode.ENFORCE
    found = published.modes.of_pod("u1", "shop", {labels.MODE_LABEL: "enfroce"})
    assert found.mode is Mode.ENFORCE


def test_deleted_pod_follows_labels_and_ceiling_while_its_sandbox_exists() -> None:
    published = _Published()
    published.set_pod(_POD)
    published.set_sandbox(_SANDBOX)
    published.remove_pod("u1")
    published.label_namespace("strict")
    published.modes.set_node({labels.MAX_MODE_LABEL: "off"})
    published.set_sandbox(_SANDBOX)
    assert [pod.mode for pod in published.pods[-2:]] == [Mode.STRICT, Mode.OFF]


def test_deleted_pod_stays_while_its_sandbox_exists() -> None:
    published = _Published()
    published.label_namespace("enforce")
    published.set_pod(_POD)
    published.set_sandbox(_SANDBOX)
    published.remove_pod("u1")
    assert not published.removed
    published.set_sandbox(_SECOND)
    assert published.pods[-1] == msgspec.structs.replace(
        _POD, netns_path="/run/netns/two", is_deleting=True
    )

    published.remove_sandbox(_SECOND)
    assert published.removed == ["u1"]
    published.set_sandbox(_SANDBOX)
    assert published.pods[-1].labels == {}  # nothing of it was kept


def test_pod_stays_while_its_sandbox_is_replaced() -> None:
    published = _Published()
    published.set_pod(_POD)
    published.set_sandbox(_SANDBOX)
    published.remove_sandbox(_SANDBOX)
    assert published.pods[-1].netns_path is None

    published.remove_pod("u1")
    assert published.removed == ["u1"]


def test_host_network_pods_need_no_namespace() -> None:
    published = _Published()
    published.set_pod(msgspec.structs.replace(_POD, host_network=True))
    assert published.pods[-1].manifest_problem is None

    published.set_sandbox(
        msgspec.structs.replace(_SANDBOX, pod_uid="u2", host_network=True, netns=None)
    )
    assert (published.pods[-1].host_network, published.pods[-1].netns_path) == (True, None)
