"""Sources that last: services by unit and hostNetwork pods by selector, in any cgroup."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, Launch, condition_of
from agent.lab.lab import Lab, LabPod
from bpf import abi, pins
from tests.kernel import cgroups, traffic
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_policies import PORT, Node, metrics, policy
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

AGENTS = {"hostNetworkPods": {"podSelector": {"matchLabels": {"app": "agent"}}}}
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), float(sys.argv[3])).close()
except OSError:
    sys.exit(1)
"""
# Connects every 10 ms until its input ends, then prints the numbers of attempts and failures; one
# line first, after the first attempt. A SYN that was dropped is sent again only after a second.
KEEP_CONNECTING = """
import select, socket, sys
tried = failed = 0
while not tried or not select.select([sys.stdin], [], [], 0.01)[0]:
    sock = socket.socket()
    sock.settimeout(0.9)
    tried += 1
    failed += sock.connect_ex((sys.argv[1], int(sys.argv[2]))) != 0
    sock.close()
    if tried == 1:
        print("started", flush=True)
print(tried, failed)
"""
# An agent finds pods by their processes, also those of a test that another worker runs.
UIDS = [f"{os.getpid():08x}-9d0c-4f3e-8a52-{number:012x}" for number in range(40)]


class Kubelet:
    """The cgroups that a kubelet makes for its pods, below a --cgroup-root of the test."""

    def __init__(self, top: Cgroup) -> None:
        self._top = top

    @contextlib.contextmanager
    def pod(self, uid: str) -> Iterator[Cgroup]:
        """A pod's cgroup with that of a container, which is returned."""
        with (
            self._below(self._top, "kubepods") as kubepods,
            self._below(kubepods, "besteffort") as besteffort,
            cgroups.cgroup(f"pod{uid}", below=besteffort) as pod,
            cgroups.cgroup("container", below=pod) as container,
        ):
            yield container

    @contextlib.contextmanager
    def _below(self, above: Cgroup, name: str) -> Iterator[Cgroup]:
        """A cgroup that may have been made already, and is removed with the last in it."""
        made = Cgroup(above.directory / name, f"{above.path}/{name}")
        made.directory.mkdir(exist_ok=True)
        try:
            yield made
        finally:
            with contextlib.suppress(OSError):
                made.directory.rmdir()


@pytest.fixture
def kubelet(isolated: None) -> Iterator[Kubelet]:
    with cgroups.cgroup(below=cgroups.root()) as top:
        yield Kubelet(top)


@pytest.fixture
def node(launch: Launch, tmp_path: pathlib.Path, installed_pins: pins.Pins) -> Iterator[Node]:
    operator = AgentProcess(tmp_path, installed_pins.bpffs, launch)
    with cgroups.cgroup() as group:
        operator.kubelet = ("--kubelet", f"cgroup:{group.path}")
        yield Node(operator, tmp_path / "rules")
        operator.stop(signal.SIGKILL)


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


def add_host_pod(
    node: Node, uid: str, *, app: str = "agent", namespace: str = "monitoring", host: bool = True
) -> None:
    metadata: dict[str, Any] = {"name": uid, "namespace": namespace, "uid": uid}
    if not host:
        metadata["annotations"] = {"podgate.io/netns": "/run/netns/nowhere"}
    document = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata | {"labels": {"app": app}},
        "spec": {"hostNetwork": host, "containers": [{"name": "app", "image": "none"}]},
    }
    node.operator.write_file(f"{uid}.yaml", json.dumps(document))


def remove_host_pod(node: Node, uid: str) -> None:
    (node.operator.manifests / f"{uid}.yaml").unlink()


def results(group: Cgroup, pod: LabPod, seconds: float) -> set[bool]:
    """Whether connections of the cgroup succeed, over both families, which may differ only for a
    moment."""
    command = [*BARE_PYTHON, "-c", CONNECT]
    arguments = [[address, str(PORT), str(seconds)] for address in (pod.ipv4, pod.ipv6)]
    return {group.run([*command, *each]).returncode == 0 for each in arguments}


def is_admitted(group: Cgroup, pod: LabPod) -> bool:
    return results(group, pod, traffic.LIMIT_SECONDS) == {True}


def is_rejected(group: Cgroup, pod: LabPod) -> bool:
    return results(group, pod, traffic.DROPPED_AFTER_SECONDS) == {False}


def await_admission(node: Node, group: Cgroup, pod: LabPod) -> None:
    node.operator.wait_for(f"{group.path} admitted", lambda _: is_admitted(group, pod))


def test_unit_is_admitted_in_whichever_slice_and_each_time_it_starts(
    node: Node, web: LabPod
) -> None:
    node.write("a.yaml", policy("unit", {"systemdUnit": {"name": "podgate-test.service"}}, PORT))
    node.start(web)
    with cgroups.cgroup() as user, cgroups.cgroup("podgate-test.service", below=user) as own:
        for slices in (1, 2):
            with contextlib.ExitStack() as undo:
                above = undo.enter_context(
                    cgroups.cgroup(cgroups.unique(f"{slices}.slice"), below=cgroups.root())
                )
                if slices == 2:
                    above = undo.enter_context(
                        cgroups.cgroup(cgroups.unique("2-deep.slice"), below=above)
                    )
                unit = undo.enter_context(cgroups.cgroup("podgate-test.service", below=above))
                inner = undo.enter_context(cgroups.cgroup("worker", below=unit))
                await_admission(node, unit, web)
                assert is_admitted(inner, web)
                # The name alone is nothing: this one is below a cgroup that is no slice.
                assert is_rejected(own, web)
                assert is_rejected(above, web)


