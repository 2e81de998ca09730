"""Service endpoints of a whole agent without a cluster: from a file, and by its own probes."""

import json
import pathlib
import signal
import socket
from typing import Any

import pytest
import yaml

from agent.lab.agent_process import AgentProcess, pod_of
from agent.lab.lab import Lab, LabPod
from tests import polling
from tests.agent.services.api import making
from tests.kernel.test_agent import LISTENING, PORT, isolated_as

pytestmark = pytest.mark.kernel

_NODE = "here"


def write(path: pathlib.Path, *items: dict[str, Any]) -> None:
    """As kubectl writes them, in one step."""
    unfinished = path.with_name(f".{path.name}")
    found = {"apiVersion": "v1", "kind": "List", "items": items}
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.rename(path)


def objects_of(pod: LabPod, uid: str) -> tuple[dict[str, Any], dict[str, Any]]:
    endpoints = [
        making.endpoint_json(pod.ipv4, node=_NODE, uid=uid),
        making.endpoint_json("198.19.77.1", node="other"),
    ]
    ports = [{"name": "http", "protocol": "TCP", "port": PORT}]
    found = making.slice_json(*endpoints, ports=ports)
    return (
        {"apiVersion": "v1", "kind": "Service", **making.service_json()},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **found},
    )


def services(operator: AgentProcess, *arguments: str) -> str:
    """Output of `podgate services`; empty while there is none."""
    where = ("--run-directory", str(operator.run_directory))
    return operator.run("services", *arguments, *where).stdout


def endpoints(operator: AgentProcess) -> list[str]:
    """Addresses that connections to the service use."""
    state = json.loads(services(operator, "--output", "json") or "{}")
    return [
        endpoint["address"]
        for service in state.get("services", ())
        for endpoint in service["ports"][0].get("endpoints", ())
    ]


def start(operator: AgentProcess, path: pathlib.Path) -> None:
    operator.start("--services-from", str(path), "--services-node", _NODE)


def test_dump_that_is_read_back_is_the_same(
    operator: AgentProcess, lab: Lab, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "services.json"
    pod = lab.add_pod("web", 1)
    write(path, *objects_of(pod, "web-uid"))
    start(operator, path)
    polling.wait_until("the services", lambda: len(endpoints(operator)) == 2)
    dump = services(operator, "--all", "--output", "yaml")
    assert [one["name"] for one in yaml.safe_load(dump)["services"]] == ["web"]
    operator.stop(signal.SIGTERM)
    path = tmp_path / "dump.yaml"
    path.write_text(dump, encoding="utf-8")
    start(operator, path)
    polling.wait_until(
        "the same services", lambda: services(operator, "--all", "--output", "yaml") == dump
    )
    report = operator.wait_for("the report", lambda report: not report.pod_source.problems)
    assert report.pod_source.pods_from.startswith("manifests")


def test_pods_of_the_node_are_avoided_while_their_probes_fail(
    operator: AgentProcess, lab: Lab, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "services.json"
    pod = lab.add_pod("web", 1)
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    write(path)
    start(operator, path)
    known = pod_of(operator.wait_for("the gate", isolated_as("web", "Enforced")), "web")
    assert known is not None
    write(path, *objects_of(pod, known.uid))
    polling.wait_until("the other endpoint", lambda: endpoints(operator) == ["198.19.77.1"])
    with pod.open_socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("", PORT))
        listening.listen()
        polling.wait_until("both endpoints", lambda: len(endpoints(operator)) == 2)
    polling.wait_until("the other endpoint", lambda: endpoints(operator) == ["198.19.77.1"])


def test_restart_without_the_file_serves_the_saved_services_and_their_age(
    operator: AgentProcess, lab: Lab, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "services.json"
    write(path, *objects_of(lab.add_pod("web", 1), "web-uid"))
    start(operator, path)
    polling.wait_until("the services", lambda: len(endpoints(operator)) == 2)
    operator.stop(signal.SIGTERM)
    path.unlink()
    start(operator, path)
    polling.wait_until("the services", lambda: len(endpoints(operator)) == 2)
    assert "has not confirmed it since" in services(operator)
    report = operator.wait_for("problems", lambda report: len(report.pod_source.problems) == 2)
    missing, saved = report.pod_source.problems
    assert missing.text == f"services from {path}: {path} does not exist; create it"
    assert saved.text.startswith("services are those saved at ")
    write(path)
    polling.wait_until("no service", lambda: endpoints(operator) == [])
    operator.wait_for("no problem", lambda report: not report.pod_source.problems)
