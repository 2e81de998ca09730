"""Why a pod is not Ready: all findings of small pods, in their order."""

from typing import Any

import pytest

from agent import labels
from agent.admin import finding_kinds as kinds
from agent.operate.kubectl import readiness
from agent.operate.kubectl.findings import Finding
from agent.operate.kubectl.node_status import NodeStatus, PodInForce
from agent.operate.kubectl.readiness import ReadinessCheck

Json = dict[str, Any]
READY: Json = {"status": {"conditions": [{"type": "Other"}, {"type": "Ready", "status": "True"}]}}
DESCRIBE = "kubectl describe pod web -n shop"
LOGS = "kubectl logs web -n shop -c app"
DOCTOR = "kubectl podgate doctor --node one"
OWN, OTHER = labels.ISOLATION_READY, "example.com/other"


def of_pod(spec: Json | None = None, status: Json | None = None) -> Json:
    """Pod shop/web on node one."""
    return {
        "metadata": {"namespace": "shop", "name": "web"},
        "spec": {"nodeName": "one", **(spec or {})},
        "status": status or {},
    }


def find(found: Json, *events: Json, node: Json | None = READY, **known: Any) -> list[Any]:
    """All findings but that the node is Ready."""
    known = {"agent": None, **known}
    checks = readiness.findings(found, events, node=node, **known)
    return [one for one in checks if one != ReadinessCheck("node", True, "Node one is Ready.")]


def condition(kind: str, status: str, **further: str) -> Json:
    return {"type": kind, "status": status, **further}


def event(reason: str, message: str, container: str = "app") -> Json:
    involved = {"fieldPath": f"spec.containers{{{container}}}"}
    return {"metadata": {}, "reason": reason, "message": message, "involvedObject": involved}


def containers(text: str, command: str) -> list[ReadinessCheck]:
    return [ReadinessCheck("containers", False, text, command)]


def test_pod_without_anything_to_report_has_its_node() -> None:
    checks = readiness.findings(of_pod(), [], node=READY, agent=None)
    assert checks == [ReadinessCheck("node", True, "Node one is Ready.")]


def test_node_that_is_not_readable_is_left_out() -> None:
    assert find(of_pod(), node={}) == []


@pytest.mark.parametrize(
    ("status", "text", "command"),
    [
        ({"phase": "Failed"}, "(Failed)", "kubectl logs web -n shop"),
        (
            {"phase": "Succeeded", "message": "done"},
            "(Succeeded, done)",
            "kubectl logs web -n shop",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "memory"},
            "(Failed, Evicted: memory)",
            "kubectl logs web -n shop",
        ),
    ],
)
def test_pod_that_has_ended_has_its_reason(status: Json, text: str, command: str) -> None:
    sentence = f"The pod has ended {text}: it does not become Ready."
    assert find(of_pod(status=status)) == [ReadinessCheck("pod", False, sentence, command)]


def test_pod_that_is_deleted_has_its_time() -> None:
    found = of_pod()
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    text = "The pod is being deleted since 2026-01-01T00:00:00Z: it does not become Ready again."
    command = "kubectl get pod web -n shop -o yaml"
    assert find(found) == [ReadinessCheck("pod", False, text, command)]


def test_pod_without_a_node_is_described() -> None:
    status = {"conditions": [condition("PodScheduled", "False", message="no room")]}
    found = of_pod({"nodeName": "", "schedulingGates": []}, status)
    assert find(found) == [ReadinessCheck("scheduling", False, "No node: no room.", DESCRIBE)]
    assert find(of_pod(), node=None) == [
        ReadinessCheck("node", False, "Its node one does not exist any more.", "kubectl get nodes")
    ]