def test_host_network_pods_are_admitted_by_their_labels_and_namespace(
    node: Node, web: LabPod, kubelet: Kubelet
) -> None:
    selector = {"namespaces": ["monitoring"], **AGENTS["hostNetworkPods"]}
    node.write("a.yaml", policy("agents", {"hostNetworkPods": selector}, PORT))
    add_host_pod(node, UIDS[0])
    add_host_pod(node, UIDS[1], app="other")
    add_host_pod(node, UIDS[2], namespace="default")
    add_host_pod(node, UIDS[3], host=False)
    with contextlib.ExitStack() as undo:
        containers = [undo.enter_context(kubelet.pod(uid)) for uid in UIDS[:5]]
        stranger = undo.enter_context(cgroups.cgroup(f"pod{UIDS[0]}"))
        node.start(web)
        await_admission(node, containers[0], web)
        for other in (*containers[1:], stranger):
            assert is_rejected(other, web)
        remove_host_pod(node, UIDS[0])
        node.operator.wait_for("no longer admitted", lambda _: is_rejected(containers[0], web))


def test_labels_of_a_running_pod_are_followed(node: Node, web: LabPod, kubelet: Kubelet) -> None:
    node.write("a.yaml", policy("agents", AGENTS, PORT))
    add_host_pod(node, UIDS[0], app="other")
    with kubelet.pod(UIDS[0]) as container:
        node.start(web)
        assert is_rejected(container, web)
        add_host_pod(node, UIDS[0])
        await_admission(node, container, web)


def test_host_network_pod_below_a_deep_cgroup_root_is_admitted(
    node: Node, web: LabPod, isolated: None
) -> None:
    """A process of the pod shows where the kubelet makes cgroups."""
    node.write("a.yaml", policy("agents", AGENTS, PORT))
    with (
        cgroups.cgroup(below=cgroups.root()) as top,
        cgroups.cgroup("deep", below=top) as deep,
        Kubelet(deep).pod(UIDS[0]) as container,
    ):
        node.start(web)
        # Before there is such a pod: what tries to connect is a process of it, too.
        assert is_rejected(container, web)
        add_host_pod(node, UIDS[0])
        with container.popen(["sleep", "1000"]) as process:
            try:
                await_admission(node, container, web)
            finally:
                process.kill()


@contextlib.contextmanager
def serving(pod: LabPod) -> Iterator[None]:
    """Accepts and closes connections over IPv4, on another port than `web` does."""
    done = threading.Event()
    with pod.listen(PORT) as listener:
        listener.settimeout(0.1)

        def accept() -> None:
            while not done.is_set():
                with contextlib.suppress(TimeoutError):
                    listener.accept()[0].close()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield
        finally:
            done.set()
            accepting.join(30)


@contextlib.contextmanager
def connecting(group: Cgroup, pod: LabPod) -> Iterator[list[int]]:
    """A process that connects all the time; afterwards the numbers of attempts and of failures."""
    found: list[int] = []
    arguments = [*BARE_PYTHON, "-c", KEEP_CONNECTING, pod.ipv4, str(PORT)]
    process = group.popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    try:
        yield found
    finally:
        output, _ = process.communicate(timeout=60)
        found += map(int, output.split())


def test_daemon_set_that_is_rolled_over_keeps_its_access_without_a_gap(
    node: Node, lab: Lab, kubelet: Kubelet
) -> None:
    pod = lab.add_pod("web", 1)
    node.write("a.yaml", policy("agents", AGENTS, PORT))
    node.start(pod)
    with serving(pod), contextlib.ExitStack() as old:
        add_host_pod(node, UIDS[0])
        before = old.enter_context(kubelet.pod(UIDS[0]))
        await_admission(node, before, pod)
        for uid, last in zip(UIDS[1:4], UIDS[:3], strict=True):
            with contextlib.ExitStack() as new:
                add_host_pod(node, uid)
                with connecting(before, pod) as of_old:
                    # As the kubelet does: the cgroup first, the container's process later.
                    after = new.enter_context(kubelet.pod(uid))
                    await_admission(node, after, pod)
                with connecting(after, pod) as of_new:
                    old.close()
                    remove_host_pod(node, last)
                    await_admission(node, after, pod)
                for tried, failed in (of_old, of_new):
                    assert tried > 0
                    assert failed == 0
                before, old = after, new.pop_all()
        old.close()


def message_of(report: AgentReport) -> str:
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    return condition.message if condition else ""


def test_pods_that_do_not_fit_are_in_condition_metric_and_rules(
    node: Node, web: LabPod, kubelet: Kubelet
) -> None:
    node.write("a.yaml", policy("agents", AGENTS, PORT))
    more = 3
    # One is the kubelet's.
    uids = UIDS[: abi.GATE_RULES - 1 + more]
    for uid in uids:
        add_host_pod(node, uid)
    with contextlib.ExitStack() as undo:
        for uid in uids:
            undo.enter_context(kubelet.pod(uid))
        node.start(web)
        # Cgroups are found one after another.
        rules = node.wait_for_rules(
            "skipped rules",
            lambda rules: (
                [one.skipped for one in rules.policies if one.name == "agents"]
                == [{"demo/web": more}]
            ),
        )
        sentence = f"gate holds {abi.GATE_RULES}: {more} are skipped, of agents"
        assert any(sentence in problem for problem in rules.problems)
        node.operator.wait_for("the condition", lambda report: sentence in message_of(report))
        report = node.operator.report()
        assert report is not None
        (series,) = [line for line in metrics(report) if line.startswith("podgate_rules_skipped{")]
        assert series == f'podgate_rules_skipped{{policy="agents"}} {float(more)}'
