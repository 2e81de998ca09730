"""What commands answer while the agent responds, hangs, and is dead: from the pinned objects."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

import msgspec
import pyroute2
import pytest

from agent.admin.report import Drops, RulesReport
from agent.drops import history
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.linux.cgroups import cgroup2_mount
from agent.operate.pinned import bpftool, drops, programs, rules, status
from agent.operate.pinned.exposures import ALL, DECLARED_PORTS
from agent.operate.pinned.installation import PinsUnreadableError
from agent.operate.pinned.report import PinnedStatus
from bpf import abi, loader, map_specs, pins, syscalls
from bpf.attachment import Attachment
from bpf.node_config import NodeConfig
from tests import polling
from tests.kernel import cgroups, foreign, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_agent import PORT, isolated_as, refuses
from tests.kernel.test_policies import LISTENING, cgroup, policy
from tests.kernel.test_standin import beat_long_ago

pytestmark = pytest.mark.kernel

UNFOLLOWED = "the kernel does not follow the kubelet's restarts"


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


@pytest.fixture
def service(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture(params=list(Attachment))
def attachment(request: pytest.FixtureRequest) -> Attachment:
    chosen = Attachment(request.param)
    if chosen is Attachment.TCX:
        offers.need_tcx()
    return chosen


def start(operator: AgentProcess, pod: LabPod, *options: str) -> pins.Pins:
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.start(*options)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    wait_for_saved_name(operator, pod)
    return pins.Pins(operator.bpffs)


def wait_for_saved_name(operator: AgentProcess, pod: LabPod) -> None:
    """The agent saves the names of pods some time after their gates are attached."""
    file = operator.run_directory / "state" / history.FLOWS_FILE
    polling.wait_until("the saved name", lambda: pod.ifindex in history.saved_pods(file))


def answer(operator: AgentProcess, *command: str) -> Any:
    """The command's JSON; it succeeds."""
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    done = operator.run(*command, "-o", "json", *where)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read(operator: AgentProcess, installation: pins.Pins) -> PinnedStatus:
    return status.read(installation, operator.run_directory)


def exposures(found: PinnedStatus) -> dict[str, bool]:
    """Whether each is open now."""
    return {each.what: each.is_open for each in found.exposures}


def test_commands_answer_from_the_pins_while_the_agent_hangs_and_when_it_is_dead(
    operator: AgentProcess, web: LabPod, service: Cgroup, tmp_path: pathlib.Path
) -> None:
    directory = tmp_path / "rules"
    directory.mkdir()
    rule = policy("backup", cgroup(service), 9999)
    (directory / "backup.yaml").write_text(json.dumps(rule), encoding="utf-8")
    installation = start(operator, web, "--rules", str(directory))
    source = f"cgroup {service.path}"
    polling.wait_until(
        "the rule", lambda: source in sources_of(rules.read(installation, operator.run_directory))
    )
    assert refuses(web)
    alive = answer(operator, "drops")["sources"]
    assert answer(operator, "status")["pods"]

    os.kill(operator.pid, signal.SIGSTOP)
    hung = [answer(operator, command) for command in ("status", "drops", "rules")]
    check_answers(hung, web, service, alive)
    assert "no agent responds" in hung[0]["agent"]
    os.kill(operator.pid, signal.SIGCONT)
    operator.stop(signal.SIGKILL)
    dead = [module.read(installation, operator.run_directory) for module in (status, drops, rules)]
    check_answers(json.loads(msgspec.json.encode(dead)), web, service, alive)
    # Counters continue without the agent.
    assert refuses(web)
    polling.wait_until(
        "the drop",
        lambda: packets(drops.read(installation, operator.run_directory)) > packets(dead[1]),
    )


def sources_of(found: RulesReport) -> list[str]:
    return [rule.source for policy in found.policies for rule in policy.rules]


def packets(found: Drops) -> int:
    return sum(source.packets for source in found.sources)