@pytest.mark.parametrize(
    ("phase", "has_sandbox", "is_named"),
    [
        ("Pending", "False", True),
        ("Pending", "True", False),
        ("Running", "False", False),
    ],
)
def test_pod_that_waits_for_its_sandbox_has_the_newest_reason(
    phase: str, has_sandbox: str, is_named: bool
) -> None:
    status = {"phase": phase, "conditions": [condition("PodReadyToStartContainers", has_sandbox)]}
    events = [event("FailedMount", "no volume"), event("Pulled", "an image")]
    text = "The pod has no sandbox: no volume."
    expected = [ReadinessCheck("sandbox", False, text, DESCRIBE)] if is_named else []
    assert find(of_pod(status=status), *events) == expected


ENDED = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
WAITING = {"state": {"waiting": {"reason": "PodInitializing"}}}
SIDECAR = {"initContainers": [{"name": "app", "restartPolicy": "Always"}, {"name": "b"}]}


@pytest.mark.parametrize(
    ("spec", "status", "expected"),
    [
        ({}, {}, []),
        ({}, {"initContainerStatuses": None}, []),
        (
            {},
            {"initContainerStatuses": [{"name": "app", "state": None}]},
            containers("Init container app has not ended: no reason is known yet.", DESCRIBE),
        ),
        (
            {},
            {"initContainerStatuses": [{"name": "app", **WAITING}, {"name": "b", **WAITING}]},
            containers("Init container app has not ended: PodInitializing.", DESCRIBE),
        ),
        (
            {},
            {"initContainerStatuses": [{"name": "app", **ENDED}]},
            containers(
                "Init container app has not ended: Error, it ended with exit code 1 (Error).",
                f"{LOGS} --previous",
            ),
        ),
        (
            {},
            {
                "conditions": [condition("Initialized", "True")],
                "initContainerStatuses": [{"name": "app", **WAITING}],
            },
            [],
        ),
        (SIDECAR, {"initContainerStatuses": [{"name": "app", "started": True}]}, []),
        (
            SIDECAR,
            {"initContainerStatuses": [{"name": "app", "started": False, **WAITING}]},
            containers("Init container app has not started: PodInitializing.", DESCRIBE),
        ),
    ],
)
def test_first_init_container_that_is_not_done_is_named(
    spec: Json, status: Json, expected: list[ReadinessCheck]
) -> None:
    assert find(of_pod(spec, status)) == expected


RUNNING = {"name": "app", "state": {"running": {}}, "started": True}
PROBES = {
    "readinessProbe": {"periodSeconds": 1, "httpGet": {"port": 80, "path": "/ready"}},
    "startupProbe": {"tcpSocket": {"port": 81}},
}


@pytest.mark.parametrize(
    ("container", "status", "expected"),
    [
        (PROBES, {**RUNNING, "ready": True}, "All 1 containers are ready."),
        (PROBES, RUNNING, "Container app, readiness probe (httpGet 80/ready): the second."),
        (
            PROBES,
            {**RUNNING, "started": False},
            "Container app, startup probe (tcpSocket 81): it starts.",
        ),
        ({}, RUNNING, "Container app runs; the kubelet has not reported it as ready yet."),
        (PROBES, {"name": "app"}, "Container app does not run: no image."),
        (
            PROBES,
            {"name": "app", "state": {"waiting": {"reason": "Slow"}}, "restartCount": 2},
            "Container app does not run: Slow, 2 restarts.",
        ),
        (
            PROBES,
            {"name": "app", "state": {"waiting": {"message": "It is slow!"}}},
            "Container app does not run: It is slow!",
        ),
    ],
)
def test_container_has_what_keeps_it_from_being_ready(
    container: Json, status: Json, expected: str
) -> None:
    events = [
        event("Unhealthy", "Readiness probe failed: the first"),
        event("Unhealthy", "Readiness probe failed: the second"),
        event("Unhealthy", "Startup probe failed: it starts"),
        event("Unhealthy", "Readiness probe failed: of another", "other"),
        event("Failed", "no network"),
        event("BackOff", "no image"),
        event("Pulled", "an image"),
    ]
    found = of_pod(
        {"containers": [{"name": "other"}, {"name": "app", **container}]},
        {"containerStatuses": [status]},
    )
    (check,) = find(found, *events)
    assert check.text == expected
    assert check.is_met == bool(status.get("ready"))


