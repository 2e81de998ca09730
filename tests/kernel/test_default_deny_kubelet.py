"""The default-deny table admits the kubelet by its cgroup. Without an agent's heartbeat it admits
the kubelet that the kernel has followed, or where it cannot, every process outside of pods."""

import asyncio
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import pytest

from agent.default_deny.table import DefaultDenyError, DefaultDenyTable
from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import abi, loader, map_specs, pins, program_specs
from bpf.hooks import Hooks
from bpf.kubelet_unit import KubeletUnit
from bpf.node_config import NodeConfig
from probes.netns import netns_cookie
from tests.kernel import cgroups, offers, traffic
from tests.kernel.default_deny import (
    OURS,
    PATHS,
    VERSIONS,
    Driven,
    OpenTable,
    connect_from,
    default_deny,
    flush_ruleset,
    open_table,
    record_scripts,
    remove_without_agent,
    tables,
)
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

# To a port of the loopback on which nothing listens.
_SHOW_PRIORITY = """
import socket
sock = socket.socket()
sock.connect_ex(("127.0.0.1", 1))
print(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
"""

__all__ = ["default_deny", "open_table"]


@PATHS
@VERSIONS
def test_the_kubelet_reaches_a_new_pod_and_others_do_not(
    lab: labs.Lab, default_deny: Driven, bridged: bool, version: int
) -> None:
    with (
        cgroups.cgroup() as system,
        cgroups.cgroup("kubelet.service", below=system) as kubelet,
        cgroups.cgroup("other.service", below=system) as other,
    ):
        default_deny.admit(kubelet.path)
        pod = lab.add_pod("web", 1, bridged=bridged)
        with pod.listen(80):
            assert connect_from(kubelet, pod, version, traffic.LIMIT_SECONDS)
            assert not connect_from(other, pod, version, traffic.DROPPED_AFTER_SECONDS)
            assert not connect_from(system, pod, version, traffic.DROPPED_AFTER_SECONDS)


def test_kubelet_in_a_new_cgroup_of_the_same_name_is_admitted_again(
    lab: labs.Lab, default_deny: Driven
) -> None:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), cgroups.cgroup() as kubelet:
        default_deny.admit(kubelet.path)
        before = kubelet.id
        cgroups.remove(kubelet)
        kubelet.directory.mkdir()
        assert kubelet.id != before
        assert not connect_from(kubelet, pod, 4, traffic.DROPPED_AFTER_SECONDS)
        default_deny.admit(kubelet.path)
        assert connect_from(kubelet, pod, 4, traffic.LIMIT_SECONDS)


@pytest.mark.parametrize("path", ["/", "/../elsewhere", "/podgate-test-no-such-cgroup"])
def test_invalid_cgroup_is_an_error_and_the_previous_one_stays(
    lab: labs.Lab, default_deny: Driven, path: str
) -> None:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), cgroups.cgroup() as kubelet:
        default_deny.admit(kubelet.path)
        with pytest.raises(DefaultDenyError, match="cgroup"):
            default_deny.admit(path)
        default_deny.ensure()
        assert connect_from(kubelet, pod, 4, traffic.LIMIT_SECONDS)


@PATHS
@VERSIONS
def test_while_the_kubelet_is_unknown_any_process_outside_of_pods_is_admitted(
    lab: labs.Lab, open_table: OpenTable, bridged: bool, version: int
) -> None:
    with (
        cgroups.cgroup() as pods,
        cgroups.cgroup("host-network-pod", below=pods) as host_network_pod,
        cgroups.cgroup() as kubelet,
        cgroups.cgroup() as other,
    ):
        table = open_table(pods=[pods.path])
        pod = lab.add_pod("web", 1, bridged=bridged)
        dropped_after = traffic.DROPPED_AFTER_SECONDS
        with pod.listen(80):
            assert not connect_from(other, pod, version, dropped_after)
            table.admit(None)
            assert connect_from(other, pod, version, traffic.LIMIT_SECONDS)
            assert not connect_from(host_network_pod, pod, version, dropped_after)
            table.admit(kubelet.path)
            assert connect_from(kubelet, pod, version, traffic.LIMIT_SECONDS)
            assert not connect_from(other, pod, version, dropped_after)


def test_without_a_heartbeat_any_process_outside_of_pods_is_admitted(
    lab: labs.Lab, open_table: OpenTable
) -> None:
    with (
        cgroups.cgroup() as pods,
        cgroups.cgroup("host-network-pod", below=pods) as host_network_pod,
        cgroups.cgroup() as restarted_kubelet,
    ):
        open_table(stale_seconds=1, pods=[pods.path])
        web, bridged = lab.add_pod("web", 1), lab.add_pod("bridged", 2, bridged=True)
        with web.listen(80), bridged.listen(80):
            # Its SYN is sent again until the heartbeat is stale.
            assert connect_from(restarted_kubelet, web, 4, traffic.LIMIT_SECONDS)
            assert connect_from(restarted_kubelet, bridged, 6, traffic.LIMIT_SECONDS)
            limit = traffic.DROPPED_AFTER_SECONDS
            assert not connect_from(host_network_pod, web, 4, limit)
            assert not connect_from(host_network_pod, bridged, 6, limit)