def check_answers(
    answers: list[Any], web: LabPod, service: Cgroup, alive: list[dict[str, Any]]
) -> None:
    """answers: of status, drops and rules; alive: drops as the agent reported them."""
    found = answers[0]
    (gate,) = found["gates"]
    assert (gate["namespace"], gate["pod"], gate["mode"]) == ("demo", "web", "enforce")
    assert (gate["interface"], gate["attachment"]) == (web.interface, Attachment.best().value)
    assert found["heartbeatAgeSeconds"] is not None
    assert [each["what"] for each in found["exposures"]][-1] == ALL
    sources = answers[1]["sources"]
    named = ("namespace", "pod", "mode", "protocol", "port", "cgroup", "process")
    shown = [[one[name] for name in named] for one in sources]
    assert all([one[name] for name in named] in shown for one in alive)
    assert alive
    policies = answers[2]["policies"]
    by_source = {one["rules"][0]["source"]: one for one in policies}
    assert by_source[f"cgroup {service.path}"]["rules"][0]["ports"] == "9999"
    assert by_source[f"cgroup {service.path}"]["pods"] == ["demo/web"]
    assert by_source["the kubelet"]["rules"][0]["ports"] == str(PORT)


def test_stale_heartbeat_and_dead_man_are_shown_as_gates_see_them(
    operator: AgentProcess, web: LabPod
) -> None:
    installation = start(operator, web)
    operator.stop(signal.SIGKILL)
    assert exposures(read(operator, installation)) == {ALL: False}

    loaded = asyncio.run(loader.load(installation))
    config = NodeConfig(loaded)
    config.set_kubelet_unit(0)
    beat_long_ago(operator.bpffs)
    found = read(operator, installation)
    assert exposures(found) == {DECLARED_PORTS: True, ALL: False}
    assert found.exposures[0].text.startswith("Declared ports of 1 pod are open to ")
    assert UNFOLLOWED in found.exposures[0].text
    config.set_limits(stale_after_seconds=15, dead_man_seconds=60)
    assert exposures(read(operator, installation)) == {DECLARED_PORTS: True, ALL: True}
    config.set_kubelet(None)
    found = read(operator, installation)
    assert found.kubelet is None
    assert any("the kubelet is not identified" in each.text for each in found.exposures)
    loaded.close()
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    doctor = operator.run("doctor", "-o", "json", *where)
    assert doctor.returncode == 1
    assert "All gates are open" in doctor.stdout


def test_gate_that_was_detached_is_shown(operator: AgentProcess, web: LabPod) -> None:
    installation = start(operator, web, "--attach", Attachment.CLSACT.value)
    operator.stop(signal.SIGKILL)
    with pyroute2.IPRoute() as netlink:
        netlink.tc("del", "clsact", web.ifindex)
    (gate,) = read(operator, installation).gates
    assert gate.attachment == ""


def test_programs_show_foreign_ones_in_the_order_in_which_they_run(
    operator: AgentProcess, web: LabPod, attachment: Attachment
) -> None:
    installation = start(operator, web, "--attach", attachment.value)
    operator.stop(signal.SIGKILL)
    with contextlib.ExitStack() as close:
        if attachment is Attachment.TCX:
            close.enter_context(foreign.attached_by_tcx(web.ifindex, foreign.TC_ACT_UNSPEC))
        else:
            foreign.add_filter(web.ifindex, foreign.TC_ACT_UNSPEC)
        report = programs.read(installation)
        (shown,) = read(operator, installation).gates
    assert shown.attachment == attachment.value
    chain = [one for one in report.chains if one.direction == "egress"]
    assert [(one.interface, one.position, one.kind, one.is_ours) for one in chain] == [
        (web.interface, 1, attachment.value, True),
        (web.interface, 2, attachment.value, False),
    ]
    gate = next(one for one in report.programs if one.name == "gate_egress")
    assert gate.instructions > 1000
    assert gate.verified_instructions is None or gate.verified_instructions > gate.instructions
    if attachment is Attachment.TCX:
        assert [link.target for link in gate.links] == [f"interface {web.interface}"]
    assert report.commands[0] == "bpftool -j prog show"
    offers.need_listed_cgroup()
    ours = {one.hook for one in report.cgroups if one.is_ours}
    assert "cgroup_inet4_connect" in ours


