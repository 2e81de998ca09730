"""Answered probes with a real kubelet: it restarts a container, or makes it unready, at the second
that its own rule gives for podgate's verdicts. Proxied probes are the controls.

The table has each pair of values of probe kind, kubelet's handler, podgate's handler, addresses,
fault and thresholds (tests/cluster/switching.py). It is printed.
"""

import collections
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests import polling
from tests.cluster import families, kubelet_log, switched, switching
from tests.cluster.answer_table import MORE_RESULTS, Table
from tests.cluster.conftest import Namespaces
from tests.cluster.deployment import Deployment
from tests.cluster.one_node import OneNode
from tests.cluster.switching import LIVENESS, READINESS, STARTUP, Row, SwitchedPod
from tests.cluster.workloads import Workloads
from tests.runtime import images

pytestmark = pytest.mark.kernel

# pkg/kubelet/prober logs each success.
_VERBOSE = 4


@pytest.fixture(scope="module")
def dual_stack(bare_cluster: OneNode, podgate: Deployment) -> Iterator[OneNode]:
    """A node whose pods have both families, with a kubelet that logs each of its probes."""
    bare_cluster.kubelet.restart_verbose(_VERBOSE)
    with families.dual_stack(bare_cluster):
        yield bare_cluster
    bare_cluster.kubelet.restart_verbose()
    bare_cluster.kubelet.wait_until_ready()


@pytest.fixture(params=["proxied", "answered"])
def rows(request: pytest.FixtureRequest) -> Callable[[str], list[Row]]:
    return {"proxied": switching.proxied, "answered": switching.answered}[request.param]


Tables = Callable[[Sequence[Row]], Table]


@pytest.fixture
def tables(
    dual_stack: OneNode,
    podgate: Deployment,
    namespaces: Namespaces,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Tables]:
    """Makes the table of a test, in a namespace in strict. It is printed at the end."""
    lines: list[str] = []
    yield lambda rows: Table(namespaces("strict"), dual_stack, podgate, rows, lines)
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")


def test_liveness_restarts_once_at_the_failure_that_the_kubelets_rule_names(
    tables: Tables,
    rows: Callable[[str], list[Row]],
) -> None:
    table = tables(rows(LIVENESS))
    table.until_ready()
    table.until_answered()
    table.break_own()
    since = table.switch(lambda row: row.fault)
    table.until("restarted", lambda pod: pod.status()["restartCount"])
    for pod in table.pods:
        table.check(pod, since, is_success=False, conclusion="liveness unhealthy")
        table.check_restart(pod, since)
    # What was found of the container before never counts against the one that runs now.
    table.until_ready()
    table.until_answered()
    table.break_own()
    assert [pod.status()["restartCount"] for pod in table.pods] == [1] * len(table.pods)


def test_startup_restarts_once_at_the_failure_that_the_kubelets_rule_names(
    tables: Tables,
    rows: Callable[[str], list[Row]],
) -> None:
    table = tables(rows(STARTUP))
    table.until("restarted", lambda pod: pod.status().get("restartCount"))
    for pod in table.pods:
        # Before its first probe the kubelet stores that the result is unknown.
        first = pod.results()[0].seconds
        table.check(pod, first, is_success=False, conclusion="startup unhealthy")
        table.check_restart(pod, first)
    table.until("started", lambda pod: pod.status().get("started"))
    table.until_ready()
    assert [pod.status()["restartCount"] for pod in table.pods] == [1] * len(table.pods)


def test_readiness_changes_at_the_results_that_the_kubelets_rule_names(
    tables: Tables,
    rows: Callable[[str], list[Row]],
) -> None:
    table = tables(rows(READINESS))
    table.until_ready()
    table.until_answered()
    table.break_own()
    since = table.switch(lambda row: row.fault)
    table.until("unready", lambda pod: not pod.status()["ready"])
    for pod in table.pods:
        table.check(pod, since, is_success=False, conclusion="readiness not ready")
    since = table.switch(lambda row: switched.HEALTHY)
    table.until_ready()
    for pod in table.pods:
        table.check(pod, since, is_success=True, conclusion="readiness ready")
    assert [pod.status()["restartCount"] for pod in table.pods] == [0] * len(table.pods)


