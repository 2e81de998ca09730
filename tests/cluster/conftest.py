"""Tests against a real cluster: the one that KUBECONFIG names, or none, which is reported loudly.

They make one namespace with a name of its own, and leave nothing behind. The user of the kubeconfig
must be allowed to make namespaces and pods.
"""

import asyncio
import json
import os
import uuid
from collections.abc import AsyncIterator

import pytest

from agent.kube.client import ApiClient, ApiError, NoClusterConfigError
from tests.cluster.cluster import Cluster

_SKIPPED = (
    "tests/cluster was SKIPPED: no cluster was asked. Name one in KUBECONFIG to run it there."
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    if any("tests/cluster/" in report.nodeid for report in reports):
        terminalreporter.write_line(_SKIPPED, yellow=True, bold=True)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A namespace of the test's own in the cluster."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip(_SKIPPED)
    try:
        api = await ApiClient.open()
    except NoClusterConfigError as error:
        pytest.fail(str(error), pytrace=False)
    namespace = f"podgate-test-{uuid.uuid4().hex[:8]}"
    try:
        nodes = json.loads(await api.request("GET", "/api/v1/nodes"))["items"]
        assert nodes, "the cluster has no node"
        await api.request(
            "POST",
            "/api/v1/namespaces",
            body={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        )
        try:
            made = Cluster(api, namespace, nodes[0]["metadata"]["name"])
            await made.wait_for_service_account()
            yield made
        finally:
            await asyncio.shield(api.request("DELETE", f"/api/v1/namespaces/{namespace}"))
    except ApiError as error:
        pytest.fail(f"the cluster of KUBECONFIG refuses: {error}", pytrace=False)
    finally:
        await api.aclose()
