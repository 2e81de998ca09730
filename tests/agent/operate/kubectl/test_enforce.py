"""`kubectl podgate enforce`: what stops it, what it watches, and how it goes back."""

import argparse
import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.admin.report import PodStatus
from agent.operate.kubectl import enforce, main
from agent.operate.kubectl.cluster import Cluster, KubectlError
from tests import polling
from tests.agent.operate.kubectl import reporting
from tests.agent.operate.kubectl.moved_clock import MovedClock
from tests.agent.operate.kubectl.observing import NAMESPACE, Nodes
from tests.agent.operate.kubectl.standin import KubectlStandin
from tests.agent.policy.observing import flows

LISTED, STRANGER = "/system.slice/a.service", "/opt/stranger"
KUBELET = "/system.slice/kubelet.service"
POLICY = {
    "apiVersion": "policy.podgate.io/v1alpha1",
    "kind": "HostAccessPolicy",
    "metadata": {"name": "a"},
    "spec": {
        "pods": {"namespaces": [NAMESPACE]},
        "from": [{"systemdUnit": {"name": "a.service"}}],
        "ports": [{"port": 80}],
    },
}
IN_FORCE: dict[str, Any] = {"policies": [POLICY], "kubelet": KUBELET}
WEB = reporting.pod("web", "enforce", "Enforced")
# After the day that nodes have observed before the step.
LATER: dict[str, Any] = {"first": 1, "last": 24.1}


class Step:
    """A namespace in audit, two nodes, and the command with a clock that the test moves."""

    def __init__(self, kubectl: KubectlStandin, cluster: Cluster) -> None:
        self.kubectl = kubectl
        self.nodes = Nodes(kubectl, "one", "two")
        for name in self.nodes.names:
            self.nodes.see(name, flows(LISTED), **IN_FORCE)
            self.report(name)
        self.label("audit")
        self.pods("web")
        self._cluster = cluster
        self.clock = MovedClock()

    def label(self, mode: str | None) -> None:
        labels = {"podgate.io/mode": mode} if mode else {}
        self.kubectl.respond("get", "namespace", output={"metadata": {"labels": labels}})
        self.kubectl.respond("label", "namespace")

    def pods(self, *names: str) -> None:
        """Running pods of the namespace; `web` is on node one, with a gate."""
        pods = [
            {
                "metadata": {"namespace": NAMESPACE, "name": name},
                "spec": {"containers": []},
                "status": {"phase": "Running"},
            }
            for name in names
        ]
        self.kubectl.respond("get", "pods", f"--namespace={NAMESPACE}", output={"items": pods})

    def report(self, name: str, **changed: Any) -> None:
        report = {
            "maxMode": "strict",
            "pods": [reporting.encoded(WEB)] if name == "one" else [],
        }
        self.kubectl.respond("exec", f"agent-{name}", "status", output={**report, **changed})

    def report_pods(self, *pods: PodStatus) -> None:
        """What the agent of node one reports from now on."""
        self.report("one", pods=[reporting.encoded(pod) for pod in pods])

    def run(self, *, yes: bool = False, mode: str = "enforce") -> int:
        arguments = argparse.Namespace(namespace=NAMESPACE, mode=mode, watch=10.0, yes=yes)
        return enforce.run(arguments, self._cluster, clock=self.clock, sleep=self.clock.sleep)

    def labels(self) -> list[str]:
        """The labels that the command has set, in order."""
        return [call[3] for call, _ in self.kubectl.calls("label")]


@pytest.fixture
def step(kubectl: KubectlStandin, cluster: Cluster) -> Step:
    return Step(kubectl, cluster)


def test_label_that_is_there_already_is_confirmed_by_its_pods(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.label("enforce")
    assert step.run() == 0
    already = "Namespace shop is labelled podgate.io/mode=enforce already; its gates are in force"
    assert capsys.readouterr().out.splitlines() == [f"{already} for 1 pods."]
    step.report_pods(reporting.pod("web", "off", "Off"))
    assert step.run() == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{already} for 0 pods.",
        "note: 1 pods stay below enforce by their own label or their node's ceiling: web.",
    ]
    step.report_pods(reporting.pod("web", "enforce", "Audit"))
    assert step.run() == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{already} for 0 pods.",
        "problem: shop/web on one is not in enforce, its gates are in audit (Audit): Gated.",
    ]
    assert step.labels() == []