@pytest.fixture
def unit(loaded: loader.Loaded, installation: pins.Pins) -> Iterator[KubeletUnit]:
    """With hooks at connect, and a heartbeat of ten minutes ago, or when the machine booted."""
    offers.need_netns_cookie()
    mount = cgroup2_mount()
    assert mount is not None
    config = NodeConfig(loaded, now_ns=lambda: max(1, time.monotonic_ns() - int(600e9)))
    config.set_netns(netns_cookie())
    config.set_limits(stale_after_seconds=15, dead_man_seconds=0)
    config.beat()
    hooks = Hooks(loaded, installation, mount)
    assert [hook.problem for hook in hooks.attach()] == [None] * len(program_specs.HOOKS)
    made = KubeletUnit(loaded, installation, config)
    made.attach()
    yield made
    made.forget()
    os.unlink(installation.links / program_specs.FOLLOW_KUBELET.name)
    hooks.detach()
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@PATHS
@VERSIONS
def test_without_a_heartbeat_only_the_followed_kubelet_is_admitted(
    lab: labs.Lab, open_table: OpenTable, unit: KubeletUnit, bridged: bool, version: int
) -> None:
    with (
        cgroups.cgroup() as system,
        cgroups.cgroup("kubelet.service", below=system) as kubelet,
        cgroups.cgroup("other.service", below=system) as other,
    ):
        unit.follow(kubelet.path)
        opened = open_table(stale_seconds=1)
        opened.admit(kubelet.path, unit.priority)
        alive_until = time.monotonic() + 1
        for number in range(1, 4):
            cgroups.remove(kubelet)
            kubelet.directory.mkdir()
            pod = lab.add_pod(f"web{number}", number, bridged=bridged)
            with pod.listen(80):
                assert connect_from(kubelet, pod, version, traffic.LIMIT_SECONDS)
                time.sleep(max(0, alive_until - time.monotonic()))
                for stranger in (other, system):
                    limit = traffic.DROPPED_AFTER_SECONDS
                    assert not connect_from(stranger, pod, version, limit)


def test_abandoned_node_opens_also_where_the_kubelet_is_followed(
    lab: labs.Lab, open_table: OpenTable, unit: KubeletUnit
) -> None:
    pod = lab.add_pod("web", 1)
    with cgroups.cgroup() as kubelet, cgroups.cgroup() as other, pod.listen(80):
        unit.follow(kubelet.path)
        opened = open_table(stale_seconds=1, abandoned_seconds=1)
        opened.admit(kubelet.path, unit.priority)
        # Its SYN is sent again until the time is over.
        assert connect_from(other, pod, 4, traffic.LIMIT_SECONDS)


def test_other_priorities_are_not_admitted(
    lab: labs.Lab, default_deny: Driven, unit: KubeletUnit
) -> None:
    pod = lab.add_pod("web", 1)
    with cgroups.cgroup() as kubelet, pod.listen(80):
        unit.follow(kubelet.path)
        assert unit.priority is not None
        default_deny.admit(kubelet.path, unit.priority)
        for priority in (0, 6, unit.priority ^ 1 << 16, unit.priority ^ 1 << 4):
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
                sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
                with pytest.raises(TimeoutError):
                    sock.connect((pod.ipv4, 80))


def test_priority_is_set_only_while_no_agent_has_confirmed_the_cgroup(
    lab: labs.Lab, loaded: loader.Loaded, unit: KubeletUnit
) -> None:
    fresh = NodeConfig(loaded)
    with cgroups.cgroup() as kubelet, cgroups.cgroup() as other:
        unit.follow(kubelet.path)
        fresh.beat()
        assert priority_of_a_socket(kubelet) == 0
        cgroups.remove(kubelet)
        kubelet.directory.mkdir()
        assert priority_of_a_socket(kubelet) == unit.priority
        assert priority_of_a_socket(other) == 0
        fresh.set_kubelet(kubelet.id)
        assert priority_of_a_socket(kubelet) == 0


def priority_of_a_socket(group: cgroups.Cgroup) -> int:
    """Of one that has tried to connect."""
    done = group.run([*BARE_PYTHON, "-c", _SHOW_PRIORITY])
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_heartbeat_restores_the_default_deny(lab: labs.Lab, open_table: OpenTable) -> None:
    opened = open_table(stale_seconds=1)
    pod = lab.add_pod("web", 1)
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)  # stale by now
        opened.made._desired.stale_seconds = 60
        for _ in range(2):
            opened.beat()
            assert traffic.node_is_dropped(pod, 4)


@pytest.mark.parametrize("name", ["kubepods", "x/kubepods", "kubepods.slice", "x/x-kubepods.slice"])
def test_cgroups_of_pods_are_found_by_their_names(
    lab: labs.Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    offers.need_default_deny()
    (tmp_path / name / "pod1").mkdir(parents=True)
    (tmp_path / "system.slice" / "kubelet.service").mkdir(parents=True)
    scripts = record_scripts(monkeypatch)
    asyncio.run(DefaultDenyTable.open(cgroup2=tmp_path))
    level = name.count("/") + 1
    relative = os.path.relpath(tmp_path / name, "/sys/fs/cgroup")
    rules = [line.strip() for line in scripts[-1].splitlines() if line.endswith(" return")]
    assert rules == [f'socket cgroupv2 level {level} "{relative}" return']
    remove_without_agent()


def test_deleted_kubelet_cgroup_does_not_prevent_changes(
    lab: labs.Lab, default_deny: Driven
) -> None:
    with cgroups.cgroup() as kubelet:
        default_deny.admit(kubelet.path)
    assert not default_deny.ensure()
    flush_ruleset()
    assert default_deny.ensure()
    assert tables() == OURS
