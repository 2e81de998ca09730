"""Another program deletes the qdiscs of a crowd's gates at random instants, as felix does before it
attaches by tcx: no pod is open for longer than a tenth of a second.

`make test-crowd` has 200 pods, twenty times, on a machine without other work. Here are few, and the
agent waits for a CPU beside other tests, so a second counts.
"""

import datetime
import os
import random
import subprocess
import sys
import threading
import time

import pytest

from agent import labels
from agent.lab.agent_process import AgentProcess, condition_of, log_time
from agent.lab.lab import NODE_IPV4, Lab, LabPod
from agent.logs import Event
from tests import polling
from tests.kernel import offers
from tests.kernel.raw_syns import RawSyns

pytestmark = pytest.mark.kernel

PODS = int(os.environ.get("PODGATE_TEST_CROWD", "12"))
TIMES = int(os.environ.get("PODGATE_TEST_TIMES", "1"))
PORT = 8080
IS_ALONE = "PODGATE_TEST_CROWD" in os.environ
OPEN_SECONDS = (0.1 if IS_ALONE else 1.0) * polling.PATIENCE**2
RIGHT_SECONDS = 1.0 * polling.PATIENCE**2
_SECONDS = 4.0 + PODS / 20
"""In which each pod loses its qdisc twice, if it has one: gates become links meanwhile."""


def delete_qdiscs(pods: list[LabPod], chance: random.Random) -> int:
    """Twice of each pod, at random instants; how many there were."""
    began = time.monotonic()
    instants = sorted((chance.uniform(0, _SECONDS), pod.interface) for pod in pods for _ in "ab")
    deleted = 0
    for instant, interface in instants:
        time.sleep(max(0.0, began + instant - time.monotonic()))
        command = ["tc", "qdisc", "del", "dev", interface, "clsact"]
        deleted += subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    return deleted


def gated_at(operator: AgentProcess) -> dict[str, float]:
    """When each pod got its gate; seconds of the monotonic clock."""
    offset = time.monotonic() - datetime.datetime.now(datetime.UTC).timestamp()
    return {
        line["pod"]: log_time(line).timestamp() + offset
        for line in operator.log_lines(Event.INTERFACE_GATED)
    }


def wrong_seconds(operator: AgentProcess) -> dict[str, float]:
    """How long each pod's condition was False, once it had been True."""
    found: dict[str, float] = {}
    false_since: dict[str, datetime.datetime] = {}
    for line in operator.log_lines(Event.CONDITION_CHANGED):
        if line["type"] != labels.ISOLATION_READY:
            continue
        pod, at = line["pod"], log_time(line)
        if line["status"] == "False":
            false_since.setdefault(pod, at)
        elif since := false_since.pop(pod, None):
            found[pod] = max(found.get(pod, 0.0), (at - since).total_seconds())
    assert not false_since, f"conditions stay False: {sorted(false_since)}"
    return found


@pytest.mark.parametrize("seed", range(1, TIMES + 1))
def test_crowd_whose_qdiscs_are_deleted_at_random_instants_stays_closed(
    operator: AgentProcess, lab: Lab, seed: int
) -> None:
    offers.need_tcx()
    pods = [lab.add_pod(f"web{number}", number) for number in range(1, PODS + 1)]
    listeners = [pod.listen(PORT) for pod in pods]
    for listener in listeners:
        listener.listen(4096)  # nothing accepts
    for pod in pods:
        operator.write_manifest(pod, mode="enforce", container={})
    addresses = [address for pod in pods for address in (pod.ipv4, pod.ipv6)]
    syns = RawSyns(lambda: addresses, source=str(NODE_IPV4), port=PORT, ignore_first=False)
    deleted: list[int] = []
    with syns:
        operator.start("--attach", "tcx")
        operator.event(Event.INTERFACE_GATED)
        chance = random.Random(seed)
        thread = threading.Thread(target=lambda: deleted.append(delete_qdiscs(pods, chance)))
        thread.start()
        for pod in pods:
            operator.event(Event.INTERFACE_GATED, pod=f"demo/{pod.name}")
        thread.join()
        operator.wait_for(
            "all are isolated",
            lambda report: all(
                (found := condition_of(report, pod.name, labels.ISOLATION_READY)) is not None
                and (found.status, found.reason) == ("True", "Enforced")
                for pod in pods
            ),
        )
    for listener in listeners:
        listener.close()
    gated = gated_at(operator)
    opened = {
        pod.name: max(
            syns.targets[address].open_seconds(gated[f"demo/{pod.name}"])
            for address in (pod.ipv4, pod.ipv6)
        )
        for pod in pods
    }
    wrong = wrong_seconds(operator)
    sys.stderr.write(
        f"seed {seed}: {deleted[0]} qdiscs deleted; open behind the gate for "
        f"{max(opened.values()):.3f} s, condition False for {max([0.0, *wrong.values()]):.3f} s\n"
    )
    assert {name: took for name, took in opened.items() if took > OPEN_SECONDS} == {}
    assert {name: took for name, took in wrong.items() if took > RIGHT_SECONDS} == {}
