"""The kernel follows the kubelet into the cgroup that its unit gets at each start, without an
agent: so a stale heartbeat opens nothing."""

import dataclasses
import errno
import os
import pathlib
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.gates.existing_flows import EnforcedPod, ExistingFlows, FlowCount
from agent.lab import lab as labs
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from bpf import abi, errors, kubelet_unit, loader, map_specs, pins, program_specs, syscalls
from bpf.gates import Gates
from bpf.kubelet_unit import KubeletUnit
from bpf.node_config import NodeConfig
from bpf.replies import ReplyTables
from bpf.verdicts import Reason
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_rules import PORT, PROBE, connects, guard, is_dropped, passed
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

STALE_AFTER_SECONDS = 15
TEN_MINUTES_NS = int(600e9)

HOLD = f"""
import socket, sys
sock = socket.create_connection((sys.argv[1], {PORT}))
sys.stdin.read()
"""


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    """With a heartbeat of ten minutes ago, or when the machine booted; as it was afterwards."""
    made = NodeConfig(loaded, now_ns=lambda: max(1, time.monotonic_ns() - TEN_MINUTES_NS))
    made.set_limits(stale_after_seconds=STALE_AFTER_SECONDS, dead_man_seconds=0)
    made.beat()
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def unit(
    loaded: loader.Loaded, installation: pins.Pins, config: NodeConfig
) -> Iterator[KubeletUnit]:
    made = KubeletUnit(loaded, installation, config)
    made.attach()
    assert made.problem == ""
    yield made
    made.forget()
    pins.unlink_quietly(link(installation))


@pytest.fixture
def system() -> Iterator[Cgroup]:
    """The cgroup above the units."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def service(system: Cgroup) -> Iterator[Cgroup]:
    with cgroups.cgroup("kubelet.service", below=system) as made:
        yield made


def link(installation: pins.Pins) -> pathlib.Path:
    return installation.links / program_specs.FOLLOW_KUBELET.name


def program_of(installation: pins.Pins) -> int:
    """The id of the program that the pinned link runs."""
    with pins.opened(link(installation)) as link_fd:
        return syscalls.link_program_id(link_fd)


def make_again(group: Cgroup) -> None:
    """As the service manager does at a restart."""
    before = group.id
    cgroups.remove(group)
    group.directory.mkdir()
    assert group.id != before


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])
def test_kubelet_is_followed_and_a_stale_heartbeat_opens_nothing(
    lab: labs.Lab,
    gates: Gates,
    config: NodeConfig,
    unit: KubeletUnit,
    system: Cgroup,
    service: Cgroup,
    bridged: bool,
    version: int,
) -> None:
    config.set_kubelet(service.id)
    unit.follow(service.path)
    pod = lab.add_pod("web", 1, bridged=bridged)
    address = traffic.address(pod, version)
    with pod.listen(PORT), cgroups.cgroup("other.service", below=system) as other:
        guard(gates, pod, PROBE)
        assert connects(service, address, PORT)
        for _ in range(5):
            make_again(service)
            assert config.facts().remade_cgroup == service.id
            assert connects(service, address, PORT)
            for stranger in (other, system):
                assert is_dropped(stranger, address, PORT)


def test_existing_flow_of_a_kubelet_that_the_kernel_alone_has_followed_is_admitted(
    lab: labs.Lab, loaded: loader.Loaded, config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    """It counts as no flow from before enforcement, and is not closed."""
    config.set_kubelet(service.id)
    unit.follow(service.path)
    make_again(service)
    pod = lab.add_pod("web", 1)
    flows = ExistingFlows(
        store=PodStore(Conditions()), node=config.facts, replies=ReplyTables(loaded), closes=True
    )
    enforced = EnforcedPod(
        Pod(uid="web", namespace="shop", name="web"),
        pod.netns,
        (pod.ifindex,),
        tuple(map(abi.pack_address, pod.addresses)),
        (PROBE,),
    )
    with pod.listen(PORT) as listener:
        process = service.popen([*BARE_PYTHON, "-c", HOLD, pod.ipv4], stdin=subprocess.PIPE)
        with process, listener.accept()[0] as server:
            assert flows._scan([enforced]) == {}
            unit.follow("/elsewhere")
            assert flows._scan([enforced]) == {"web": FlowCount(closed=1)}
            with pytest.raises(ConnectionResetError):
                server.recv(1)
            process.kill()


@pytest.mark.parametrize("name", ["kubelet.servic", "kubelet.service2", "Kubelet.service"])
def test_similar_path_is_not_followed(
    config: NodeConfig, unit: KubeletUnit, system: Cgroup, service: Cgroup, name: str
) -> None:
    unit.follow(service.path)
    with cgroups.cgroup(name, below=system), cgroups.cgroup("kubelet.service", below=service):
        assert config.facts().remade_cgroup == 0
    make_again(service)
    with cgroups.cgroup("below", below=service):
        assert config.facts().remade_cgroup == service.id


def test_cgroup_of_version_1_at_the_same_path_is_not_followed(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup, tmp_path: pathlib.Path
) -> None:
    """In a hierarchy of the test's own, which ends with its mount namespace."""
    unit.follow(service.path)
    script = 'mount -t cgroup -o none,name=podgate-test none "$0" && mkdir -p "$0$1"'
    rest = ' && test -d "$0$1" && rmdir "$0$1" "$(dirname "$0$1")"'
    subprocess.run(
        ["unshare", "--mount", "sh", "-c", script + rest, str(tmp_path), service.path],
        check=True,
        timeout=20,
    )
    assert config.facts().remade_cgroup == 0


