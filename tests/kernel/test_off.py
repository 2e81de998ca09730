"""`podgate off --node` opens the node at once, whatever state its agent is in, and stays in force
until `podgate on --node`."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from agent.admin.report import AgentReport
from agent.lab import attempts, leftovers
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.labels import ISOLATION_READY
from agent.logs import Event
from bpf import pins
from tests.docs import blocks
from tests.kernel import attached, cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.polling import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.kernel

PORT = 8080
PROBE = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 3600}}
RANGES = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1, bridged=True)
    with pod.listen(PORT):
        yield pod


@pytest.fixture
def installation(operator: AgentProcess) -> pins.Pins:
    return pins.Pins(operator.bpffs)


@pytest.fixture(params=["tcx", "clsact"])
def attachment(request: pytest.FixtureRequest) -> str:
    """Each that this kernel has."""
    if request.param == "tcx":
        offers.need_tcx()
    return str(request.param)


def is_closed(pod: LabPod) -> bool:
    result = attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=True)
    return result in (attempts.REFUSED, attempts.DROPPED)


def is_open(pod: LabPod) -> bool:
    return attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=False) == "connects"


def isolated_as(report: AgentReport, reason: str) -> bool:
    condition = condition_of(report, "web", ISOLATION_READY)
    return condition is not None and (condition.status, condition.reason) == ("True", reason)


def start(operator: AgentProcess, web: LabPod, mode: str, *extra: str) -> None:
    """An agent with everything that one can have on a node: the default-deny table, too."""
    operator.write_manifest(web, mode=mode, container=PROBE)
    operator.start("--mode", mode, *RANGES, *extra)
    reason = {"enforce": "Enforced", "strict": "Strict"}[mode]
    operator.wait_for(f"mode {mode}", lambda report: isolated_as(report, reason))
    # The last of an agent's first programs: a command that lists programs before it leaves it.
    wait_until("a guarded bridge", lambda: _guards_bridge(pins.Pins(operator.bpffs)))


def _guards_bridge(installation: pins.Pins) -> bool:
    """Whether it has its program in place of the one that it had before a pod was enforced."""
    programs = " ".join(attached.programs(installation))
    return "bridge_gate" in programs and "device_gate" not in programs


AWAITED = ("--timeout", f"{PATIENCE_SECONDS:.0f}")
"""The agent has as long as it needs on an emulated machine."""


def switch(operator: AgentProcess, word: str, *options: str) -> str:
    where = ["--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs)]
    done = operator.run(word, "--node", *where, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_off(report: AgentReport) -> bool:
    return report.max_mode == "off" and not report.in_force


def test_off_detaches_everything_and_on_attaches_it_again(
    operator: AgentProcess, installation: pins.Pins, web: LabPod, attachment: str
) -> None:
    start(operator, web, "enforce", "--attach", attachment)
    assert is_closed(web)
    before = attached.everything(installation)
    assert len(before) > 10
    assert [name for name in before if "gate_egress" in name]
    assert "hook_connect4" in before
    assert ("table inet podgate" in before) == offers.has_default_deny()

    assert "its agent follows" in switch(operator, "off", *AWAITED)
    assert attached.everything(installation) == []
    assert is_open(web)
    report = operator.wait_for("off", is_off)
    assert isolated_as(report, "Off")
    assert report.max_mode_from == "'podgate off --node'"
    assert report.kubelet_unfollowed == ""

    assert "Modes up to strict, by --max-mode." in switch(operator, "on", *AWAITED)
    operator.wait_for("enforce", lambda report: isolated_as(report, "Enforced"))
    # Not read again: until then a bridge changes its program.
    wait_until("everything as before", lambda: attached.everything(installation) == before)
    assert is_closed(web)


def test_off_releases_the_relay_and_on_starts_one(
    operator: AgentProcess, installation: pins.Pins, web: LabPod, kubelet: Cgroup
) -> None:
    start(operator, web, "strict", "--kubelet", f"cgroup:{kubelet.path}")
    assert is_closed(web)
    switch(operator, "off")
    assert is_open(web)
    # Its connections drain.
    wait_until("the relay gone", lambda: attached.everything(installation) == [])
    switch(operator, "on")
    operator.wait_for("strict", lambda report: isolated_as(report, "Strict"))
    assert is_closed(web)


def test_off_needs_no_agent_and_a_restarted_one_attaches_nothing(
    operator: AgentProcess, installation: pins.Pins, web: LabPod, attachment: str
) -> None:
    start(operator, web, "enforce", "--attach", attachment)
    operator.stop(signal.SIGKILL)
    assert is_closed(web)

    assert "no agent has responded" in switch(operator, "off")
    assert attached.everything(installation) == []
    assert is_open(web)

    lines = len(list(operator.log_lines()))
    for number in (signal.SIGKILL, signal.SIGTERM):
        operator.start("--mode", "enforce", "--attach", attachment)
        operator.wait_for("off", lambda report: isolated_as(report, "Off") and is_off(report))
        assert attached.everything(installation) == []
        assert is_open(web)
        operator.stop(number)
    events = {line["event"] for line in list(operator.log_lines())[lines:]}
    assert not events & {Event.INTERFACE_GATED.key, Event.DEFAULT_DENY_READY.key}

    assert "No agent responds" in switch(operator, "on")
    operator.start("--mode", "enforce", "--attach", attachment)
    operator.wait_for("enforce", lambda report: isolated_as(report, "Enforced"))
    assert is_closed(web)


def test_off_opens_the_node_of_an_agent_that_hangs(
    operator: AgentProcess, installation: pins.Pins, web: LabPod
) -> None:
    start(operator, web, "enforce")
    os.kill(operator.pid, signal.SIGSTOP)
    try:
        assert "no agent has responded" in switch(operator, "off")
        assert attached.everything(installation) == []
        assert is_open(web)
    finally:
        os.kill(operator.pid, signal.SIGCONT)
    operator.wait_for("off", lambda report: isolated_as(report, "Off") and is_off(report))
    assert attached.everything(installation) == []
    switch(operator, "on")
    operator.wait_for("enforce", lambda report: isolated_as(report, "Enforced"))
    assert is_closed(web)


def test_pods_that_start_while_podgate_is_off_are_open_and_closed_after_it(
    operator: AgentProcess, lab: Lab, web: LabPod
) -> None:
    start(operator, web, "enforce")
    switch(operator, "off")
    later = lab.add_pod("later", 2)
    with later.listen(PORT):
        assert is_open(later)
        operator.write_manifest(later, mode="enforce", container=PROBE)
        operator.wait_for("its manifest", lambda report: pod_of(report, "later") is not None)
        assert is_open(later)
        switch(operator, "on")
        wait_until("both closed", lambda: is_closed(later) and is_closed(web))


def test_five_lines_of_shell_open_everything_and_a_later_agent_stays_off(
    operator: AgentProcess, installation: pins.Pins, web: LabPod, attachment: str
) -> None:
    """Of docs/off.md, run as documented."""
    start(operator, web, "enforce", "--attach", attachment)
    operator.stop(signal.SIGKILL)
    assert is_closed(web)
    programs = leftovers.program_ids(installation)

    script = blocks.read(blocks.ROOT / "docs" / "off.md")[0].text
    # In this order: the lab's BPF file systems are below /run/podgate-lab.
    script = script.replace("/run/podgate/", f"{operator.run_directory}/")
    script = script.replace("/sys/fs/bpf", str(operator.bpffs))
    subprocess.run(["sh", "-c", script], check=False, capture_output=True)
    assert is_open(web)
    # The kernel ends a link some time after its last pin is gone.
    wait_until("no link", lambda: leftovers.links_to(programs) == [])
    assert attached.everything(installation) == []
    state = json.loads((operator.run_directory / "cni.json").read_text())
    assert (state["mode"], state["namespaces"]) == ("off", {})

    operator.start("--mode", "enforce", "--attach", attachment)
    operator.wait_for("off", lambda report: isolated_as(report, "Off") and is_off(report))
    assert attached.everything(installation) == []
    assert is_open(web)


def test_off_without_node_names_the_clusters_command(operator: AgentProcess) -> None:
    for word in ("off", "on"):
        done = operator.run(word)
        assert done.returncode == 2
        assert f"kubectl podgate {word}" in done.stderr
