"""The ladder: node, namespace, pod and ceiling decide the mode together."""

import itertools

import pytest

from agent import labels as agent_labels
from agent.pods import modes
from agent.pods.modes import (
    INVALID,
    LIMITED,
    NOT_ALLOWED,
    NOT_CLOSED,
    ModeLabel,
    NamespaceModes,
    NodeModes,
)
from bpf.verdicts import Mode

OFF, AUDIT, ENFORCE, STRICT = Mode.OFF, Mode.AUDIT, Mode.ENFORCE, Mode.STRICT
LADDER = ["off", "audit", "enforce", "strict"]
LABELS = [None, *LADDER]


def mode(word: str | None) -> Mode | None:
    return None if word is None else Mode.from_label(word)


def node(default: str, ceiling: str = "strict") -> NodeModes:
    return NodeModes(default=Mode.from_label(default), ceiling=Mode.from_label(ceiling))


def namespace(label: str | None, *, may_override: bool = False) -> NamespaceModes:
    return NamespaceModes(ModeLabel(mode(label)), may_override)


def by_the_documents(
    default: str, ceiling: str, of_namespace: str | None, may_override: bool, of_pod: str | None
) -> tuple[str, set[str]]:
    """The mode and the reasons as docs/deploy.md has them, by lists of words alone."""
    permitted = LADDER
    if not may_override:
        # The list from the namespace's mode, or else from the node's, to its end.
        permitted = LADDER[LADDER.index(default if of_namespace is None else of_namespace) :]
    reasons = set()
    wanted = [of_pod, of_namespace, default]
    if of_pod is not None and of_pod not in permitted:
        wanted.remove(of_pod)
        reasons.add(NOT_ALLOWED)
    found = next(word for word in wanted if word is not None)
    while found not in LADDER[: LADDER.index(ceiling) + 1]:
        found = LADDER[LADDER.index(found) - 1]
        reasons.add(LIMITED)
    return found, reasons


def test_every_combination_is_as_documented() -> None:
    wrong = {}
    for combination in itertools.product(LADDER, LADDER, LABELS, (False, True), LABELS):
        default, ceiling, of_namespace, may_override, of_pod = combination
        decision = modes.decide(
            node(default, ceiling),
            namespace(of_namespace, may_override=may_override),
            ModeLabel(mode(of_pod)),
        )
        found = decision.mode.label, {problem.reason for problem in decision.problems}
        if found != by_the_documents(*combination):
            wrong[combination] = found
    assert wrong == {}


@pytest.mark.parametrize(
    ("default", "ceiling", "of_namespace", "of_pod", "expected"),
    [
        # The first step of the ladder: one namespace on a node in audit.
        ("audit", "strict", "enforce", None, ENFORCE),
        ("audit", "strict", "strict", None, STRICT),
        ("enforce", "strict", "audit", None, AUDIT),
        ("strict", "strict", "off", None, OFF),
        ("audit", "strict", None, "enforce", ENFORCE),
        ("enforce", "strict", None, "audit", ENFORCE),
        ("audit", "strict", "enforce", "off", ENFORCE),
        # The way out.
        ("audit", "audit", "enforce", "strict", AUDIT),
        ("enforce", "off", "strict", None, OFF),
        # A canary: strict is wanted everywhere, and not yet had.
        ("strict", "enforce", None, None, ENFORCE),
    ],
)
def test_examples(
    default: str, ceiling: str, of_namespace: str | None, of_pod: str | None, expected: Mode
) -> None:
    decision = modes.decide(
        node(default, ceiling), namespace(of_namespace), ModeLabel(mode(of_pod))
    )
    assert decision.mode is expected


def test_labels_of_the_node_replace_the_agents_settings() -> None:
    wrong = {}
    for combination in itertools.product(LADDER, LABELS, LADDER, LABELS):
        setting, label, max_setting, max_label = combination
        found = modes.node_modes(
            *(Mode.from_label(setting), Mode.from_label(max_setting)),
            *(ModeLabel(mode(label)), ModeLabel(mode(max_label))),
        )
        is_right = (
            found.default.label == (label or setting)
            and found.ceiling.label == (max_label or max_setting)
            and (agent_labels.MAX_MODE_LABEL in found.ceiling_from) == (max_label is not None)
            and found.is_labelled is (label is not None)
            and not found.problems
        )
        if not is_right:
            wrong[combination] = found
    assert wrong == {}


def read(text: str | None, last: Mode | None = None) -> ModeLabel:
    labels = {} if text is None else {agent_labels.MODE_LABEL: text}
    return modes.read_label(labels, agent_labels.MODE_LABEL, "namespace shop", last)


def test_a_missing_label_is_no_problem() -> None:
    assert read(None) == ModeLabel()
    assert read(None, STRICT) == ModeLabel()


@pytest.mark.parametrize("text", ["enfroce", "Enforce", "", "2", "enforce ", "x" * 1000])
def test_a_label_that_is_no_mode_counts_as_its_last_one(text: str) -> None:
    labels = {last: read(text, last) for last in (None, *Mode)}
    assert {last: label.mode for last, label in labels.items()} == {last: last for last in labels}
    problems = [label.problem for label in labels.values() if label.problem is not None]
    assert [problem.reason for problem in problems] == [INVALID] * len(labels)
    assert max(len(problem.message) for problem in problems) < 300


def test_problems_of_all_labels_are_listed() -> None:
    problem = read("x").problem
    assert problem is not None
    found = NodeModes(default=ENFORCE, ceiling=AUDIT, problems=(problem,))
    decision = modes.decide(found, NamespaceModes(read("y")), read("z"))
    reasons = [problem.reason for problem in decision.problems]
    assert (decision.mode, reasons) == (AUDIT, [INVALID, INVALID, INVALID, LIMITED])


