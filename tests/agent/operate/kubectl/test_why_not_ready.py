"""`kubectl podgate why-not-ready`: pods as a real API server and kubelet reported them."""

import copy
import json
import pathlib
from typing import Any

import pytest

from agent import labels
from agent.operate.explain.model import Check, PodExplanation
from agent.operate.kubectl import main, node_status, readiness
from agent.operate.kubectl.cluster import NodeAnswer
from agent.operate.kubectl.node_status import NodeStatus
from agent.operate.kubectl.readiness import ReadinessCheck
from tests.agent.operate.kubectl import reporting
from tests.agent.operate.kubectl.standin import KubectlStandin

RECORDED = pathlib.Path(__file__).parent / "recorded"
NODE = "node1"
Json = dict[str, Any]


def recorded(name: str) -> Json:
    found: Json = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def pod(name: str) -> Json:
    (found,) = (one for one in recorded("pods")["items"] if one["metadata"]["name"] == name)
    return dict(found)


def agent_of(found: Json, reason: str = "Enforced", **changes: Any) -> NodeStatus:
    """The report of the node's agent, which has this pod."""
    metadata = found["metadata"]
    one = reporting.pod(metadata["name"], "enforce", reason, status=changes.pop("status", "True"))
    report = reporting.report(one, **changes)
    report["pods"][0]["namespace"] = metadata["namespace"]
    return node_status.read(NodeAnswer(NODE, json.dumps(report)))


def unmet(found: Json, events: list[Json] | None = None, **known: Any) -> list[ReadinessCheck]:
    known = {"node": recorded("node"), "agent": agent_of(found), **known}
    return [one for one in readiness.findings(found, events or [], **known) if not one.is_met]


def with_gate(found: Json, kind: str, condition: Json | None) -> Json:
    """The pod with only this readiness gate."""
    changed = copy.deepcopy(found)
    changed["spec"]["readinessGates"] = [{"conditionType": kind}]
    conditions = [one for one in changed["status"]["conditions"] if one["type"] != kind]
    changed["status"]["conditions"] = conditions + (
        [{"type": kind, **condition}] if condition else []
    )
    return changed


def test_gate_of_another_controller_is_named() -> None:
    (finding,) = unmet(pod("gated"))
    assert finding.subject == "readiness gate"
    assert "example.com/other is missing: its controller has not written it" in finding.text


def test_false_gate_of_podgate_has_its_reason_and_the_nodes_doctor() -> None:
    condition = {"status": "False", "reason": "GateFailed", "message": "No room."}
    found = with_gate(pod("gated"), labels.ISOLATION_READY, condition)
    gate, of_agent = unmet(found, agent=agent_of(found, "GateFailed", status="False"))
    assert gate.text == "podgate.io/isolation-ready is False, GateFailed: No room."
    assert gate.next_command == f"kubectl podgate doctor --node {NODE}"
    assert of_agent.text.startswith("Mode enforce, in force none (GateFailed)")


def test_missing_gate_without_an_agent_leads_to_status() -> None:
    found = with_gate(pod("gated"), labels.ISOLATION_READY, None)
    silent = NodeStatus(NODE, "no agent runs on this node")
    gate, of_agent = unmet(found, agent=silent)
    assert "no agent of podgate has written it" in gate.text
    assert gate.next_command == "kubectl podgate status"
    assert of_agent.text == f"The agent of node {NODE} does not answer: no agent runs on this node."


def test_condition_that_the_api_server_does_not_have_yet_is_outstanding() -> None:
    condition = {"status": "False", "reason": "GatePending", "message": "Not yet."}
    found = with_gate(pod("gated"), labels.ISOLATION_READY, condition)
    assert "the write is outstanding" in unmet(found)[-1].text
    written = with_gate(
        pod("gated"), labels.ISOLATION_READY, {"status": "True", "reason": "Enforced"}
    )
    assert unmet(written) == []


