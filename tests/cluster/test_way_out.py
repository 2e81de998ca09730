"""podgate is switched off, rolled back and uninstalled while pods start and stop."""

import contextlib
import itertools
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from agent.lab import leftovers
from agent.operate.kubectl import main
from agent.relay import interfaces as relay_interfaces
from bpf import pins
from tests import polling
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.workloads import (
    HTTP_PROBE,
    ISOLATION_READY,
    PROBED,
    PROBES_PASSING,
    Workloads,
    condition,
    is_reachable,
)
from tests.image.node import BPFFS, RUN_DIRECTORY

pytestmark = pytest.mark.kernel

GATES = (ISOLATION_READY, PROBES_PASSING)
# A busy machine answers late; what podgate would break stays broken.
_PATIENT = {**HTTP_PROBE, "timeoutSeconds": 5, "failureThreshold": 6}
PATIENT = {**PROBED, "readinessProbe": _PATIENT, "livenessProbe": _PATIENT}
_LISTS = (
    "/api/v1/namespaces",
    "/apis/apps/v1/daemonsets",
    "/apis/apps/v1/deployments",
    "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
)


class Churn:
    """Pods start and stop; two others, with both readiness gates, stay and must stay Ready."""

    def __init__(self, users: Workloads, gates: Sequence[str] = GATES) -> None:
        """gates: of those that start and stop."""
        self.problems: list[str] = []
        self._gates = gates
        self.started = 0
        self._users = users
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(self._watch,), name="readiness"),
            threading.Thread(target=self._run, args=(self._replace,), name="churn"),
        ]

    def __enter__(self) -> "Churn":
        for name in ("stays-1", "stays-2"):
            self._users.run(name, PATIENT, gates=GATES)
        self._users.until_ready("stays-1", "stays-2")
        for thread in self._threads:
            thread.start()
        polling.wait_until("a pod of the churn", lambda: self.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(300)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._users.api.close()  # this thread's connection

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            for name in ("stays-1", "stays-2"):
                pod = self._users.pod(name)
                if condition(pod, "Ready").get("status") != "True":
                    found = pod["status"]["conditions"]
                    false = [
                        f"{one['type']} {one.get('reason')} {one.get('message')}"
                        for one in found
                        if one["status"] != "True"
                    ]
                    self.problems.append(f"{name}: {false}")

    def _replace(self) -> None:
        for number in itertools.count():
            if self._end.is_set():
                return
            name = f"churn-{number}"
            self._users.run(name, PROBED, gates=self._gates)
            try:
                self._users.until_ready(name)
            except AssertionError as error:
                self.problems.append(str(error))
            self.started += 1
            self._users.delete(name)


def kubectl(node: OneNode, *arguments: str) -> int:
    """Run the plugin with the cluster's administrator."""
    command = shutil.which("kubectl")
    if command is None:
        pytest.fail("kubectl is not installed; put it into PATH", pytrace=False)
    kubeconfig = node.control_plane.kubeconfig("admin")
    # Of a plugin that chooses among versions of kubectl, and of a home directory.
    os.environ["HOME"] = str(kubeconfig.parent)
    return main.main(
        [*("--kubectl", command), *("--kubeconfig", str(kubeconfig)), "--timeout=30", *arguments]
    )


def in_kernel(programs: list[int]) -> list[str]:
    """What is attached of these programs, and podgate's tables, interfaces and routes."""
    found = [f"link {number}" for number in leftovers.links_to(programs)]
    found += [line for line in _lines("nft", "list", "tables") if "podgate" in line]
    found += [line for line in _lines("ip", "link") if relay_interfaces.PREFIX in line]
    for family in ("-4", "-6"):
        found += _lines("ip", family, "route", "show", "proto", "112")
    return found


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def in_api(node: OneNode) -> list[str]:
    """podgate's objects in the API server."""
    return [
        f"{path}/{one['metadata']['name']}"
        for path in _LISTS
        for one in node.api.items(path)
        if "podgate" in one["metadata"]["name"]
    ]


def files(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def conditions(pod: Json) -> dict[str, tuple[str, str]]:
    """Status and reason of podgate's conditions."""
    found = {kind: condition(pod, kind) for kind in GATES}
    return {kind: (one.get("status", ""), one.get("reason", "")) for kind, one in found.items()}


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_off_and_on_while_pods_start_and_stop(
    node: OneNode, podgate: Deployment, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    with Churn(users) as churn:
        users.until_isolated("stays-1")
        assert not is_reachable(users.pod("stays-1"))
        assert kubectl(node, "off") == 0
        assert is_reachable(users.pod("stays-1"))
        programs = leftovers.program_ids(pins.Pins(BPFFS))
        # The relay's connections drain; listener events of probes are no link to these programs.
        users.until("stays-1", ISOLATION_READY, "True", "Off")
        before = churn.started
        polling.wait_until("pods start while podgate is off", lambda: churn.started > before + 1)
        assert podgate.until("off", lambda report: not report.in_force).max_mode == "off"
        assert kubectl(node, "on") == 0
        users.until_isolated("stays-1", "stays-2")
        assert not is_reachable(users.pod("stays-1"))
    assert programs
    assert churn.problems == []
    assert users.restarts() == {}


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_roll_out_and_roll_back_while_pods_start_and_stop(
    podgate: Deployment, namespaces: Namespaces, mode: str
) -> None:
    users = namespaces(mode)
    with Churn(users) as churn:
        for arguments in (("--dead-man-hours=23",), ()):
            podgate.set_arguments(arguments)
            before = churn.started
            polling.wait_until("pods start", lambda: churn.started > before + 1)  # noqa: B023
            assert not is_reachable(users.pod("stays-1"))
    assert podgate.restarts() == 0
    assert churn.problems == []
    assert users.restarts() == {}


@pytest.fixture
def with_plugin(node: OneNode, podgate: Deployment) -> dict[str, bytes]:
    """podgate-cni holds pods back without gates. The CNI's files without it."""
    conf, plugins = node.runtime.cni_directory, node.runtime.plugins
    before = files(conf)
    podgate.set_arguments(
        [f"--cni-conf-dir={conf}", f"--cni-bin-dir={plugins}", "--cni-strict-start"],
        directories=(conf, plugins),
    )
    polling.wait_until("podgate-cni is installed", lambda: files(conf) != before)
    return before


@contextlib.contextmanager
def gated_template(node: OneNode) -> Iterator[None]:
    """A Deployment without pods whose template has a gate."""
    path = "/apis/apps/v1/namespaces/default/deployments"
    template = {
        "metadata": {"labels": {"app": "gated"}},
        "spec": {
            "readinessGates": [{"conditionType": ISOLATION_READY}],
            "containers": [{"name": "app", "image": "none"}],
        },
    }
    selector = {"matchLabels": {"app": "gated"}}
    spec = {"replicas": 0, "selector": selector, "template": template}
    body = {"metadata": {"name": "gated"}, "spec": spec}
    node.api.create(path, {"apiVersion": "apps/v1", "kind": "Deployment", **body})
    yield
    node.api.delete(f"{path}/gated")


def test_uninstall_leaves_nothing_and_pods_with_gates_ready(
    node: OneNode,
    podgate: Deployment,
    with_plugin: dict[str, bytes],
    namespaces: Namespaces,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    users = namespaces("strict")
    ungated = namespaces("enforce")
    ungated.run("plain", PROBED)
    policies = tmp_path / "policies.json"
    # What starts when no agent is left has no gates: uninstall insists on that.
    with Churn(users, gates=()) as churn:
        users.until_isolated("stays-1")
        with gated_template(node):
            assert kubectl(node, "uninstall", "--yes") == 1
        assert "deployment/default/gated" in capsys.readouterr().out
        # A new installation would be in force by the namespaces' labels.
        assert kubectl(node, "uninstall", "--yes") == 1
        assert "--labels=keep" in capsys.readouterr().out
        assert in_api(node)
        # An agent that is dead takes no part.
        programs = leftovers.program_ids(pins.Pins(BPFFS))
        assert in_kernel(programs)
        podgate.kill_agent()

        options = ("--yes", "--labels=keep", f"--policies-file={policies}")
        status = kubectl(node, "uninstall", *options)
        printed = capsys.readouterr()
        assert status == 0, printed
        assert "podgate is removed." in printed.out
        assert f"kubectl label namespace {users.namespace} podgate.io/mode-" in printed.out
    assert churn.problems == []
    assert users.restarts() == ungated.restarts() == {}

    polling.wait_until("nothing in the kernel", lambda: not in_kernel(programs))
    assert not [number for number in programs if leftovers.program_exists(number)]
    assert not (BPFFS / "podgate").exists()
    assert not RUN_DIRECTORY.exists()
    assert files(node.runtime.cni_directory) == with_plugin
    assert not (node.runtime.plugins / "podgate-cni").exists()
    assert in_api(node) == []
    for name in ("stays-1", "stays-2"):
        pod = users.pod(name)
        assert conditions(pod) == dict.fromkeys(GATES, ("True", "Removed"))
        assert condition(pod, "Ready")["status"] == "True"
    plain = ungated.until_ready("plain")[0]
    assert conditions(plain) == dict.fromkeys(GATES, ("", ""))
    # New pods start, and are as without podgate.
    ungated.run("later", PROBED)
    assert is_reachable(ungated.until_ready("later")[0])

    podgate.apply()
    podgate.wait_until_ready()
    users.confirm_labels()
    users.until_isolated("stays-1", "stays-2")
