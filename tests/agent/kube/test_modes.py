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
    ("node_mode", "namespace", "pod", "mode", "reasons"),
    [
        # No label.
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
        # A value that is not a mode is ignored.
        (ENFORCE, "enfroce", None, ENFORCE, [INVALID]),
        (ENFORCE, "audit", "Enforce", AUDIT, [INVALID]),
        (ENFORCE, "", None, ENFORCE, [INVALID]),
        (ENFORCE, "x", "y", ENFORCE, [INVALID, INVALID]),
    ],
)
def test_ladder(
    node_mode: Mode, namespace: str | None, pod: str | None, mode: Mode, reasons: list[str]
) -> None:
    decision = modes.decide(node_mode, labels(namespace), labels(pod))
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
def test_override_is_read_from_the_namespace(override: str, pod: str, mode: Mode) -> None:
    decision = modes.decide(ENFORCE, labels("enforce", override=override), labels(pod))
    assert decision.mode is mode


def test_pod_cannot_set_the_override() -> None:
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
def test_node_label_overrides_the_setting(
    setting: Mode, label: str | None, mode: Mode, reasons: list[str]
) -> None:
    decision = modes.node_default(setting, labels(label))
    assert decision.mode is mode
    assert [problem.reason for problem in decision.problems] == reasons


def test_problem_names_label_and_remedy() -> None:
    decision = modes.decide(ENFORCE, labels(None), labels("off"))
    assert decision.problems[0].message == (
        "Pod label podgate.io/mode=off is less strict than enforce and is ignored; set "
        "podgate.io/mode-override=allowed on the namespace to allow it."
    )
