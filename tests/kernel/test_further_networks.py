"""A probe of a further network dials the addresses of its interface inside the pod."""

import contextlib
import json
import pathlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, Launch, condition_of
from agent.lab.lab import Lab, LabPod
from agent.pods.conditions import TRUE
from bpf import pins
from probes.spec.networks import STATUS_ANNOTATION
from probes.spec.probespec import ANNOTATION
from tests.kernel import links

pytestmark = pytest.mark.kernel

PORT = 8090
NETWORK = "demo/storage"
ADDRESSES = {socket.AF_INET: "198.18.200.1", socket.AF_INET6: "fd00:18:200::1"}


@pytest.fixture
def operator(
    launch: Launch, tmp_path: pathlib.Path, installed_pins: pins.Pins
) -> Iterator[AgentProcess]:
    made = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    yield made
    made.stop(signal.SIGKILL)


def manifest(pod: LabPod, target: dict[str, str]) -> str:
    readiness: dict[str, Any] = {
        "tcp": {"port": PORT},
        "target": target,
        "ipFamilyPolicy": "RequireDualStack",
        "periodMilliseconds": 100,
    }
    spec = {"apiVersion": "podgate.io/v2", "containers": [{"name": "app", "readiness": readiness}]}
    annotations = {
        labels.NETNS_ANNOTATION: pod.netns.path,
        ANNOTATION: json.dumps(spec),
        STATUS_ANNOTATION: json.dumps([{"name": NETWORK, "interface": "net1"}]),
    }
    return json.dumps(
        {
            "kind": "Pod",
            "metadata": {"name": pod.name, "namespace": "demo", "annotations": annotations},
            "spec": {"containers": [{"name": "app"}]},
        }
    )


def message(report: AgentReport) -> str:
    condition = condition_of(report, "web", labels.PROBES_PASSING)
    return condition.message if condition else ""


def passes(report: AgentReport) -> bool:
    condition = condition_of(report, "web", labels.PROBES_PASSING)
    return condition is not None and condition.status == TRUE


@pytest.mark.parametrize("target", [{"interface": "net1"}, {"network": NETWORK}])
def test_server_on_the_further_network_alone_passes(
    operator: AgentProcess, lab: Lab, target: dict[str, str]
) -> None:
    web = lab.add_pod("web", 1)
    operator.write_file("web.yaml", manifest(web, target))
    operator.start()
    operator.wait_for(
        "the probe to miss the interface",
        lambda report: 'the pod has no interface "net1" with an address' in message(report),
    )
    links.ip_inside(
        web,
        "link add net1 type veth peer name other",
        f"address add {ADDRESSES[socket.AF_INET]}/24 dev net1",
        f"address add {ADDRESSES[socket.AF_INET6]}/64 dev net1 nodad",
        "link set net1 up",
        "link set other up",
    )
    operator.wait_for("the probe to fail there", lambda report: "refused" in message(report))
    with contextlib.ExitStack() as stack:
        for family, address in ADDRESSES.items():
            sock = stack.enter_context(web.open_socket(family, socket.SOCK_STREAM))
            sock.bind((address, PORT))
            sock.listen()
        operator.wait_for("the probe to pass", passes)
