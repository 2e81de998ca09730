"""Colours of the plugin's output: red is open or broken, yellow not as desired, green in order."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from agent.admin.report import Drops
from agent.operate.kubectl import main, printing, why_not_ready
from agent.operate.kubectl.readiness import ReadinessCheck
from tests.agent.operate.kubectl.reporting import encoded, pod, report
from tests.agent.operate.kubectl.standin import KubectlStandin, agent_pod
from tests.agent.operate.kubectl.test_drops import source
from tests.agent.operate.kubectl.test_output import Terminal

Coloured = Callable[[Callable[[], object]], list[tuple[int, str]]]


@pytest.fixture
def coloured(monkeypatch: pytest.MonkeyPatch) -> Coloured:
    """What a command prints in a colour on a terminal, in order."""
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(command: Callable[[], object]) -> list[tuple[int, str]]:
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            command()
        found = re.findall(r"\x1b\[(-?\d+)m(.+?)\x1b", terminal.getvalue())
        return [(int(colour), text) for colour, text in found]

    return run


def command(kubectl: KubectlStandin, *arguments: str) -> Callable[[], int]:
    return lambda: main.main(["--kubectl", kubectl.command, *arguments])


def test_status(kubectl: KubectlStandin, coloured: Coloured) -> None:
    kubectl.serve_nodes("a", "b", "c", "d", without_agent=["d"])
    kubectl.respond("exec", "agent-a", output=report(pod("web", "enforce", "Enforced")))
    pods = [
        pod("broken", "enforce", "GateFailed", status="False"),
        pod("held", "enforce", "Audit"),
        pod("open", "enforce", "Off"),
        pod("relayed", "strict", "Enforced"),
    ]
    kubectl.respond("exec", "agent-b", output=report(*pods))
    kubectl.respond("exec", "agent-c", output=report(kubelet=None))
    unready: dict[str, Any] = {"type": "Ready", "status": "False"}
    agents = [agent_pod(name) for name in ("a", "b", "c")]
    agents[2]["status"]["conditions"] = [unready]
    kubectl.respond("get", "pods", "--namespace=podgate", output={"items": agents})
    assert coloured(command(kubectl, "status")) == [
        # Findings: a gate that failed, no answer, a kubelet that is not identified.
        (printing.RED, "open"),
        (printing.RED, "broken"),
        (printing.YELLOW, "degraded"),
        # Node d, then b, and c, which is not ready and has not identified its kubelet.
        (printing.RED, "1"),
        (printing.RED, "no answer"),
        (printing.YELLOW, "1"),
        (printing.YELLOW, "1/0 off, 1/0 audit, 1/3 enforce, 0/1 strict"),
        (printing.YELLOW, "no"),
        (printing.YELLOW, "no"),
        (printing.YELLOW, "1"),
        (printing.RED, "none"),
        (printing.YELLOW, "audit"),
        (printing.YELLOW, "off"),
    ]


def test_drops(kubectl: KubectlStandin, coloured: Coloured) -> None:
    kubectl.serve_nodes("a")
    sources = [source("web", 9), source("dns", 7, mode="audit")]
    kubectl.respond("exec", "drops", output=encoded(Drops(sources=sources, lost_packets=0)))
    assert coloured(command(kubectl, "drops")) == [(printing.YELLOW, "would-drop")]


@pytest.mark.parametrize(
    ("is_ready", "head"),
    [(True, (printing.GREEN, "Ready")), (False, (printing.YELLOW, "not Ready"))],
)
def test_why_not_ready(is_ready: bool, head: tuple[int, str], coloured: Coloured) -> None:
    found = [
        ReadinessCheck("gate", True, "It is met."),
        ReadinessCheck("gate", False, "It is not."),
    ]
    shown = {"metadata": {"namespace": "shop", "name": "web"}}
    printed = coloured(lambda: why_not_ready._show(shown, found, "", is_ready=is_ready))
    assert printed == [head, (printing.GREEN, "+"), (printing.RED, "-")]


def test_numbers_are_the_terminals_colours() -> None:
    """ECMA-48, 8.3.117."""
    assert (printing.RED, printing.GREEN, printing.YELLOW) == (31, 32, 33)
