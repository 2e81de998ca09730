"""docs/examples/gpu_conditions.py beside a real agent: from ConditionOwner to the pod's status."""

import asyncio
import os
import pathlib

import pytest

from agent.admin import finding_kinds as kinds
from agent.api.conditions import sockets
from tests.agent.api.conditions.node import OWNERS, owner
from tests.agent.client import distribution
from tests.node.node import Node, status_of

pytestmark = pytest.mark.kernel

_PROGRAM = pathlib.Path(__file__).parents[2] / "docs" / "examples" / "gpu_conditions.py"
DOMAIN, HEALTHY = "gpu.example.com", "gpu.example.com/healthy"


async def test_example_reports_each_pod_and_its_end_is_a_finding(
    node: Node, tmp_path: pathlib.Path
) -> None:
    python = await asyncio.to_thread(
        lambda: distribution.install(distribution.build(tmp_path), tmp_path / "environment")
    )
    directory = node.operator.run_directory
    spec = {"staleAfterSeconds": 0, "whenStale": "False"}
    node.server.put(owner(DOMAIN, {"user": os.getuid()}, **spec), path=OWNERS)
    await node.start_agent("--condition-owners=api")
    node.create("web")
    node.change("web", lambda pod: pod["spec"]["readinessGates"].append({"conditionType": HEALTHY}))
    await node.run_pod("web")
    program = await asyncio.create_subprocess_exec(
        *(python, _PROGRAM, f"unix:{sockets.conditions(directory)}"),
        f"unix:{directory}/podinfo/podinfo.sock",
    )
    try:
        await node.until(
            "the condition", lambda: node.condition("web", HEALTHY).get("status") == "True"
        )
        assert node.condition("web", HEALTHY)["message"].startswith("The GPU of web passes. (sand")
    finally:
        program.kill()
        await program.wait()
    await node.until("its end", lambda: node.condition("web", HEALTHY).get("reason") == "OwnerGone")
    report = await node.report("the finding", lambda report: report.findings)
    (finding,) = (one for one in report.findings if one.kind == kinds.CONDITION_OWNER_GONE.name)
    assert len(finding.pod_names) == 1
    assert HEALTHY in [one.type for one in status_of(report, "web").conditions]
    explained = await asyncio.to_thread(
        node.operator.run,
        *("explain", "pod", finding.pod_names[0], "--run-directory", str(directory)),
        *("--bpffs", str(node.operator.bpffs)),
    )
    assert "reports conditions gpu.example.com/*" in explained.stdout
    assert "False (OwnerGone): Its owner has been gone since" in " ".join(explained.stdout.split())
    # The feature goes, and with it what it had written.
    await node.stop_agent()
    await node.start_agent()
    await node.until("the removal", lambda: not node.condition("web", HEALTHY))