def test_problems_of_the_nodes_labels_are_in_order() -> None:
    of_node, of_ceiling, of_cluster = (read(text) for text in "xyz")
    found = modes.node_modes(AUDIT, STRICT, of_node, of_ceiling, cluster=of_cluster)
    assert found.problems == (of_node.problem, of_ceiling.problem, of_cluster.problem)
    found = modes.node_modes(AUDIT, STRICT, ModeLabel(), of_ceiling)
    assert found.problems == (of_ceiling.problem,)


def messages(decision: modes.ModeDecision) -> list[str]:
    return [problem.message for problem in decision.problems]


def test_problems_name_label_and_remedy() -> None:
    assert messages(modes.decide(node("enforce"), namespace(None), ModeLabel(OFF))) == [
        "Pod label podgate.io/mode=off is less strict than enforce and is ignored; set "
        "podgate.io/mode-override=allowed on the namespace to allow it."
    ]
    assert messages(modes.decide(node("audit", "audit"), namespace("strict"), ModeLabel())) == [
        "Mode strict is limited to audit by --max-mode."
    ]
    labelled = modes.node_modes(AUDIT, STRICT, ModeLabel(), ModeLabel(OFF))
    assert messages(modes.decide(labelled, namespace("enforce"), ModeLabel())) == [
        "Mode enforce is limited to off by the node's label podgate.io/max-mode."
    ]
    problem = read("enfroce", ENFORCE).problem
    assert problem is not None
    assert problem.message == (
        "Label podgate.io/mode of namespace shop is 'enfroce', which is no mode; use one of off, "
        "audit, enforce, strict. Its last valid value enforce stays in force."
    )


def test_lowest_ceiling_of_node_cluster_and_switch_decides() -> None:
    wrong = {}
    for combination in itertools.product(LADDER, LABELS, LABELS, (False, True)):
        setting, max_label, cluster, is_off = combination
        found = modes.node_modes(
            *(STRICT, Mode.from_label(setting)),
            *(ModeLabel(), ModeLabel(mode(max_label))),
            cluster=ModeLabel(mode(cluster)),
            is_off=is_off,
        )
        ceilings = [max_label or setting, cluster or "strict", "off" if is_off else "strict"]
        lowest = min(map(Mode.from_label, ceilings))
        if found.ceiling is not lowest or found.is_off is not ("off" in ceilings):
            wrong[combination] = found
    assert wrong == {}


def test_reason_names_what_sets_the_lowest_ceiling() -> None:
    labels = ModeLabel(), ModeLabel(STRICT)
    by_cluster = modes.node_modes(AUDIT, STRICT, *labels, cluster=ModeLabel(OFF))
    assert messages(modes.decide(by_cluster, namespace("enforce"), ModeLabel())) == [
        "Mode enforce is limited to off by the label podgate.io/max-mode of podgate's namespace."
    ]
    by_node = modes.node_modes(AUDIT, STRICT, *labels, cluster=ModeLabel(AUDIT), is_off=True)
    assert messages(modes.decide(by_node, namespace("enforce"), ModeLabel())) == [
        "Mode enforce is limited to off by 'podgate off --node'."
    ]


DENY = "ClusterNetworkPolicy deny-all"


@pytest.mark.parametrize(
    ("default", "ceiling", "of_namespace", "of_pod", "expected", "origin", "reasons"),
    [
        ("audit", "strict", None, None, ENFORCE, DENY, []),
        ("off", "strict", None, None, ENFORCE, DENY, []),
        ("audit", "strict", "audit", None, ENFORCE, DENY, []),
        # A label that is stricter stays.
        ("audit", "strict", "strict", None, STRICT, "", []),
        ("enforce", "strict", None, "strict", STRICT, "", []),
        # The ways out.
        ("audit", "strict", "off", None, OFF, "", [NOT_CLOSED]),
        ("audit", "audit", None, None, AUDIT, "", [NOT_CLOSED]),
        ("audit", "off", None, None, OFF, "", [NOT_CLOSED]),
        ("audit", "audit", "enforce", None, AUDIT, "", [NOT_CLOSED]),
        ("audit", "enforce", "strict", None, ENFORCE, "", [LIMITED]),
        # A pod's author cannot open it.
        ("audit", "strict", None, "off", ENFORCE, DENY, [NOT_ALLOWED]),
        ("off", "strict", None, "off", ENFORCE, DENY, []),
    ],
)
def test_denied_ingress_closes_below_the_ceiling_and_not_over_an_off_label(
    default: str,
    ceiling: str,
    of_namespace: str | None,
    of_pod: str | None,
    expected: Mode,
    origin: str,
    reasons: list[str],
) -> None:
    of_node, label = node(default, ceiling), ModeLabel(mode(of_pod))
    found = modes.decide(of_node, namespace(of_namespace), label, DENY)
    assert (found.mode, found.origin) == (expected, origin)
    assert [problem.reason for problem in found.problems] == reasons
    without = modes.decide(of_node, namespace(of_namespace), label)
    assert without.origin == ""
    assert found.mode >= without.mode


def test_labels_of_an_owner_keep_a_denied_pod_off() -> None:
    labelled = NodeModes(default=OFF, is_labelled=True)
    assert modes.decide(labelled, namespace(None), modes.NO_LABEL, DENY).mode is OFF
    allowed = namespace(None, may_override=True)
    assert modes.decide(node("audit"), allowed, ModeLabel(OFF), DENY).mode is OFF
    assert modes.decide(node("audit"), allowed, ModeLabel(AUDIT), DENY).mode is ENFORCE