def test_failing_probe_is_named_with_the_kubelets_reason() -> None:
    events = recorded("events-failing")["items"]
    (finding,) = unmet(pod("failing"), events, agent_command="kubectl exec -c agent x --")
    assert finding.text == (
        "Container web, readiness probe (httpGet 8080/nope): "
        "HTTP probe failed with statuscode: 404."
    )
    namespace = pod("failing")["metadata"]["namespace"]
    expected = f"kubectl exec -c agent x -- podgate probe --pod {namespace}/failing"
    assert finding.next_command == expected
    (finding,) = unmet(pod("failing"), events, agent_command="")
    assert finding.next_command == f"kubectl logs failing -n {namespace} -c web"


def test_crashing_container_is_named_with_its_last_end() -> None:
    (finding,) = unmet(pod("crash"))
    assert "Container web does not run: CrashLoopBackOff" in finding.text
    assert "it ended with exit code 128 (StartError)" in finding.text
    assert "7 restarts" in finding.text
    assert finding.next_command.endswith("-c web --previous")


def test_message_of_the_last_end_is_named() -> None:
    found = pod("crash")
    (status,) = found["status"]["containerStatuses"]
    ended = {"exitCode": 3, "reason": "Error", "message": "no such file"}
    status["lastState"] = {"terminated": ended}
    (finding,) = unmet(found)
    assert "it ended with exit code 3 (Error), no such file" in finding.text
    del ended["message"]
    (finding,) = unmet(found)
    assert "it ended with exit code 3 (Error), 7 restarts" in finding.text


def test_image_that_cannot_be_pulled_is_named() -> None:
    (finding,) = unmet(pod("noimage"))
    assert "ErrImagePull, failed to pull and unpack image" in finding.text
    assert finding.next_command.startswith("kubectl describe pod noimage")


def test_pod_without_a_node_has_the_schedulers_reason() -> None:
    (finding,) = unmet(pod("unschedulable"), node=None, agent=None)
    assert finding.text.startswith("No node: 0/1 nodes are available")


def test_node_that_is_not_ready_comes_before_all_of_its_pods_problems() -> None:
    node = recorded("node")
    node["status"]["conditions"][-1] |= {"status": "Unknown", "message": "Kubelet stopped posting."}
    first, *_ = unmet(pod("failing"), node=node)
    assert first.text == (
        f"Node {NODE} is not Ready, so none of its pods is: Kubelet stopped posting."
    )
    first, *_ = unmet(pod("failing"), node=None)
    assert first.text == f"Its node {NODE} does not exist any more."


