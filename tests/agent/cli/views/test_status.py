"""What `podgate status` prints about the kubelet and about modes."""

import msgspec
import pytest

from agent.admin.report import (
    AgentReport,
    PodStatus,
)
from agent.cli.output import Screen
from agent.cli.views import status
from tests.agent.kubectl.reporting import REPORT


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
