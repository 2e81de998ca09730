"""What is wrong on a node without an agent, by what is pinned."""

import pathlib
from typing import Any

import msgspec
import pytest

from agent.admin import finding_kinds as kinds
from agent.operate.pinned import agent_process, exposures, findings
from agent.operate.pinned.agent_process import AgentProcess
from agent.operate.pinned.report import Exposure, PinnedRelayStatus, PinnedStatus
from agent.pods import off_marks
from bpf import pins
from tests.agent.operate.cli.reports import NOW, PINNED

GATES = [
    msgspec.structs.replace(PINNED.gates[0], mode=mode, attachment=attachment, pod=pod)
    for mode, attachment, pod in (("strict", "tcx", "web"), ("audit", "clsact", "web"))
]
UP = PinnedRelayStatus(is_up=True, beat_age_seconds=0.1, ports=1)
GOOD = msgspec.structs.replace(PINNED, gates=GATES, hooks=[], exposures=[], relay=UP)
AGENT = ("agent-dead", "No agent responds, and 2 gates are in force, heartbeat 40 s old.")


def exposure(what: str, *, is_open: bool) -> Exposure:
    return Exposure(what=what, pods=1, is_open=is_open, at=NOW, text="It opens")


def found(status: PinnedStatus, **changes: Any) -> list[tuple[str, str]]:
    """Kinds and sentences, in their order."""
    changed = msgspec.structs.replace(status, **changes)
    return [(one.kind, one.sentence) for one in findings.find(changed)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [AGENT]),
        (
            {"gates": GATES[:1]},
            [("agent-dead", "No agent responds, and 1 gate is in force, heartbeat 40 s old.")],
        ),
        ({"gates": []}, [("agent-missing", "No agent responds, and no gate is in force.")]),
        (
            {"heartbeat_age_seconds": None},
            [
                (
                    "agent-dead",
                    "No agent responds, and 2 gates are in force, heartbeat never written.",
                )
            ],
        ),
        (
            {"is_off": True},
            [
                (
                    "off",
                    "podgate is off by 'podgate off --node': all pods of this node are open.",
                ),
                AGENT,
            ],
        ),
        (
            {"exposures": [exposure(exposures.ALL, is_open=True)]},
            [
                ("gates-open", "It opens."),
                ("agent-dead", "No agent responds, and 0 gates are in force, heartbeat 40 s old."),
            ],
        ),
        (
            {"exposures": [exposure(exposures.ALL, is_open=False)]},
            [AGENT, ("gates-open-soon", "It opens.")],
        ),
        (
            {"exposures": [exposure(exposures.DECLARED_PORTS, is_open=True)], "kubelet": None},
            [("declared-ports-open", "It opens."), AGENT],
        ),
        (
            {"exposures": [exposure(exposures.DECLARED_PORTS, is_open=False)], "kubelet": None},
            [
                AGENT,
                ("declared-ports-open-soon", "It opens."),
                ("kubelet-unknown", "Kubelet not identified."),
            ],
        ),
        ({"kubelet": None}, [AGENT, ("kubelet-unknown", "Kubelet not identified.")]),
        (
            {"gates": [GATES[0], msgspec.structs.replace(GATES[1], attachment="")]},
            [
                (
                    "gate-detached",
                    "No program is attached at veth7d21: everything passes there.",
                ),
                ("agent-dead", "No agent responds, and 1 gate is in force, heartbeat 40 s old."),
            ],
        ),
        (
            {"relay": msgspec.structs.replace(UP, is_up=False)},
            [
                AGENT,
                (
                    "relay-missing",
                    "Strict unavailable, falling back to enforce: no relay serves.",
                ),
            ],
        ),
        (
            {"relay": msgspec.structs.replace(UP, is_up=False), "gates": GATES[1:]},
            [("agent-dead", "No agent responds, and 1 gate is in force, heartbeat 40 s old.")],
        ),
    ],
)
def test_findings_by_what_is_pinned(
    changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert found(GOOD, **changes) == expected


@pytest.mark.parametrize(
    ("gate", "subject"),
    [
        (GATES[0], "pod shop/web"),
        (msgspec.structs.replace(GATES[0], namespace="", pod=""), "node"),
    ],
)
def test_detached_gate_is_its_pod_s(gate: Any, subject: str) -> None:
    detached = msgspec.structs.replace(gate, attachment="")
    (worst, *_) = findings.find(msgspec.structs.replace(GOOD, gates=[detached]))
    assert (worst.kind, worst.subject) == ("gate-detached", subject)


@pytest.mark.parametrize(
    ("age", "beat", "sentence"),
    [
        (5.0, 40.0, "The agent starts and does not answer yet, and 2 gates are in force."),
        (59.9, None, "The agent starts and does not answer yet, and 2 gates are in force."),
        (600.0, 3.1, "The agent hangs (pid 7 has no heartbeat), and 2 gates are in force."),
        (30.0, 3.1, "The agent hangs (pid 7 has no heartbeat), and 2 gates are in force."),
        (600.0, 2.9, "It answers nonsense."),
    ],
)
def test_agent_that_does_not_answer_in_words(age: float, beat: float | None, sentence: str) -> None:
    status = msgspec.structs.replace(
        GOOD,
        agent="It answers nonsense",
        agent_pid=7,
        agent_age_seconds=age,
        heartbeat_age_seconds=beat,
    )
    assert findings.agent_finding(status).sentence == sentence


def test_node_without_pins_may_be_off(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off_marks, "are_set", lambda *_: True)
    monkeypatch.setattr(agent_process, "find", lambda _: AgentProcess(7, 59.9))
    kinds_found = [
        one.kind for one in findings.without_pins(pins.Pins(tmp_path), tmp_path, "It is away")
    ]
    assert kinds_found == [kinds.OFF.name, kinds.AGENT_STARTING.name]
    monkeypatch.setattr(agent_process, "find", lambda _: AgentProcess(7, 60.1))
    (_, missing) = findings.without_pins(pins.Pins(tmp_path), tmp_path, "It is away")
    assert (missing.kind, missing.sentence) == (kinds.AGENT_MISSING.name, "It is away.")
