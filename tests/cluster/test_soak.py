"""Pods that come and go while everything restarts, in random order."""

import contextlib
import functools
import os
import pathlib
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator

import pytest

from agent.admin.report import AgentReport
from agent.linux.cgroups import cgroup2_mount
from bpf import map_specs, maps, pins
from tests import polling
from tests.cluster import containers, etcd, workloads
from tests.cluster.api import Json
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    MODE,
    PROBES_PASSING,
    WEB,
    Workloads,
    is_reachable,
)
from tests.image.node import BPFFS
from tests.runtime.containerd import Containerd

_SECONDS = float(os.environ.get("PODGATE_TEST_SOAK_SECONDS", "600"))
_SEED = int(os.environ.get("PODGATE_TEST_SEED", "0")) or time.time_ns() % 1_000_000
pytestmark = [pytest.mark.kernel, pytest.mark.timeout(_SECONDS * 2 + 1200)]
# Types of maps (include/uapi/linux/bpf.h).
_HASH, _PERCPU_HASH, _HASH_OF_MAPS = 1, 5, 13
_OF_RULES = (map_specs.RULE_HITS, map_specs.RAW_SOCKET_CREATORS)
_MODES = ("audit", "enforce", "strict")
_MAX_PODS = 15
_CHECK_SECONDS = 60
_GATES = ((), (ISOLATION_READY,), (ISOLATION_READY, PROBES_PASSING))
# A restarted container has to be found, started and probed. On a busy machine a server responds
# late, which is no reason to restart it here.
_SLOW_PROBE = {**HTTP_PROBE, "timeoutSeconds": 5}
_PATIENT = {
    **WEB,
    "startupProbe": {**HTTP_PROBE, "failureThreshold": 300},
    "readinessProbe": _SLOW_PROBE,
    "livenessProbe": _SLOW_PROBE,
}
_RESTARTED_SECONDS = 180
# A relay stays for a minute after the last pod in strict.
_INTERFACES_SECONDS = 150
_OTHER_ARGUMENTS = ("--dead-man-hours=23",)
# The kubelet waits so long before it starts a container that exits again and again.
_BACK_OFF_SECONDS = 330
# Descriptors of connections that are open at one of the two moments only.
_SPARE_DESCRIPTORS = 10
_SPARE_MEMORY_KB = 20 << 10


