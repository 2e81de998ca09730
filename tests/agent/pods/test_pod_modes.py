"""Labels as they change: what follows for pods, and what stays."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest

from agent import labels as agent_labels
from agent.pods.modes import INVALID, INVALID_CEILING, LEFT, Labels
from agent.pods.pod_modes import NODE, NewPodModes, PodModes
from bpf.verdicts import Mode

pytestmark = pytest.mark.looptime


def labels(mode: str | None = None, **more: str) -> dict[str, str]:
    found = {f"podgate.io/{name.replace('_', '-')}": text for name, text in more.items()}
    return found if mode is None else {agent_labels.MODE_LABEL: mode, **found}


def reasons(modes: PodModes, pod: str | None = None) -> list[str]:
    return [problem.reason for problem in modes.of_pod("u1", "shop", labels(pod)).problems]


@pytest.fixture
def modes() -> PodModes:
    return PodModes(Mode.AUDIT)


def test_namespace_decides_for_its_pods_alone(modes: PodModes) -> None:
    modes.set_namespace("shop", labels("enforce"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE
    assert modes.of_pod("u2", "other", {}).mode is Mode.AUDIT
    modes.set_namespace("shop", {})
    assert modes.of_pod("u1", "shop", {}).mode is Mode.AUDIT


def test_a_pod_needs_its_namespaces_consent_to_be_less_strict(modes: PodModes) -> None:
    modes.set_namespace("shop", labels("enforce"))
    assert modes.of_pod("u1", "shop", labels("off")).mode is Mode.ENFORCE
    # Its own consent is none.
    own = labels("off", mode_override="allowed")
    assert modes.of_pod("u1", "shop", own).mode is Mode.ENFORCE
    for word in ("true", "Allowed", ""):
        modes.set_namespace("shop", labels("enforce", mode_override=word))
        assert modes.of_pod("u1", "shop", labels("off")).mode is Mode.ENFORCE
    modes.set_namespace("shop", labels("enforce", mode_override="allowed"))
    assert modes.of_pod("u1", "shop", labels("off")).mode is Mode.OFF


def test_without_a_cluster_a_pods_own_label_decides_below_the_ceiling() -> None:
    modes = PodModes(Mode.ENFORCE, Mode.ENFORCE, pods_decide=True)
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE
    assert modes.of_pod("u1", "shop", labels("off")).mode is Mode.OFF
    assert modes.of_pod("u1", "shop", labels("strict")).mode is Mode.ENFORCE


def test_unreadable_label_of_a_new_pod_counts_as_none_and_never_as_off(modes: PodModes) -> None:
    modes.set_namespace("shop", labels("enforce"))
    assert modes.of_pod("u1", "shop", labels("enfroce")).mode is Mode.ENFORCE
    assert reasons(modes, "enfroce") == [INVALID]
    assert (
        PodModes(Mode.STRICT, pods_decide=True).of_pod("u1", "", labels("of")).mode is Mode.STRICT
    )


def test_label_that_becomes_unreadable_keeps_its_last_value(modes: PodModes) -> None:
    modes.set_node(labels("off", max_mode="enforce"))
    modes.set_namespace("shop", labels("strict"))
    assert modes.of_pod("u1", "other", labels("audit")).mode is Mode.AUDIT

    modes.set_node(labels("of", max_mode="enfroce"))
    modes.set_namespace("shop", labels("stritc"))
    assert modes.node.default is Mode.OFF
    assert modes.node.ceiling is Mode.ENFORCE
    assert modes.of_pod("u2", "shop", {}).mode is Mode.ENFORCE
    assert modes.of_pod("u1", "other", labels("adit")).mode is Mode.AUDIT
    # It is that label's own: another pod never had one.
    assert modes.of_pod("u3", "other", labels("adit")).mode is Mode.OFF

    modes.set_node({})
    modes.set_namespace("shop", {})
    modes.set_namespace("shop", labels("stritc"))
    assert modes.of_pod("u2", "shop", {}).mode is Mode.AUDIT


def test_last_label_counts_while_only_the_sandbox_of_a_pod_is_listed(modes: PodModes) -> None:
    assert modes.of_sandbox("u1", "shop").mode is Mode.AUDIT
    modes.of_pod("u1", "shop", labels("strict"))
    assert modes.of_sandbox("u1", "shop").mode is Mode.STRICT
    # It is the pod's still, when the API has it again.
    assert modes.of_pod("u1", "shop", labels("stritc")).mode is Mode.STRICT
    modes.set_node(labels(max_mode="enforce"))
    assert modes.of_sandbox("u1", "shop").mode is Mode.ENFORCE


def test_a_pods_label_is_forgotten_with_it(modes: PodModes) -> None:
    modes.of_pod("u1", "shop", labels("strict"))
    modes.forget("u1")
    assert modes.of_pod("u1", "shop", labels("stritc")).mode is Mode.AUDIT


def test_changes_are_marked_once(modes: PodModes) -> None:
    changes = modes.changes.subscribe()
    assert modes.set_node(labels("enforce"))
    assert modes.set_namespace("shop", labels("strict"))
    assert changes.take() == [NODE, "shop"]
    # Labels that decide nothing, and the same once more.
    assert not modes.set_node({**labels("enforce"), "zone": "a"})
    assert not modes.set_namespace("shop", {**labels("strict"), "team": "b"})
    assert not modes.set_namespace("other", {"team": "b"})
    assert not changes.take()


def test_new_pods_have_the_modes_of_their_namespaces_below_the_ceiling(modes: PodModes) -> None:
    modes.set_namespace("shop", labels("enforce"))
    modes.set_namespace("vault", labels("strict"))
    modes.set_namespace("same", labels("audit", mode_override="allowed"))
    own = {"shop": Mode.ENFORCE, "vault": Mode.STRICT}
    assert modes.of_new_pods == NewPodModes(Mode.AUDIT, own)
    modes.set_node(labels(max_mode="enforce"))
    assert modes.of_new_pods.namespaces == {"shop": Mode.ENFORCE, "vault": Mode.ENFORCE}
    modes.set_node(labels(max_mode="audit"))
    assert modes.of_new_pods == NewPodModes(Mode.AUDIT)


def test_stricter_gates_are_kept_only_until_labels_are_listed() -> None:
    modes = PodModes(Mode.AUDIT, Mode.ENFORCE, is_complete=False)
    changes = modes.changes.subscribe()
    before = modes.kept_up_to("shop")
    modes.complete()
    assert (before, modes.kept_up_to("shop")) == (Mode.ENFORCE, Mode.OFF)
    assert changes.take() == [NODE]


@contextlib.asynccontextmanager
async def running(state: pathlib.Path) -> AsyncIterator[PodModes]:
    modes = PodModes(Mode.AUDIT, state=state)
    modes.restore()
    task = asyncio.create_task(modes.run())
    await asyncio.sleep(0)
    try:
        yield modes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_last_values_survive_a_restart(tmp_path: pathlib.Path) -> None:
    state = tmp_path / "state" / "modes.json"
    async with running(state) as modes:
        modes.set_node(labels(max_mode="enforce"))
        modes.set_namespace("shop", labels("enforce"))
        modes.set_namespace("gone", labels("enforce"))
        modes.of_pod("u1", "shop", labels("strict"))
    for _ in range(2):
        async with running(state) as modes:
            modes.set_node(labels(max_mode="enfroce"))
            modes.set_namespace("shop", labels("enfroce"))
            assert modes.node.ceiling is Mode.ENFORCE
            assert modes.of_sandbox("u2", "shop").mode is Mode.ENFORCE
            modes.set_node({})
            assert modes.of_pod("u1", "shop", labels("stritc")).mode is Mode.STRICT
            modes.set_node(labels(max_mode="enforce"))
    assert "gone" not in state.read_text()


async def test_last_value_of_a_label_that_is_removed_is_not_kept(tmp_path: pathlib.Path) -> None:
    state = tmp_path / "modes.json"
    async with running(state) as modes:
        modes.set_namespace("shop", labels("enforce"))
        modes.of_pod("u1", "shop", labels("strict"))
        await asyncio.sleep(600)
        assert "shop" in state.read_text()
        modes.set_namespace("shop", {})
        modes.forget("u1")
    assert "shop" not in state.read_text()
    assert "u1" not in state.read_text()


async def test_removed_label_of_the_previous_agents_life_is_forgotten(
    tmp_path: pathlib.Path,
) -> None:
    state = tmp_path / "modes.json"
    async with running(state) as modes:
        modes.of_pod("u1", "shop", labels("enforce"))
    async with running(state) as modes:
        assert modes.of_pod("u1", "shop", {}).mode is Mode.AUDIT
        # Its last value was none.
        assert modes.of_pod("u1", "shop", labels("enfroce")).mode is Mode.AUDIT


@pytest.mark.parametrize("content", ["", "{", "[]", '{"labels": {"a": 9}}', '{"labels": 1}'])
async def test_a_broken_file_is_none(tmp_path: pathlib.Path, content: str) -> None:
    state = tmp_path / "modes.json"
    state.write_text(content)
    async with running(state) as modes:
        assert modes.of_pod("u1", "shop", labels("stritc")).mode is Mode.AUDIT


def test_kube_system_stays_at_audit_until_default_rules_are_in_force() -> None:
    modes = PodModes(Mode.STRICT, is_complete=False)
    modes.complete()
    changes = modes.changes.subscribe()
    held = modes.of_pod("1", "kube-system", {})
    assert held.mode is Mode.AUDIT
    assert held.problems[0].message == (
        "Mode strict is limited to audit by podgate until its default rules are in force."
    )
    # A gate that enforces already does not open meanwhile.
    assert modes.kept_up_to("kube-system") is Mode.STRICT
    assert modes.kept_up_to("shop") is Mode.OFF
    assert modes.of_pod("2", "shop", {}).mode is Mode.STRICT
    assert modes.of_sandbox("1", "kube-system").mode is Mode.AUDIT
    assert modes.of_new_pods.namespaces == {"kube-system": Mode.AUDIT}
    modes.apply_rules()
    assert changes.take() == ["kube-system"]
    assert modes.of_pod("1", "kube-system", {}).mode is Mode.STRICT
    assert modes.kept_up_to("kube-system") is Mode.OFF
    assert modes.of_new_pods.namespaces == {}
    modes.apply_rules()
    assert changes.is_empty


def test_ceiling_that_is_no_higher_is_the_one_that_is_named() -> None:
    modes = PodModes(Mode.STRICT, Mode.AUDIT, is_complete=False)
    (problem,) = modes.of_pod("1", "kube-system", {}).problems
    assert problem.message == "Mode strict is limited to audit by --max-mode."


def test_pods_of_manifests_wait_for_no_rules() -> None:
    modes = PodModes(Mode.ENFORCE)
    assert modes.of_sandbox("1", "kube-system").mode is Mode.ENFORCE


def test_label_of_podgates_namespace_is_the_ceiling_of_the_cluster() -> None:
    modes = PodModes(Mode.ENFORCE, own_namespace="podgate")
    changes = modes.changes.subscribe()
    modes.set_namespace("shop", labels(max_mode="off"))
    assert modes.node.ceiling is Mode.STRICT
    modes.set_namespace("podgate", labels(max_mode="off"))
    assert modes.node.is_off
    assert NODE in changes.take()
    assert modes.of_pod("u1", "shop", labels("strict")).mode is Mode.OFF
    assert modes.of_new_pods == NewPodModes(Mode.OFF)
    # The node's own label can only lower it.
    modes.set_node(labels(max_mode="strict"))
    assert modes.node.is_off
    modes.set_namespace("podgate", {})
    assert modes.node.ceiling is Mode.STRICT
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE


def test_unreadable_ceiling_of_the_cluster_keeps_its_last_value() -> None:
    modes = PodModes(Mode.ENFORCE, own_namespace="podgate")
    modes.set_namespace("podgate", labels(max_mode="off"))
    modes.set_namespace("podgate", labels(max_mode="of"))
    assert modes.node.is_off
    assert INVALID_CEILING in reasons(modes)


def test_switch_of_the_node_changes_all_pods_and_back() -> None:
    modes = PodModes(Mode.ENFORCE)
    changes = modes.changes.subscribe()
    assert modes.set_off(is_off=True)
    assert changes.take() == [NODE]
    assert not modes.set_off(is_off=True)
    assert modes.of_pod("u1", "shop", {}).mode is Mode.OFF
    assert modes.kept_up_to("shop") is Mode.OFF
    assert modes.set_off(is_off=False)
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE


def left(mode: str, *, now: str | None = None) -> dict[str, str]:
    """Labels after a removal of podgate that left this mode label; now: what it is since."""
    found = labels(mode if now is None else now, left_behind=mode)
    return {key: value for key, value in found.items() if value or key == agent_labels.LEFT_LABEL}


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_labels_from_before_a_removal_close_nothing_until_they_are_confirmed(
    modes: PodModes, mode: str
) -> None:
    modes.set_node(left(mode))
    modes.set_namespace("shop", left(mode))
    for pod in (None, "enforce", "strict"):
        assert modes.of_pod("u1", "shop", labels(pod)).mode is Mode.AUDIT
        assert reasons(modes, pod) == [LEFT, LEFT]
    assert modes.of_new_pods == NewPodModes(Mode.AUDIT)
    of_node, of_namespace = modes.label_problems
    assert of_node.subject == "node"
    assert of_namespace.subject == "namespace shop"
    assert "kubectl label namespace shop podgate.io/left-behind-" in of_namespace.message

    modes.set_namespace("shop", labels(mode))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.from_label(mode)
    modes.set_node(labels(mode))
    assert modes.of_pod("u1", "other", {}).mode is Mode.from_label(mode)
    assert modes.label_problems == []


def test_label_that_was_changed_since_the_removal_is_in_force(modes: PodModes) -> None:
    modes.set_namespace("shop", left("enforce", now="strict"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.STRICT
    modes.set_namespace("shop", left("", now="enforce"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE
    # Removed since, so the pods' own labels are the only ones.
    modes.set_namespace("shop", left("enforce", now=""))
    assert modes.of_pod("u1", "shop", labels("enforce")).mode is Mode.ENFORCE
    assert modes.label_problems == []


def test_pods_own_labels_from_before_a_removal_close_nothing_either(modes: PodModes) -> None:
    modes.set_namespace("shop", left(""))
    assert modes.of_pod("u1", "shop", labels("enforce")).mode is Mode.AUDIT
    assert reasons(modes, "enforce") == [LEFT]
    assert reasons(modes) == []
    # A sandbox of which only the last value is known.
    assert modes.of_sandbox("u1", "shop").mode is Mode.AUDIT
    assert modes.of_pod("u2", "other", labels("enforce")).mode is Mode.ENFORCE


def test_what_was_left_behind_opens_no_further_than_the_settings_of_the_new_installation() -> None:
    modes = PodModes(Mode.ENFORCE, Mode.STRICT)
    modes.set_node(left("strict"))
    modes.set_namespace("shop", left("strict"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.ENFORCE
    # Labels that are less strict count, and so do ceilings.
    modes.set_namespace("shop", left("off"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.OFF
    modes.set_node({**left("strict"), agent_labels.MAX_MODE_LABEL: "audit"})
    assert modes.of_pod("u1", "other", {}).mode is Mode.AUDIT


def test_label_that_was_left_behind_is_no_last_value_of_an_unreadable_one(modes: PodModes) -> None:
    modes.set_namespace("shop", left("enforce"))
    modes.set_namespace("shop", left("enforce", now="enfroce"))
    assert modes.of_pod("u1", "shop", {}).mode is Mode.AUDIT
    assert reasons(modes) == [INVALID]


class Closed:
    """Ingress of all pods of one namespace is denied, and of those of any that are labelled."""

    is_settled = False

    def closed_by(self, namespace: str, labels: Labels | None) -> str:
        is_denied = namespace == "vault" or bool(labels and "deny" in labels)
        return "ClusterNetworkPolicy deny" if is_denied else ""

    def namespaces(self) -> set[str]:
        return {"vault"}


def test_denied_ingress_closes_pods_with_a_network_of_their_own(modes: PodModes) -> None:
    modes.closures = Closed()
    denied = modes.of_pod("u1", "vault", {})
    assert (denied.mode, denied.origin) == (Mode.ENFORCE, "ClusterNetworkPolicy deny")
    assert modes.of_pod("u2", "shop", {"deny": ""}).mode is Mode.ENFORCE
    assert modes.of_pod("u3", "shop", {}).mode is Mode.AUDIT
    assert modes.of_pod("u4", "vault", {}, host_network=True).mode is Mode.AUDIT
    assert modes.of_sandbox("u5", "vault").mode is Mode.ENFORCE
    assert modes.of_sandbox("u6", "vault", host_network=True).mode is Mode.AUDIT
    assert modes.of_new_pods == NewPodModes(Mode.AUDIT, {"vault": Mode.ENFORCE})


def test_gates_keep_their_mode_until_it_is_read_what_denies_ingress(modes: PodModes) -> None:
    closures = modes.closures = Closed()
    before = modes.kept_up_to("shop")
    closures.is_settled = True
    assert (before, modes.kept_up_to("shop")) == (Mode.STRICT, Mode.OFF)


def test_any_label_of_a_namespace_may_decide_where_ingress_is_denied(modes: PodModes) -> None:
    modes.closures = Closed()
    changes = modes.changes.subscribe()
    assert modes.set_namespace("shop", {"team": "a"})
    assert changes.take() == ["shop"]
