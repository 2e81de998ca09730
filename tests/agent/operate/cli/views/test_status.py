"""What `podgate status` prints about the kubelet and about modes, and what of it is red."""

import msgspec
import pytest

from agent import labels
from agent.admin.report import (
    AgentReport,
    GateStatus,
    PathStatus,
    PodStatus,
)
from agent.operate.cli.output import Screen, Signal
from agent.operate.cli.views import status
from agent.pods.conditions import Condition
from tests.agent.operate.kubectl.reporting import AT, REPORT, found_in


def shown(report: AgentReport, capsys: pytest.CaptureFixture[str]) -> str:
    status.show(Screen(), report)
    return capsys.readouterr().out


def test_followed_kubelet_is_one_path(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(REPORT, capsys)
    assert "kubelet: /system.slice/kubelet.service" in output
    assert "follow" not in output


def pod(name: str) -> PodStatus:
    return PodStatus(
        namespace="shop",
        name=name,
        uid=name,
        mode="audit",
        source="api",
        netns=None,
        addresses=[],
        conditions=[],
        gates=[],
        paths=[],
        existing_flows=0,
        probes=[],
    )


def test_default_mode_and_ceiling_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    report = msgspec.structs.replace(REPORT, default_mode="audit", max_mode="enforce")
    assert "modes: default audit, at most enforce; pods from" in shown(report, capsys)


def test_findings_are_above_all_else_and_the_worst_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pods = [msgspec.structs.replace(pod(f"web-{n}"), existing_flows=n + 1) for n in range(7)]
    report = found_in(msgspec.structs.replace(REPORT, max_mode="off", pods=pods))
    first, second, *_ = shown(report, capsys).splitlines()
    assert first == "open: podgate is off: all pods of this node are open."
    assert second.startswith("degraded: Flows that the host opened before enforcement")
    assert second.endswith("shop/web-4 and 2 more.")


def with_condition(kind: str, value: str, reason: str) -> PodStatus:
    condition = Condition(kind, value, reason, "Busy.", AT)
    return msgspec.structs.replace(pod("web"), conditions=[condition])


def cell(column: str, shown: PodStatus) -> tuple[object, Signal | None]:
    """The content of a pod's cell, and its colour."""
    (found,) = (one for one in status.PODS if one.header == column)
    return found.cell(shown), found.signal(shown)


@pytest.mark.parametrize(
    ("kind", "value", "reason", "signal"),
    [
        (labels.ISOLATION_READY, "True", "Enforced", Signal.SAFE),
        (labels.ISOLATION_READY, "True", "Strict", Signal.SAFE),
        (labels.ISOLATION_READY, "True", "Audit", Signal.CAUTION),
        (labels.ISOLATION_READY, "False", "NoInterface", Signal.CAUTION),
        (labels.ISOLATION_READY, "False", "GateBypassed", Signal.DANGER),
        (labels.ISOLATION_READY, "True", "GateLost", Signal.DANGER),
        (labels.PROBES_PASSING, "True", "ProbesPassing", Signal.SAFE),
        (labels.PROBES_PASSING, "False", "ProbesFailing", Signal.CAUTION),
    ],
)
def test_conditions_colour_their_columns(
    kind: str, value: str, reason: str, signal: Signal
) -> None:
    column, other = ("ISOLATED", "PROBES")[:: 1 if kind == labels.ISOLATION_READY else -1]
    shown = with_condition(kind, value, reason)
    assert cell(column, shown) == (reason, signal)
    assert cell(other, shown) == ("", None)


@pytest.mark.parametrize(
    ("results", "signal"),
    [
        ([], None),
        (["confirmed"], Signal.SAFE),
        (["confirmed", "unreachable"], Signal.CAUTION),
        (["confirmed", "bypassed"], Signal.DANGER),
    ],
)
def test_path_test_is_as_red_as_its_worst_address(
    results: list[str], signal: Signal | None
) -> None:
    paths = [PathStatus(address=f"198.18.1.{n}", result=one) for n, one in enumerate(results)]
    shown = msgspec.structs.replace(pod("web"), paths=paths)
    assert cell("PATH TEST", shown) == (sorted(results), signal)


def test_drops_are_summed_over_gates_and_by_reason() -> None:
    packets: list[dict[str, dict[str, int]]] = [
        {"drop": {"node": 2, "policy": 1}, "would-drop": {"node": 4}},
        {"drop": {"node": 8}},
    ]
    gates = [
        GateStatus(interface=f"veth{n}", ifindex=n, packets=each) for n, each in enumerate(packets)
    ]
    shown = msgspec.structs.replace(pod("web"), gates=gates)
    assert cell("DROPPED", shown)[0] == 11
    assert cell("WOULD DROP", shown)[0] == 4
    assert cell("DROP REASONS", shown)[0] == ["node ×14", "policy ×1"]
