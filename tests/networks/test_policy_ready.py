"""Pods with the gate policy-ready beside a network whose policies are late, or do not come."""

import concurrent.futures
import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests import polling
from tests.chart import rendering
from tests.cluster.api import Json
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import PATHS, Deployment
from tests.cluster.workloads import PORT, WEB, Workloads, condition
from tests.networks import traffic
from tests.networks.network import Network

pytestmark = pytest.mark.kernel

POLICY_READY = "podgate.io/policy-ready"
LATE_SECONDS = 10.0
"""For which policies of new pods are held up."""
TIMEOUT_SECONDS = 5
MANY = 60
ROUNDS = 3
_READY_SECONDS = 300
_AFTER_SECONDS = 5.0
_POLL_SECONDS = 0.3
_REJECTED = ("", ConnectionRefusedError.__name__)
_FROM_CLIENT: Json = {
    "from": [{"podSelector": {"matchLabels": {"app": "client"}}}],
    "ports": [{"port": PORT}],
}
# What the witness may do.
_ADMITTED: Json = {"ports": [{"port": 7000}]}


@pytest.fixture(scope="module")
def podgate_that_checks(podgate: Deployment, network: Network) -> Iterator[Deployment]:
    """As the chart's value `policyReady.mode` has it: agents, rights, a witness."""
    values = {"policyReady": {"mode": "wait", "timeoutSeconds": TIMEOUT_SECONDS}}
    things = [
        one
        for one in rendering.objects(values, service="kubectl")
        if one["metadata"]["name"] in ("podgate-policy-ready", "podgate-witness")
    ]
    paths = [f"{PATHS[one['kind']]}/{one['metadata']['name']}" for one in things]
    for thing in things:
        network.api.create(PATHS[thing["kind"]], thing)
    podgate.set_arguments(arguments())
    witness = paths[-1]
    assert witness.endswith("/daemonsets/podgate-witness")
    polling.wait_until(
        "the witness", lambda: network.api.get(witness)["status"].get("numberReady") == 1
    )
    yield podgate
    for path in paths:
        network.api.delete(path)
    podgate.set_arguments([])


def arguments(mode: str = "wait") -> list[str]:
    return [f"--policy-ready={mode}", f"--policy-ready-timeout={TIMEOUT_SECONDS}"]


@pytest.fixture(params=["audit", "strict"])
def users(request: pytest.FixtureRequest, namespaces: Namespaces) -> Workloads:
    return namespaces(request.param)


def admit(users: Workloads, *rules: Json) -> str:
    """Ingress of pods with the label guarded; the policy's path."""
    path = f"/apis/networking.k8s.io/v1/namespaces/{users.namespace}/networkpolicies"
    spec = {
        "podSelector": {"matchLabels": {"guarded": "true"}},
        "policyTypes": ["Ingress"],
        "ingress": list(rules),
    }
    users.api.create(path, {"metadata": {"name": "guarded"}, "spec": spec})
    return f"{path}/guarded"


def run_guarded(users: Workloads, name: str, *, is_gated: bool = True) -> None:
    gates = (POLICY_READY,) if is_gated else ()
    users.run(name, WEB, gates=gates, labels={"guarded": "true"})


class Intruder:
    """Connects from a pod that no policy admits, until its end."""

    def __init__(self, pod: Json, users: Workloads, target: str) -> None:
        """target: the name of a pod."""
        self.dropped = 0
        self.reached: list[float] = []
        """When, by `time.monotonic`, a connection was established."""
        self._netns = traffic.netns_of(pod)
        self._users, self._target = users, target
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            for one in self._users.pod(self._target)["status"].get("podIPs", []):
                if traffic.dial(one["ip"], PORT, self._netns):
                    self.dropped += 1
                else:
                    self.reached.append(time.monotonic())
        self._users.api.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()


@pytest.mark.parametrize("rules", [[_FROM_CLIENT, _ADMITTED], [_FROM_CLIENT]], ids=["some", "none"])
def test_no_pod_is_ready_before_its_policies_are_in_force(
    network: Network,
    podgate_that_checks: Deployment,
    users: Workloads,
    rules: list[Json],
    record_property: Callable[[str, object], None],
) -> None:
    """They are held up while the pod starts. `some`, `none`: of what the policies admit, the
    witness may do something."""
    admit(users, *rules)
    users.run("intruder")
    (intruding,) = users.until_ready("intruder")
    began = time.monotonic()
    network.programmer.pause()
    try:
        run_guarded(users, "web")
        intruder = Intruder(intruding, users, "web")
        with intruder.running():
            time.sleep(LATE_SECONDS)
            was_ready = condition(users.pod("web"), "Ready").get("status") == "True"
            network.programmer.resume()
            users.until_ready("web")
            ready_at = time.monotonic()
            time.sleep(_AFTER_SECONDS)
    finally:
        network.programmer.resume()
    reached = [at - began for at in intruder.reached]
    record_property(
        "figures",
        f"reached {len(reached)} times, until {max(reached, default=0):.1f} s; Ready after "
        f"{'less than ' if was_ready else ''}{LATE_SECONDS if was_ready else ready_at - began:.1f} "
        f"s; dropped {intruder.dropped} times",
    )
    pod = users.pod("web")
    assert [at for at in intruder.reached if at > ready_at] == []
    assert not (was_ready and reached)
    assert intruder.dropped
    found = condition(pod, POLICY_READY)
    assert found["reason"] == "PoliciesProgrammed"
    assert "TCP 65535 is dropped" in found["message"]


