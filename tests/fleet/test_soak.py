"""Pods come and go everywhere while programs of the nodes restart, in random order.

A minute, or `make test-fleet SECONDS=3600 SEED=17 NODES=3 FILES=tests/fleet/test_soak.py`.
"""

import collections
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests import polling
from tests.cluster import workloads
from tests.cluster.api import Json
from tests.cluster.machine import Machine
from tests.cluster.workloads import HTTP_PROBE, ISOLATION_READY, MODE, WEB, Workloads
from tests.fleet import watching
from tests.fleet.conftest import Agents, Site
from tests.fleet.test_modes import set_mode
from tests.fleet.workload import Fleet
from tests.networks import traffic

_SECONDS = float(os.environ.get("PODGATE_TEST_SOAK_SECONDS") or 60)
_SEED = int(os.environ.get("PODGATE_TEST_SEED") or time.time_ns() % 1_000_000)
pytestmark = [pytest.mark.kernel, pytest.mark.timeout(_SECONDS * 2 + 1200)]

_MODES = ("off", "enforce", "strict")
"""Of namespaces. The first one is the control: its pods have no gate."""
_MAX_PODS = 12
# The CNI plugin portmap writes host ports at a pod's start only, so they are put back.
_FLUSH = """
for_restore() { grep -E '^[*]|CNI-|^COMMIT' || true; }
ipv4=$(iptables-save -t nat | for_restore)
ipv6=$(ip6tables-save -t nat | for_restore)
nft flush ruleset
echo "$ipv4" | iptables-restore --noflush
echo "$ipv6" | ip6tables-restore --noflush
"""
# On a busy machine a server responds late, which is no reason to restart it here.
_SLOW_PROBE = {**HTTP_PROBE, "timeoutSeconds": 5}
_PATIENT = {
    **WEB,
    "startupProbe": {**HTTP_PROBE, "failureThreshold": 300},
    "readinessProbe": _SLOW_PROBE,
    "livenessProbe": _SLOW_PROBE,
    "resources": {"requests": {"cpu": "50m"}},
}


class Soak:
    """What a run has done."""

    def __init__(self, site: Site, agents: Agents, users: dict[str, Workloads]) -> None:
        self._site = site
        self._agents = agents
        self._users = users
        self._random = random.Random(_SEED)
        self._pods: dict[str, tuple[str, Machine]] = {}
        """Mode of the namespace and node of each pod that exists."""
        self.done: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Actions until the time is over."""
        actions: list[tuple[int, Callable[[], None]]] = [
            (10, self._create),
            (6, self._delete),
            (2, self._restart_network),
            (2, self._restart_proxy),
            (1, self._flush),
            (1, self._restart_kubelet),
            (1, self._kill_agent),
        ]
        weights, calls = zip(*actions, strict=True)
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            (action,) = self._random.choices(calls, weights)
            action()
            self.done[action.__name__.strip("_").replace("_", " ")] += 1
            time.sleep(self._random.random())

    def check(self) -> None:
        """All pods are Ready, and those that are enforced closed to their node."""
        for name, (mode, machine) in self._pods.items():
            pod = self._users[mode].until(name, "Ready")
            if mode == "off":
                continue
            status = self._agents[machine.name].pod_status(self._users[mode].namespace, name)
            assert status is not None, f"no agent knows {name}"
            assert status.gates, f"{name} has no gate"
            for address in traffic.addresses(pod):
                found = traffic.dial(address, netns=watching.netns(machine.pid))
                assert found, f"{machine.name} reaches {name} by {address}"

    def restarts(self) -> dict[str, dict[str, int]]:
        """Of containers, by mode."""
        return {mode: users.restarts() for mode, users in self._users.items()}

    def _create(self) -> None:
        if len(self._pods) >= _MAX_PODS:
            return
        mode = self._random.choice(_MODES)
        machine = self._random.choice(self._site.cluster.machines)
        name = f"pod-{self.done['create']}-{len(self._pods)}"
        gates = () if mode == "off" else (ISOLATION_READY,)
        self._users[mode].run(name, _PATIENT, gates=gates, nodeName=machine.name)
        self._pods[name] = (mode, machine)

    def _delete(self) -> None:
        if self._pods:
            name = self._random.choice(sorted(self._pods))
            mode, _ = self._pods.pop(name)
            self._users[mode].delete(name)
            self._users[mode].until_gone(name)

    def _restart_network(self) -> None:
        self._site.network.restart(self._machine().name)

    def _restart_proxy(self) -> None:
        self._site.proxy.restart(self._machine().name)

    def _flush(self) -> None:
        """As a firewall's reload, after which network and service proxy write their rules again."""
        machine = self._machine()
        machine.run("sh", "-ec", _FLUSH)
        self._site.proxy.restart(machine.name)

    def _restart_kubelet(self) -> None:
        machine = self._machine()
        machine.kubelet.restart()
        machine.kubelet.wait_until_ready()

    def _kill_agent(self) -> None:
        machine = self._machine()
        report = polling.wait_until("an agent responds", self._agents[machine.name].report)
        assert report is not None
        machine.run("kill", "-KILL", str(report.pid))
        self._agents[machine.name].until(
            "the next agent responds", lambda found: found.pid != report.pid
        )

    def _machine(self) -> Machine:
        return self._random.choice(self._site.cluster.machines)


@pytest.fixture
def users(site: Site) -> Iterator[dict[str, Workloads]]:
    """A namespace of each mode."""
    with contextlib.ExitStack() as undo:
        made = {}
        for mode in _MODES:
            labels: Json = {MODE: mode}
            name = f"soak-{mode}"
            made[mode] = undo.enter_context(workloads.namespace(site.cluster.api, name, labels))
        yield made


def test_soak(
    site: Site,
    fleet: Fleet,
    podgate: Agents,
    users: dict[str, Workloads],
    record_property: Callable[[str, object], None],
) -> None:
    print(f"seed {_SEED}, {_SECONDS:g} s, {len(site.cluster.machines)} nodes")  # noqa: T201
    set_mode(fleet, podgate, "strict")
    soak = Soak(site, podgate, users)
    watch = traffic.Watch(*watching.paths(site.cluster, fleet))
    with watch.running():
        soak.run()
        soak.check()
    actions = ", ".join(f"{count} {name}" for name, count in sorted(soak.done.items()))
    nodes = len(site.cluster.machines)
    record_property(
        "figures", f"seed {_SEED}, {_SECONDS:g} s, {nodes} nodes: {actions}; {watch.summary}"
    )
    assert not any(watch.wrong.values()), watch.wrong
    control, *others = soak.restarts().values()
    assert all(not one for one in others), f"restarts {others}, of the control {control}"
    assert fleet.harm(kills=soak.done["kill agent"]) == ""
