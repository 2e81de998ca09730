"""Containers open raw and packet sockets in the host's network namespace: they are counted by
source, and rejected if so set, unless a policy names the container's cgroup."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.drops.raw_sockets import RawSocketSources
from agent.drops.source_processes import SourceProcesses
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, pod_of
from agent.linux.cgroups import cgroup2_mount
from agent.logs import Event
from agent.pods.conditions import Conditions
from agent.pods.object_labels import ObjectLabels
from agent.pods.store import PodStore
from agent.settings import RawSocketMode
from bpf import abi, loader, map_specs, pins, program_specs
from bpf.drop_sources import DropSources
from bpf.maps import Map
from bpf.node_config import NodeConfig
from bpf.raw_socket_policy import RawSocketPolicy
from bpf.verdicts import Verdict
from tests import polling
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

RAW4, RAW6, PACKET, OLD_PACKET, OTHER = "raw4", "raw6", "packet", "old-packet", "other"

# Opens one socket of each kind, prints those that are open, and holds them until its input ends.
OPEN = """
import socket, sys
kinds = {
    "raw4": (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    "raw6": (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
    "packet": (socket.AF_PACKET, socket.SOCK_DGRAM, 0),
    "old-packet": (socket.AF_INET, 10, 0),
    "other": (socket.AF_INET6, socket.SOCK_DGRAM, 0),
}
held = []
for name in sys.argv[1:]:
    try:
        held.append(socket.socket(*kinds[name]))
    except PermissionError:
        print(name, "rejected")
    else:
        print(name, "open")
sys.stdout.flush()
sys.stdin.read()
"""

FAMILIES = {RAW4: socket.AF_INET, RAW6: socket.AF_INET6, PACKET: socket.AF_PACKET}


def opened(group: Cgroup, *kinds: str, before: tuple[str, ...] = ()) -> dict[str, bool]:
    """Whether a process of this cgroup can open a socket of each kind. before: its command."""
    done = group.run([*before, *BARE_PYTHON, "-c", OPEN, *kinds])
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    return {kind: result == "open" for kind, result in lines}


@pytest.fixture
def pods() -> Iterator[Cgroup]:
    """The cgroup above all pods'."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def container(pods: Cgroup) -> Iterator[Cgroup]:
    with cgroups.cgroup("pod", below=pods) as pod, cgroups.cgroup("app", below=pod) as made:
        yield made


@pytest.fixture
def config(loaded: loader.Loaded, attached_hooks: None, pods: Cgroup) -> NodeConfig:
    made = NodeConfig(loaded)
    made.set_pods(pods.id, pods.level)
    return made


@pytest.fixture
def policy(
    loaded: loader.Loaded, installation: pins.Pins, config: NodeConfig
) -> Iterator[RawSocketPolicy]:
    made = RawSocketPolicy(loaded, installation, None)
    made.attach()
    yield made
    made.set_denies_pods(is_denied=False)
    made.admit_only({})
    pins.unlink_quietly(installation.links / program_specs.CREATE_PACKET_SOCKET.name)


def rejectable(*kinds: str) -> set[str]:
    """Those that this kernel can reject."""
    without = set() if offers.rejects_packet_sockets() else {PACKET, OLD_PACKET}
    return set(kinds) - without


def sources_of(policy: RawSocketPolicy, group: Cgroup) -> dict[tuple[int, Verdict], int]:
    seen = [source for source in policy.sources() if source.cgroup == group.id]
    assert {source.process_name for source in seen} <= {"python", "python3", "pytest"}
    return {(source.family, source.verdict): source.count for source in seen}


def test_audit_counts_and_names_what_a_container_opens(
    lab: labs.Lab, policy: RawSocketPolicy, container: Cgroup
) -> None:
    before = policy.counts()
    kinds = (RAW4, RAW6, PACKET, OTHER)
    assert opened(container, *kinds) == dict.fromkeys(kinds, True)
    counted = {(FAMILIES[kind], Verdict.WOULD_DROP): 1 for kind in rejectable(RAW4, RAW6, PACKET)}
    assert sources_of(policy, container) == counted
    after = policy.counts()
    added = {key: number - before.get(key, 0) for key, number in after.items()}
    assert {key: number for key, number in added.items() if number} == counted


def test_denied_container_opens_none(
    lab: labs.Lab, policy: RawSocketPolicy, container: Cgroup
) -> None:
    policy.set_denies_pods(is_denied=True)
    kinds = (RAW4, RAW6, PACKET, OLD_PACKET, OTHER)
    rejected = rejectable(RAW4, RAW6, PACKET, OLD_PACKET)
    assert opened(container, *kinds) == {kind: kind not in rejected for kind in kinds}
    found = sources_of(policy, container)
    assert {verdict for _, verdict in found} == {Verdict.DROP}
    assert sum(found.values()) == len(rejected)
    policy.set_denies_pods(is_denied=False)
    assert opened(container, *kinds) == dict.fromkeys(kinds, True)


def test_processes_outside_pods_are_never_denied(
    lab: labs.Lab, policy: RawSocketPolicy, config: NodeConfig, pods: Cgroup
) -> None:
    """Services of the host, as the kubelet and the container runtime are."""
    policy.set_denies_pods(is_denied=True)
    kinds = (RAW4, RAW6, PACKET)
    with cgroups.cgroup() as system, cgroups.cgroup("kubelet.service", below=system) as service:
        for group in (system, service):
            assert opened(group, *kinds) == dict.fromkeys(kinds, True)
            assert sources_of(policy, group) == {}
        config.set_kubelet(service.id)
        assert opened(service, *kinds) == dict.fromkeys(kinds, True)


def test_without_a_cgroup_of_pods_none_is_denied(
    lab: labs.Lab, policy: RawSocketPolicy, config: NodeConfig, container: Cgroup
) -> None:
    policy.set_denies_pods(is_denied=True)
    config.set_pods(None)
    assert opened(container, RAW4, PACKET) == {RAW4: True, PACKET: True}


@pytest.mark.parametrize("which", ["exact", "subtree"])
def test_policy_admits_at_once_and_no_longer_once_it_is_removed(
    lab: labs.Lab, policy: RawSocketPolicy, pods: Cgroup, container: Cgroup, which: str
) -> None:
    policy.set_denies_pods(is_denied=True)
    kinds = (RAW4, RAW6, PACKET)
    rejected = {kind: kind not in rejectable(*kinds) for kind in kinds}
    pod = container.directory.parent.stat().st_ino
    admitted = {"exact": {container.id: False}, "subtree": {pod: True}}[which]
    with cgroups.cgroup("other", below=pods) as other:
        for _ in range(2):
            assert opened(container, *kinds) == rejected
            policy.admit_only(admitted)
            assert opened(container, *kinds) == dict.fromkeys(kinds, True)
            assert opened(other, *kinds) == rejected
            policy.admit_only({})
    # A pod's own cgroup is not that of its containers.
    policy.admit_only({pod: False})
    assert opened(container, *kinds) == rejected


def test_sockets_of_a_pod_s_own_namespace_are_not_denied(
    lab: labs.Lab, policy: RawSocketPolicy, container: Cgroup
) -> None:
    policy.set_denies_pods(is_denied=True)
    kinds = (RAW4, RAW6, PACKET)
    own = opened(container, *kinds, before=("unshare", "--net"))
    assert own == dict.fromkeys(kinds, True)
    assert sources_of(policy, container) == {}


def test_open_sockets_stay_open(lab: labs.Lab, policy: RawSocketPolicy, container: Cgroup) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
        policy.set_denies_pods(is_denied=True)
        sock.sendto(b"\x45" + bytes(19), ("127.0.0.1", 0))


def test_after_the_dead_mans_time_none_is_denied(
    lab: labs.Lab, loaded: loader.Loaded, policy: RawSocketPolicy, container: Cgroup
) -> None:
    policy.set_denies_pods(is_denied=True)
    config = NodeConfig(loaded, now_ns=lambda: time.monotonic_ns() - int(120e9))
    config.set_limits(stale_after_seconds=15, dead_man_seconds=60)
    config.beat()
    assert opened(container, RAW4, PACKET) == {RAW4: True, PACKET: True}


def test_kernel_whose_hooks_have_no_effect_is_a_problem(
    loaded: loader.Loaded, policy: RawSocketPolicy, config: NodeConfig, tmp_path: pathlib.Path
) -> None:
    processes = SourceProcesses(
        DropSources(loaded),
        state=tmp_path / "names",
        store=PodStore(Conditions()),
        labels=ObjectLabels(),
    )
    sources = RawSocketSources(policy, RawSocketMode.DENY_PODS, config, processes)
    policy.set_denies_pods(is_denied=True)
    assert "none is rejected" not in sources.problem
    config.set_netns(None)
    assert sources.problem == (
        "this kernel has no netns cookies (Linux 5.14), so none is rejected."
    )


def start(operator: AgentProcess, rules: pathlib.Path, mode: str) -> None:
    rules.mkdir(exist_ok=True)
    operator.start("--rules", str(rules), f"--raw-sockets={mode}")
    operator.wait_for("first sync", lambda report: report.is_synced)


def set_pods(operator: AgentProcess, pods: Cgroup) -> None:
    """Have an agent take this cgroup for that of pods. It changes other fields of the same value,
    and may have read it before: so again before each trial."""

    def is_set() -> bool:
        with Map.open(pins.Pins(operator.bpffs).map(map_specs.CONFIG), map_specs.CONFIG) as opened:
            config = abi.CConfig.from_buffer_copy(opened.get(bytes(4)) or b"")
            if config.pods_cgroup == pods.id:
                return True
            config.pods_cgroup, config.pods_cgroup_level = pods.id, pods.level
            opened.set(bytes(4), bytes(config))
        return False

    polling.wait_until("cgroup of pods", is_set)


def names(group: Cgroup) -> str:
    return json.dumps(
        {
            "apiVersion": "policy.podgate.io/v1alpha1",
            "kind": "HostAccessPolicy",
            "metadata": {"name": "network"},
            "spec": {
                "pods": {"namespaces": ["elsewhere"]},
                "from": [{"cgroup": {"path": group.path}}],
                "ports": [{"port": 80}],
            },
        }
    )


def test_agent_denies_reports_and_follows_policies(
    operator: AgentProcess, tmp_path: pathlib.Path, pods: Cgroup, container: Cgroup
) -> None:
    offers.need_netns_cookie()
    rules = tmp_path / "rules"
    start(operator, rules, "deny-pods")
    where = ("--run-directory", str(operator.run_directory))

    def opens() -> bool:
        set_pods(operator, pods)
        return all(opened(container, *rejectable(RAW4, RAW6, PACKET)).values())

    assert not opens()
    [line, *_] = polling.wait_until("log", lambda: lines_about(operator, container))
    assert (line["verdict"], line["level"]) == ("drop", "warning")
    report = operator.report()
    assert report is not None
    assert {source.cgroup for source in report.raw_sockets.sources} == {container.path}
    assert bool(report.raw_sockets.problem) is not offers.rejects_packet_sockets()
    (denied,) = (one for one in report.findings if one.kind == kinds.GUARD_DENIED.name)
    assert denied.severity == "note"
    assert denied.sentence.startswith("--raw-sockets=deny-pods has rejected")
    output = operator.run("drops", "--output", "wide", *where).stdout
    assert container.path in output
    assert "raw IPv6" in output
    (rules / "network.yaml").write_text(names(container))
    polling.wait_until("admission", opens)
    (rules / "network.yaml").unlink()
    polling.wait_until("rejection", lambda: not opens())
    operator.stop(signal.SIGKILL)
    assert not opens()
    start(operator, rules, "audit")
    assert opens()


def lines_about(operator: AgentProcess, group: Cgroup) -> list[dict[str, Any]]:
    found = operator.log_lines(Event.RAW_SOCKET_CREATED)
    return [line for line in found if line["cgroup"] == group.path]


def test_agent_names_the_holder_of_a_packet_socket(
    operator: AgentProcess, tmp_path: pathlib.Path, pods: Cgroup, container: Cgroup
) -> None:
    """By its creation, or where the kernel does not report that while it is open."""
    start(operator, tmp_path / "rules", "audit")
    set_pods(operator, pods)
    command = [*BARE_PYTHON, "-c", OPEN, PACKET]
    with container.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        [line] = polling.wait_until("log", lambda: lines_about(operator, container))
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)
    assert (line["family"], line["verdict"], line["level"]) == ("packet", "would-drop", "info")
    assert line["process"].startswith("python")
    report = operator.wait_for("report", lambda report: bool(report.raw_sockets.sources))
    assert [source.sockets for source in report.raw_sockets.sources] == [1]


def test_agent_in_a_pod_admits_itself(
    lab: labs.Lab,
    operator: AgentProcess,
    tmp_path: pathlib.Path,
    pods: Cgroup,
    container: Cgroup,
) -> None:
    """Also if the one before it denied it: its path tests use raw sockets."""
    pod = lab.add_pod("web", 1)
    start(operator, tmp_path / "rules", "deny-pods")
    set_pods(operator, pods)
    operator.stop(signal.SIGKILL)
    own = pathlib.Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    mount = cgroup2_mount()
    assert mount is not None
    container.add(os.getpid())
    try:
        operator.start("--raw-sockets=deny-pods")
    finally:
        (mount / own[1:] / "cgroup.procs").write_text(str(os.getpid()))
    operator.write_manifest(pod, mode="enforce", container={})
    report = operator.wait_for(
        "path tests",
        lambda report: bool((found := pod_of(report, pod.name)) and found.paths),
    )
    tested = pod_of(report, pod.name)
    assert tested is not None
    assert {path.result for path in tested.paths} == {"confirmed"}
    assert report.raw_sockets.sources == []
