"""Invalid settings of API pods: they are reported, and affect no other pod."""

import asyncio
import subprocess

import pytest

from agent import labels
from tests.agent.kube.apiserver import Json
from tests.node.node import NAMESPACE, READY, Node, status_of

pytestmark = pytest.mark.kernel

WRONG: dict[str, Json] = {
    "netns": {"annotations": {labels.NETNS_ANNOTATION: "/proc/1/ns/net"}},
    "probes": {"annotations": {"podgate.io/probes": "yes, please"}},
    "relay": {"annotations": {labels.RELAY_ANNOTATION: "perhaps"}},
    "spec": {"annotations": {"podgate.io/probe-spec": "{not JSON"}},
    "mode": {"labels": {labels.MODE_LABEL: "fortress"}},
}


async def test_invalid_settings_are_reported_and_affect_no_other_pod(node: Node) -> None:
    await node.start_agent()
    node.create("well")
    for name, metadata in WRONG.items():
        node.create(name, **metadata)
    for name in ("well", *WRONG):
        await node.run_pod(name)
    # Each is gated as if it had no setting; an invalid probe spec is no probe.
    await node.ready("well", "netns", "probes", "relay", "mode")
    await node.until("a condition", lambda: probing(node, "spec"))
    assert probing(node, "spec")["reason"] == "InvalidProbeSpec"
    await node.until(
        "the gate of the pod with an invalid spec",
        lambda: node.condition("spec", labels.ISOLATION_READY).get("reason") == "Enforced",
    )
    assert "podgate.io/probe-spec" in probing(node, "spec")["message"]
    assert "fortress" in node.condition("mode", labels.ISOLATION_READY)["message"]

    await node.until("events", lambda: len(warned(node)) >= len(WRONG) - 1)
    assert warned(node) >= {
        ("netns", "AnnotationIgnored", labels.NETNS_ANNOTATION),
        ("probes", "AnnotationIgnored", "podgate.io/probes"),
        ("relay", "AnnotationIgnored", labels.RELAY_ANNOTATION),
        ("mode", "LabelInvalid", labels.MODE_LABEL),
    }
    assert "well" not in {pod for pod, _, _ in warned(node)}


async def test_unknown_fields_and_other_types_are_tolerated(node: Node) -> None:
    await node.start_agent()
    node.create("odd", container={**READY, "lifecycle": 7, "ports": "none", "newField": [1]})
    node.change("odd", lambda pod: pod["spec"].update(newList=[{"a": None}]))
    node.create("well")
    for name in ("odd", "well"):
        await node.run_pod(name)
    await node.ready("well")
    await node.until("a condition", lambda: probing(node, "odd"))
    await node.until(
        "the gate of the odd pod",
        lambda: node.condition("odd", labels.ISOLATION_READY).get("status") == "True",
    )
    assert probing(node, "odd")["status"] == "False"
    assert "ports" in probing(node, "odd")["message"]


async def test_undecodable_event_does_not_affect_others(node: Node) -> None:
    await node.start_agent()
    node.create("well")
    await node.run_pod("well")
    stream = await node.server.watched()
    stream.send(b'{"type": "ADDED", "object": {"metadata": {"name": 7, "uid": []}}}\n')
    stream.send(b"no JSON at all\n")
    node.create("later")
    await node.run_pod("later")
    await node.ready("well", "later")


def probing(node: Node, name: str) -> Json:
    return node.condition(name, labels.PROBES_PASSING)


def warned(node: Node) -> set[tuple[str, str, str]]:
    """Events: pod, reason, and what it is about."""
    return {
        (event["regarding"]["name"], event["reason"], event["note"].split()[1].split("=")[0])
        for event in node.events()
    }


async def test_an_address_that_only_the_pod_claims_is_an_event(node: Node) -> None:
    await node.start_agent()
    node.create("web")
    await node.run_pod("web")
    await node.ready("web")
    report = await node.report("its namespace", lambda report: status_of(report, "web").netns)
    confirmed = status_of(report, "web").addresses
    assert confirmed
    enter = ["nsenter", f"--net={status_of(report, 'web').netns}"]
    command = [*enter, "ip", "address", "add", "198.18.99.9/32", "dev", "eth0"]
    await asyncio.to_thread(subprocess.run, command, check=True)

    await node.until(
        "the event",
        lambda: any(
            event["reason"] == "AddressUnconfirmed" and "198.18.99.9" in event["note"]
            for event in node.events()
        ),
    )
    report = await node.report("the claim", lambda report: status_of(report, "web").unconfirmed)
    assert status_of(report, "web").addresses == confirmed
    assert node.condition("web", labels.ISOLATION_READY)["status"] == "True"
    _, metrics = await node.get_http("/metrics")
    assert f'podgate_unconfirmed_addresses{{namespace="{NAMESPACE}",pod="web"}} 1.0' in metrics