@pytest.mark.parametrize(
    ("status", "command"),
    [
        ({**RUNNING, "ready": False}, "x podgate probe --pod shop/web"),
        ({"name": "app", "lastState": ENDED["state"]}, f"{LOGS} --previous"),
        ({"name": "app", **WAITING}, DESCRIBE),
        ({**RUNNING, "name": "bare"}, "kubectl get pod web -n shop -o yaml"),
    ],
)
def test_container_has_the_command_that_shows_more(status: Json, command: str) -> None:
    found = of_pod(
        {"containers": [{"name": "app", **PROBES}, {"name": "bare"}]},
        {"containerStatuses": [status]},
    )
    (check,) = find(found, agent_command="x")
    assert check.next_command == command
    if command.startswith("x "):
        (check,) = find(found)
        assert check.next_command == LOGS


def test_containers_are_left_out_until_the_pod_is_initialized() -> None:
    status = {"containerStatuses": [{"name": "app", **WAITING}]}
    conditions = {"conditions": [condition("Initialized", "False")]}
    assert find(of_pod(status={**status, **conditions})) == []
    assert find(of_pod(status={"containerStatuses": None})) == []


def in_force(mode: str, reason: str, name: str = "web") -> PodInForce:
    return PodInForce("one", "shop", name, "enforce", mode, reason, "In words.")


def agent(*pods: PodInForce, **changes: Any) -> NodeStatus:
    return NodeStatus("one", pods=pods, **changes)


def gated(*conditions: Json, gates: tuple[str, ...] = (OTHER, OWN)) -> Json:
    return of_pod(
        {"readinessGates": [{"conditionType": kind} for kind in gates]},
        {"conditions": [*conditions]},
    )


def gate(is_met: bool, text: str, command: str = "") -> ReadinessCheck:
    return ReadinessCheck("readiness gate", is_met, text, command)


MISSING = (
    f"{OTHER} is missing: its controller has not written it; podgate does only what the "
    "ConditionOwner of its domain reports."
)
ENFORCED = ReadinessCheck(
    "gate", True, "Mode enforce, in force enforce (Enforced): In words.", DOCTOR
)


@pytest.mark.parametrize(
    ("found", "known", "expected"),
    [
        (
            gated(condition(OTHER, "True", reason="Fine"), condition(OWN, "True")),
            None,
            [gate(True, f"{OTHER} is True (Fine)."), gate(True, f"{OWN} is True (no reason).")],
        ),
        (
            gated(condition(OTHER, "True")),
            None,
            [
                gate(True, f"{OTHER} is True (no reason)."),
                gate(
                    False,
                    f"{OWN} is missing: no agent of podgate has written it.",
                    "kubectl podgate status",
                ),
            ],
        ),
        (
            gated(condition(OWN, "True", reason="Enforced")),
            agent(in_force("enforce", "Enforced")),
            [
                gate(False, MISSING, DESCRIBE),
                gate(True, f"{OWN} is True (Enforced)."),
                ENFORCED,
            ],
        ),
        (
            gated(condition(OWN, "False", reason="Late", message="Soon."), gates=(OWN,)),
            agent(in_force("enforce", "Enforced", "other"), in_force("none", "Late")),
            [
                gate(False, f"{OWN} is False, Late: Soon.", DOCTOR),
                ReadinessCheck(
                    "gate", False, "Mode enforce, in force none (Late): In words.", DOCTOR
                ),
            ],
        ),
        (
            gated(gates=()),
            agent(in_force("none", "Late")),
            [ReadinessCheck("gate", True, "Mode enforce, in force none (Late): In words.", DOCTOR)],
        ),
        (
            gated(condition(OWN, "True", reason="Audit"), gates=(OWN,)),
            agent(in_force("enforce", "Enforced")),
            [
                gate(True, f"{OWN} is True (Audit)."),
                ENFORCED,
                ReadinessCheck(
                    "agent",
                    False,
                    f"The agent has {OWN} as Enforced, and the API server as Audit: the write is "
                    "outstanding.",
                    DOCTOR,
                ),
            ],
        ),
        (
            gated(gates=(OTHER,)),
            agent(problem="It hangs"),
            [
                gate(False, MISSING, DESCRIBE),
                ReadinessCheck(
                    "agent",
                    True,
                    "The agent of node one does not answer: It hangs.",
                    "kubectl podgate status",
                ),
            ],
        ),
        (
            gated(gates=(OWN,)),
            agent(problem="It hangs."),
            [
                gate(
                    False,
                    f"{OWN} is missing: no agent of podgate has written it.",
                    "kubectl podgate status",
                ),
                ReadinessCheck(
                    "agent",
                    False,
                    "The agent of node one does not answer: It hangs.",
                    "kubectl podgate status",
                ),
            ],
        ),
        (
            gated(condition(OWN, "True"), gates=(OWN,)),
            agent(),
            [
                gate(True, f"{OWN} is True (no reason)."),
                ReadinessCheck(
                    "agent", False, "The agent of node one does not know the pod yet.", DOCTOR
                ),
            ],
        ),
    ],
)
def test_gates_have_what_the_api_server_and_the_agent_know(
    found: Json, known: NodeStatus | None, expected: list[ReadinessCheck]
) -> None:
    assert find(found, agent=known) == expected


