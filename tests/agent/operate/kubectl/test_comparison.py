"""Which probes and pods mode strict would change, by reports and the API's pods."""

from typing import Any

import msgspec
import pytest

from agent.admin.report import PodStatus, ProbeStatus
from agent.operate.kubectl.comparison import Comparison, Effects
from tests.agent.operate.kubectl import reporting
from tests.agent.operate.page.reports import probe

REFUSED = "dial tcp 198.18.1.1:8080: connect: connection refused"
LIVENESS = probe(type="Liveness", result="failure", last_message=REFUSED, successes=0, failures=9)
READINESS = probe(type="Readiness", result="failure", last_message=REFUSED, successes=0, failures=9)
REDIRECTED = probe(
    type="Liveness",
    result="unknown",
    last_message="Redirected to port 15001 (Consul, user 5995), which shows nothing.",
    successes=0,
    failures=0,
    is_redirected=True,
)


def reported(*probes: ProbeStatus, name: str = "web", problem: str = "") -> PodStatus:
    made = reporting.pod(name, "enforce", "Enforced")
    return msgspec.structs.replace(made, probes=list(probes), strict_problem=problem)


def of_api(name: str = "web", **changes: Any) -> dict[str, Any]:
    """A pod with one container that runs."""
    status = {"name": "app", "ready": True, "started": True, "restartCount": 0}
    status |= {"state": {"running": {}}, **changes}
    return {
        "metadata": {"namespace": "shop", "name": name, "uid": name},
        "status": {"containerStatuses": [status]},
    }


def effects(*samples: tuple[PodStatus, dict[str, Any]]) -> Effects:
    comparison = Comparison()
    for pod, found in samples:
        comparison.add([reporting.encoded(pod)], [found])
    return comparison.effects()


def test_probe_with_the_same_result_is_harmless() -> None:
    found = effects((reported(probe(type="Liveness"), probe()), of_api()))
    assert found == Effects(compared=2)
    assert found.is_harmless


def test_liveness_that_fails_from_inside_would_restart_the_container() -> None:
    found = effects((reported(LIVENESS), of_api()))
    assert found.restarts == (
        "shop/web, container app: Liveness probe passes for the kubelet and fails from inside: "
        f"{REFUSED}.",
    )
    assert not found.is_harmless


def test_startup_that_fails_from_inside_would_restart_the_container() -> None:
    startup = msgspec.structs.replace(LIVENESS, type="Startup")
    assert len(effects((reported(startup), of_api())).restarts) == 1


def test_readiness_that_fails_from_inside_would_make_the_container_unready() -> None:
    found = effects((reported(READINESS), of_api()))
    assert (len(found.restarts), len(found.unready)) == (0, 1)


def test_probe_that_fails_for_both_is_no_difference() -> None:
    assert effects((reported(READINESS), of_api(ready=False))) == Effects(compared=1)
    startup = msgspec.structs.replace(LIVENESS, type="Startup")
    assert effects((reported(startup), of_api(started=False))) == Effects(compared=1)


def test_container_that_does_not_run_is_not_compared() -> None:
    waiting = of_api(state={"waiting": {"reason": "CrashLoopBackOff"}})
    assert effects((reported(LIVENESS), waiting)) == Effects()


def test_probe_that_passes_once_is_no_difference() -> None:
    failing, passing = (reported(LIVENESS), of_api()), (reported(probe(type="Liveness")), of_api())
    for order in ((failing, passing), (passing, failing), (failing, passing, failing)):
        assert effects(*order).restarts == ()


def test_container_that_restarts_meanwhile_fails_for_the_kubelet_too() -> None:
    samples = [(reported(LIVENESS), of_api(restartCount=count)) for count in (0, 1, 1)]
    assert effects(*samples) == Effects()


def test_sidecar_is_compared_like_a_container() -> None:
    pod = of_api()
    pod["status"]["initContainerStatuses"] = pod["status"].pop("containerStatuses")
    assert len(effects((reported(LIVENESS), pod)).restarts) == 1


def test_pod_that_the_relay_cannot_proxy_to_stays_at_enforce() -> None:
    """The kubelet's probes of it stay as they are."""
    found = effects((reported(LIVENESS, problem="The loopback of the pod is down."), of_api()))
    assert found == Effects(at_enforce=("shop/web: The loopback of the pod is down.",))


