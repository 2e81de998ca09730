"""The ladder: node, namespace and pod decide the mode together."""

import pytest

from agent import labels as agent_labels
from agent.kube import modes
from agent.kube.modes import INVALID, NOT_ALLOWED
from bpf.verdicts import Mode

OFF, AUDIT, ENFORCE, STRICT = Mode.OFF, Mode.AUDIT, Mode.ENFORCE, Mode.STRICT


def labels(mode: str | None, *, override: str | None = None) -> dict[str, str]:
    found = {}
    if mode is not None:
        found[agent_labels.MODE_LABEL] = mode
    if override is not None:
        found[modes.OVERRIDE_LABEL] = override
    return found


@pytest.mark.parametrize(
    ("bound", "namespace", "pod", "mode", "reasons"),
    [
        # Nobody says anything.
        (OFF, None, None, OFF, []),
        (AUDIT, None, None, AUDIT, []),
        (STRICT, None, None, STRICT, []),
        # The namespace decides within the node's default.
        (ENFORCE, "off", None, OFF, []),
        (ENFORCE, "audit", None, AUDIT, []),
        (ENFORCE, "enforce", None, ENFORCE, []),
        (ENFORCE, "strict", None, ENFORCE, []),
        (AUDIT, "strict", None, AUDIT, []),
        (OFF, "strict", None, OFF, []),
        # A pod may be stricter, within the node's default.
        (STRICT, "audit", "enforce", ENFORCE, []),
        (STRICT, "off", "strict", STRICT, []),
        (STRICT, "audit", "audit", AUDIT, []),
        (ENFORCE, "audit", "strict", ENFORCE, [NOT_ALLOWED]),
        (AUDIT, None, "enforce", AUDIT, [NOT_ALLOWED]),
        # It may not be less strict.
        (ENFORCE, None, "off", ENFORCE, [NOT_ALLOWED]),
        (ENFORCE, None, "audit", ENFORCE, [NOT_ALLOWED]),
        (STRICT, "enforce", "audit", ENFORCE, [NOT_ALLOWED]),
        # A word that is no mode counts as none.
        (ENFORCE, "enfroce", None, ENFORCE, [INVALID]),
        (ENFORCE, "audit", "Enforce", AUDIT, [INVALID]),
        (ENFORCE, "", None, ENFORCE, [INVALID]),
        (ENFORCE, "x", "y", ENFORCE, [INVALID, INVALID]),
    ],
)
def test_ladder(
    bound: Mode, namespace: str | None, pod: str | None, mode: Mode, reasons: list[str]
) -> None:
    decision = modes.decide(bound, labels(namespace), labels(pod))
    assert decision.mode is mode
    assert [problem.reason for problem in decision.problems] == reasons


@pytest.mark.parametrize(
    ("override", "pod", "mode"),
    [
        ("allowed", "off", OFF),
        ("allowed", "audit", AUDIT),
        ("allowed", "enforce", ENFORCE),
        ("allowed", "strict", ENFORCE),
        ("true", "off", ENFORCE),
        ("Allowed", "off", ENFORCE),
        ("", "off", ENFORCE),
    ],
)
def test_override_is_the_namespaces_to_give(override: str, pod: str, mode: Mode) -> None:
    decision = modes.decide(ENFORCE, labels("enforce", override=override), labels(pod))
    assert decision.mode is mode


def test_a_pod_cannot_give_itself_the_override() -> None:
    decision = modes.decide(ENFORCE, {}, labels("off", override="allowed"))
    assert decision.mode is ENFORCE


@pytest.mark.parametrize(
    ("setting", "label", "mode", "reasons"),
    [
        (AUDIT, None, AUDIT, []),
        (AUDIT, "strict", STRICT, []),
        (ENFORCE, "off", OFF, []),
        (ENFORCE, "of", ENFORCE, [INVALID]),
    ],
)
def test_nodes_label_beats_the_setting(
    setting: Mode, label: str | None, mode: Mode, reasons: list[str]
) -> None:
    decision = modes.node_default(setting, labels(label))
    assert decision.mode is mode
    assert [problem.reason for problem in decision.problems] == reasons


def test_problems_say_what_to_do() -> None:
    decision = modes.decide(ENFORCE, labels(None), labels("off"))
    assert decision.problems[0].message == (
        "label podgate.io/mode=off of the pod is less strict than enforce and has no effect; "
        "label the namespace podgate.io/mode-override=allowed to allow it."
    )