def test_findings_of_the_node_and_of_no_pod_are_notes() -> None:
    of_pods = Finding("one", "open", "off", "pod shop/web", "It is open.")
    of_node = Finding("one", "broken", kinds.OFF.name, "node", "It is broken.")
    known = agent(in_force("enforce", "Enforced"), findings=(of_pods, of_node))
    assert find(of_pod(), agent=known) == [
        ENFORCED,
        ReadinessCheck("agent (broken)", True, "Node one: It is broken."),
    ]
    assert find(of_pod({"hostNetwork": True}), agent=known) == []


@pytest.mark.parametrize(
    ("check", "expected"),
    [
        ({"name": "readiness gate", "state": "problem"}, []),
        ({"name": "API server", "state": "problem"}, []),
        ({"name": "gate", "text": "It is on"}, [("gate", True, "It is on.", "")]),
        (
            {"name": "gate", "state": "problem", "text": "Off.", "next": "kubectl get nodes"},
            [("gate", False, "Off.", "kubectl get nodes")],
        ),
        (
            {"name": "gate", "state": "problem", "text": "Off", "next": "podgate doctor"},
            [("gate", False, "Off.", "x podgate doctor")],
        ),
        (
            {
                **{"name": "gate", "state": "problem", "severity": "open", "text": "Off"},
                **{"remedy": "Restart it.", "next": "wait"},
            },
            [("gate (open)", False, "Off; wait. Restart it.", "")],
        ),
    ],
)
def test_checks_of_the_node_have_their_text_and_command(
    check: Json, expected: list[tuple[str, bool, str, str]]
) -> None:
    last = {"name": "last", "state": "ok", "text": "so"}
    found = find(of_pod(), agent=agent(), agent_command="x", explanation={"checks": [check, last]})
    assert found == [
        ReadinessCheck(f"on the node, {subject}", is_met, text, command)
        for subject, is_met, text, command in [*expected, ("last", True, "so.", "")]
    ]
    assert find(of_pod(), explanation={"checks": None}) == []


def test_pod_is_ready_by_its_condition() -> None:
    assert [
        readiness.is_ready(of_pod(status={"conditions": conditions}))
        for conditions in (
            [condition("Ready", "True")],
            [condition("Other", "True"), condition("Ready", "False")],
            [condition("Other", "True")],
            None,
        )
    ] == [True, False, False, False]