def test_unit_is_followed_before_its_first_start(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    cgroups.remove(service)
    unit.follow(service.path)
    service.directory.mkdir()
    assert config.facts().remade_cgroup == service.id


@pytest.mark.parametrize("version", [4, 6])
def test_declared_ports_are_open_until_the_unit_starts_for_the_first_time(
    lab: labs.Lab,
    gates: Gates,
    config: NodeConfig,
    unit: KubeletUnit,
    system: Cgroup,
    service: Cgroup,
    version: int,
) -> None:
    """Without an agent: the kernel closes them before a process can be in the unit's cgroup."""
    cgroups.remove(service)
    unit.follow(service.path)
    pod = lab.add_pod("web", 1)
    address = traffic.address(pod, version)
    with pod.listen(PORT), cgroups.cgroup("other.service", below=system) as other:
        guard(gates, pod, PROBE)
        assert connects(other, address, PORT)
        service.directory.mkdir()
        assert is_dropped(other, address, PORT)
        assert connects(service, address, PORT)


def test_next_agent_agrees_with_what_the_kernel_recorded(
    loaded: loader.Loaded,
    installation: pins.Pins,
    config: NodeConfig,
    unit: KubeletUnit,
    service: Cgroup,
) -> None:
    unit.follow(service.path)
    make_again(service)
    before = config.read().kubelet_unit, program_of(installation)
    following = KubeletUnit(loaded, installation, config)
    following.attach()
    following.follow(service.path)
    assert config.facts().remade_cgroup == service.id
    assert following.path == service.path
    after = config.read().kubelet_unit, program_of(installation)
    assert after == before


def test_agent_that_is_killed_while_it_changes_the_path_leaves_the_heartbeat_to_decide(
    loaded: loader.Loaded,
    config: NodeConfig,
    unit: KubeletUnit,
    service: Cgroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(Exception):
        pass

    def kill(key: bytes, value: bytes) -> None:
        raise Killed

    unit.follow(service.path)
    with monkeypatch.context() as context:
        context.setattr(loaded.map(map_specs.KUBELET_UNIT), "set", kill)
        with pytest.raises(Killed):
            unit.follow("/elsewhere")
    assert config.read().kubelet_unit == 0
    unit.follow(service.path)
    assert unit.path == service.path


@pytest.mark.parametrize("path", ["/elsewhere", None])
def test_other_path_or_none_forgets_what_was_recorded(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup, path: str | None
) -> None:
    unit.follow(service.path)
    make_again(service)
    assert config.facts().remade_cgroup == service.id
    if path is None:
        unit.forget()
    else:
        unit.follow(path)
    assert unit.path == path
    unit.follow(service.path)
    assert config.facts().remade_cgroup == 0


def test_without_a_path_nothing_is_recorded(
    config: NodeConfig, unit: KubeletUnit, service: Cgroup
) -> None:
    unit.follow(service.path)
    unit.forget()
    make_again(service)
    unit.follow(service.path)
    assert config.facts().remade_cgroup == 0


async def test_program_of_another_version_is_replaced(
    loaded: loader.Loaded,
    installation: pins.Pins,
    fresh_pins: pins.Pins,
    config: NodeConfig,
    unit: KubeletUnit,
    service: Cgroup,
) -> None:
    unit.follow(service.path)
    ours = program_of(installation)
    other = await loader.load(fresh_pins)
    try:
        upgraded = dataclasses.replace(loaded, programs=other.programs)
        KubeletUnit(upgraded, installation, config).attach()
        expected = syscalls.program_id(other.programs[program_specs.FOLLOW_KUBELET.name])
        assert program_of(installation) == expected != ours
        names = os.listdir(installation.links)
        assert [name for name in names if program_specs.FOLLOW_KUBELET.name in name] == [
            link(installation).name
        ]
    finally:
        other.close()


@pytest.mark.parametrize("lack", ["type information", "program", "short path"])
def test_where_the_kernel_cannot_follow_a_stale_heartbeat_opens_declared_ports(
    lab: labs.Lab,
    gates: Gates,
    loaded: loader.Loaded,
    installation: pins.Pins,
    config: NodeConfig,
    unit: KubeletUnit,
    system: Cgroup,
    service: Cgroup,
    tmp_path: pathlib.Path,
    lack: str,
) -> None:
    unit.follow(service.path)
    path, types, programs = service.path, tmp_path / "vmlinux", loaded.programs
    if lack == "type information":
        lacking = KubeletUnit(loaded, installation, config, types=types)
        assert lacking.problem == f"{types} cannot be read (No such file or directory)."
    elif lack == "program":
        programs = {k: v for k, v in programs.items() if k != program_specs.FOLLOW_KUBELET.name}
        without = dataclasses.replace(loaded, programs=programs)
        lacking = KubeletUnit(without, installation, config)
        assert "does not accept the program" in lacking.problem
    else:
        lacking, path = unit, "/" + "x" * kubelet_unit.MAX_PATH_BYTES
    lacking.follow(path)
    assert lacking.problem
    assert lacking.path is None
    config.set_kubelet(service.id)  # as the agent did that is missing now
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        guard(gates, pod, PROBE)
        assert connects(system, pod.ipv4, PORT)
    # An open hole must not look like probes, nor like a kubelet that was never found.
    assert passed(gates, pod, Reason.STALE) == 1
    assert passed(gates, pod, Reason.PROBE) == passed(gates, pod, Reason.UNIDENTIFIED) == 0
    if lack == "short path":
        assert "longer than 254 bytes" in lacking.problem
        lacking.follow(service.path)
        assert lacking.problem == ""
        assert lacking.path == service.path


def test_longest_path_is_followed(config: NodeConfig, unit: KubeletUnit, system: Cgroup) -> None:
    name = "x" * (kubelet_unit.MAX_PATH_BYTES - len(system.path) - 1)
    unit.follow(f"{system.path}/{name}")
    assert unit.problem == ""
    with cgroups.cgroup(f"{name}y", below=system):
        assert config.facts().remade_cgroup == 0
    with cgroups.cgroup(name, below=system) as made:
        assert config.facts().remade_cgroup == made.id


def test_doctor_s_trial_finds_this_kernel_able(isolated: None) -> None:
    kubelet_unit.try_to_follow()


def test_missing_tracepoint_is_an_error(loaded: loader.Loaded) -> None:
    program = loaded.programs[program_specs.FOLLOW_KUBELET.name]
    with pytest.raises(errors.BpfError, match="attaching to tracepoint nothing") as caught:
        syscalls.raw_tracepoint_open(program, "nothing")
    assert caught.value.errno == errno.ENOENT