def test_label_that_was_left_behind_is_confirmed_with_the_same_checks(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"podgate.io/mode": "enforce", "podgate.io/left-behind": "enforce"}
    step.kubectl.respond("get", "namespace", output={"metadata": {"labels": left}})
    assert step.run() == 0
    (call,) = (call for call, _ in step.kubectl.calls("label"))
    assert call[3:5] == ["podgate.io/mode=enforce", "podgate.io/left-behind-"]
    assert (
        f"kubectl label namespace {NAMESPACE} podgate.io/mode=enforce "
        "podgate.io/left-behind=enforce --overwrite' goes back"
    ) in capsys.readouterr().out


def test_pods_of_a_silent_node_are_not_confirmed_and_are_no_pods_without_a_gate(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = {
        "metadata": {"namespace": NAMESPACE, "name": "client"},
        "spec": {"nodeName": "two"},
        "status": {"phase": "Running"},
    }
    step.kubectl.respond("get", "pods", f"--namespace={NAMESPACE}", output={"items": [elsewhere]})
    step.kubectl.respond("exec", "agent-two", "status", error="podgate: no agent responds\n")
    assert step.run() == 1
    output = capsys.readouterr().out
    assert output.splitlines() == [
        "problem: two: podgate: no agent responds.",
        "problem: 1 running pods are on nodes that do not answer: client.",
        "Nothing was changed. Solve these 2 problems ('kubectl podgate suggest -n shop' prints "
        "policies), or use --yes.",
    ]
    assert step.run(yes=True) == 1
    output = capsys.readouterr().out
    assert "not confirmed on two: 1 pods (podgate: no agent responds)." in output


def test_namespace_stays_enforced_if_nothing_harmful_is_dropped(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    assert step.run() == 0
    assert step.labels() == ["podgate.io/mode=enforce"]
    assert step.clock.now >= 10
    assert capsys.readouterr().out.splitlines() == [
        "Namespace shop is labelled podgate.io/mode=enforce. Watching drops for 10 s; Ctrl-C takes "
        "the label back.",
        "Namespace shop stays in enforce; its gates are in force for 1 pods. Next: 'podgate drops' "
        "on its nodes and the metric podgate_gate_packets_total show what is dropped; 'kubectl "
        "label namespace shop podgate.io/mode=audit --overwrite' goes back.",
    ]


def test_drops_that_cannot_be_read_are_tried_again(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [{"metadata": {"name": name}} for name in step.nodes.names]
    step.clock.at[5] = lambda: step.kubectl.respond("get", "nodes", error="It is away.\n")
    step.clock.at[10] = lambda: step.kubectl.respond("get", "nodes", output={"items": nodes})
    assert step.run() == 0
    assert (
        capsys.readouterr().out.splitlines()[1] == "Drops cannot be read, trying again: It is away."
    )


def test_label_is_taken_back_if_the_watch_fails(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("no memory")

    step.clock.at[5] = fail
    with pytest.raises(OSError, match="no memory"):
        step.run()
    assert step.labels() == ["podgate.io/mode=enforce", "podgate.io/mode=audit"]
    assert "was taken back (the watch failed: no memory)" in capsys.readouterr().out


def test_pod_without_its_mode_at_the_end_is_a_problem_and_changes_nothing(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.clock.at[5] = lambda: step.report_pods(
        WEB,
        reporting.pod("new", "enforce", "Audit", message="Gate in audit."),
        reporting.pod("vm", "enforce", "NotSupported", message="No veth pair."),
    )
    assert step.run() == 1
    assert step.labels() == ["podgate.io/mode=enforce"]
    output = capsys.readouterr().out
    assert (
        "problem: shop/new on one is not in enforce, its gates are in audit (Audit): "
        "Gate in audit.\n" in output
    )
    assert "problem: shop/vm on one is not in enforce, its gates are in none" in output
    assert "for 1 pods." in output


def test_pod_that_starts_during_the_watch_has_a_minute_for_its_gate(step: Step) -> None:
    step.clock.at[10] = lambda: step.report_pods(WEB, reporting.pod("new", "enforce", ""))
    step.clock.at[40] = lambda: step.report_pods(WEB, reporting.pod("new", "enforce", "Enforced"))
    assert step.run() == 0
    assert 40 <= step.clock.now < 70


def test_pods_whose_own_mode_is_below_the_namespaces_are_a_note(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.clock.at[5] = lambda: step.report_pods(
        reporting.pod("web", "strict", "Strict"), reporting.pod("old", "audit", "Audit")
    )
    assert step.run() == 0
    output = capsys.readouterr().out
    assert "note: 1 pods stay below enforce by their own label or their node's ceiling: old." in (
        output
    )
    assert "in force for 1 pods." in output


def test_pods_of_other_namespaces_and_of_the_host_network_are_left_out(step: Step) -> None:
    other = msgspec.structs.replace(reporting.pod("x", "enforce", "Audit"), namespace="else")
    step.clock.at[5] = lambda: step.report_pods(
        WEB, other, reporting.pod("agent", "enforce", "HostNetwork")
    )
    assert step.run() == 0


def test_dropped_stranger_is_reported_and_changes_nothing(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.clock.at[5] = lambda: step.nodes.see("two", flows(STRANGER, **LATER), **IN_FORCE)
    assert step.run() == 0
    assert step.labels() == ["podgate.io/mode=enforce"]
    _, *dropped, _ = capsys.readouterr().out.splitlines()
    # Once, however often it is read.
    assert dropped == [f"dropped: {STRANGER} to shop/web-1, TCP 80 on two"]


@pytest.mark.parametrize(
    ("cgroup", "port", "reason"),
    [
        (LISTED, 80, "a policy lists this source"),
        (LISTED, 81, "a policy lists this source"),
        (KUBELET, 81, "it is the kubelet"),
    ],
)
@pytest.mark.parametrize(
    ("before", "restored"), [("audit", "podgate.io/mode=audit"), (None, "podgate.io/mode-")]
)
def test_label_is_taken_back_if_traffic_is_dropped_that_must_not_be(
    step: Step,
    capsys: pytest.CaptureFixture[str],
    cgroup: str,
    port: int,
    reason: str,
    before: str | None,
    restored: str,
) -> None:
    step.label(before)
    seen = flows(cgroup, port=port, packets=3, **LATER)
    step.clock.at[5] = lambda: step.nodes.see("two", seen, **IN_FORCE)
    assert step.run() == 1
    assert step.labels() == ["podgate.io/mode=enforce", restored]
    assert step.clock.now < 10
    output = capsys.readouterr().out
    assert reason in output
    assert "was taken back (traffic was dropped that must not be)" in output


def test_old_flow_under_a_new_name_is_no_drop(step: Step) -> None:
    step.clock.at[5] = lambda: step.nodes.see(
        "one", flows(LISTED), flows(LISTED, port=81), **IN_FORCE
    )
    assert step.run() == 0


def test_flow_without_a_new_packet_is_no_drop(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.clock.at[5] = lambda: step.nodes.see("one", flows(LISTED, **LATER), **IN_FORCE)
    assert step.run() == 0
    assert "dropped: " not in capsys.readouterr().out


def finding(kind: Kind) -> dict[str, Any]:
    return {"findings": [{"severity": kind.severity, "kind": kind.name, "sentence": "It is so."}]}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (finding(kinds.KUBELET_UNKNOWN), "It is so."),
        (finding(kinds.DECLARED_PORTS_OPEN), "It is so."),
        (finding(kinds.PODS_NOT_SYNCED), "It is so."),
        ({"maxMode": "audit"}, "its ceiling is audit"),
    ],
)
def test_agent_that_is_not_prepared_stops_the_step(
    step: Step, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], problem: str
) -> None:
    step.report("two", **changed)
    assert step.run() == 1
    assert step.labels() == []
    output = capsys.readouterr().out
    assert f"problem: two: {problem}" in output
    assert "Nothing was changed." in output
    assert step.run(yes=True) == 0
    assert step.labels() == ["podgate.io/mode=enforce"]


def test_agent_that_does_not_respond_stops_the_step(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.kubectl.respond("exec", "agent-two", error="unable to upgrade connection\n")
    assert step.run() == 1
    assert step.labels() == []
    assert "problem: two: unable to upgrade connection" in capsys.readouterr().out


def test_pod_without_a_gate_stops_the_step(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    step.pods("web", "bare")
    assert step.run() == 1
    assert "problem: 1 running pods have no gate in place: bare." in capsys.readouterr().out


def test_source_without_a_policy_stops_the_step(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.nodes.see("one", flows(LISTED), flows(STRANGER), **IN_FORCE)
    assert step.run() == 1
    assert f"problem: No policy admits {STRANGER} to shop/web-1" in capsys.readouterr().out


def test_source_with_a_doubt_is_a_note(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    step.nodes.see("one", flows("/", first=2, last=2), **IN_FORCE)
    assert step.run() == 0
    assert "note: / to shop/web-1, TCP 80 (" in capsys.readouterr().out


def test_less_than_a_day_stops_the_step(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    step.nodes.see("one", unobserved_seconds=7200.0, **IN_FORCE)
    assert step.run() == 1
    assert "problem: one has observed 22.0 h, less than a day." in capsys.readouterr().out


def test_namespace_with_the_label_is_left_alone(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.label("enforce")
    assert step.run() == 0
    assert step.labels() == []
    assert "already" in capsys.readouterr().out


def test_node_that_stops_responding_is_reported(
    step: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    step.clock.at[5] = lambda: step.kubectl.respond("exec", "agent-two", error="gone away\n")
    assert step.run() == 1
    assert step.labels() == ["podgate.io/mode=enforce"]
    assert "two was not watched to the end: gone away." in capsys.readouterr().out


def test_interrupt_takes_the_label_back(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    step.clock.at[5] = interrupt
    assert step.run() == 130
    assert step.labels() == ["podgate.io/mode=enforce", "podgate.io/mode=audit"]
    assert "was taken back (interrupted)" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_take_the_label_back_also_if_they_reach_kubectl(
    step: Step, number: signal.Signals
) -> None:
    """As Ctrl-C in a terminal does: all processes of the group get it, and then once more."""
    command = [
        sys.executable,
        "-m",
        "agent.operate.kubectl.main",
        "--kubectl",
        step.kubectl.command,
    ]
    with subprocess.Popen(
        [*command, "enforce", NAMESPACE, "--watch", "1h"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            while "Watching drops" not in (line := process.stdout.readline()):
                assert line, "it ended before the watch"
            os.killpg(process.pid, number)
            polling.wait_until("the label is taken back", lambda: len(step.labels()) == 2)
            output, _ = process.communicate(timeout=polling.PATIENCE_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert step.labels() == ["podgate.io/mode=enforce", "podgate.io/mode=audit"]
    assert "was taken back (interrupted)" in output


def test_label_that_cannot_be_taken_back_names_the_command(
    step: Step, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        step.kubectl.respond("label", error="connection refused\n")
        step.nodes.see("two", flows(KUBELET, packets=3, **LATER), **IN_FORCE)

    pauses: list[float] = []
    handled: list[tuple[int, object]] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(signal, "signal", lambda *of: handled.append(of))
    step.clock.at[5] = fail
    with pytest.raises(KubectlError, match="could NOT be taken back") as raised:
        step.run()
    assert {(signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_IGN)} <= {*handled}
    # Not after the last attempt; subprocess sleeps, too.
    assert pauses.count(enforce._POLL_SECONDS) == len(step.labels()) - 2
    assert f"kubectl label namespace {NAMESPACE} podgate.io/mode=audit" in str(raised.value)
    assert "not taken back yet: connection refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("5m", 300.0), ("1h", 3600.0), ("7", 7.0), ("0", 0.0)]
)
def test_duration_is_a_number_with_or_without_a_unit(text: str, seconds: float) -> None:
    arguments = ["enforce", NAMESPACE, "--watch", text]
    assert main.parser().parse_args(arguments).watch == seconds


@pytest.mark.parametrize("text", ["5x", "", "-1", "1d"])
def test_wrong_duration_is_a_usage_error(step: Step, text: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main.main(["--kubectl", step.kubectl.command, "enforce", NAMESPACE, "--watch", text])
    assert raised.value.code == 2
