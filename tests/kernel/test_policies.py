"""Policies with the whole agent: which sources a rule admits, and what the agent reports."""

import asyncio
import datetime
import json
import pathlib
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import yaml

from agent import labels
from agent.admin import client as admin_client
from agent.admin.report import AgentReport, PolicyStatus, RulesReport
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, Launch, condition_of
from agent.lab.lab import Lab, LabPod
from agent.settings import admin_socket
from bpf import abi, loader, map_specs, pins
from bpf.gates import GateConfig, Gates
from bpf.maps import Map
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_agent import is_dropped, isolated_as, reaches
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT, OTHER_PORT = 8080, 8081
REPLACEMENTS = 1000
# Attempts from just before each of them. An installation waits for RCU after its replacement, where
# more attempts show nothing more. Those that are dropped take two milliseconds.
AROUND_REPLACEMENT = {PORT: 20, OTHER_PORT: 3}
LISTENING = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}


class Node:
    """An operator with a directory of rules, and the agent's report of them."""

    def __init__(self, operator: AgentProcess, rules: pathlib.Path) -> None:
        self.operator = operator
        self.directory = rules
        rules.mkdir()

    def write(self, name: str, *policies: dict[str, Any] | str) -> None:
        text = [one if isinstance(one, str) else yaml.safe_dump(one) for one in policies]
        unfinished = self.directory / f".{name}"
        unfinished.write_text("---\n".join(text), encoding="utf-8")
        unfinished.rename(self.directory / name)

    def start(self, pod: LabPod, mode: str = "enforce", *extra: str) -> None:
        self.operator.write_manifest(pod, mode=mode, container=LISTENING)
        self.operator.start("--rules", str(self.directory), *extra)
        reason = "Audit" if mode == "audit" else "Enforced"
        self.operator.wait_for("the gate", isolated_as(pod.name, reason))

    def podgate(self, command: str, *arguments: str) -> str:
        where = ("--run-directory", str(self.operator.run_directory))
        done = self.operator.run(command, *where, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rules(self) -> RulesReport:
        """As `podgate rules --output json` shows them."""
        path = admin_socket(self.operator.run_directory)
        return msgspec.json.decode(
            asyncio.run(admin_client.fetch(path, "/rules")), type=RulesReport
        )

    def wait_for_rules(self, what: str, holds: Callable[[RulesReport], bool]) -> RulesReport:
        self.operator.wait_for(what, lambda _: holds(self.rules()))
        return self.rules()

    def lines(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.operator.log_lines() if line.get("event") == event]


@pytest.fixture
def node(launch: Launch, tmp_path: pathlib.Path, installed_pins: pins.Pins) -> Iterator[Node]:
    operator = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    with cgroups.cgroup() as kubelet:
        operator.kubelet = ("--kubelet", f"cgroup:{kubelet.path}")
        yield Node(operator, tmp_path / "rules")
        operator.stop(signal.SIGKILL)


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT), pod.listen(OTHER_PORT):
        yield pod


@pytest.fixture
def service(isolated: None) -> Iterator[Cgroup]:
    with cgroups.cgroup() as made:
        yield made


