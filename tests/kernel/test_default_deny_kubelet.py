"""The default-deny table admits the kubelet by its cgroup. Without an agent's heartbeat it admits
every process outside of pods."""

import asyncio
import os
import pathlib

import pytest

from agent.default_deny.table import DefaultDenyError, DefaultDenyTable
from agent.lab import lab as labs
from tests.kernel import cgroups, traffic
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

pytestmark = pytest.mark.kernel

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
        default_deny.admit(None)
        assert not connect_from(kubelet, pod, 4, traffic.DROPPED_AFTER_SECONDS)


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
