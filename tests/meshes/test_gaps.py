"""Probes of the application that the mesh would reject, while relay, agent and proxy restart: the
kubelet sends 50 a second in strict."""

import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest

from agent.logs import Event
from tests.kernel import fleet, pacing
from tests.kernel.secondagent import SecondAgent
from tests.kernel.strictnode import wait_until
from tests.meshes import record
from tests.meshes.conftest import RecordRun
from tests.meshes.meshes import MESHES
from tests.meshes.record import Gap
from tests.meshes.scene import WEB, Scene
from tests.polling import PATIENCE

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.parametrize("mesh", MESHES[:1], indirect=True, ids=lambda mesh: mesh.name),
]

PER_SECOND = 50
# Two probes a second, the most that a kubelet sends, and failureThreshold 3: no pod restarts.
SHORTEST_FAILURE_SECONDS = 1.0 * PATIENCE


class Probes:
    """What the kubelet sends to the application's own ports."""

    def __init__(self, pods: Scene, folder: pathlib.Path) -> None:
        web = pods.node.pods[WEB]
        self._targets = [
            *web.targets("http", fleet.HTTP),
            *web.targets("tcp", fleet.TCP),
        ]
        self._group = pods.node.kubelet
        self._folder = folder

    def during(self, event: Callable[[], None]) -> Gap:
        """The probes from a while before the event to a while after it."""
        with pacing.paced(self._group, self._folder, PER_SECOND, self._targets) as paced:
            paced.wait_for_more(PER_SECOND // 2)
            event()
            paced.wait_for_more(PER_SECOND)
            probes = paced.result()
        failed = [probe for probe in probes if probe.result != pacing.OK]
        seconds = failed[-1].ended - failed[0].started if failed else 0.0
        return Gap(len(probes), len(failed), round(seconds, 2))


def test_no_probe_fails_that_the_mesh_would_reject(
    pods: Scene, record_run: RecordRun, tmp_path: pathlib.Path
) -> None:
    """But for those that a relay's own death lets go direct, until another serves."""
    node = pods.node
    for pod in node.pods.values():
        pod.mode = "strict"
        node.declare(pod)
    node.start()
    probes = Probes(pods, tmp_path)

    def restart(number: signal.Signals) -> None:
        node.operator.stop(number)
        time.sleep(1)  # a DaemonSet's pod takes longer: the relay alone serves meanwhile
        node.start()
        wait_for_one_relay()

    def wait_for_one_relay() -> None:
        wait_until("one relay", lambda: len(node.relay_pids()) == 1)

    def kill_relay() -> None:
        (before,) = node.relay_pids()
        engaged = len(list(node.operator.log_lines(Event.RELAY_ENGAGED)))
        os.kill(before, signal.SIGKILL)
        wait_until(
            "another relay",
            lambda: len(list(node.operator.log_lines(Event.RELAY_ENGAGED))) > engaged,
        )

    def upgrade() -> None:
        second = SecondAgent(node.operator, tmp_path / "second")
        try:
            second.start_standby(*node.options)
            node.settle(by=second)
        finally:
            second.stop(signal.SIGTERM)
        node.settle()

    gaps = {
        "nothing happens": probes.during(lambda: None),
        "agent killed, started 1 s later": probes.during(lambda: restart(signal.SIGKILL)),
        "agent stopped, started 1 s later": probes.during(lambda: restart(signal.SIGTERM)),
        "agent upgraded with a standby, and back": probes.during(upgrade),
    }
    relay_killed = probes.during(kill_relay)
    for proxy in pods.in_pods.proxies:
        proxy.kill()
    gaps["proxy killed"] = probes.during(lambda: None)
    record_run(record.GAPS, gaps={**gaps, "relay killed": relay_killed})
    assert {event: gap.failed for event, gap in gaps.items()} == dict.fromkeys(gaps, 0)
    assert relay_killed.seconds < SHORTEST_FAILURE_SECONDS
