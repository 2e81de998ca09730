"""A scrape from another network namespace, authorized by a real API server.

PODGATE_TEST_RECORD=1 records its answers for tests/agent/kube/test_token_reviews.py again.
"""

import asyncio
import http.client
import json
import os
import pathlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator

import pytest
import yaml

from agent.app.remote_metrics import RemoteMetrics
from agent.kube.client import ApiClient
from agent.lab.lab import NODE_IPV4, LabPod
from tests import polling
from tests.cluster import api_only, conftest
from tests.cluster.api import Json
from tests.cluster.api_only import ApiOnly
from tests.image import manifests

pytestmark = pytest.mark.kernel

REPOSITORY = pathlib.Path(__file__).parents[2]
RECORDED = REPOSITORY / "tests/agent/kube/recorded/reviews.json"
READER = REPOSITORY / "deploy/monitoring/metrics-reader.yaml"
TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
METRICS = b'podgate_pod_condition{namespace="shop",pod="web"} 1.0\n'
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/podgate/serviceaccounts",
    "ClusterRole": f"{RBAC}/clusterroles",
    "ClusterRoleBinding": f"{RBAC}/clusterrolebindings",
}


class Served:
    """A process whose metrics are `METRICS`."""

    def unhealthy_reason(self) -> str | None:
        return None

    def unready_reason(self) -> str | None:
        return "pod shop/web waits"

    async def metrics(self) -> bytes:
        return METRICS


@pytest.fixture(scope="module")
def server(isolated: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiOnly]:
    """With the manifests' rights, and two accounts: the reader has the role, the stranger not."""
    with api_only.running(conftest.binaries(), tmp_path_factory.mktemp("api")) as made:
        for thing in manifests.applied():
            if (
                thing["kind"] in PATHS
                and thing["metadata"].get("namespace", "podgate") == "podgate"
            ):
                made.api.create(PATHS[thing["kind"]], thing)
        made.api.create(PATHS["ClusterRole"], yaml.safe_load(READER.read_text(encoding="utf-8")))
        for name in ("reader", "stranger"):
            account = {"kind": "ServiceAccount", "metadata": {"name": name}}
            made.api.create(PATHS["ServiceAccount"], account)
        binding = {
            "metadata": {"name": "reader"},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": "podgate-metrics-reader",
            },
            "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": "podgate"}],
        }
        made.api.create(PATHS["ClusterRoleBinding"], binding)
        yield made


@pytest.fixture
async def port(server: ApiOnly) -> AsyncIterator[int]:
    """On the node's address, as the agent serves it with its own account's rights."""
    api = await ApiClient.open(str(server.kubeconfig("podgate")))
    with socket.create_server((str(NODE_IPV4), 0)) as listening:
        serving = asyncio.create_task(RemoteMetrics(Served(), api, (listening,), None).run())
        yield int(listening.getsockname()[1])
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    await api.aclose()


@pytest.fixture
def pod(server: ApiOnly) -> LabPod:
    """Another network namespace."""
    return server.lab.add_pod("prometheus", 1)


def get(pod: LabPod, port: int, path: str, token: str = "") -> tuple[int, bytes]:
    """Status and body of a request from inside the pod, over TLS."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    plain = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
    plain.settimeout(polling.PATIENCE_SECONDS)
    plain.connect((str(NODE_IPV4), port))
    with tls.wrap_socket(plain) as connected:
        connection = http.client.HTTPConnection(str(NODE_IPV4), port)
        connection.sock = connected
        connection.request(
            "GET", path, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        response = connection.getresponse()
        return response.status, response.read()


async def test_pod_names_are_for_clients_with_the_right(
    server: ApiOnly, port: int, pod: LabPod
) -> None:
    reader, stranger = server.token("reader"), server.token("stranger")

    async def scrape(token: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(get, pod, port, "/metrics", token)

    # The API server's authorizer reads new bindings some moments after they are stored.
    await polling.request_until(
        "the reader's right", lambda: scrape(server.token("reader")), lambda got: got[0] == 200
    )
    assert await scrape(reader) == (200, METRICS)
    for token, status in ((stranger, 403), ("", 401), ("not-a-token", 401)):
        code, body = await scrape(token)
        assert (code, b"shop" in body) == (status, False)
    assert await asyncio.to_thread(get, pod, port, "/healthz") == (200, b"ok\n")
    code, body = await asyncio.to_thread(get, pod, port, "/readyz")
    assert (code, b"shop" in body) == (503, False)


def test_answers_are_those_that_are_recorded(server: ApiOnly) -> None:
    served = {
        "allowed": _answers(server, server.token("reader")),
        "forbidden": _answers(server, server.token("stranger")),
        "invalid": _answers(server, "not-a-token"),
    }
    if os.environ.get("PODGATE_TEST_RECORD"):
        RECORDED.write_text(json.dumps(served, indent=1) + "\n", encoding="utf-8")
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert _shape(served) == _shape(recorded)


def _answers(server: ApiOnly, token: str) -> Json:
    """Both reviews, without the token itself."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token},
    }
    answer = server.send("POST", TOKEN_REVIEWS, body)
    assert answer.code == 201
    review = answer.body
    review["spec"]["token"] = "left out"
    review["metadata"].pop("managedFields", None)
    if not review["status"].get("authenticated"):
        return {"tokenReview": review}
    user = review["status"]["user"]
    spec = {
        **{"user": user["username"], "uid": user["uid"], "groups": user["groups"]},
        **{"extra": user["extra"]},
        "nonResourceAttributes": {"path": "/metrics", "verb": "get"},
    }
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = server.send("POST", ACCESS_REVIEWS, body)
    assert answer.code == 201
    answer.body["metadata"].pop("managedFields", None)
    return {"tokenReview": review, "accessReview": answer.body}


def _shape(thing: object) -> object:
    """Names and types, and all values that decide; not uids and ids of tokens."""
    if isinstance(thing, dict):
        return {name: _shape(value) for name, value in thing.items()}
    if isinstance(thing, list):
        return [_shape(value) for value in thing]
    return thing if isinstance(thing, bool) else type(thing).__name__
