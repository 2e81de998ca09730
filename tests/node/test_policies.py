"""HostAccessPolicies of the API server, with restarts of server and agent."""

import signal
from typing import Any

import pytest
from aiohttp import web

from agent.admin import finding_kinds as kinds
from agent.admin.report import RulesReport
from agent.policy.api_source import QUERY
from tests.kernel import traffic
from tests.node.node import PORT, Node, reason_of, status_of

pytestmark = pytest.mark.kernel


async def test_policy_admits_until_it_is_deleted(node: Node) -> None:
    """Also while it is invalid, and while neither the API server nor the previous agent runs."""
    await node.start_agent()
    address = await web_address(node)
    assert is_dropped(address)
    put(node, {"pods": {"namespaces": ["tests"]}, "from": [{"anyProcess": {}}]})
    await node.until("a way in", lambda: not is_dropped(address))

    put(node, {"pods": {"podSelector": {}}, "from": []})
    rules = await node.rules("a problem", lambda rules: rules.problems)
    (problem,) = rules.problems
    assert problem.startswith("API server, policy 'everybody': spec.from: ")
    assert problem.endswith("The last valid version stays in force.")
    assert "podgate_policy_problems 1.0" in (await node.get_http("/metrics"))[1]
    assert is_let_in(address)

    await node.stop_api()
    await node.stop_agent(signal.SIGKILL)
    await node.start_agent()
    await node.report("its pods", lambda report: reason_of(report, "web") == "Enforced")
    rules = await node.rules("its absence", lambda rules: len(rules.problems) > 1)
    assert written(rules) == [("everybody", "API server")]
    assert is_let_in(address)

    node.server.delete("everybody", namespace="", path=QUERY.path)
    await node.start_api()
    await node.until("its end", lambda: is_dropped(address))
    await node.rules("no policy", lambda rules: not written(rules))


async def test_cluster_without_the_resource_has_no_policies(node: Node) -> None:
    async def not_installed(request: web.Request) -> web.StreamResponse | None:
        if request.path != QUERY.path:
            return None
        return web.Response(status=404, text="404 page not found\n")

    node.server.faults.append(not_installed)
    await node.start_agent()
    address = await web_address(node)
    report = await node.report("the finding", lambda report: report.pod_source.problems)
    (found,) = (one for one in report.findings if one.kind == kinds.DEFINITION_MISSING.name)
    assert found.sentence == "API server: it has no hostaccesspolicies."
    assert is_dropped(address)
    rules = await node.rules("an answer", lambda rules: True)
    assert rules.sources == [
        "the API server (without resource hostaccesspolicies)",
        "podgate's default rules",
    ]
    assert rules.problems == []
    lines = [line for line in node.operator.log_lines() if line.get("resource") == QUERY.name]
    assert [line["level"] for line in lines] == ["info"]


def written(rules: RulesReport) -> list[tuple[str, str]]:
    """Name and source of the policies in force, without default rules."""
    return [
        (policy.name, policy.source)
        for policy in rules.policies
        if not policy.name.startswith("podgate:")
    ]


def put(node: Node, spec: dict[str, Any]) -> None:
    metadata = {"name": "everybody", "uid": "uid-everybody"}
    node.server.put({"metadata": metadata, "spec": spec}, path=QUERY.path)


def is_let_in(address: str) -> bool:
    """Whether a process of the node, this one, can connect to the pod."""
    return traffic.is_reached(address, PORT)


def is_dropped(address: str) -> bool:
    return traffic.is_dropped(address, PORT)


async def web_address(node: Node) -> str:
    """Of the pod that all tests have."""
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    report = await node.report("a gate", lambda report: reason_of(report, "web") == "Enforced")
    [address] = status_of(report, "web").addresses
    return address