def test_programs_of_the_root_cgroup_are_shown_where_others_change_too_fast(
    operator: AgentProcess, web: LabPod, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation = start(operator, web)
    operator.stop(signal.SIGKILL)
    offers.need_listed_cgroup()
    # As bpftool does when a cgroup is removed while it walks the tree.
    walking = tmp_path / "bin" / "bpftool"
    walking.parent.mkdir()
    failing = '[ "$3" = tree ] && echo "Error: can not open cgroup" >&2 && exit 255'
    walking.write_text(f'#!/bin/sh\n{failing}\nexec {bpftool.find()} "$@"\n', encoding="ascii")
    walking.chmod(0o755)
    monkeypatch.setenv("PATH", f"{walking.parent}:{os.environ['PATH']}")
    report = programs.read(installation)
    assert {"/"} == {one.cgroup for one in report.cgroups}
    assert any(one.is_ours for one in report.cgroups)
    assert f"cgroup show {cgroup2_mount()}" in report.commands[-1]


def test_raw_output_is_that_of_bpftool_with_its_commands(
    operator: AgentProcess, web: LabPod
) -> None:
    installation = start(operator, web)
    operator.stop(signal.SIGKILL)
    where = ("--bpffs", str(operator.bpffs))
    path = installation.map(map_specs.CONFIG)
    dumped = operator.run("maps", "config", "--raw", *where)
    assert dumped.returncode == 0, dumped.stderr
    assert dumped.stdout.startswith(f"# bpftool map dump pinned {path}\n")
    assert '"heartbeat_ns"' in dumped.stdout
    shown = operator.run("programs", "--raw", *where)
    assert shown.returncode == 0, shown.stderr
    commands = [line for line in shown.stdout.splitlines() if line.startswith("# bpftool")]
    assert commands[:3] == ["# bpftool prog show", "# bpftool link show", "# bpftool net show"]
    assert "gate_egress" in shown.stdout
    unknown = operator.run("maps", "nothing", *where)
    assert unknown.returncode == 2
    assert "no map 'nothing' is pinned; use one of addresses, " in unknown.stderr


def test_value_of_another_version_is_one_sentence(
    fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    loaded = asyncio.run(loader.load(fresh_pins))
    gate = abi.CGate(ifindex=1, mode=99)
    slot = abi.FIRST_SLOT.to_bytes(4, "little")
    value = abi.CGateSlot()
    value.versions[0] = gate
    loaded.map(map_specs.GATES).set(slot, bytes(value))
    loaded.map(map_specs.GATE_SLOTS).set((1).to_bytes(4, "little"), slot)
    loaded.close()
    for read_pins in (status.read, rules.read):
        with pytest.raises(PinsUnreadableError, match="99 is not a valid Mode") as raised:
            read_pins(fresh_pins, tmp_path)
        assert "use the podgate command of the version that wrote it" in str(raised.value)


def test_pins_that_cannot_be_read_are_one_sentence(
    operator: AgentProcess, fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    for read_pins in (status.read, drops.read, rules.read):
        with pytest.raises(PinsUnreadableError, match="no pod of this node has a gate"):
            read_pins(fresh_pins, tmp_path)
    pins.Pins(fresh_pins.bpffs, schema=99).prepare()
    with pytest.raises(PinsUnreadableError, match=r"schema v99; this one reads v\d+"):
        status.read(fresh_pins, tmp_path)
    fresh_pins.prepare()
    stranger = foreign.create_map(4, 8, 16)
    syscalls.pin(stranger, str(fresh_pins.maps / "gates"))
    os.close(stranger)
    with pytest.raises(PinsUnreadableError, match="another version of podgate"):
        status.read(fresh_pins, tmp_path)
    where = ("--run-directory", str(tmp_path / "none"), "--bpffs", str(fresh_pins.bpffs))
    done = operator.run("status", *where)
    assert done.returncode == 3
    assert "another version of podgate" in done.stderr
    assert done.stdout == ""
