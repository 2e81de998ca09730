"""What `podgate status` prints about the kubelet and about modes, and what of it is red."""

from typing import Any

import msgspec
import pytest

from agent import labels
from agent.admin.report import (
    AgentReport,
    GateStatus,
    HookStatus,
    PathStatus,
    PodSourceStatus,
    PodStatus,
    RawSocketStatus,
)
from agent.operate.cli.output import Screen, Signal
from agent.operate.cli.views import status
from agent.pods.conditions import Condition
from tests.agent.operate.kubectl.reporting import AT, REPORT


def shown(report: AgentReport, capsys: pytest.CaptureFixture[str]) -> str:
    status.show(Screen(), report)
    return capsys.readouterr().out


def test_followed_kubelet_is_one_path(capsys: pytest.CaptureFixture[str]) -> None:
    output = shown(REPORT, capsys)
    assert "kubelet: /system.slice/kubelet.service" in output
    assert "follow" not in output


def test_reason_is_shown_when_there_is_no_kubelet(capsys: pytest.CaptureFixture[str]) -> None:
    problem = "several processes could be the kubelet (pids 600, 700), in different cgroups."
    report = msgspec.structs.replace(REPORT, kubelet=None, kubelet_problem=problem)
    assert f"Kubelet not identified: {problem}\n" in shown(report, capsys)


def test_reason_is_shown_when_the_kernel_cannot_follow_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = "/sys/kernel/btf/vmlinux cannot be read (No such file or directory)."
    report = msgspec.structs.replace(REPORT, kubelet_unfollowed=problem)
    expected = f"Without the agent the kernel does not follow the kubelet's restarts: {problem}\n"
    assert expected in shown(report, capsys)


def pod(name: str, *problems: str) -> PodStatus:
    return PodStatus(
        namespace="shop",
        name=name,
        uid=name,
        mode="audit",
        mode_problems=list(problems),
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


def test_problem_of_many_pods_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    limited, own = "Mode enforce is limited to audit by --max-mode.", "Label [x] is no mode."
    pods = [pod(f"web-{number}", limited) for number in range(7)]
    output = shown(msgspec.structs.replace(REPORT, pods=[*pods, pod("db", limited, own)]), capsys)
    names = ", ".join(f"shop/web-{number}" for number in range(5))
    assert f"{limited} Pods: {names} and 3 more.\n" in output
    assert f"{own} Pods: shop/db.\n" in output


def relay(**changes: Any) -> dict[str, Any]:
    return {"relay": msgspec.structs.replace(REPORT.relay, **changes)}


@pytest.mark.parametrize(
    ("changes", "signal", "text"),
    [
        ({"open_ports": "any host process reaches them"}, Signal.DANGER, "Any host process"),
        ({"kubelet": None, "kubelet_problem": "two."}, Signal.CAUTION, "not identified: two."),
        ({"max_mode": "off", "max_mode_from": "a file"}, Signal.DANGER, "off on this node, by a"),
        ({"is_synced": False}, Signal.CAUTION, "first pass"),
        ({"kubelet_unfollowed": "no BTF."}, Signal.CAUTION, "no BTF."),
        (
            {"pod_source": PodSourceStatus(pods_from="", problems=["The watch fails."])},
            Signal.CAUTION,
            "The watch fails.",
        ),
        (
            {"pod_source": PodSourceStatus(pods_from="", pending_conditions=12)},
            Signal.CAUTION,
            "Conditions of 12 pods are not written",
        ),
        ({"hooks": [HookStatus(name="connect6", problem="EPERM")]}, Signal.CAUTION, "EPERM"),
        (
            {"raw_sockets": RawSocketStatus(mode="deny-pods", problem="Not all.", sources=[])},
            Signal.CAUTION,
            "--raw-sockets=deny-pods: Not all.",
        ),
        (relay(problem="no netns", has_fallback=True), Signal.CAUTION, "no netns"),
        (relay(problem="no netns", has_fallback=False), Signal.DANGER, "no netns"),
    ],
)
def test_problem_of_the_node_is_red_if_pods_are_open_or_probes_fail(
    changes: dict[str, Any], signal: Signal, text: str
) -> None:
    (found,) = status.problems(msgspec.structs.replace(REPORT, **changes))
    assert found[0] is signal
    assert text in found[1]


def test_red_problems_are_first() -> None:
    changes = {"is_synced": False, "max_mode": "off"}
    found = status.problems(msgspec.structs.replace(REPORT, **changes))
    assert [signal for signal, _ in found] == [Signal.DANGER, Signal.CAUTION]


def with_condition(kind: str, value: str, reason: str) -> PodStatus:
    condition = Condition(kind, value, reason, "Busy.", AT)
    return msgspec.structs.replace(pod("web"), conditions=[condition])


@pytest.mark.parametrize(
    ("kind", "reason", "signal"),
    [
        (labels.ISOLATION_READY, "GateBypassed", Signal.DANGER),
        (labels.ISOLATION_READY, "GateFailed", Signal.DANGER),
        (labels.ISOLATION_READY, "NetnsMissing", Signal.DANGER),
        (labels.ISOLATION_READY, "NetnsInvalid", Signal.DANGER),
        (labels.ISOLATION_READY, "NetnsInUse", Signal.DANGER),
        (labels.ISOLATION_READY, "Off", Signal.CAUTION),
        (labels.PROBES_PASSING, "ProbesFailing", Signal.CAUTION),
    ],
)
def test_condition_that_is_false_is_red_if_host_processes_reach_the_pod(
    kind: str, reason: str, signal: Signal
) -> None:
    (found,) = status.pod_problems([with_condition(kind, "False", reason)])
    name = kind.rpartition("/")[2]
    assert found == (signal, f"shop/web: {name} is False ({reason}): Busy.")


def test_condition_that_is_true_is_no_problem() -> None:
    found = with_condition(labels.ISOLATION_READY, "True", "Enforced")
    assert list(status.pod_problems([found])) == []


def test_open_flows_of_a_pod_are_a_problem() -> None:
    found = msgspec.structs.replace(pod("web"), existing_flows=3)
    ((signal, text),) = status.pod_problems([found])
    assert signal is Signal.CAUTION
    assert "shop/web: 3 flows opened before enforcement" in text


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
        (labels.ISOLATION_READY, "False", "Off", Signal.CAUTION),
        (labels.ISOLATION_READY, "False", "GateBypassed", Signal.DANGER),
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
