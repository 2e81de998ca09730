"""What a scrape shows of a whole agent: coverage, components, and what works without the agent."""

import os
import pathlib
import signal
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import cast

import pytest
from prometheus_client import parser

from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab.agent_process import AgentProcess, drop_result
from agent.lab.lab import Lab, LabPod
from bpf import abi, loader, program_specs, syscalls, usage
from bpf.gates import Gates
from tests import polling
from tests.kernel import offers, traffic
from tests.kernel.test_agent import LISTENING, PORT, isolated_as
from tests.kernel.test_rules import guard

pytestmark = pytest.mark.kernel

PROMTOOL = pathlib.Path(sys.prefix) / "bin" / "promtool"
_ENABLE_STATS = cast(syscalls.Command, 32)  # BPF_ENABLE_STATS, Linux 5.8

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def pods(lab: Lab) -> Iterator[list[LabPod]]:
    """One for each mode that gates."""
    made = [lab.add_pod(name, number) for number, name in enumerate(("audit", "enforce"), 1)]
    with made[0].listen(PORT), made[1].listen(PORT):
        yield made


def scrape(report: AgentReport) -> str:
    url = f"http://{report.http_address}/metrics"
    with urllib.request.urlopen(url, timeout=polling.PATIENCE_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def samples(text: str) -> Samples:
    """By name and labels."""
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in parser.text_string_to_metric_families(text)
        for one in family.samples
    }


def test_a_scrape_shows_coverage_and_what_is_in_force(
    operator: AgentProcess, pods: list[LabPod]
) -> None:
    offers.need_netns_cookie()
    offers.need_default_deny()
    for pod in pods:
        operator.write_manifest(pod, mode=pod.name, container=LISTENING)
    operator.write_file("broken.yaml", "metadata: {")
    operator.start("--mode", "enforce")
    report = operator.wait_for("both gates", isolated_as("enforce", "Enforced"))
    report = operator.wait_for("both gates", isolated_as("audit", "Audit"))
    text = scrape(report)
    found = samples(text)
    for mode, count in (("off", 0), ("audit", 1), ("enforce", 1), ("strict", 0)):
        labels = (("mode", mode),)
        assert found["podgate_pods_desired", labels] == count
        assert found["podgate_pods_in_force", labels] == count
    assert 'podgate_manifest_invalid{file="broken.yaml"' in text
    assert 'pod="broken.yaml"' not in text
    assert 'pod="relay"' not in text
    for component in ("hooks", "default_deny", "policies"):
        assert found["podgate_component_up", (("component", component),)] == 1
    assert ("podgate_component_up", (("component", "api_server"),)) not in found
    hooks = [value for (name, _), value in found.items() if name == "podgate_hook_attached"]
    assert hooks
    assert set(hooks) == {1.0}
    assert 0 <= found["podgate_heartbeat_age_seconds", ()] < polling.PATIENCE_SECONDS
    assert 0 < found["podgate_dead_man_remaining_seconds", ()] <= 24 * 3600
    assert found["podgate_map_entries", (("map", "gate_slots"),)] == 2
    room = (("kind", "hash"), ("map", "gate_slots"))
    assert found["podgate_map_max_entries", room] == abi.MAX_GATES
    assert found["podgate_node_turns_total", ()] == 1
    checked = subprocess.run(
        (PROMTOOL, "check", "metrics"), input=text, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_pods_are_added_up_by_node(operator: AgentProcess, pods: list[LabPod]) -> None:
    for pod in pods:
        operator.write_manifest(pod, mode=pod.name, container=LISTENING)
    operator.start("--mode", "enforce", "--metrics", "node")
    operator.wait_for("both gates", isolated_as("enforce", "Enforced"))
    report = operator.wait_for("both gates", isolated_as("audit", "Audit"))
    text = scrape(report)
    found = samples(text)
    assert not [
        labels for _, labels in found if {"pod", "namespace"} & {name for name, _ in labels}
    ]
    condition = (
        ("condition", "podgate.io/isolation-ready"),
        ("reason", "Audit"),
        ("status", "True"),
    )
    assert found["podgate_pod_condition", condition] == 1
    assert any(name == "podgate_gate_packets_total" for name, _ in found)
    checked = subprocess.run(
        (PROMTOOL, "check", "metrics"), input=text, capture_output=True, text=True, timeout=60
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_counters_go_on_without_the_agent(operator: AgentProcess, pods: list[LabPod]) -> None:
    operator.write_manifest(pods[1], mode="enforce", container=LISTENING)
    operator.start("--mode", "enforce")
    report = operator.wait_for("the gate", isolated_as("enforce", "Enforced"))
    directories = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    alive = operator.run("metrics", *directories)
    assert alive.returncode == 0
    assert samples(alive.stdout)["podgate_ready", ()] == 1
    operator.stop(signal.SIGKILL)
    labels = (
        *(("interface", pods[1].interface), ("namespace", "demo"), ("pod", "enforce")),
        *(("reason", "node"), ("verdict", "drop")),
    )
    dropped = "podgate_gate_packets_total", labels
    before = samples(operator.run("metrics", *directories).stdout)
    observed = attempts.connect_from_node(pods[1], "IPv4", PORT, is_rejected=True)
    assert observed == drop_result(report)
    dead = operator.run("metrics", *directories)
    assert dead.returncode == 0
    after = samples(dead.stdout)
    assert after[dropped] == before.get(dropped, 0) + 1
    assert after["podgate_heartbeat_age_seconds", ()] > before["podgate_heartbeat_age_seconds", ()]
    assert after["podgate_kubelet_admitted", ()] == 1
    assert after["podgate_gates", (("mode", "enforce"),)] == 1
    assert {name for name, _ in after} <= {name for name, _ in samples(alive.stdout)}


def test_hook_that_another_program_removes_is_shown(
    operator: AgentProcess, pods: list[LabPod]
) -> None:
    operator.write_manifest(pods[1], mode="enforce", container=LISTENING)
    operator.start()
    report = operator.wait_for("the gate", isolated_as("enforce", "Enforced"))
    links = operator.bpffs / "podgate" / f"v{abi.SCHEMA}" / "links"
    name = next(hook.name for hook in program_specs.HOOKS if (links / hook.name).exists())
    attached = ("podgate_hook_attached", (("hook", name),))
    assert samples(scrape(report))[attached] == 1
    (links / name).unlink()
    assert samples(scrape(report))[attached] == 0


def test_runs_of_programs_are_the_kernels_figures(
    lab: Lab,
    gates: Gates,
    loaded: loader.Loaded,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    pod = lab.add_pod("web", 1)
    guard(gates, pod)
    enabled = tmp_path / "bpf_stats_enabled"
    monkeypatch.setattr(usage, "_STATS", enabled)
    enabled.write_text("0\n")
    assert usage.program_runs(loaded.programs) == {}
    enabled.write_text("1\n")
    measuring, _ = syscalls.call(_ENABLE_STATS, struct.pack("=I", 0), what="measuring programs")
    try:
        before = usage.program_runs(loaded.programs)["gate_egress"]
        assert traffic.node_is_dropped(pod, 4, PORT)
        after = usage.program_runs(loaded.programs)["gate_egress"]
    finally:
        os.close(measuring)
    assert 1 <= after.runs - before.runs < 1000
    assert 0 < after.seconds - before.seconds < polling.PATIENCE_SECONDS
