"""A kubelet that is not identified is no outage: declared ports are open to host processes outside
pods, which is reported everywhere, until it is found.
"""

import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, condition_of
from agent.logs import Event
from agent.pods.conditions import TRUE
from tests import polling
from tests.kernel import cgroups, offers, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.standin import KubeletStub
from tests.kernel.strictnode import relay_addresses
from tests.kernel.test_relay_conditions import RANGES, dial
from tests.kernel.test_rules import OTHER_PORT, PORT, connects, is_dropped
from tests.kernel.test_standin import beat_long_ago

pytestmark = pytest.mark.kernel

PROBE = {"livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
OPEN = "Kubelet not identified, so host processes outside pods reach declared ports: "


@pytest.fixture
def pod(lab: labs.Lab) -> Iterator[labs.LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(PORT), made.listen(OTHER_PORT):
        yield made


@pytest.fixture
def system(isolated: None) -> Iterator[Cgroup]:
    """The cgroup above the units."""
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def stranger(system: Cgroup) -> Iterator[Cgroup]:
    with cgroups.cgroup("other.service", below=system) as made:
        yield made


@pytest.fixture
def unit(system: Cgroup) -> Iterator[Cgroup]:
    """The configured unit's; it is not started yet."""
    made = Cgroup(system.directory / "kubelet.service", f"{system.path}/kubelet.service")
    yield made
    cgroups.remove(made)


@pytest.fixture
def agent(operator: AgentProcess, pod: labs.LabPod, unit: Cgroup) -> AgentProcess:
    """Enforces for the pod; its kubelet is in the unit's cgroup."""
    operator.kubelet = ("--kubelet", f"cgroup:{unit.path}")
    operator.write_manifest(pod, mode="enforce", container=PROBE)
    operator.start()
    operator.wait_for("open ports", is_open)
    return operator


def is_open(report: AgentReport) -> bool:
    return report.is_synced and OPEN in message(report)


def is_closed(report: AgentReport) -> bool:
    return report.is_synced and message(report) != "" and OPEN not in message(report)


def message(report: AgentReport) -> str:
    """Of the pod's condition, while it is True."""
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    is_true = condition is not None and condition.status == "True"
    return condition.message if condition and is_true else ""


def reaches_declared(process: Cgroup, pod: labs.LabPod) -> bool:
    """Whether a process of this cgroup reaches the pod's declared port and no other."""
    addresses = [traffic.address(pod, version) for version in (4, 6)]
    return all(
        connects(process, address, PORT) and is_dropped(process, address, OTHER_PORT)
        for address in addresses
    )


def reaches_nothing(process: Cgroup, pod: labs.LabPod) -> bool:
    return all(
        is_dropped(process, traffic.address(pod, version), port)
        for version in (4, 6)
        for port in (PORT, OTHER_PORT)
    )


def get(report: AgentReport, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{report.http_address}{path}", timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def admitted(report: AgentReport) -> str:
    _, text = get(report, "/metrics")
    lines = [line for line in text.splitlines() if line.startswith("podgate_kubelet_admitted ")]
    return lines[0].rpartition(" ")[2] if lines else "no metric"


def doctor(agent: AgentProcess) -> tuple[str, str]:
    """Severity and sentence about the kubelet's cgroup; what passed if all is well."""
    where = ("--run-directory", str(agent.run_directory), "--bpffs", str(agent.bpffs))
    report = json.loads(agent.run("doctor", "--output", "json", *where).stdout)
    for one in report["findings"]:
        if one["kind"] == "declared-ports-open":
            return one["severity"], one["sentence"]
    (text,) = (one["text"] for one in report["passed"] if one["check"] == "agent")
    return "", text


def test_host_processes_reach_declared_ports_until_the_kubelet_is_found(
    agent: AgentProcess, pod: labs.LabPod, stranger: Cgroup, unit: Cgroup
) -> None:
    assert reaches_declared(stranger, pod)
    unit.directory.mkdir()
    # At once: the kernel has recorded it, also before the agent has found it.
    assert reaches_nothing(stranger, pod)
    assert reaches_declared(unit, pod)
    agent.wait_for("the kubelet", is_closed)
    assert reaches_nothing(stranger, pod)
    assert reaches_declared(unit, pod)


def test_open_ports_are_reported_until_the_kubelet_is_found(
    agent: AgentProcess, unit: Cgroup
) -> None:
    report = agent.wait_for("open ports", lambda report: report.open_ports != "")
    assert report.open_ports == f"{OPEN}{report.kubelet_problem}"
    assert report.open_ports in message(report)
    assert f"no cgroup {unit.path} on this node" in report.kubelet_problem
    assert get(report, "/readyz") == (503, f"{report.open_ports}\n")
    assert get(report, "/healthz") == (200, "ok\n")
    assert admitted(report) == "0.0"
    assert doctor(agent) == ("open", report.open_ports)
    assert report.open_ports in " ".join(
        agent.run("status", "--run-directory", str(agent.run_directory)).stdout.split()
    )
    assert len(list(agent.log_lines(Event.DECLARED_PORTS_OPEN))) == 1

    unit.directory.mkdir()
    report = agent.wait_for("the kubelet", is_closed)
    assert report.open_ports == ""
    assert get(report, "/readyz") == (200, "ok\n")
    assert admitted(report) == "1.0"
    polling.wait_until("log", lambda: list(agent.log_lines(Event.DECLARED_PORTS_CLOSED)))
    offers.need_netns_cookie()  # else doctor finds more
    assert "Agent running" in doctor(agent)[1]


def test_pods_in_the_kubelet_s_cgroup_open_the_declared_ports(
    agent: AgentProcess, pod: labs.LabPod, stranger: Cgroup, unit: Cgroup
) -> None:
    """It must not be admitted then, since they would be as well."""
    unit.directory.mkdir()
    agent.wait_for("the kubelet", is_closed)
    with cgroups.cgroup("kubepods", below=unit):
        report = agent.wait_for("open ports", is_open)
        assert "also holds pods" in report.open_ports
        assert reaches_declared(unit, pod)
        assert reaches_declared(stranger, pod)
    agent.wait_for("the kubelet", is_closed)
    assert reaches_nothing(stranger, pod)


def test_kubelet_that_exits_opens_nothing_where_the_kernel_follows_it(
    agent: AgentProcess, pod: labs.LabPod, stranger: Cgroup, unit: Cgroup
) -> None:
    unit.directory.mkdir()
    agent.wait_for("the kubelet", is_closed)
    cgroups.remove(unit)
    report = agent.wait_for("a missing kubelet", lambda report: report.kubelet is None)
    assert report.open_ports == ""
    assert reaches_nothing(stranger, pod)
    unit.directory.mkdir()
    assert reaches_declared(unit, pod)
    assert reaches_nothing(stranger, pod)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_what_was_open_stays_open_without_an_agent_until_the_unit_starts(
    agent: AgentProcess,
    pod: labs.LabPod,
    stranger: Cgroup,
    unit: Cgroup,
    number: signal.Signals,
) -> None:
    agent.stop(number)
    assert reaches_declared(stranger, pod)
    beat_long_ago(agent.bpffs)
    assert reaches_declared(stranger, pod)
    unit.directory.mkdir()
    assert reaches_nothing(stranger, pod)
    assert reaches_declared(unit, pod)


def test_process_that_is_not_found_by_its_name_is_no_outage(
    operator: AgentProcess, pod: labs.LabPod, stranger: Cgroup, system: Cgroup
) -> None:
    operator.kubelet = ("--kubelet", "process:podgate-nosuch")
    operator.write_manifest(pod, mode="enforce", container=PROBE)
    operator.start()
    report = operator.wait_for("open ports", is_open)
    assert "no process named podgate-nosuch on this node" in report.open_ports
    assert reaches_declared(stranger, pod)
    targets = [f"tcp,{pod.ipv4},{PORT}", f"tcp,{pod.ipv6},{PORT}"]
    with cgroups.cgroup("kubelet.service", below=system) as service:
        kubelet = KubeletStub(service, "podgate-nosuch", targets)
        try:
            operator.wait_for("the kubelet", is_closed)
            assert reaches_nothing(stranger, pod)
            assert kubelet.probe() == {target: [""] for target in targets}
        finally:
            kubelet.end()


@pytest.mark.parametrize("extra", [(), ("--strict-without-fallback",)], ids=["", "no-fallback"])
def test_relay_serves_no_process_while_the_kubelet_is_unknown(
    operator: AgentProcess,
    pod: labs.LabPod,
    stranger: Cgroup,
    unit: Cgroup,
    extra: tuple[str, ...],
) -> None:
    """It would carry them past what the pod itself rejects from outside, such as a mesh's mTLS."""
    offers.need_netns_cookie()
    operator.kubelet = ("--kubelet", f"cgroup:{unit.path}")
    operator.write_manifest(pod, mode="strict", container=PROBE)
    operator.start(*RANGES, *extra)
    unidentified = "Strict unavailable: the kubelet is not identified"
    report = operator.wait_for("a relay", lambda r: r.relay.is_up and unidentified in message(r))
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    assert condition is not None
    assert (condition.status, condition.reason) == (TRUE, "Enforced")
    for address in (pod.ipv4, pod.ipv6):
        assert dial(stranger, address) == address
    with rejecting(pod):
        for address in (pod.ipv4, pod.ipv6):
            assert "refused" in dial(stranger, address)
    for address in relay_addresses(operator.bpffs).values():
        assert dial(stranger, address) not in (pod.ipv4, pod.ipv6, address)
    report = operator.wait_for("counts", lambda r: "unidentified" in passed(r))
    assert report.relay.connections == 0

    unit.directory.mkdir()
    operator.wait_for("the kubelet", is_strict_and(is_closed))
    assert reaches_nothing(stranger, pod)
    with rejecting(pod):
        assert dial(unit, pod.ipv4) == pod.ipv4


@contextlib.contextmanager
def rejecting(pod: labs.LabPod) -> Iterator[None]:
    """The pod's own rule against connections from outside, as a mesh in STRICT has one."""
    script = (
        "table inet own { chain i { type filter hook input priority 0;\n"
        f'iifname "eth0" tcp dport {PORT} reject with tcp reset\n}}\n}}\n'
    )
    command = ["nsenter", f"--net={pod.netns.path}", "nft"]
    subprocess.run([*command, "-f", "-"], input=script, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run([*command, "delete", "table", "inet", "own"], check=True)


def passed(report: AgentReport) -> dict[str, int]:
    (gate,) = next(each for each in report.pods if each.name == "web").gates
    return gate.packets.get("pass", {})


def is_strict_and(holds: Callable[[AgentReport], bool]) -> Callable[[AgentReport], bool]:
    def both(report: AgentReport) -> bool:
        condition = condition_of(report, "web", labels.ISOLATION_READY)
        is_strict = condition is not None and condition.reason == "Strict"
        return is_strict and "probes fail" not in message(report) and holds(report)

    return both
