"""What the agent follows at a real API server, and what breaks such watches."""

import base64
import http.client
import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agent.admin.report import AgentReport
from agent.lab.lab import NODE_IPV4
from tests.cluster import etcd
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import ISOLATION_READY, MODE, PROBED, PROBES_PASSING, Workloads

pytestmark = pytest.mark.kernel
BOTH = (ISOLATION_READY, PROBES_PASSING)
_SLOW_SECONDS = 2.0


def test_label_of_a_namespace_is_followed(node: OneNode, namespaces: Namespaces) -> None:
    users = namespaces("enforce")
    path = f"/api/v1/namespaces/{users.namespace}"
    users.run("web", gates=BOTH)
    users.until("web", ISOLATION_READY, "True", "Enforced")
    for mode, reason in (("audit", "Audit"), ("strict", "Strict"), ("enforce", "Enforced")):
        node.api.patch(path, {"metadata": {"labels": {MODE: mode}}})
        users.until("web", ISOLATION_READY, "True", reason)


def test_label_of_the_node_is_followed(node: OneNode, namespaces: Namespaces) -> None:
    users = namespaces()
    users.run("web", gates=BOTH)
    users.until("web", ISOLATION_READY, "True", "Audit")
    node.label(MODE, "enforce")
    try:
        users.until("web", ISOLATION_READY, "True", "Enforced")
    finally:
        node.label(MODE, None)
    users.until("web", ISOLATION_READY, "True", "Audit")


def test_api_server_killed_in_a_watch_delays_new_pods_only(
    node: OneNode, closed: Workloads
) -> None:
    closed.run("old", PROBED, gates=BOTH)
    closed.until_ready("old")
    for turn in range(3):
        node.control_plane.api_server.kill()
        node.control_plane.api_server.start()
        node.control_plane.wait_until_ready()
        closed.run(f"new{turn}", PROBED, gates=BOTH)
        closed.until_ready(f"new{turn}", "old")
    assert closed.restarts() == {}
    assert closed.unhealthy() == []


def test_versions_that_etcd_compacted_are_listed_again(
    node: OneNode, podgate: Deployment, closed: Workloads
) -> None:
    closed.run("deleted", gates=BOTH)
    closed.run("kept", gates=BOTH)
    closed.until_ready("deleted", "kept")
    report = podgate.until("the agent responds", lambda report: report.pid)
    os.kill(report.pid, signal.SIGSTOP)
    try:
        # The agent has this version, or an older one.
        version = node.api.get(closed.pods_path)["metadata"]["resourceVersion"]
        closed.delete("deleted")
        closed.until_gone("deleted")
        closed.run("created", gates=BOTH)
        etcd.compact()
        # The cache of a new API server starts at its own first version.
        node.control_plane.api_server.kill()
        node.control_plane.api_server.start()
        node.control_plane.wait_until_ready()
        answer = next(node.api.watch(closed.pods_path, resourceVersion=version))
        assert (answer["type"], answer["object"]["code"]) == ("ERROR", http.client.GONE)
    finally:
        os.kill(report.pid, signal.SIGCONT)
    closed.until_ready("created", "kept")
    podgate.until(
        "the deleted pod is forgotten",
        lambda report: "deleted" not in {pod.name for pod in report.pods},
    )


def test_two_thousand_pods_of_another_node_are_not_followed(
    node: OneNode, podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")

    def followed(report: AgentReport) -> set[str]:
        return {pod.name for pod in report.pods if pod.namespace == users.namespace}

    try:
        for number in range(2000):
            users.run(f"far{number}", nodeName="elsewhere")
        users.run("web", PROBED, gates=BOTH)
        users.until_ready("web")
        podgate.until("the agent has one pod", lambda report: followed(report) == {"web"})
        # The next agent lists.
        killed = podgate.kill_agent()
        podgate.until(
            "the next agent has one pod",
            lambda report: report.pid != killed and followed(report) == {"web"},
        )
        users.until_ready("web")
    finally:
        node.api.delete(users.pods_path, gracePeriodSeconds="0")


class _SlowWebhook(BaseHTTPRequestHandler):
    """Admits each request after some seconds, as a busy admission webhook does."""

    reviewed = 0

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        uid = json.loads(content)["request"]["uid"]
        time.sleep(_SLOW_SECONDS)
        type(self).reviewed += 1
        response = {"uid": uid, "allowed": True}
        review = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": response,
        }
        answer = json.dumps(review).encode()
        self.send_response(http.client.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """The API server's log has the requests."""


@pytest.fixture
def slow_webhook(node: OneNode) -> Iterator[type[_SlowWebhook]]:
    """Called for each patch of podgate's."""
    pki = node.control_plane.pki
    pki.sign("webhook", user="webhook", hosts=f"IP:{NODE_IPV4}")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki.certificate("webhook"), pki.key("webhook"))
    server = ThreadingHTTPServer((str(NODE_IPV4), 0), _SlowWebhook)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    try:
        node.api.create(path, _configuration(node, server.server_port))
        yield _SlowWebhook
    finally:
        node.api.delete(f"{path}/slow")
        server.shutdown()
        thread.join()
        server.server_close()


def _configuration(node: OneNode, port: int) -> dict[str, object]:
    user = "system:serviceaccount:podgate:podgate"
    return {
        "metadata": {"name": "slow"},
        "webhooks": [
            {
                "name": "slow.tests.podgate.io",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "timeoutSeconds": 30,
                "clientConfig": {
                    "url": f"https://{NODE_IPV4}:{port}/",
                    "caBundle": base64.b64encode(
                        node.control_plane.pki.authority.read_bytes()
                    ).decode(),
                },
                "rules": [
                    {
                        "apiGroups": [""],
                        "apiVersions": ["v1"],
                        "operations": ["UPDATE"],
                        "resources": ["pods/status"],
                    }
                ],
                "matchConditions": [
                    {"name": "podgate", "expression": f"request.userInfo.username == '{user}'"}
                ],
            }
        ],
    }


def test_webhook_that_slows_patches_loses_no_condition(
    closed: Workloads, slow_webhook: type[_SlowWebhook]
) -> None:
    names = [f"web{number}" for number in range(10)]
    for name in names:
        closed.run(name, PROBED, gates=BOTH)
    closed.until_ready(*names)
    assert slow_webhook.reviewed >= len(names)
    assert closed.restarts() == {}
