"""The whole agent as a process: what it gates, which input it rejects, what outlives it."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import attempts
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, condition_of, execute, pod_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE, Condition
from tests.kernel import cgroups, offers, traffic
from tests.kernel.cgroups import Cgroup
from tests.polling import wait_until
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

PORT = 8080
LISTENING = {"readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    """A routed pod that listens on PORT."""
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


def isolation(report: AgentReport, name: str) -> Condition | None:
    return condition_of(report, name, labels.ISOLATION_READY)


def passing(report: AgentReport, name: str) -> Condition | None:
    return condition_of(report, name, labels.PROBES_PASSING)


def isolated_as(name: str, reason: str) -> Callable[[AgentReport], bool]:
    def holds(report: AgentReport) -> bool:
        condition = isolation(report, name)
        return condition is not None and condition.reason == reason

    return holds


def start_enforcing(operator: AgentProcess, pod: LabPod) -> AgentReport:
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.start()
    return operator.wait_for("the gate", isolated_as(pod.name, "Enforced"))


def manifest_text(pod_netns: str | None, *, name: str = "bad", containers: str = "") -> str:
    annotations = {labels.NETNS_ANNOTATION: pod_netns} if pod_netns else {}
    document = {
        "kind": "Pod",
        "metadata": {"name": name, "annotations": annotations},
        "spec": {"containers": json.loads(containers or '[{"name": "app"}]')},
    }
    return json.dumps(document)


@pytest.mark.parametrize("family", attempts.FAMILIES)
def test_an_enforced_pod_is_closed_to_the_node_and_open_to_pods(
    operator: AgentProcess, lab: Lab, web: LabPod, family: str
) -> None:
    neighbour = lab.add_pod("neighbour", 2, bridged=True)
    start_enforcing(operator, web)
    address = attempts.address_of(web, family)
    assert refuses(web, family)
    assert attempts.connect_from_pod(neighbour, address, family, PORT) == "connects"


def test_a_mode_is_changed_by_the_label_while_running(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    operator.write_manifest(web, mode="audit", container=LISTENING)
    operator.wait_for("audit", isolated_as("web", "Audit"))
    assert connects(web)
    operator.write_manifest(web, mode="off", container=LISTENING)
    report = operator.wait_for("off", isolated_as("web", "Off"))
    pod = pod_of(report, "web")
    assert pod is not None
    assert pod.gates == []


def test_removing_a_manifest_removes_the_gate(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    (operator.manifests / "web.yaml").unlink()
    operator.wait_for("the pod gone", lambda report: not report.pods)
    # The report forgets the pod first; the gate follows in the same pass.
    operator.wait_for("the gate gone", lambda _: connects(web))


def test_the_life_of_a_healthy_pod_logs_no_warning(
    operator: AgentProcess, web: LabPod, lab: Lab
) -> None:
    start_enforcing(operator, web)
    (operator.manifests / "web.yaml").unlink()
    operator.wait_for("the pod gone", lambda report: not report.pods)
    operator.wait_for("the log line", lambda _: any(operator.log_lines(Event.POD_REMOVED)))
    lab.remove_pod("web")
    operator.stop(signal.SIGTERM)
    lines = [line for line in operator.log_lines() if "pod" in line or "ifindex" in line]
    assert {line["event"] for line in lines} >= {"interface_gated", "condition_changed"}
    assert [line for line in lines if line["level"] != "info"] == []


def connects(pod: LabPod) -> bool:
    return attempts.connect_from_node(pod, "IPv4", PORT, is_rejected=False) == "connects"


def refuses(pod: LabPod, family: str = "IPv4") -> bool:
    observed = attempts.connect_from_node(pod, family, PORT, is_rejected=True)
    return observed in (attempts.REFUSED, attempts.DROPPED)


def test_probes_run_from_inside_an_enforced_pod(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    operator.wait_for("probes", lambda r: (c := passing(r, "web")) is not None and c.status == TRUE)


def test_an_address_that_a_pod_gets_later_is_gated_too(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    subprocess.run(
        [
            "nsenter",
            f"--net={web.netns.path}",
            "ip",
            "addr",
            "add",
            "198.18.99.9/32",
            "dev",
            "eth0",
        ],
        check=True,
    )

    def knows(report: AgentReport) -> bool:
        pod = pod_of(report, "web")
        return pod is not None and "198.18.99.9" in pod.unconfirmed

    operator.wait_for("the new address", knows)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param("a: [", "InvalidManifest", id="not YAML"),
        pytest.param("kind: Service\nmetadata: {name: x}\n", "InvalidManifest", id="not a pod"),
        pytest.param(manifest_text(None), "NetnsMissing", id="no netns"),
        pytest.param(manifest_text("/nowhere"), "NetnsNotFound", id="netns not there"),
        pytest.param(manifest_text("/etc/passwd"), "NetnsInvalid", id="not a netns"),
        pytest.param(manifest_text("/proc/self/ns/mnt"), "NetnsInvalid", id="another namespace"),
        pytest.param(manifest_text("/proc/self/ns/net"), "NetnsInvalid", id="the node's own"),
    ],
)
def test_invalid_manifest_is_one_log_line_and_one_condition_and_affects_no_other_pod(
    operator: AgentProcess, web: LabPod, content: str, reason: str
) -> None:
    operator.write_file("bad.yaml", content)
    report = start_enforcing(operator, web)
    bad = next(pod for pod in report.pods if pod.name != "web")
    condition = isolation(report, bad.name)
    assert condition is not None
    assert (condition.status, condition.reason) == (FALSE, reason)
    assert "\n" not in condition.message
    lines = [line for line in operator.log_lines() if line.get("uid") == bad.uid]
    assert len([line for line in lines if line["type"] == labels.ISOLATION_READY]) == 1
    assert refuses(web)


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        pytest.param({"tcpSocket": {"port": "nowhere"}}, "nowhere", id="unknown port name"),
        pytest.param(
            {"tcpSocket": {"port": 1}, "httpGet": {"port": 1}}, "handler", id="two handlers"
        ),
        pytest.param(
            {"tcpSocket": {"port": 1}, "periodSeconds": 0}, "periodSeconds", id="period 0"
        ),
        pytest.param(
            {"httpGet": {"port": 1, "host": "198.18.0.1"}}, "host", id="a host to be dialled"
        ),
    ],
)
def test_impossible_probe_affects_neither_the_gate_nor_other_pods(
    operator: AgentProcess, lab: Lab, web: LabPod, probe: dict[str, object], words: str
) -> None:
    other = lab.add_pod("other", 2)
    with other.listen(PORT):
        operator.write_manifest(other, mode="enforce", container={"readinessProbe": probe})
        start_enforcing(operator, web)
        report = operator.wait_for(
            "the other probe passing",
            lambda r: (c := passing(r, "web")) is not None and c.status == TRUE,
        )
        condition = passing(report, "other")
        assert condition is not None
        assert condition.status == FALSE
        assert words in condition.message
        assert refuses(other)
        lines = [line for line in operator.log_lines() if line.get("pod") == "demo/other"]
        assert len([line for line in lines if line.get("type") == labels.PROBES_PASSING]) == 1


def test_a_manifest_that_becomes_wrong_opens_nothing(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    operator.write_file("web.yaml", "a: [")
    report = operator.wait_for(
        "the problem noted",
        lambda r: (c := isolation(r, "web")) is not None and "stays in force" in c.message,
    )
    condition = isolation(report, "web")
    assert condition is not None
    assert condition.status == TRUE
    assert refuses(web)


def test_two_pods_cannot_share_a_namespace(operator: AgentProcess, web: LabPod) -> None:
    operator.write_manifest(web, mode="enforce", container=LISTENING)
    operator.write_file("z.yaml", manifest_text(web.netns.path, name="thief"))
    operator.start()
    operator.wait_for("the second refused", isolated_as("thief", "NetnsInUse"))
    # Its path test may still be running.
    operator.wait_for("the first guarded", isolated_as("web", "Enforced"))


def test_a_pod_whose_namespace_comes_later_is_gated_then(operator: AgentProcess, lab: Lab) -> None:
    path = lab_path("late")
    operator.write_file("late.yaml", manifest_text(str(path), name="late"))
    operator.start("--mode", "enforce")
    operator.wait_for("waiting", isolated_as("late", "NetnsNotFound"))
    lab.add_pod("late", 3)
    operator.wait_for("the gate", isolated_as("late", "Enforced"))


def lab_path(name: str) -> pathlib.Path:
    return labs.LAB_DIRECTORY / "netns" / name


def test_a_pod_that_ends_fails_its_probes_and_disturbs_no_other(
    operator: AgentProcess, lab: Lab, web: LabPod
) -> None:
    other = lab.add_pod("other", 2)
    with other.listen(PORT):
        operator.write_manifest(other, mode="enforce", container=LISTENING)
        start_enforcing(operator, web)
        operator.wait_for("both", isolated_as("other", "Enforced"))
    lab.remove_pod("other")
    report = operator.wait_for(
        "the probe failing", lambda r: (c := passing(r, "other")) is not None and c.status == FALSE
    )
    assert isolated_as("web", "Enforced")(report)
    assert refuses(web)


def test_a_killed_agent_leaves_the_gate_and_a_new_one_compiles_nothing(
    operator: AgentProcess, web: LabPod
) -> None:
    start_enforcing(operator, web)
    operator.stop(signal.SIGKILL)
    assert refuses(web)
    operator.start()
    report = operator.wait_for("the pod known again", isolated_as("web", "Enforced"))
    assert report.programs == "pinned"
    assert refuses(web)


def test_gate_of_a_pod_that_was_deleted_while_the_agent_was_down_is_removed(
    operator: AgentProcess, web: LabPod
) -> None:
    start_enforcing(operator, web)
    operator.stop(signal.SIGKILL)
    (operator.manifests / "web.yaml").unlink()
    operator.start()
    operator.wait_for("the gate gone", lambda report: report.is_synced and connects(web))


def test_no_gate_is_removed_while_a_manifest_cannot_be_read(
    operator: AgentProcess, web: LabPod
) -> None:
    start_enforcing(operator, web)
    operator.stop(signal.SIGKILL)
    operator.write_file("web.yaml", "a: [")
    operator.start()
    operator.wait_for("the sync", lambda report: report.is_synced)
    assert refuses(web)


def test_second_agent_exits_with_an_error(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    second = operator.run("run", "--manifests", str(operator.manifests), *directories(operator))
    assert second.returncode == 1
    assert "another agent is running" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1


def test_cleanup_beside_an_agent_opens_everything_and_fails(
    operator: AgentProcess, web: LabPod
) -> None:
    start_enforcing(operator, web)
    done = operator.cleanup()
    assert done.returncode == 1
    assert "an agent still runs" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert connects(web)
    operator.stop(signal.SIGTERM)
    assert operator.cleanup().returncode == 0


@pytest.mark.parametrize("attachment", ["tcx", "clsact"])
def test_cleanup_opens_everything_and_leaves_nothing(
    operator: AgentProcess, web: LabPod, attachment: str
) -> None:
    if attachment == "tcx":
        offers.need_tcx()
    operator.write_manifest(web, mode="enforce", container=LISTENING)
    operator.start("--attach", attachment)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    operator.stop(signal.SIGTERM)
    assert refuses(web)
    assert operator.cleanup().returncode == 0
    assert connects(web)
    assert not (operator.bpffs / "podgate").exists()
    for direction in ("ingress", "egress"):
        shown = ["tc", "filter", "show", "dev", web.interface, direction]
        assert "podgate" not in subprocess.check_output(shown, text=True)


def test_status_page_names_the_pod_and_its_drops(operator: AgentProcess, web: LabPod) -> None:
    report = start_enforcing(operator, web)
    assert refuses(web)

    def drops() -> str:
        return get(report, "/").partition("Drops by source")[2]

    # A page is up to five seconds old.
    wait_until("the page shows the drop", lambda: "demo/web" in drops())
    assert "tcp" in drops()


def test_endpoints_answer_and_metrics_count_the_drop(operator: AgentProcess, web: LabPod) -> None:
    report = start_enforcing(operator, web)
    assert refuses(web)
    operator.wait_for("a look at every pod", lambda report: report.is_synced)
    assert get(report, "/healthz") == "ok\n"
    assert get(report, "/readyz") == "ok\n"
    series = [line for line in get(report, "/metrics").splitlines() if 'reason="node"' in line]
    assert len(series) == 1
    assert 'verdict="drop"' in series[0]
    assert float(series[0].split()[-1]) >= 1


def get(report: AgentReport, path: str) -> str:
    with urllib.request.urlopen(f"http://{report.http_address}{path}", timeout=20) as answer:
        content: bytes = answer.read()
        return content.decode()


def test_status_shows_the_pod_as_text_and_as_json(operator: AgentProcess, web: LabPod) -> None:
    start_enforcing(operator, web)
    arguments = ("status", "--run-directory", str(operator.run_directory))
    text = operator.run(*arguments).stdout
    assert "demo/web" in text
    assert "Enforced" in text
    document = json.loads(operator.run(*arguments, "--output", "json").stdout)
    assert document["pods"][0]["mode"] == "enforce"


CONNECT = """
import socket, sys
sock = socket.socket()
sock.settimeout(float(sys.argv[3]))
sys.exit(1 if sock.connect_ex((sys.argv[1], int(sys.argv[2]))) else 0)
"""


def reaches(sender: Cgroup, pod: LabPod, port: int, seconds: float = traffic.LIMIT_SECONDS) -> bool:
    """Whether a process of this cgroup connects to the pod."""
    command = [*BARE_PYTHON, "-c", CONNECT, pod.ipv4, str(port), str(seconds)]
    return sender.run(command).returncode == 0


def is_dropped(sender: Cgroup, pod: LabPod, port: int) -> bool:
    """Whether a process of this cgroup gets no answer to one SYN, or a rejection."""
    return not reaches(sender, pod, port, traffic.DROPPED_AFTER_SECONDS)


def start_with_kubelet(operator: AgentProcess, pod: LabPod, kubelet: Cgroup) -> None:
    operator.write_manifest(pod, mode="enforce", container=LISTENING)
    operator.start("--kubelet", f"cgroup:{kubelet.path}")
    operator.wait_for(
        "gate and kubelet",
        lambda r: isolated_as(pod.name, "Enforced")(r) and r.kubelet == kubelet.path,
    )


def test_only_the_kubelet_reaches_the_declared_port_of_an_unmodified_pod(
    operator: AgentProcess, web: LabPod
) -> None:
    with cgroups.cgroup() as kubelet, cgroups.cgroup() as other, web.listen(PORT + 1):
        start_with_kubelet(operator, web, kubelet)
        assert reaches(kubelet, web, PORT)
        assert is_dropped(kubelet, web, PORT + 1)
        assert is_dropped(other, web, PORT)
        operator.stop(signal.SIGKILL)
        assert reaches(kubelet, web, PORT)
        assert is_dropped(other, web, PORT)


def test_a_kubelet_in_a_new_cgroup_is_followed(operator: AgentProcess, web: LabPod) -> None:
    with cgroups.cgroup() as first:
        start_with_kubelet(operator, web, first)
        cgroups.remove(first)
        first.directory.mkdir()
        operator.wait_for("the new cgroup admitted", lambda _: reaches(first, web, PORT))


def test_new_pod_is_blocked_before_its_gate_if_the_default_mode_is_enforce(
    operator: AgentProcess, lab: Lab, web: LabPod
) -> None:
    offers.need_default_deny()
    operator.write_manifest(web, mode=None, container=LISTENING)
    operator.start("--mode", "enforce")
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    newborn = lab.add_pod("newborn", 2)
    with newborn.listen(PORT):
        # No manifest names the pod yet: it has no gate, and the table blocks it.
        assert refuses(newborn)
        assert attempts.connect_from_pod(web, newborn.ipv4, "IPv4", PORT) == "connects"
        operator.write_manifest(newborn, mode="audit", container=LISTENING)
        operator.wait_for("its own mode", isolated_as("newborn", "Audit"))
        assert connects(newborn)
        operator.stop(signal.SIGKILL)
        later = lab.add_pod("later", 3)
        with later.listen(PORT):
            assert refuses(later)
    assert operator.cleanup().returncode == 0
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True)
    assert "podgate" not in tables.stdout


def test_default_mode_audit_removes_an_existing_default_deny_table(
    operator: AgentProcess, lab: Lab, web: LabPod
) -> None:
    operator.write_manifest(web, mode=None, container=LISTENING)
    operator.start("--mode", "enforce")
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    operator.stop(signal.SIGKILL)
    operator.start("--mode", "audit")
    operator.wait_for("audit", isolated_as("web", "Audit"))
    newborn = lab.add_pod("newborn", 2)
    with newborn.listen(PORT):
        assert connects(newborn)


def test_drops_lists_source_processes_without_a_rule(operator: AgentProcess, web: LabPod) -> None:
    operator.write_manifest(web, mode="audit", container=LISTENING)
    operator.start()
    operator.wait_for("the gate", isolated_as("web", "Audit"))
    arguments = ("drops", "--run-directory", str(operator.run_directory))
    assert "No host process" in operator.run(*arguments).stdout
    assert connects(web)
    document = json.loads(operator.run(*arguments, "--output", "json").stdout)
    (caller,) = document["sources"]
    assert (caller["pod"], caller["protocol"], caller["port"]) == ("web", "tcp", PORT)
    assert caller["cgroup"].startswith("/")
    assert f"tcp {PORT}" in operator.run(*arguments).stdout


def test_status_without_an_agent_is_one_sentence(operator: AgentProcess) -> None:
    done = operator.run("status", "--run-directory", str(operator.run_directory))
    assert done.returncode == 3
    assert "no agent responds" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--manifests", "/nowhere"], "not a directory"),
        (["--manifests", "{manifests}", "--bpffs", "/tmp"], "not a BPF file system"),
    ],
)
def test_agent_that_cannot_start_prints_one_sentence(
    operator: AgentProcess, arguments: list[str], words: str
) -> None:
    given = [argument.format(manifests=operator.manifests) for argument in arguments]
    done = operator.run("run", *directories(operator), *given)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_steady_agent_has_no_compiler_in_it(operator: AgentProcess, web: LabPod) -> None:
    operator.launch = execute
    start_enforcing(operator, web)
    assert "libbcc" not in pathlib.Path(f"/proc/{operator.pid}/maps").read_text(encoding="utf-8")


def test_an_agent_holds_no_namespace_alive(operator: AgentProcess, lab: Lab, web: LabPod) -> None:
    operator.launch = execute
    start_enforcing(operator, web)
    held = set()
    for entry in os.scandir(f"/proc/{operator.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(entry.path))
    assert f"net:[{web.netns.inode}]" not in held


def directories(operator: AgentProcess) -> list[str]:
    return ["--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs)]
