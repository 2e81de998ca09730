"""Metrics of a cluster's node, for this machine and for Prometheus on others."""

import asyncio
import contextlib
import http.client
import ssl

import pytest

from agent.logs import Event
from tests import polling, unprivileged
from tests.agent.kube.test_token_reviews import Cluster
from tests.kernel import offers
from tests.node.node import Node

pytestmark = pytest.mark.kernel

# Another address than that of --http-address, within the test's node.
ADDRESS, METRICS_PORT = "127.0.0.2", 9652


def get(path: str, token: str = "") -> tuple[int, str]:
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        ADDRESS, METRICS_PORT, timeout=polling.PATIENCE_SECONDS, context=tls
    )
    try:
        connection.request(
            "GET", path, headers={"Authorization": f"Bearer {token}"} if token else {}
        )
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


async def test_prometheus_gets_all_metrics_and_strangers_health(node: Node) -> None:
    offers.need_netns_cookie()
    offers.need_default_deny()
    cluster = Cluster(node.server)
    await node.start_agent("--metrics-address", f"{ADDRESS}:{METRICS_PORT}")
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    status, text = await asyncio.to_thread(get, "/metrics", "good")
    assert status == 200
    lines = text.splitlines()
    assert 'podgate_pods_in_force{mode="enforce"} 1.0' in lines
    for component in ("api_server", "runtime", "hooks", "default_deny"):
        assert f'podgate_component_up{{component="{component}"}} 1.0' in lines
    assert 'podgate_watch_healthy{resource="pods"} 1.0' in lines
    assert 'podgate_api_patches_total{code="403"} 0.0' in lines
    [written] = [line for line in lines if line.startswith('podgate_api_patches_total{code="200"}')]
    assert float(written.split()[1]) >= 1
    for token, expected in (("", 401), ("stolen", 401), ("other", 403)):
        status, text = await asyncio.to_thread(get, "/metrics", token)
        assert (status, "web" in text) == (expected, False)
    assert await asyncio.to_thread(get, "/healthz") == (200, "ok\n")

    cluster.is_away = True
    assert (await asyncio.to_thread(get, "/metrics", "new"))[0] == 503
    assert (await asyncio.to_thread(get, "/metrics", "good"))[0] == 200


async def test_port_of_metrics_that_a_user_holds_keeps_no_agent_out_and_is_served_later(
    node: Node,
) -> None:
    Cluster(node.server)
    squatted = unprivileged.running(
        unprivileged.SQUAT_PORT, ADDRESS, str(METRICS_PORT), "listening"
    )
    with contextlib.ExitStack() as stack:
        process = await asyncio.to_thread(stack.enter_context, squatted)
        await node.start_agent("--metrics-address", f"{ADDRESS}:{METRICS_PORT}")
        node.create("web")
        await node.run_pod("web")
        await node.ready("web")
        await asyncio.to_thread(node.operator.event, Event.METRICS_NOT_SERVED)
        report = await node.report("the problem", lambda report: report.server_problems)
        (problem,) = report.server_problems
        assert f"process {process}" in problem
        assert "of user 65534" in problem
    await node.report("no problem", lambda report: not report.server_problems)
    assert (await asyncio.to_thread(get, "/metrics", "good"))[0] == 200