def test_pod_whose_policies_do_not_come_waits_and_the_owner_may_choose_otherwise(
    network: Network, podgate_that_checks: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("enforce")
    admit(users, _FROM_CLIENT, _ADMITTED)
    network.programmer.stop()
    try:
        run_guarded(users, "waits")
        users.until("waits", POLICY_READY, "False", "PoliciesNotProgrammed")
        assert condition(users.pod("waits"), "Ready")["status"] == "False"
        podgate_that_checks.until(
            "a finding",
            lambda report: (
                f"pod {users.namespace}/waits"
                in {one.subject for one in report.findings if one.kind == "policy-not-programmed"}
            ),
        )
        podgate_that_checks.set_arguments(arguments("ready"))
        users.until("waits", POLICY_READY, "True", "PoliciesUnconfirmed")
        users.until_ready("waits")
    finally:
        network.programmer.start()
        network.wait_until_ready()
        podgate_that_checks.set_arguments(arguments())
    run_guarded(users, "again")
    users.until("again", POLICY_READY, "True", "PoliciesProgrammed")


def test_sixty_pods_at_once_are_ready_once_their_policies_are_in_force(
    podgate_that_checks: Deployment,
    namespaces: Namespaces,
    record_property: Callable[[str, object], None],
) -> None:
    """The figures are ratios of rounds with the gate and without, in turns: of the time until all
    are Ready, and of that until a client reaches all at the port that the policies admit, which is
    the network's own time and no gate can be faster than."""
    users = namespaces("enforce")
    admit(users, _FROM_CLIENT, _ADMITTED)
    users.run("client")
    (client,) = users.until_ready("client")
    to_ready, to_policies = [], []
    for number in range(ROUNDS):
        with_gate = start_many(users, f"gated-{number}", client, is_gated=True)
        without = start_many(users, f"plain-{number}", client, is_gated=False)
        to_ready.append(with_gate.ready / without.ready)
        to_policies.append(with_gate.ready / without.admitted)
    record_property(
        "figures",
        f"{MANY} pods, ratio to Ready without the gate {spread(to_ready)}, to policies in force "
        f"without it {spread(to_policies)}",
    )
    assert users.restarts() == {}


class Seconds(NamedTuple):
    """From the first pod's creation until the last one is Ready, and admits what it should."""

    ready: float
    admitted: float


def spread(ratios: list[float]) -> str:
    found = sorted(ratios)
    return f"{found[len(found) // 2]:.2f} [{found[0]:.2f}, {found[-1]:.2f}]"


def start_many(users: Workloads, prefix: str, client: Json, *, is_gated: bool) -> Seconds:
    """MANY pods, which are deleted then."""
    names = [f"{prefix}-{number}" for number in range(MANY)]
    netns = traffic.netns_of(client)
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(MANY) as threads:
        for name in names:
            run_guarded(users, name, is_gated=is_gated)
        reached = [threads.submit(await_admission, users, name, netns) for name in names]
        polling.wait_until("all are Ready", lambda: are_ready(users, names), seconds=_READY_SECONDS)
        ready = time.monotonic() - began
        admitted = max(each.result() for each in reached) - began
    for name in names:
        users.delete(name)
    users.until_gone(*names)
    return Seconds(ready, admitted)


def await_admission(users: Workloads, name: str, netns: pathlib.Path) -> float:
    """When, by `time.monotonic`, a connection to the admitted port, where nothing listens, is
    rejected by the pod itself."""

    def is_reached() -> bool:
        addresses = [one["ip"] for one in users.pod(name)["status"].get("podIPs", [])]
        time.sleep(_POLL_SECONDS)
        return bool(addresses) and traffic.dial(addresses[0], 7000, netns) in _REJECTED

    try:
        polling.wait_until(f"{name} admits", is_reached, seconds=_READY_SECONDS)
        return time.monotonic()
    finally:
        users.api.close()


def are_ready(users: Workloads, names: list[str]) -> bool:
    ready = {
        pod["metadata"]["name"]
        for pod in users.pods()
        if condition(pod, "Ready").get("status") == "True"
    }
    return ready.issuperset(names)
