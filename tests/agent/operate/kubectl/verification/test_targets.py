"""Which ports of a pod are tried, and which mode its labels want."""

import dataclasses

import pytest

from agent.operate.kubectl.verification import targets
from agent.operate.kubectl.verification.targets import Port, Target
from tests.agent.operate.kubectl.verification.made_cluster import DAEMONSET, Json, sample

MODE, OVERRIDE = "podgate.io/mode", "podgate.io/mode-override"


def labelled(**labels: str) -> Json:
    return {"metadata": {"labels": labels}}


@pytest.mark.parametrize(
    ("pod", "namespace", "node", "wanted"),
    [
        ({}, {}, {}, "audit"),
        ({}, {}, {MODE: "strict"}, "strict"),
        ({}, {MODE: "off"}, {MODE: "strict"}, "off"),
        ({MODE: "enforce"}, {}, {}, "enforce"),
        ({MODE: "audit"}, {MODE: "enforce"}, {}, "enforce"),
        ({MODE: "audit"}, {MODE: "enforce", OVERRIDE: "allowed"}, {}, "audit"),
        ({MODE: "Enforce"}, {MODE: "closed"}, {}, "audit"),
        ({MODE: "strict"}, {MODE: "enforce"}, {}, "strict"),
        ({MODE: "off"}, {}, {}, "audit"),
        ({MODE: "off"}, {OVERRIDE: "allowed"}, {}, "off"),
        ({MODE: "off"}, {OVERRIDE: "yes"}, {}, "audit"),
    ],
)
def test_labels_alone_decide_the_mode(pod: Json, namespace: Json, node: Json, wanted: str) -> None:
    found = targets.label_mode(labelled(**pod), labelled(**namespace), labelled(**node), "audit")
    assert found == wanted


def test_default_mode_is_that_of_the_daemonset() -> None:
    assert targets.default_mode(DAEMONSET) == "audit"
    assert targets.default_mode(None) == ""
    arguments = [["--mode=off", "--mode=strict", "--model=x"], None, ["run"]]
    containers = [{"args": one} for one in arguments]
    assert targets.default_mode({"spec": {"template": {"spec": {"containers": containers}}}}) == (
        "strict"
    )
    bare: Json = {"metadata": {"labels": None}}
    found = {one: targets.label_mode(bare, bare, bare, one) for one in ("strict", "Strict", "")}
    assert found == {"strict": "strict", "Strict": "audit", "": "audit"}


def test_target_has_its_ports_and_addresses() -> None:
    pod = sample("web")
    pod["spec"]["containers"].append({"name": "bare"})
    pod["spec"]["containers"][0]["livenessProbe"] = {"exec": {}, "tcpSocket": {"port": "gone"}}
    declared = Port("TCP", 8080, is_declared=True)
    expected = Target(
        *("shop", "web", "u-web", "audit", ("198.18.0.9", "fd00:18::9")),
        (declared, Port("TCP", 9), Port("UDP", 9), Port("ICMP", 0)),
        kubelet=None,
    )
    assert targets.of_pod(pod, "audit") == expected
    of_canary = (declared, Port("TCP", 8081), Port("UDP", 8081), Port("ICMP", 0))
    found = targets.of_pod(pod, "audit", is_canary=True)
    assert found == dataclasses.replace(expected, ports=of_canary, is_canary=True)


def test_ports_of_containers_and_probes_are_tried_and_one_that_is_free() -> None:
    pod = sample("web")
    (container,) = pod["spec"]["containers"]
    container["ports"] = [
        {"name": "web", "containerPort": 8080},
        {"containerPort": 9, "protocol": "UDP"},
        {"containerPort": 132, "protocol": "SCTP"},
    ]
    container["livenessProbe"] = {"httpGet": {"port": "web"}}
    container["startupProbe"] = {"grpc": {"port": 50051}}
    target = targets.of_pod(pod, "enforce")
    assert target is not None
    assert target.ports == (
        Port("TCP", 8080, is_declared=True),
        Port("UDP", 9, is_declared=True),
        Port("TCP", 50051, is_declared=True),
        Port("TCP", 19),
        Port("UDP", 19),
        Port("ICMP", 0),
    )


def test_number_of_ports_is_bounded() -> None:
    pod = sample("web")
    pod["spec"]["containers"][0]["ports"] = [{"containerPort": 1000 + n} for n in range(99)]
    target = targets.of_pod(pod, "enforce")
    assert target is not None
    assert len(target.ports) == targets.MOST_PORTS + 3


@pytest.mark.parametrize(("ready", "passes"), [("True", True), ("False", False)])
def test_readiness_shows_whether_the_kubelet_reaches_it(ready: str, *, passes: bool) -> None:
    pod = sample("web")
    pod["status"]["conditions"] = [{"type": "ContainersReady", "status": ready}]
    target = targets.of_pod(pod, "enforce")
    assert target is not None
    assert target.kubelet is None  # no probe connects
    pod["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": 1}}
    target = targets.of_pod(pod, "enforce")
    assert target is not None
    assert target.kubelet is passes


def test_pod_on_the_nodes_network_or_without_address_is_not_tried() -> None:
    for place, field, value in (
        ("spec", "hostNetwork", True),
        ("status", "podIPs", []),
        ("status", "phase", "Pending"),
        ("metadata", "deletionTimestamp", "2026-11-22T10:00:00Z"),
    ):
        pod = sample("web")
        pod[place][field] = value
        assert targets.of_pod(pod, "enforce") is None