class Soak:
    """What a run has done, and what it expects of each pod."""

    def __init__(self, node: OneNode, podgate: Deployment, users: dict[str, Workloads]) -> None:
        self._node = node
        self._podgate = podgate
        self._users = users
        self._random = random.Random(_SEED)
        self._count = 0
        self._pods: dict[str, str] = {}
        """The namespace's key of each pod."""
        self._gated: set[str] = set()
        self._killed: dict[str, int] = {}
        """How often the test ended a pod's container or sandbox."""
        self._aborted: set[str] = set()
        self._has_arguments = False
        """Whether the agent has others than the manifests'."""

    def run(self) -> None:
        """Actions until the time is over."""
        actions: list[tuple[int, Callable[[], None]]] = [
            (12, self._create),
            (8, self._delete),
            (2, self._kill_container),
            (1, self._kill_sandbox),
            (2, self._restart_kubelet),
            (2, self._kill_agent),
            (1, self._roll_out),
            (2, self._kill_relay),
            (1, self._kill_api_server),
            (1, self._pause_api_server),
            (1, self._compact),
            (2, self._relabel),
        ]
        weights, calls = zip(*actions, strict=True)
        checked = time.monotonic()
        end = checked + _SECONDS
        while time.monotonic() < end:
            (action,) = self._random.choices(calls, weights)
            action()
            time.sleep(self._random.random())
            if time.monotonic() - checked > _CHECK_SECONDS:
                self._check_gates()
                checked = time.monotonic()

    def check(self) -> None:
        """All pods are Ready, closed as their mode requires, and restarted by the test only."""
        for name, key in self._pods.items():
            self._users[key].until_ready(name)
        for name, key in self._pods.items():
            users = self._users[key]
            pod = users.pod(name)
            status = self._podgate.pod_status(users.namespace, name)
            assert status is not None, f"the agent does not know {name}"
            assert status.gates, f"{name} has no gate"
            assert is_reachable(pod) == (status.mode == "audit"), f"{name} in {status.mode}"
        restarts: dict[str, int] = {}
        for users in self._users.values():
            restarts |= users.restarts()
        expected = {name: n for name, n in self._killed.items() if name in self._pods}
        failed = [line for users in self._users.values() for line in users.unhealthy()]
        assert restarts == expected, failed

    def _check_gates(self) -> None:
        for name, key in self._pods.items():
            users = self._users[key]
            users.until_ready(name)
            has_gate = functools.partial(self._has_gate, users.namespace, name)
            polling.wait_until(f"{name} has a gate", has_gate)

    def _has_gate(self, namespace: str, name: str) -> bool:
        status = self._podgate.pod_status(namespace, name)
        return status is not None and bool(status.gates)

    def reset_arguments(self) -> None:
        """The agent has the manifests' arguments again."""
        if self._has_arguments:
            polling.wait_until(
                "the agent responds", self._podgate.report, seconds=_BACK_OFF_SECONDS
            )
            self._roll_out()

    def delete_all(self) -> None:
        for name in list(self._pods):
            self._users[self._pods.pop(name)].delete(name)
        polling.wait_until(
            "all pods are gone", lambda: not any(users.pods() for users in self._users.values())
        )

    def _create(self) -> None:
        if len(self._pods) < _MAX_PODS:
            self._count += 1
            name, key = f"web{self._count}", self._random.choice(sorted(self._users))
            gates = self._random.choice(_GATES)
            self._users[key].run(name, _PATIENT, gates=gates)
            self._pods[name] = key
            if gates:
                self._gated.add(name)

    def _delete(self) -> None:
        if len(self._pods) > 3:
            name = self._random.choice(sorted(self._pods))
            self._users[self._pods.pop(name)].delete(name)

    def _kill_container(self) -> None:
        self._kill_one_of(self._pods, containers.kill_container)

    def _kill_sandbox(self) -> None:
        # Their conditions name the sandbox.
        self._kill_one_of(self._pods.keys() & self._gated, containers.kill_sandbox)

    def _kill_one_of(
        self, names: Collection[str], kill: Callable[[Containerd, Json], None]
    ) -> None:
        if names:
            name = self._random.choice(sorted(names))
            users = self._users[self._pods[name]]
            (pod,) = users.until_ready(name)
            kill(self._node.runtime, pod)
            count = self._killed[name] = self._killed.get(name, 0) + 1
            # Counted before it is killed again.
            polling.wait_until(
                f"{name} restarted",
                lambda: users.restarts().get(name) == count,
                seconds=_RESTARTED_SECONDS,
            )

    def _restart_kubelet(self) -> None:
        self._node.kubelet.restart()
        self._node.kubelet.wait_until_ready()
        self._count_aborted_starts()

    def _count_aborted_starts(self) -> None:
        """The runtime ends a container whose start the kubelet did not live to see (containerd,
        container_start.go), and the next kubelet starts another one."""
        for name, key in self._pods.items():
            for pod in self._users[key].until_ready(name):
                last = pod["status"]["containerStatuses"][0]["lastState"].get("terminated", {})
                if last.get("reason") == "StartError" and last["containerID"] not in self._aborted:
                    self._aborted.add(last["containerID"])
                    self._killed[name] = self._killed.get(name, 0) + 1

    def _kill_agent(self) -> None:
        self._podgate.kill_agent()

    def _roll_out(self) -> None:
        # The kubelet may be waiting before it starts a killed agent again.
        if self._podgate.report():
            self._has_arguments = not self._has_arguments
            self._podgate.set_arguments(_OTHER_ARGUMENTS if self._has_arguments else ())

    def _kill_relay(self) -> None:
        if report := self._podgate.report():
            for pid in _children(report.pid):
                os.kill(pid, signal.SIGKILL)

    def _kill_api_server(self) -> None:
        self._node.control_plane.api_server.kill()
        time.sleep(self._random.random() * 5)
        self._node.control_plane.api_server.start()
        self._node.control_plane.wait_until_ready()

    def _pause_api_server(self) -> None:
        self._node.control_plane.api_server.pause()
        time.sleep(self._random.random() * 5)
        self._node.control_plane.api_server.resume()
        self._node.control_plane.wait_until_ready()

    def _compact(self) -> None:
        etcd.compact()

    def _relabel(self) -> None:
        key = self._random.choice(sorted(self._users))
        path = f"/api/v1/namespaces/{self._users[key].namespace}"
        mode = self._random.choice(_MODES)
        self._node.api.patch(path, {"metadata": {"labels": {MODE: mode}}})