def test_deleted_pod_and_ended_one_do_not_become_ready() -> None:
    found = pod("gated")
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert unmet(found)[0].text.startswith("The pod is being deleted since 2026-01-01T00:00:00Z")
    found = pod("gated")
    found["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "out of memory"}
    assert unmet(found)[0].text.startswith("The pod has ended (Failed, Evicted: out of memory)")


def test_first_init_container_that_waits_hides_what_waits_for_it() -> None:
    found = pod("noimage")
    status = found["status"]
    for condition in status["conditions"]:
        if condition["type"] == "Initialized":
            condition["status"] = "False"
    (web,) = status["containerStatuses"]
    status["initContainerStatuses"] = [
        {**web, "name": "done", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
        {**web, "name": "first"},
        {**web, "name": "second"},
    ]
    (finding,) = unmet(found)
    assert finding.text.startswith("Init container first has not ended: ErrImagePull")


def test_sidecar_that_has_not_started_holds_back_the_others() -> None:
    found = pod("noimage")
    status = found["status"]
    for condition in status["conditions"]:
        if condition["type"] == "Initialized":
            condition["status"] = "False"
    (web,) = status["containerStatuses"]
    found["spec"]["initContainers"] = [
        {"name": name, "restartPolicy": "Always"} for name in ("started", "waiting")
    ]
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    status["initContainerStatuses"] = [
        {**web, "name": "started", "started": True, "state": running},
        {**web, "name": "waiting", "started": False, "state": running},
    ]
    (finding,) = unmet(found)
    assert finding.text.startswith("Init container waiting has not started")


def event(reason: str, message: str, second: int, container: str = "") -> Json:
    involved = {"fieldPath": f"spec.containers{{{container}}}"} if container else {}
    return {
        "metadata": {"creationTimestamp": f"2026-01-01T00:00:{second:02}Z"},
        "reason": reason,
        "message": message,
        "involvedObject": involved,
    }


def test_pod_without_a_sandbox_has_the_newest_reason_of_the_runtime() -> None:
    found = pod("noimage")
    found["status"]["phase"] = "Pending"
    found["status"]["containerStatuses"] = []
    kind = "PodReadyToStartContainers"
    others = [one for one in found["status"]["conditions"] if one["type"] != kind]
    found["status"]["conditions"] = [*others, {"type": kind, "status": "False"}]
    (finding,) = unmet(found)
    assert finding.text == "The pod has no sandbox: the runtime has not created it yet."
    events = [event("FailedCreatePodSandBox", "newest", 2), event("FailedMount", "oldest", 1)]
    (finding,) = unmet(found, events)
    assert finding.text == "The pod has no sandbox: newest."


def running(name: str, **changes: Any) -> Json:
    """A recorded pod whose container runs, and is not ready."""
    found = pod(name)
    (web,) = found["status"]["containerStatuses"]
    web |= {"ready": False, "state": {"running": {}}, "started": True, **changes}
    return found


def test_running_container_without_a_probe_waits_for_the_kubelet() -> None:
    found = running("gated")
    found["spec"]["containers"][0].pop("readinessProbe", None)
    (finding, *_) = unmet(found)
    assert finding.text == "Container web runs; the kubelet has not reported it as ready yet."


def test_startup_probe_is_named_before_the_readiness_probe() -> None:
    found = running("failing", started=False)
    found["spec"]["containers"][0]["startupProbe"] = {"tcpSocket": {"port": 5432}}
    events = [event("Unhealthy", "Readiness probe failed: no", 1, "web")]
    (finding,) = unmet(found, events)
    assert finding.text == (
        "Container web, startup probe (tcpSocket 5432): the kubelet has no result yet."
    )


def test_container_without_a_state_has_its_newest_event() -> None:
    found = running("failing", state={}, lastState={}, restartCount=0)
    events = [
        event("BackOff", "Back-off pulling image", 3, "web"),
        event("Failed", "another container", 4, "sidecar"),
        event("Failed", "older", 2, "web"),
    ]
    (finding,) = unmet(found, events)
    assert finding.text == "Container web does not run: Back-off pulling image."
    (finding,) = unmet(found, [])
    assert finding.text == "Container web does not run: no reason is known yet."


def test_agent_that_has_not_received_the_pod_is_named_if_a_gate_waits_for_it() -> None:
    other = agent_of(pod("failing"))
    found = readiness.findings(pod("crash"), [], node=recorded("node"), agent=other)
    (of_agent,) = [one for one in found if one.subject == "agent"]
    assert of_agent.text == f"The agent of node {NODE} does not know the pod yet."
    assert of_agent.is_met
    gated = with_gate(pod("gated"), labels.ISOLATION_READY, {"status": "True", "reason": "x"})
    assert [one.subject for one in unmet(gated, agent=other)] == ["agent"]


def test_problems_of_the_nodes_agent_are_notes() -> None:
    found = pod("crash")
    agent = agent_of(found, is_synced=False)
    notes = readiness.findings(found, [], node=recorded("node"), agent=agent)
    text = f"Node {NODE}: Initial pod sync not finished."
    assert [one.is_met for one in notes if one.text == text] == [True]


EXPLANATION = PodExplanation(
    namespace="shop",
    name="gated",
    uid="u",
    is_well=False,
    from_agent=True,
    checks=[
        Check(name="agent", state="ok", text="alive"),
        Check(name="gate", state="problem", text="not attached", next="podgate doctor"),
        Check(name="relay", state="problem", text="none serves", next="start the agent"),
        Check(name="network namespace", state="unknown", text="only the agent knows its path"),
        Check(name="readiness gate", state="problem", text="example.com/other is not set"),
    ],
)


def test_checks_of_the_node_follow_those_of_the_api_server() -> None:
    found = readiness.findings(
        pod("gated"),
        [],
        node=recorded("node"),
        agent=agent_of(pod("gated")),
        agent_command="kubectl exec -c agent x --",
        explanation=reporting.encoded(EXPLANATION),
    )
    of_node = [one for one in found if one.subject.startswith("on the node, ")]
    assert of_node == found[-4:]
    assert [(one.is_met, one.text, one.next_command) for one in of_node] == [
        (True, "alive.", ""),
        (False, "not attached.", "kubectl exec -c agent x -- podgate doctor"),
        (False, "none serves; start the agent.", ""),
        (True, "only the agent knows its path.", ""),
    ]


@pytest.fixture
def serving(kubectl: KubectlStandin) -> KubectlStandin:
    """A cluster with the recorded pod "gated", and its node's agent."""
    kubectl.serve_nodes(NODE)
    found = pod("gated")
    kubectl.respond("get", "pod", "gated", output=found)
    kubectl.respond("get", "events", output={"items": []})
    kubectl.respond("get", "node", NODE, output=recorded("node"))
    report = reporting.report(reporting.pod("gated", "enforce", "Enforced"))
    report["pods"][0]["namespace"] = found["metadata"]["namespace"]
    kubectl.respond("exec", f"agent-{NODE}", "status", output=report)
    ended = "command terminated with exit code 1\n"
    kubectl.respond(
        *("exec", f"agent-{NODE}", "explain"), output=reporting.encoded(EXPLANATION), error=ended
    )
    return kubectl


def test_answer_ends_with_the_next_command(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["--kubectl", serving.command, "why-not-ready", "gated"]) == 1
    namespace = pod("gated")["metadata"]["namespace"]
    assert capsys.readouterr().out.splitlines() == [
        f"Pod {namespace}/gated is not Ready.",
        f"+ node: Node {NODE} is Ready.",
        "+ containers: All 1 containers are ready.",
        "- readiness gate: example.com/other is missing: its controller has not written it; "
        "podgate does only what the ConditionOwner of its domain reports.",
        "+ readiness gate: podgate.io/isolation-ready is True (Enforced).",
        "+ on the node, agent: alive.",
        "- on the node, gate: not attached.",
        "- on the node, relay: none serves; start the agent.",
        "+ on the node, network namespace: only the agent knows its path.",
        f"Next: kubectl describe pod gated -n {namespace}",
    ]


def test_ready_pod_is_success_and_json_has_all_findings(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pod("gated")
    for condition in found["status"]["conditions"]:
        if condition["type"] == "Ready":
            condition["status"] = "True"
    serving.respond("get", "pod", "gated", output=found)
    arguments = ["why-not-ready", "shop/gated", "-o", "json"]
    assert main.main(["--kubectl", serving.command, *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    shown = document.pop("findings")
    assert document == {
        "pod": f"{found['metadata']['namespace']}/gated",
        **{"isReady": True, "nextCommand": "", "notRead": ""},
    }
    assert shown[0] == {
        **{"subject": "node", "isMet": True, "text": f"Node {NODE} is Ready."},
        "nextCommand": "",
    }
    command = f"kubectl exec --namespace=podgate --container=agent agent-{NODE} -- podgate doctor"
    assert shown[5] == {
        **{"subject": "on the node, gate", "isMet": False, "text": "not attached."},
        "nextCommand": command,
    }
    assert len(shown) == 8
    assert serving.calls("get", "pod", "gated", "--namespace=shop")


def test_unknown_pod_is_one_sentence(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    error = 'Error from server (NotFound): pods "web" not found\n'
    kubectl.respond("get", "pod", "web", error=error)
    assert main.main(["--kubectl", kubectl.command, "why-not-ready", "web"]) == 1
    assert capsys.readouterr().err == f"kubectl podgate: {error}"


def test_agent_without_explain_is_no_error(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    error = "Error: No such command 'explain'.\ncommand terminated with exit code 2\n"
    serving.respond("exec", f"agent-{NODE}", "explain", error=error, exit_status=2)
    assert main.main(["--kubectl", serving.command, "why-not-ready", "gated"]) == 1
    captured = capsys.readouterr()
    assert "+ gate: Mode enforce, in force enforce (Enforced): Gated." in captured.out
    assert captured.err == ""


def test_node_that_is_gone_is_the_reason(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.respond("get", "node", NODE, error="Error from server (NotFound): nodes\n")
    assert main.main(["--kubectl", serving.command, "why-not-ready", "gated"]) == 1
    captured = capsys.readouterr()
    assert f"Its node {NODE} does not exist any more." in captured.out
    serving.respond("get", "node", NODE, error="Error from server (Timeout): nodes\n")
    assert main.main(["--kubectl", serving.command, "why-not-ready", "gated"]) == 1
    captured = capsys.readouterr()
    assert captured.err.endswith("Error from server (Timeout): nodes\n")
    assert captured.out == ""


def test_node_that_the_user_may_not_get_is_reported_as_missing(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.respond("get", "node", NODE, error="Error from server (Forbidden): nodes\n")
    assert main.main(["--kubectl", serving.command, "why-not-ready", "gated"]) == 1
    captured = capsys.readouterr()
    assert f"The state of node {NODE} is missing: Error from server (Forbidden)" in captured.err
    assert f"ode {NODE} is" not in captured.out
    assert "readiness gate: " in captured.out


def test_agent_of_another_version_has_a_note(
    serving: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    serving.respond("exec", f"agent-{NODE}", "status", output=reporting.report(version="9.0.0"))
    main.main(["--kubectl", serving.command, "why-not-ready", "gated"])
    assert f"agents on {NODE} are 9.0.0" in capsys.readouterr().err


def test_pod_without_a_node_may_be_held_back_by_scheduling_gates() -> None:
    found = pod("unschedulable")
    found["spec"]["schedulingGates"] = [{"name": "example.com/a"}, {"name": "example.com/b"}]
    (finding,) = unmet(found, node=None, agent=None)
    assert finding.text == ("No node: scheduling gates example.com/a, example.com/b hold it back.")
    del found["spec"]["schedulingGates"]
    found["status"]["conditions"] = []
    (finding,) = unmet(found, node=None, agent=None)
    assert finding.text == "No node: the scheduler has not handled it yet."


def test_node_whose_kubelet_is_silent_is_named_without_a_message() -> None:
    node = recorded("node")
    node["status"]["conditions"] = []
    first, *_ = unmet(pod("failing"), node=node)
    assert first.text == (
        f"Node {NODE} is not Ready, so none of its pods is: its kubelet does not report."
    )
    assert first.next_command == f"kubectl describe node {NODE}"


def test_pod_that_has_ended_needs_no_reason() -> None:
    found = pod("gated")
    found["status"]["phase"] = "Succeeded"
    text = "The pod has ended (Succeeded): it does not become Ready."
    assert unmet(found)[0].text == text


def test_only_containers_that_are_not_ready_are_named() -> None:
    found = running("failing")
    (web,) = found["status"]["containerStatuses"]
    ready = {**web, "name": "ready", "ready": True}
    found["status"]["containerStatuses"] = [ready, web, {**web, "name": "later", "state": {}}]
    subjects = [one.text.partition(" ")[2].partition(" ")[0] for one in unmet(found)]
    assert subjects == ["web,", "later"]
    web["ready"] = True
    found["status"]["containerStatuses"] = [ready, web]
    checks = readiness.findings(found, [], node=recorded("node"), agent=agent_of(found))
    assert "All 2 containers are ready." in [one.text for one in checks]


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ({"status": "False"}, "is False, no reason: -."),
        ({"status": "Unknown", "reason": "Late"}, "is Unknown, Late: -."),
    ],
)
def test_gate_of_another_controller_has_its_reason(condition: Json, text: str) -> None:
    found = with_gate(pod("gated"), "example.com/other", condition)
    (finding,) = unmet(found)
    assert finding.text == f"example.com/other {text}"
    namespace = found["metadata"]["namespace"]
    assert finding.next_command == f"kubectl describe pod gated -n {namespace}"


def test_gate_that_is_true_is_met_without_a_reason() -> None:
    found = with_gate(pod("gated"), "example.com/other", {"status": "True"})
    checks = readiness.findings(found, [], node=recorded("node"), agent=agent_of(found))
    text = "example.com/other is True (no reason)."
    assert [one.is_met for one in checks if one.text == text] == [True]


def test_agent_is_no_obstacle_to_pods_that_do_not_wait_for_it() -> None:
    found = pod("crash")
    silent = NodeStatus(NODE, "no agent runs on this node")
    checks = readiness.findings(found, [], node=recorded("node"), agent=silent)
    assert [one.is_met for one in checks if one.subject == "agent"] == [True]
    found["spec"]["hostNetwork"] = True
    checks = readiness.findings(found, [], node=recorded("node"), agent=silent)
    assert "agent" not in [one.subject for one in checks]


def of_node(*checks: Check, agent_command: str = "") -> list[ReadinessCheck]:
    explanation = PodExplanation(
        namespace="shop", name="gated", uid="u", is_well=False, from_agent=True, checks=[*checks]
    )
    found = readiness.findings(
        pod("gated"),
        [],
        node=recorded("node"),
        agent=agent_of(pod("gated")),
        agent_command=agent_command,
        explanation=reporting.encoded(explanation),
    )
    return [one for one in found if one.subject.startswith("on the node, ")]


def test_check_of_the_node_has_its_severity_and_remedy() -> None:
    check = Check(
        name="gate",
        state="problem",
        text="not attached",
        remedy="Reload it.",
        severity="open",
        next="kubectl get nodes",
    )
    (found,) = of_node(check, Check(name="API server", state="problem", text="old"))
    assert found == ReadinessCheck(
        *("on the node, gate (open)", False, "not attached. Reload it.", "kubectl get nodes")
    )


def test_command_of_the_node_is_a_hint_where_no_agent_can_run_it() -> None:
    (found,) = of_node(Check(name="gate", state="problem", text="off", next="podgate doctor"))
    assert (found.text, found.next_command) == ("off; podgate doctor.", "")


@pytest.mark.parametrize(
    ("handler", "text"),
    [
        ({"tcpSocket": {"port": 5432}}, "tcpSocket 5432"),
        ({"httpGet": {"port": "web", "path": "/"}}, "httpGet web/"),
        ({"exec": {"command": ["true"]}}, "exec"),
        ({"periodSeconds": 10}, "no handler"),
    ],
)
def test_probe_is_named_with_its_handler(handler: Json, text: str) -> None:
    found = running("failing")
    found["spec"]["containers"][0]["readinessProbe"] = {"periodSeconds": 10, **handler}
    (finding,) = unmet(found)
    assert finding.text.startswith(f"Container web, readiness probe ({text}): ")


def test_newest_event_is_the_one_that_was_seen_last() -> None:
    """Of a series it is seen again; old clients write lastTimestamp, newer ones eventTime."""
    found = running("failing", state={}, lastState={}, restartCount=0)
    made = event("Failed", "created", 5, "web")
    legacy = event("Failed", "legacy", 1, "web") | {"lastTimestamp": "2026-01-01T00:00:06Z"}
    modern = event("Failed", "modern", 1, "web") | {"eventTime": "2026-01-01T00:00:07Z"}
    series = event("Failed", "series", 1, "web") | {
        "eventTime": "2026-01-01T00:00:01Z",
        "series": {"lastObservedTime": "2026-01-01T00:00:08Z"},
    }
    events = [series, modern, legacy, made]
    for newest in ("series", "modern", "legacy", "created"):
        (finding,) = unmet(found, events)
        assert finding.text == f"Container web does not run: {newest}."
        events = events[1:]


def test_probe_has_the_newest_of_its_failures() -> None:
    events = [
        event("Unhealthy", "Readiness probe failed: oldest", 1, "web"),
        event("Unhealthy", "Readiness probe failed: newest", 3, "web"),
        event("Unhealthy", "Readiness probe failed: older", 2, "web"),
    ]
    (finding,) = unmet(running("failing"), events)
    assert finding.text.endswith("): newest.")


@pytest.mark.parametrize(
    ("condition", "written"),
    [({"status": "False", "reason": "GatePending"}, "GatePending"), (None, "missing")],
)
def test_what_the_api_server_has_is_named_beside_what_the_agent_has(
    condition: Json | None, written: str
) -> None:
    found = with_gate(pod("gated"), labels.ISOLATION_READY, condition)
    assert unmet(found)[-1].text == (
        f"The agent has {labels.ISOLATION_READY} as Enforced, and the API server as {written}: "
        "the write is outstanding."
    )
