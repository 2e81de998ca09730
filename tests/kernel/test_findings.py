"""States that are made on a node, and what every front end reports of them: one severity and one
sentence."""

import html
import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pyroute2
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from bpf import pins, program_specs
from bpf.attachment import Attachment
from tests import polling
from tests.kernel.test_agent import PORT, isolated_as
from tests.kernel.test_path_test import detour, results, touch
from tests.kernel.test_policies import LISTENING

__all__ = ["detour"]

pytestmark = pytest.mark.kernel


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


def start(operator: AgentProcess, pod: LabPod, *options: str, mode: str = "enforce") -> None:
    operator.write_manifest(
        pod, mode=mode, container=LISTENING, addresses=[str(each) for each in pod.addresses]
    )
    operator.start(*options)


def has(kind: Kind) -> Callable[[AgentReport], bool]:
    return lambda report: kind.name in {one.kind for one in report.findings}


def document(operator: AgentProcess, *command: str) -> Any:
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    return json.loads(operator.run(*command, "-o", "json", *where).stdout)


def sentence_of(found: list[dict[str, Any]], kind: Kind) -> str:
    """The only one of this kind, with the kind's severity."""
    (one,) = (one for one in found if one["kind"] == kind.name)
    assert one["severity"] == kind.severity
    sentence: str = one["sentence"]
    return sentence


def fetch(report: AgentReport, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{report.http_address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def explained(operator: AgentProcess) -> dict[str, str]:
    """Sentences of `explain pod`, by severity."""
    checks = document(operator, "explain", "pod", "demo/web")["checks"]
    return {one["text"]: one["severity"] for one in checks if one["severity"]}


def reported_by_all(operator: AgentProcess, report: AgentReport, kind: Kind) -> str:
    """The sentence, once status, doctor, page and metric agree about it."""
    sentence = sentence_of(document(operator, "status")["findings"], kind)
    assert sentence_of(document(operator, "doctor")["findings"], kind) == sentence
    _, page = fetch(report, "/")
    assert f"{kind.severity}: {sentence}" in html.unescape(page)
    _, metrics = fetch(report, "/metrics")
    assert f'podgate_findings{{kind="{kind.name}",severity="{kind.severity}"}} 1.0' in metrics
    return sentence


def test_label_that_is_no_mode(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web, mode="Enforce")
    report = operator.wait_for("the finding", has(kinds.LABEL_IGNORED))
    sentence = reported_by_all(operator, report, kinds.LABEL_IGNORED)
    assert "'Enforce', which is no mode" in sentence
    assert explained(operator)[sentence] == "open"
    assert fetch(report, "/readyz") == (200, "ok\n")


def test_path_around_a_gate_that_is_found_later(
    operator: AgentProcess,
    web: LabPod,
    detour: Callable[[], None],
) -> None:
    start(operator, web)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    detour()
    touch(operator, web)
    operator.wait_for("the bypass", lambda report: "bypassed" in results(report).values())
    report = operator.wait_for("the finding", has(kinds.GATE_BYPASSED))
    sentence = reported_by_all(operator, report, kinds.GATE_BYPASSED)
    assert explained(operator)[sentence] == "open"
    (pod,) = report.pods
    assert sentence in pod.conditions[0].message


def test_node_that_is_switched_off(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    operator.run("off", "--node", *where)
    report = operator.wait_for("the finding", has(kinds.OFF))
    sentence = reported_by_all(operator, report, kinds.OFF)
    assert sentence == "podgate is off by 'podgate off --node': all pods of this node are open."
    assert explained(operator)[sentence] == "open"
    operator.stop(signal.SIGTERM)
    assert sentence_of(document(operator, "doctor")["findings"], kinds.OFF) == sentence


def test_gate_that_is_detached_and_a_hook_that_is_gone_while_the_agent_is_dead(
    operator: AgentProcess, web: LabPod
) -> None:
    start(operator, web, "--attach", Attachment.CLSACT.value)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    saved = operator.run_directory / "state"
    polling.wait_until("its name", lambda: any(saved.iterdir()))
    operator.stop(signal.SIGKILL)
    with pyroute2.IPRoute() as netlink:
        netlink.tc("del", "clsact", web.ifindex)
    (pins.Pins(operator.bpffs).links / program_specs.HOOKS[0].name).unlink()
    status = document(operator, "status")["findings"]
    doctor = document(operator, "doctor")["findings"]
    shown = explained(operator)
    for kind in (kinds.GATE_DETACHED, kinds.HOOK_MISSING, kinds.AGENT_DEAD):
        sentence = sentence_of(status, kind)
        if kind is kinds.AGENT_DEAD:
            # The age of the heartbeat grows.
            assert sentence.startswith("No agent responds, and 0 gates are in force, ")
            continue
        assert sentence_of(doctor, kind) == sentence
    assert shown[sentence_of(status, kinds.GATE_DETACHED)] == "open"


def test_state_that_cannot_be_written(operator: AgentProcess, web: LabPod) -> None:
    operator.run_directory.mkdir(mode=0o700)
    (operator.run_directory / "state").write_text("", encoding="ascii")
    start(operator, web)
    report = operator.wait_for("the finding", has(kinds.STATE_NOT_WRITTEN))
    sentence = reported_by_all(operator, report, kinds.STATE_NOT_WRITTEN)
    assert sentence == "State files cannot be written: the next agent starts with older ones."
    (operator.run_directory / "state").unlink()
    operator.wait_for("its end", lambda report: not has(kinds.STATE_NOT_WRITTEN)(report))


def test_guards_that_are_configured_are_in_force(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web, "--mode=enforce")
    report = operator.wait_for("the gate", isolated_as("web", "Enforced"))
    _, metrics = fetch(report, "/metrics")
    guards = dict(re.findall(r'podgate_guard_in_force\{guard="(\w+)"\} ([01])', metrics))
    # Raw sockets and host probes are not configured.
    names = ("hooks", "default_deny", "path_tests", "kubelet_followed")
    assert guards == dict.fromkeys(names, "1")


def test_agent_that_hangs_is_not_a_dead_one(operator: AgentProcess, web: LabPod) -> None:
    start(operator, web)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    os.kill(operator.pid, signal.SIGSTOP)
    sentence = sentence_of(document(operator, "status")["findings"], kinds.AGENT_HUNG)
    assert sentence == (
        f"The agent hangs (pid {operator.pid} has no heartbeat), and 1 gate is in force."
    )
    assert sentence_of(document(operator, "doctor")["findings"], kinds.AGENT_HUNG) == sentence
    assert explained(operator)[sentence] == "broken"
    os.kill(operator.pid, signal.SIGCONT)
    operator.stop(signal.SIGKILL)
    (dead,) = (
        one for one in document(operator, "status")["findings"] if "heartbeat" in one["sentence"]
    )
    assert dead["kind"] == kinds.AGENT_DEAD.name