@pytest.fixture
def soak(node: OneNode, podgate: Deployment, capsys: pytest.CaptureFixture[str]) -> Iterator[Soak]:
    with capsys.disabled():
        print(f"PODGATE_TEST_SEED={_SEED}")  # noqa: T201
    with (
        workloads.namespace(node.api, "soak-a", {MODE: "audit"}) as a,
        workloads.namespace(node.api, "soak-b", {MODE: "enforce"}) as b,
        workloads.namespace(node.api, "soak-c", {MODE: "strict"}) as c,
    ):
        yield Soak(node, podgate, {"a": a, "b": b, "c": c})


def test_nothing_is_lost_or_left_while_everything_restarts(
    node: OneNode, podgate: Deployment, soak: Soak
) -> None:
    interfaces = len(socket.if_nameindex())
    entries = _entries()
    soak.run()
    soak.check()
    soak.reset_arguments()
    soak.delete_all()
    polling.wait_until(
        "the pods' interfaces are gone",
        lambda: len(socket.if_nameindex()) <= interfaces,
        seconds=_INTERFACES_SECONDS,
    )
    podgate.until("the agent has forgotten the pods", lambda report: _users_pods(report) == [])
    with contextlib.suppress(polling.TimedOutError):
        # The history of sources deletes entries without a gate after two of its minutes.
        polling.wait_until("map entries", lambda: _entries() == entries, seconds=240)
    assert _entries() == entries
    _check_entries_of_rules(podgate)
    old = podgate.until("the agent responds", lambda report: report.pid).pid
    used = _fewest_descriptors(old), _memory_kb(old)
    podgate.kill_agent()
    podgate.wait_until_ready()
    new = podgate.until("the next agent responds", lambda report: report.pid != old).pid
    fresh = _descriptors(new), _memory_kb(new)
    assert used[0] <= fresh[0] + _SPARE_DESCRIPTORS
    assert used[1] <= fresh[1] + _SPARE_MEMORY_KB


def _users_pods(report: AgentReport) -> list[str]:
    return [pod.name for pod in report.pods if pod.namespace.startswith("soak-")]


def _entries() -> dict[str, int]:
    """Entries of each hash map of the installation that does not evict by itself, but for those
    of rules, and each of its pinned links."""
    installation = pins.Pins(BPFFS)
    counts = {f"link {path.name}": 1 for path in installation.links.iterdir()}
    for spec in map_specs.MAPS:
        if spec.type in (_HASH, _PERCPU_HASH, _HASH_OF_MAPS) and spec not in _OF_RULES:
            with maps.Map.open(installation.map(spec), spec) as opened:
                counts[spec.name] = sum(1 for _ in opened.items())
    return counts


def _check_entries_of_rules(podgate: Deployment) -> None:
    """Default rules may name a process that started meanwhile, or select the run's pods."""
    installation = pins.Pins(BPFFS)
    rules = sum(len(policy.rules) for policy in podgate.rules().policies)
    with maps.Map.open(installation.map(map_specs.RULE_HITS), map_specs.RULE_HITS) as hits:
        assert sum(1 for _ in hits.items()) <= rules
    mount = cgroup2_mount()
    assert mount is not None
    existing = {path.stat().st_ino for path in (mount, *mount.glob("**/"))}
    with maps.Map.open(
        installation.map(map_specs.RAW_SOCKET_CREATORS), map_specs.RAW_SOCKET_CREATORS
    ) as creators:
        assert {int.from_bytes(key, sys.byteorder) for key, _ in creators.items()} <= existing


def _children(pid: int) -> list[int]:
    try:
        text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(word) for word in text.split()]


def _descriptors(pid: int) -> int:
    return len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))


def _fewest_descriptors(pid: int) -> int:
    """Within 30 s: idle connections to the API server are closed after 15."""
    fewest = _descriptors(pid)
    for _ in range(60):
        time.sleep(0.5)
        fewest = min(fewest, _descriptors(pid))
    return fewest


def _memory_kb(pid: int) -> int:
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("Pss:"))
    return int(found.split()[1])