def policy(name: str, sender: dict[str, Any], *ports: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"pods": {"namespaces": ["demo"]}, "from": [sender]}
    if ports:
        spec["ports"] = [{"port": port} for port in ports]
    return {
        "apiVersion": "policy.podgate.io/v1alpha1",
        "kind": "HostAccessPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def cgroup(group: Cgroup, match: str = "exact") -> dict[str, Any]:
    return {"cgroup": {"path": group.path, "match": match}}


def policy_of(rules: RulesReport, name: str) -> PolicyStatus | None:
    return next((one for one in rules.policies if one.name == name), None)


def has_policy(name: str) -> Callable[[RulesReport], bool]:
    return lambda rules: policy_of(rules, name) is not None


def hits_of(rules: RulesReport, name: str) -> int:
    found = policy_of(rules, name)
    return sum(rule.hits for rule in found.rules) if found else -1


def test_rule_admits_its_cgroup_to_its_port_and_counts(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    with cgroups.cgroup("below", below=service) as below, cgroups.cgroup() as stranger:
        assert reaches(service, web, PORT)
        assert is_dropped(service, web, OTHER_PORT)
        assert is_dropped(below, web, PORT)
        assert is_dropped(stranger, web, PORT)
        node.write("a.yaml", policy("service", cgroup(service, "subtree"), PORT))
        node.operator.wait_for("all below let in", lambda _: reaches(below, web, PORT))
        assert is_dropped(stranger, web, PORT)
    rules = node.rules()
    shown = policy_of(rules, "service")
    assert shown is not None
    assert shown.pods == ["demo/web"]
    assert rules.problems == []
    assert hits_of(rules, "service") >= 1
    document = msgspec.json.decode(node.podgate("rules", "--output", "json"), type=RulesReport)
    assert document.policies == rules.policies
    text = node.podgate("rules")
    assert f"{service.path} and below" in text
    assert f"TCP {PORT}" in text


def test_hits_are_counted_for_all_pods_together_and_shown_as_a_metric(
    node: Node, lab: Lab, web: LabPod, service: Cgroup
) -> None:
    other = lab.add_pod("other", 2)
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.operator.write_manifest(other, mode="enforce", container=LISTENING)
    node.start(web)
    node.operator.wait_for("both", isolated_as("other", "Enforced"))
    with other.listen(PORT):
        assert reaches(service, web, PORT)
        assert reaches(service, other, PORT)
    assert hits_of(node.rules(), "service") == 2
    report = node.operator.report()
    assert report is not None
    (series,) = [line for line in metrics(report) if line.startswith("podgate_rule_hits_total{")]
    assert 'policy="service"' in series
    assert float(series.split()[-1]) == 2


def metrics(report: AgentReport) -> list[str]:
    with socket.create_connection(("127.0.0.1", int(report.http_address.split(":")[1])), 5) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with sock.makefile() as answer:
            return answer.read().splitlines()


def test_hits_and_rules_outlive_the_agent(node: Node, web: LabPod, service: Cgroup) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    assert reaches(service, web, PORT)
    node.operator.stop(signal.SIGKILL)
    assert reaches(service, web, PORT)
    node.start(web)
    assert reaches(service, web, PORT)
    assert hits_of(node.rules(), "service") == 3


def test_deleted_policy_admits_no_source_and_leaves_no_counter(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    assert reaches(service, web, PORT)
    with Map.open(counters_of(node), map_specs.RULE_HITS) as counters:
        assert len(list(counters.items())) == 1
        (node.directory / "a.yaml").unlink()
        node.operator.wait_for("the service blocked", lambda _: is_dropped(service, web, PORT))
        node.operator.wait_for("no counter left", lambda _: not list(counters.items()))


def counters_of(node: Node) -> str:
    return str(pins.Pins(node.operator.bpffs).map(map_specs.RULE_HITS))


def test_agent_without_rules_removes_existing_counters(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    node.operator.stop(signal.SIGTERM)
    node.operator.start()
    node.operator.wait_for("the gate", isolated_as("web", "Enforced"))
    assert is_dropped(service, web, PORT)
    with Map.open(counters_of(node), map_specs.RULE_HITS) as counters:
        assert list(counters.items()) == []
    assert "without --rules" in node.podgate("rules")


def test_expired_policy_admits_nothing_until_its_time_is_later(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    document = policy("backup", cgroup(service), PORT)
    document["spec"]["expires"] = "2026-01-01T00:00:00Z"
    node.write("backup.yaml", document)
    node.start(web)
    assert is_dropped(service, web, PORT)
    (problem,) = node.rules().problems
    assert problem.startswith("Policy backup expired at 2026-01-01T00:00:00Z and admits nothing")
    document["spec"]["expires"] = "2126-01-01T00:00:00Z"
    node.write("backup.yaml", document)
    found = node.wait_for_rules("the rule", has_policy("backup"))
    node.operator.wait_for("the gate", lambda _: reaches(service, web, PORT))
    assert [one.expires for one in found.policies] == ["2126-01-01T00:00:00Z"]
    report = node.operator.report()
    assert report is not None
    times = [line for line in metrics(report) if line.startswith("podgate_policy_expires_")]
    later = datetime.datetime(2126, 1, 1, tzinfo=datetime.UTC)
    assert [float(line.split()[-1]) for line in times] == [later.timestamp()]


def test_policy_with_action_audit_admits_nothing_and_counts_what_it_would_admit(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    document = policy("backup", cgroup(service), PORT)
    document["spec"]["action"] = "Audit"
    node.write("backup.yaml", document)
    node.start(web)
    assert is_dropped(service, web, PORT)
    assert is_dropped(service, web, OTHER_PORT)
    staged = policy_of(node.rules(), "backup")
    assert staged is not None
    assert (staged.action, staged.pods) == ("Audit", ["demo/web"])
    counted = hits_of(node.rules(), "backup")
    assert counted > 0
    report = node.operator.report()
    assert report is not None
    (line,) = [
        line for line in metrics(report) if line.startswith("podgate_staged_policy_packets{")
    ]
    assert line.split()[-1] == f"{counted}.0"
    assert "would have admitted" in node.podgate("rules")
    # Its port alone, and once it allows, it has nothing more to stage.
    document["spec"]["action"] = "Allow"
    node.write("backup.yaml", document)
    node.operator.wait_for("the gate", lambda _: reaches(service, web, PORT))
    assert is_dropped(service, web, OTHER_PORT)
    allowing = policy_of(node.rules(), "backup")
    assert allowing is not None
    assert allowing.action == "Allow"


def test_missing_cgroup_is_reported_until_it_exists(node: Node, web: LabPod) -> None:
    with cgroups.cgroup() as group:
        cgroups.remove(group)
        node.write("a.yaml", policy("service", cgroup(group, "subtree"), PORT))
        node.start(web)
        rules = node.rules()
        shown = policy_of(rules, "service")
        assert shown is not None
        assert shown.rules[0].problem == (
            f"Cgroup {group.path} not found; the rule admits nothing until it exists."
        )
        assert node.podgate("rules").count("not found") == 1
        assert len([line for line in node.operator.log_lines() if group.path in str(line)]) == 1
        group.directory.mkdir()
        node.operator.wait_for("the cgroup admitted", lambda _: reaches(group, web, PORT))


def test_cgroup_that_is_created_again_is_followed(node: Node, web: LabPod, service: Cgroup) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    assert reaches(service, web, PORT)
    cgroups.remove(service)
    with cgroups.cgroup() as another:
        service.directory.mkdir()
        node.operator.wait_for("the new cgroup admitted", lambda _: reaches(service, web, PORT))
        assert is_dropped(another, web, PORT)


def test_last_valid_version_of_an_invalid_policy_applies_also_after_a_restart(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    node.write(
        "a.yaml",
        {**policy("service", cgroup(service), PORT), "spec": {"pods": {"podSelector": {}}}},
    )
    rules = node.wait_for_rules("the problem", lambda rules: bool(rules.problems))
    assert rules.problems == [
        "a.yaml, document 1 ('service'): spec: object missing required field `from`. "
        "The last valid version stays in force."
    ]
    assert reaches(service, web, PORT)
    assert len(node.lines("policy_problem")) == 1
    node.operator.stop(signal.SIGKILL)
    node.start(web)
    assert reaches(service, web, PORT)


# Connects every 10 ms until its input ends, then prints the numbers of attempts and of failures. A
# SYN that was dropped is sent again only after a second.
KEEP_CONNECTING = """
import select, socket, sys
tried = failed = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:
    sock = socket.socket()
    sock.settimeout(0.9)
    tried += 1
    failed += sock.connect_ex((sys.argv[1], int(sys.argv[2]))) != 0
    sock.close()
print(tried, failed)
"""


def test_admitted_source_stays_admitted_during_edits_and_a_restart(
    node: Node, lab: Lab, service: Cgroup
) -> None:
    pod = lab.add_pod("web", 1)
    done = threading.Event()

    def accept() -> None:
        while not done.is_set():
            if select.select([listener], [], [], 0.1)[0]:
                listener.accept()[0].close()

    with pod.listen(PORT) as listener:
        node.write("a.yaml", policy("p0", cgroup(service), PORT))
        node.start(pod)
        accepting = threading.Thread(target=accept)
        accepting.start()
        arguments = [*BARE_PYTHON, "-c", KEEP_CONNECTING, pod.ipv4, str(PORT)]
        process = service.popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            for number in range(1, 6):
                others = [policy(f"a{index}", {"kernel": {}}, 1 + index) for index in range(number)]
                node.write("a.yaml", *others, policy(f"p{number}", cgroup(service), PORT))
                node.wait_for_rules("the edit", has_policy(f"p{number}"))
            node.operator.stop(signal.SIGKILL)
            node.start(pod)
            node.wait_for_rules("the restart", has_policy("p5"))
        finally:
            output, _ = process.communicate(timeout=10)
            done.set()
            accepting.join(5)
    tried, failed = map(int, output.split())
    assert failed == 0
    assert tried > 10


def test_rule_for_the_root_cgroup_works_like_others(node: Node, web: LabPod) -> None:
    node.write(
        "a.yaml",
        policy("root", {"cgroup": {"path": "/"}}, PORT),
        policy("all", {"cgroup": {"path": "/", "match": "subtree"}}, OTHER_PORT),
    )
    node.start(web)
    with cgroups.cgroup() as group:
        assert is_dropped(group, web, PORT)
        assert reaches(group, web, OTHER_PORT)
    assert reaches(cgroups.root(), web, PORT)


def test_a_pod_gets_the_rules_for_its_labels_as_they_are_now(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    chosen = policy("service", cgroup(service), PORT)
    chosen["spec"]["pods"]["podSelector"] = {"matchLabels": {"app": "web"}}
    node.write("a.yaml", chosen)
    node.start(web)
    assert is_dropped(service, web, PORT)
    manifest = json.loads((node.operator.manifests / "web.yaml").read_text(encoding="utf-8"))
    manifest["metadata"]["labels"]["app"] = "web"
    node.operator.write_file("web.yaml", json.dumps(manifest))
    node.operator.wait_for("the service admitted", lambda _: reaches(service, web, PORT))


def test_rules_beyond_the_limit_are_reported_and_the_kubelet_stays_admitted(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write(
        "a.yaml",
        policy("a", {"anyProcess": {}}, *range(2, 64, 2)),
        policy("b", cgroup(service), PORT),
    )
    node.start(web, "enforce", "--kubelet", f"cgroup:{service.path}")
    report = node.operator.wait_for("the kubelet", lambda report: report.kubelet == service.path)
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    assert condition is not None
    assert "33 rules match this pod and a gate holds 32: 1 are skipped, of b" in (condition.message)
    assert "Pod demo/web: 33 rules" in node.podgate("rules")
    with cgroups.cgroup() as stranger:
        # The readiness probe's port is open to the kubelet; policy b would admit it, too.
        assert reaches(service, web, PORT)
        assert is_dropped(stranger, web, PORT)
        node.write("a.yaml", policy("b", cgroup(stranger), PORT))
        node.operator.wait_for("policy b", lambda _: reaches(stranger, web, PORT))


def test_hundred_thousand_rules_are_reported_and_affect_no_other_policy(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.write("a.yaml", policy("service", cgroup(service), PORT))
    node.start(web)
    for number in range(5):
        many = [policy(f"p{number}-{index}", {"kernel": {}}, 1) for index in range(4000)]
        text = json.dumps({"kind": "List", "items": many}, separators=(",", ":"))
        node.write(f"{number}.json", text)
    many_ports = policy("huge", {"anyProcess": {}}, *range(1, 40_000, 2))
    node.write("huge.json", json.dumps(many_ports))
    rules = node.wait_for_rules("the limit", lambda rules: len(rules.problems) >= 2)
    assert any("policies more than the maximum of" in problem for problem in rules.problems)
    assert any("more rules than the 32" in problem for problem in rules.problems)
    assert policy_of(rules, "service") is not None
    assert reaches(service, web, PORT)
    assert is_dropped(service, web, OTHER_PORT)


def test_suggested_policy_admits_exactly_the_recorded_source(
    node: Node, web: LabPod, service: Cgroup
) -> None:
    node.start(web, "audit")
    assert reaches(service, web, OTHER_PORT)
    suggested = node.podgate("suggest")
    assert service.path in suggested
    # One packet to a pod without labels needs a decision.
    _, doubtful = suggested.split("# ---\n")
    node.write("suggested.yaml", "".join(f"{line[2:]}\n" for line in doubtful.splitlines()))
    node.operator.write_manifest(web, mode="enforce", container=LISTENING)
    node.operator.wait_for("the gate", isolated_as("web", "Enforced"))
    node.wait_for_rules("the policy", lambda rules: bool(rules.policies))
    node.operator.wait_for("the service admitted", lambda _: reaches(service, web, OTHER_PORT))
    assert is_dropped(service, web, PORT)
    with cgroups.cgroup() as stranger:
        assert is_dropped(stranger, web, OTHER_PORT)


def test_suggest_without_drops_prints_one_sentence(node: Node, web: LabPod) -> None:
    node.start(web)
    done = node.operator.run("suggest", "--run-directory", str(node.operator.run_directory))
    assert done.returncode == 0
    (span,) = done.stdout.splitlines()
    assert span.startswith("# this node: ")
    assert "no dropped traffic" in done.stderr


def test_missing_rules_directory_is_one_sentence(node: Node) -> None:
    done = node.operator.run(
        "run", "--manifests", str(node.operator.manifests), "--rules", "/nowhere"
    )
    assert done.returncode == 1
    assert "/nowhere does not exist" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def retransmitted_syns() -> int:
    """Since this namespace was made (TCPSynRetrans)."""
    lines = pathlib.Path("/proc/thread-self/net/netstat").read_text(encoding="ascii").splitlines()
    names, values = (line.split() for line in lines if line.startswith("TcpExt:"))
    return int(values[names.index("TCPSynRetrans")])


def test_replacing_rules_never_drops_an_admitted_source_nor_admits_another(
    gates: Gates, loaded: loader.Loaded, lab: labs.Lab
) -> None:
    pod = lab.add_pod("replaced", 1)
    fillers = tuple(Rule(SourceKind.ANY, 6, port, port) for port in range(1, abi.GATE_RULES))
    admitting = Rule(SourceKind.ANY, 6, PORT, PORT)
    # As first, as last and as the only one: a mixture of two would miss it.
    values = [(admitting, *fillers), (*fillers, admitting), (admitting,)]
    configs = [GateConfig(Mode.ENFORCE, pod.addresses, rules) for rules in values]
    gates.install(pod.ifindex, configs[0])
    done = threading.Event()
    dropped_attempts: list[int] = []
    passed_attempts: list[int] = []
    attempts = {PORT: 0, OTHER_PORT: 0}
    starts = {port: threading.Semaphore(0) for port in attempts}
    retransmitted = retransmitted_syns()

    def connect(listener: socket.socket, limit_seconds: float) -> bool:
        port = listener.getsockname()[1]
        attempts[port] += 1
        with socket.socket() as sock:
            # No TIME-WAIT: thousands of connections would use up the ports.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(limit_seconds)
            try:
                sock.connect((pod.ipv4, port))
            except TimeoutError:
                return False
            # At once, or a full backlog would drop SYNs that the gate passed.
            listener.accept()[0].close()
            return True

    def connect_admitted(listener: socket.socket) -> None:
        while starts[PORT].acquire() and not done.is_set():
            # A SYN that was dropped is sent again only after a second.
            if not connect(listener, 0.9):
                dropped_attempts.append(attempts[PORT])

    def connect_blocked(listener: socket.socket) -> None:
        while starts[OTHER_PORT].acquire() and not done.is_set():
            # A SYN that passes is answered within microseconds.
            if connect(listener, 0.002):
                passed_attempts.append(attempts[OTHER_PORT])

    with pod.listen(PORT) as server, pod.listen(OTHER_PORT) as other:
        threads = [
            threading.Thread(target=connect_admitted, args=(server,)),
            threading.Thread(target=connect_blocked, args=(other,)),
        ]
        for thread in threads:
            thread.start()
        try:
            deadline = time.monotonic() + 60
            replaced = 0
            while replaced < REPLACEMENTS or min(attempts.values()) < REPLACEMENTS:
                assert time.monotonic() < deadline, f"{replaced} replacements, {attempts} attempts"
                for port, start in starts.items():
                    start.release(AROUND_REPLACEMENT[port])
                gates.install(pod.ifindex, configs[replaced % len(configs)])
                replaced += 1
        finally:
            done.set()
            for start in starts.values():
                start.release()
            for thread in threads:
                thread.join(5)
    assert (dropped_attempts, passed_attempts) == ([], [])
    counts = gates.counts()[pod.ifindex]
    # A dropped SYN is sent again only after both connects have given up.
    sent_again = retransmitted_syns() - retransmitted
    assert counts[Verdict.PASS, Reason.RULE] == attempts[PORT] + sent_again
    assert counts[Verdict.DROP, Reason.NODE] >= attempts[OTHER_PORT]
