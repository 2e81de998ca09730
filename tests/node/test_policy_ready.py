"""A pod with the gate policy-ready is Ready once an engine drops what its policies must drop."""

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.admin.finding_kinds import Kind
from agent.admin.report import AgentReport
from agent.lab.agent_process import condition_of
from agent.network_policy.source import POLICIES
from tests.node.node import NAMESPACE, Node, reason_of, status_of

pytestmark = pytest.mark.kernel

WAIT = ("--mode", "audit", "--namespace", NAMESPACE, "--policy-ready", "wait")
KIND = labels.POLICY_READY
TABLE = "test-engine"


def put_policy(node: Node, name: str = "web-ports", **spec: object) -> None:
    """For pods with app=web: TCP 7000 from all pods, and nothing else."""
    spec = {
        "podSelector": {"matchLabels": {"app": "web"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [{"port": 7000}]}],
        **spec,
    }
    metadata = {"namespace": NAMESPACE, "name": name, "uid": name}
    node.server.put({"metadata": metadata, "spec": spec}, path=POLICIES.path)


@contextlib.contextmanager
def engine(address: str, port: int = 7000) -> Iterator[None]:
    """Rules on the node, as those of an engine: to this pod this port alone."""
    rules = f"""table inet {TABLE} {{
        chain forward {{
            type filter hook forward priority 0;
            ip daddr {address} tcp dport {port} accept
            ip daddr {address} ct state established,related accept
            ip daddr {address} drop
        }}
    }}"""
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", TABLE], check=True)


async def run_gated(node: Node, name: str = "web") -> str:
    """A pod with app=web and the gate; its sandbox."""
    made = node.create(name, container={}, is_gated=False, labels={"app": "web"})
    made["spec"]["readinessGates"] = [{"conditionType": KIND}]
    node.server.put(made)
    return await node.run_pod(name)


def drop_from(address: str) -> None:
    rule = ("inet", TABLE, "forward", "ip", "saddr", address, "drop")
    subprocess.run(["nft", "insert", "rule", *rule], check=True)


async def start(node: Node, *options: str, witness: bool = True) -> None:
    await node.start_agent(*WAIT, *options)
    if witness:
        of_witness = {labels.NAME: labels.WITNESS_NAME}
        node.create("witness", container={}, is_gated=False, labels=of_witness)
        await node.run_pod("witness")


async def condition(node: Node, name: str, status: str, reason: str) -> str:
    """Its message, once the API server has it."""
    await node.until(
        f"{reason} of {name}",
        lambda: (
            (found := node.condition(name, KIND))
            and (found.get("status"), found.get("reason")) == (status, reason)
        ),
    )
    return str(node.condition(name, KIND)["message"])


async def await_text(node: Node, name: str, text: str) -> None:
    """The agent has the condition with this text. The API server gets a change of text only once a
    minute."""

    def has_text(report: AgentReport) -> bool:
        found = condition_of(report, name, KIND)
        return found is not None and text in found.message

    await node.report(text, has_text)


def statuses(node: Node, name: str, after: int) -> list[dict[str, str]]:
    """The condition in each patch of the pod after the first ones."""
    return [
        one
        for patch in node.patches(name)[after:]
        for one in patch.body["status"]["conditions"]
        if one["type"] == KIND
    ]


def is_programmed(report: AgentReport) -> bool:
    """Whether the agent has the condition of web as True."""
    return reason_of(report, "web", KIND) == "PoliciesProgrammed"


def has_finding(report: AgentReport, kind: Kind) -> bool:
    found = [(one.kind, one.subject) for one in report.findings]
    return (kind.name, f"pod {NAMESPACE}/web") in found


async def address_of(node: Node, name: str) -> str:
    report = await node.report("its address", lambda report: status_of(report, name).addresses)
    return next(one for one in status_of(report, name).addresses if ":" not in one)


async def test_pod_waits_until_the_engine_has_its_policies(node: Node) -> None:
    put_policy(node)
    await start(node)
    await run_gated(node)
    await condition(node, "web", "False", "PoliciesPending")
    await await_text(node, "web", "Ingress from the witness: TCP 65535 arrives, though")

    with engine(await address_of(node, "web")):
        text = await condition(node, "web", "True", "PoliciesProgrammed")
        assert "TCP 65535 is dropped, TCP 7000 arrives" in text
        # What the engine does later changes nothing for this sandbox.
    assert node.condition("web", KIND)["status"] == "True"


async def test_result_outlives_agent_and_api_server_and_no_sandbox(node: Node) -> None:
    put_policy(node)
    await start(node)
    sandbox = await run_gated(node)
    with engine(await address_of(node, "web")):
        await condition(node, "web", "True", "PoliciesProgrammed")
    saved = node.operator.run_directory / "state" / "policyready.json"
    await node.until(
        "its file", lambda: saved.exists() and "PoliciesProgrammed" in saved.read_text()
    )
    await node.saved("web")
    written = len(node.patches("web"))
    await node.stop_api()
    await node.stop_agent(signal.SIGKILL)
    await start(node, witness=False)
    await node.report("the pod", is_programmed)
    await node.start_api()

    # Without the file the API server's own condition counts.
    await node.stop_agent()
    saved.unlink()
    await start(node, witness=False)
    await node.report("the pod", is_programmed)
    assert {one["status"] for one in statuses(node, "web", written)} <= {"True"}

    await node.end_pod(sandbox)
    await node.run_pod("web", attempt=1)
    await condition(node, "web", "False", "PoliciesPending")
    with engine(await address_of(node, "web")):
        await condition(node, "web", "True", "PoliciesProgrammed")


async def test_pod_without_policies_does_not_wait_and_a_later_policy_changes_nothing(
    node: Node,
) -> None:
    await start(node, witness=False)
    await run_gated(node)
    assert await condition(node, "web", "True", "NoPolicies")
    put_policy(node)
    await run_gated(node, "late")
    await condition(node, "late", "False", "PoliciesPending")
    assert node.condition("web", KIND)["status"] == "True"


async def test_without_an_engine_the_owner_chooses_and_a_finding_is_reported(node: Node) -> None:
    put_policy(node)
    await start(node, "--policy-ready", "ready", "--policy-ready-timeout", "1")
    await run_gated(node)
    text = await condition(node, "web", "True", "PoliciesUnconfirmed")
    assert "arrives, though tests/web-ports drops it" in text
    await node.report("a finding", lambda report: has_finding(report, kinds.POLICY_NOT_PROGRAMMED))


async def test_pod_without_a_witness_waits_and_a_finding_is_reported(node: Node) -> None:
    put_policy(node)
    await start(node, "--policy-ready-timeout", "1", witness=False)
    await run_gated(node)
    text = await condition(node, "web", "False", "WitnessMissing")
    assert "No witness runs on this node" in text
    await node.report("a finding", lambda report: has_finding(report, kinds.POLICY_NOT_CHECKED))


async def test_egress_and_a_default_deny_are_seen_at_the_witness_in_strict(node: Node) -> None:
    put_policy(node, policyTypes=["Ingress", "Egress"], ingress=[], egress=[])
    await start(node, "--mode", "strict")
    await run_gated(node)
    await await_text(node, "web", "Ingress from the witness: TCP 65535 arrives")
    address = await address_of(node, "web")
    with engine(address):
        await await_text(node, "web", "Egress to the witness")
        await asyncio.to_thread(drop_from, address)
        text = await condition(node, "web", "True", "PoliciesProgrammed")
    assert "from the witness: TCP 65535 is dropped" in text
    assert "to the witness: TCP 65535 is dropped" in text