def test_probe_without_a_result_cannot_be_compared() -> None:
    found = effects((reported(REDIRECTED), of_api()))
    assert found.unknown == (
        "shop/web, container app: Liveness probe has no result of podgate. Redirected to port "
        "15001 (Consul, user 5995), which shows nothing.",
    )
    new = probe(result="failure", last_message="", successes=0, failures=0)
    assert effects((reported(new), of_api())).unknown == (
        "shop/web, container app: Readiness probe has no result of podgate.",
    )


def test_probes_beside_one_that_cannot_be_compared_are_compared() -> None:
    found = effects((reported(REDIRECTED, READINESS), of_api()))
    assert (len(found.unknown), len(found.unready), found.compared) == (1, 1, 1)
    waiting = {"name": "aide", "state": {"waiting": {}}}
    pod = of_api()
    pod["status"]["containerStatuses"].append(waiting)
    other = msgspec.structs.replace(LIVENESS, container="aide")
    gone = msgspec.structs.replace(LIVENESS, container="gone")
    found = effects((reported(gone, other, READINESS), pod))
    assert (found.unready, found.compared) == (
        (
            "shop/web, container app: Readiness probe passes for the kubelet and fails from "
            f"inside: {REFUSED}.",
        ),
        1,
    )


@pytest.mark.parametrize(
    ("kind", "status", "compared"),
    [
        ("Startup", {"started": None, "ready": False}, 1),
        ("Startup", {"started": True, "ready": False}, 1),
        ("Liveness", {"started": False}, 0),
        ("Liveness", {"started": True, "ready": False}, 1),
        ("Readiness", {"started": True, "ready": False}, 1),
        ("Readiness", {"state": None}, 0),
    ],
)
def test_probe_is_compared_while_the_kubelet_runs_it(
    kind: str, status: dict[str, Any], compared: int
) -> None:
    failing = msgspec.structs.replace(LIVENESS, type=kind)
    assert effects((reported(failing), of_api(**status))).compared == compared


def test_pods_that_end_and_those_of_no_agent_are_left_out() -> None:
    ending = of_api()
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    assert effects((reported(LIVENESS), ending)) == Effects()
    assert effects((reported(LIVENESS), of_api("other"))) == Effects()
    comparison = Comparison()
    both = [reporting.encoded(reported(LIVENESS, name=name)) for name in ("ending", "web")]
    comparison.add(both, [of_api("web")])
    assert len(comparison.effects().restarts) == 1


def test_report_without_newer_fields_is_enough() -> None:
    comparison = Comparison()
    pod = reporting.encoded(reported(LIVENESS))
    del pod["strictProblem"], pod["probes"][0]["isRedirected"]
    comparison.add([pod], [of_api()])
    assert len(comparison.effects().restarts) == 1


def test_differences_are_in_order_of_pods_containers_and_probes() -> None:
    pods = [of_api(name) for name in ("web", "db")]
    for pod in pods:
        (app,) = pod["status"]["containerStatuses"]
        pod["status"]["containerStatuses"] = [app, {**app, "name": "aide"}]
    probes = [
        msgspec.structs.replace(LIVENESS, container=container, type=kind)
        for container in ("app", "aide", "gone")
        for kind in ("Startup", "Liveness")
    ]
    comparison = Comparison()
    found = [reporting.encoded(reported(*probes, name=name)) for name in ("web", "db")]
    comparison.add(found, pods)
    names = [text.partition(" probe")[0] for text in comparison.effects().restarts]
    assert names == [
        f"shop/{pod}, container {container}: {kind}"
        for pod in ("db", "web")
        for container in ("aide", "app")
        for kind in ("Liveness", "Startup")
    ]
    assert comparison.effects().compared == 8


def test_pods_that_stay_at_enforce_are_in_order_until_they_do_not() -> None:
    comparison = Comparison()
    pods = [of_api(name) for name in ("web", "db")]
    stuck = [reporting.encoded(reported(name=name, problem="No.")) for name in ("web", "db")]
    comparison.add(stuck, pods)
    assert comparison.effects().at_enforce == ("shop/db: No.", "shop/web: No.")
    comparison.add([reporting.encoded(reported(name=name)) for name in ("web", "db")], pods)
    assert comparison.effects() == Effects()


def test_probe_that_has_run_only_with_successes_or_failures_has_a_result() -> None:
    for successes, failures in ((1, 0), (0, 1)):
        probe_ = probe(type="Liveness", successes=successes, failures=failures)
        assert effects((reported(probe_), of_api())).compared == 1


def test_readiness_of_a_container_that_starts_is_not_compared() -> None:
    assert effects((reported(READINESS), of_api(started=False, ready=False))) == Effects()