ROW = Row(LIVENESS, "http", "http", "localhost", switched.SICK, 2)


def test_the_kubelet_restarts_by_verdicts_while_the_api_server_is_away(
    dual_stack: OneNode, tables: Tables
) -> None:
    table = tables([ROW])
    table.until_ready()
    table.until_answered()
    api_server = dual_stack.control_plane.api_server
    api_server.kill()
    try:
        since = table.switch(lambda row: row.fault)
        (pod,) = table.pods
        polling.wait_until("the container ends", lambda: _has_ended(pod, since))
        table.check(pod, since, is_success=False, conclusion="liveness unhealthy")
    finally:
        api_server.start()
        dual_stack.control_plane.wait_until_ready()
    table.until("restarted", lambda pod: pod.status()["restartCount"] == 1)
    table.until_ready()


def _has_ended(pod: SwitchedPod, since: float) -> bool:
    return "killed" in {one.what for one in pod.conclusions(since)}


def test_hooks_on_the_port_of_an_answered_probe_run_in_the_pod(
    dual_stack: OneNode, namespaces: Namespaces
) -> None:
    users = namespaces("strict")
    switching.provide(users, dual_stack)
    hooks = {
        "postStart": {"httpGet": {"port": switched.OWN_HTTP, "path": "/started"}},
        "preStop": {"httpGet": {"port": switched.OWN_HTTP, "path": "/stopping"}},
    }
    # An init container that keeps serving listens before and after the other one's hooks.
    users.run(
        "hooked",
        {
            "name": "hooked",
            "image": images.POD,
            "command": ["/bin/sleep", "1000000"],
            "lifecycle": hooks,
        },
        initContainers=[ROW.container() | {"restartPolicy": "Always"}],
        annotations=ROW.annotations(),
        volumes=switching.VOLUMES,
        terminationGracePeriodSeconds=10,
    )
    users.until_ready("hooked")
    assert _paths(users)["/started"] == 1
    pod = users.pod("hooked")

    def is_answered() -> bool:
        before = _paths(users)["/own"]
        time.sleep(MORE_RESULTS)
        return _paths(users)["/own"] == before

    polling.wait_until("the probe is answered", is_answered)
    users.api.delete(f"{users.pods_path}/hooked")
    polling.wait_until("the hook ran", lambda: _paths(users)["/stopping"] == 1)
    users.until_gone("hooked")
    assert pod["status"]["initContainerStatuses"][0]["restartCount"] == 0
    assert users.events("FailedPostStartHook") + users.events("FailedPreStopHook") == []


def _paths(users: Workloads) -> collections.Counter[str]:
    """Requests to the part `own`, by path."""
    log = users.api.text(f"{users.pods_path}/hooked/log?container=app")
    lines = (line.split() for line in log.splitlines())
    return collections.Counter(words[1] for words in lines if words[:1] == [switched.OWN])


def test_a_probe_that_cannot_be_recognised_is_proxied_and_reported(
    dual_stack: OneNode, podgate: Deployment, namespaces: Namespaces
) -> None:
    users = namespaces("strict")
    switching.provide(users, dual_stack)
    encrypted = {"httpGet": {"port": switched.HTTPS, "path": "/", "scheme": "HTTPS"}}
    container = ROW.container()
    container["livenessProbe"] = {**encrypted, "periodSeconds": 1, "failureThreshold": 60}
    users.run("encrypted", container, annotations=ROW.annotations(), volumes=switching.VOLUMES)
    users.until_ready("encrypted")
    polling.wait_until("an Event", lambda: users.events("ProbeNotAnswered"))
    pod = podgate.pod_status(users.namespace, "encrypted")
    assert pod is not None
    answers = [one.answer for one in pod.probes if one.type == "Liveness"]
    assert [answer and answer.obstacle for answer in answers] == ["tls"]
    log = dual_stack.kubelet.daemon.log

    def probed() -> bool:
        results = kubelet_log.of_pod(log, users.namespace, "encrypted").results
        return any(one.is_success for one in results if one.kind == LIVENESS)

    polling.wait_until("the pod responds to the kubelet itself", probed)
    assert users.restarts() == {}
