"""Which report of a local pod's readiness counts: podgate's or the API's."""

import datetime
import itertools
from typing import Any

import msgspec
import pytest

from agent.kube.objects import ApiPod
from agent.kube.pod_reports import PodReports
from agent.pods.conditions import FALSE, TRUE, Condition
from agent.services.api.local_readiness import LocalReadiness, ProbeReadiness, effective_readiness

NOON = datetime.datetime(2026, 1, 1, 12, 0, 0, tzinfo=datetime.UTC)
PROBE = {"httpGet": {"port": 80}}
GATE = "podgate.io/probes-passing"


def at(seconds: float) -> datetime.datetime:
    return NOON + datetime.timedelta(seconds=seconds)


def pod(
    ready: str | None = "True",
    since: str | None = "2026-01-01T12:00:00Z",
    *,
    probe: dict[str, Any] | None = PROBE,
    is_container_ready: bool = True,
    gates: tuple[str, ...] = (),
    conditions: dict[str, str] | None = None,
    uid: str = "api-1",
    ip: str = "198.19.0.1",
    **spec: Any,
) -> ApiPod:
    listed = [{"type": kind, "status": status} for kind, status in (conditions or {}).items()]
    if ready is not None:
        listed.append({"type": "Ready", "status": ready, "lastTransitionTime": since})  # type: ignore[dict-item]
    return msgspec.convert(
        {
            "metadata": {"name": "web", "namespace": "default", "uid": uid},
            "spec": {
                "containers": [{"name": "app", "readinessProbe": probe}],
                "readinessGates": [{"conditionType": gate} for gate in gates],
                **spec,
            },
            "status": {
                "podIPs": [{"ip": ip}],
                "conditions": listed,
                "containerStatuses": [{"name": "app", "ready": is_container_ready}],
            },
        },
        ApiPod,
    )


@pytest.mark.parametrize(
    ("word", "found", "verdict"),
    [
        # Not probed.
        (None, pod("True"), None),
        # Both agree: their report counts, whatever the slices still have.
        (ProbeReadiness(True, at(-9)), pod("True"), True),
        (ProbeReadiness(False, at(-9)), pod("False"), False),
        # The most recent change counts.
        (ProbeReadiness(False, at(1)), pod("True"), False),
        (ProbeReadiness(False, at(-1)), pod("True"), None),
        (ProbeReadiness(True, at(1)), pod("False", is_container_ready=False), True),
        (ProbeReadiness(True, at(-1)), pod("False", is_container_ready=False), None),
        # In the same second: podgate, since the API's time was cut off.
        (ProbeReadiness(False, at(0.5)), pod("True"), False),
        (ProbeReadiness(False, at(0)), pod("True"), False),
        # The kubelet has reported no condition, or no time.
        (ProbeReadiness(False, at(-1)), pod(None), False),
        (ProbeReadiness(False, at(-1)), pod("True", None), False),
        (ProbeReadiness(False, at(-1)), pod("True", "yesterday"), False),
        (ProbeReadiness(True, at(1)), pod(None, is_container_ready=False), True),
        # That probes pass is not enough where something else is missing.
        (ProbeReadiness(True, at(1)), pod("False", is_container_ready=False, probe=None), None),
        (
            ProbeReadiness(True, at(1)),
            pod("False", is_container_ready=False, probe={"exec": {"command": ["true"]}}),
            None,
        ),
        (ProbeReadiness(True, at(1)), pod("False", gates=("other",)), None),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=("other",), conditions={"other": "False"}),
            None,
        ),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=("other",), conditions={"other": "True"}),
            True,
        ),
        (
            ProbeReadiness(True, at(1)),
            pod("False", gates=(GATE,), conditions={GATE: "False"}),
            True,
        ),
        # That they fail is enough.
        (
            ProbeReadiness(False, at(1)),
            pod("True", gates=("other",), conditions={"other": "True"}),
            False,
        ),
        # The node's own address is not the pod's.
        (ProbeReadiness(False, at(1)), pod("True", hostNetwork=True), None),
    ],
)
def test_most_recent_change_counts(
    word: ProbeReadiness | None, found: ApiPod, verdict: bool | None
) -> None:
    assert effective_readiness(word, PodReports(of_api=found)) is verdict


NEWER = "2026-01-01T12:00:09Z"


@pytest.mark.parametrize(
    ("word", "api", "kubelet", "is_current", "verdict"),
    [
        # Not probed: the kubelet's own report counts before the API server has it.
        (None, pod("True"), pod("False", NEWER), True, False),
        (None, pod("False"), pod("True", NEWER), True, True),
        (None, pod("True"), pod("True"), True, True),
        # Its stream has ended: until the API server has a later one.
        (None, pod("True"), pod("False", NEWER), False, False),
        (None, pod("True", NEWER), pod("False"), False, None),
        # Probed: the most recent change of all counts.
        (ProbeReadiness(True, at(1)), pod("True"), pod("False", NEWER), True, False),
        (ProbeReadiness(True, at(12)), pod("True"), pod("False", NEWER), True, True),
        (ProbeReadiness(False, at(12)), pod("True"), pod("True", NEWER), True, False),
        (ProbeReadiness(False, at(1)), pod("True"), pod("True", NEWER), True, True),
        # The node's own address is not the pod's, and its readiness is.
        (
            ProbeReadiness(False, at(12)),
            pod("True", hostNetwork=True),
            pod("True", hostNetwork=True),
            True,
            True,
        ),
    ],
)
def test_kubelets_own_report_counts_if_it_is_newer(
    word: ProbeReadiness | None,
    api: ApiPod,
    kubelet: ApiPod,
    is_current: bool,
    verdict: bool | None,
) -> None:
    reports = PodReports(of_api=api, of_kubelet=kubelet, is_current=is_current)
    assert effective_readiness(word, reports) is verdict


def test_container_that_has_not_started_is_not_ready() -> None:
    bare = msgspec.structs.replace(
        pod("False"), status=msgspec.structs.replace(pod("False").status, container_statuses=())
    )
    assert effective_readiness(ProbeReadiness(True, at(1)), PodReports(of_api=bare)) is None


class Watched:
    """The readiness of local pods with a fake clock, and the changes that were published."""

    def __init__(self) -> None:
        self.now = at(10)
        self.changes: list[frozenset[str]] = []
        self.readiness = LocalReadiness(on_changed=self.changes.append, now=lambda: self.now)

    def note(self, reason: str) -> None:
        status = TRUE if reason == "ProbesPassing" else FALSE
        self.readiness.set_probes("api-1", Condition(GATE, status, reason, "", self.now))

    def set_pod(self, pod: ApiPod) -> None:
        """As the API server has it."""
        self.readiness.set_pod(pod.uid, PodReports(of_api=pod))

    def is_ready(self) -> bool | None:
        return self.readiness.is_ready("api-1", "198.19.0.1")


ALL = frozenset(("api-1", "default/web", "198.19.0.1"))


def test_failing_pod_is_published_once_by_uid_name_and_address() -> None:
    watched = Watched()
    watched.set_pod(pod())
    assert watched.is_ready() is None
    watched.note("ProbeFailing")
    watched.note("ProbeFailing")
    assert watched.is_ready() is False
    assert watched.readiness.is_ready("", "198.19.0.1") is False
    assert watched.readiness.is_ready("default/web", "198.19.0.1") is False
    assert watched.readiness.is_ready("another", "198.19.0.1") is None
    assert watched.changes == [ALL]


def test_time_is_of_the_readiness_and_not_of_the_condition() -> None:
    watched = Watched()
    watched.now = at(-5)
    watched.note("NoNetns")
    watched.now = at(10)
    watched.note("ProbeFailing")
    watched.set_pod(pod())
    assert watched.is_ready() is False


@pytest.mark.parametrize("reason", ["NoProbes", "HostNetwork", "NoNetns", "PodSpecUnknown"])
def test_reasons_without_a_probe_do_not_count(reason: str) -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note(reason)
    assert watched.is_ready() is None


def test_pending_probe_after_start_does_not_count() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbePending")
    assert watched.is_ready() is None


def test_recovering_pod_stays_unready_until_it_passed_often_enough() -> None:
    watched = Watched()
    watched.set_pod(pod())
    for reason in ("ProbesPassing", "ProbeFailing", "ProbePending"):
        watched.note(reason)
    assert watched.is_ready() is False
    watched.note("ProbesPassing")
    assert watched.is_ready() is True


def test_later_report_of_the_kubelet_counts() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbeFailing")
    watched.set_pod(pod("True", "2026-01-01T12:00:20Z"))
    assert watched.is_ready() is None
    assert watched.changes == [ALL, ALL]


def test_same_report_of_a_pod_changes_nothing() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbeFailing")
    watched.set_pod(pod())
    assert watched.is_ready() is False
    assert watched.changes == [ALL]


def test_pod_with_another_address_leaves_its_previous_one() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbeFailing")
    watched.set_pod(pod(ip="198.19.0.2"))
    assert watched.readiness.is_ready("", "198.19.0.1") is None
    assert watched.readiness.is_ready("", "198.19.0.2") is False
    assert watched.changes == [ALL, ALL, ALL - {"198.19.0.1"} | {"198.19.0.2"}]


def test_time_of_a_result_is_of_its_first_report() -> None:
    watched = Watched()
    watched.note("ProbeFailing")
    assert watched.readiness.probed == {}
    watched.set_pod(pod())
    watched.now = at(20)
    watched.note("ProbeFailing")
    assert watched.readiness.probed == {"api-1": ProbeReadiness(False, at(10))}
    watched.note("ProbesPassing")
    assert watched.readiness.probed == {"api-1": ProbeReadiness(True, at(20))}
    watched.note("NoProbes")
    assert watched.readiness.probed == {}


def test_deleted_pod_does_not_affect_the_next_one_at_its_address() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbeFailing")
    watched.readiness.end("api-1")
    watched.set_pod(pod(uid="api-2"))
    assert watched.readiness.is_ready("", "198.19.0.1") is None
    assert watched.readiness.is_ready("api-2", "198.19.0.1") is None


def test_pod_that_has_ended_is_not_ready() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.changes.clear()
    watched.readiness.end("api-1")
    watched.readiness.end("api-1")
    assert watched.is_ready() is False
    assert watched.changes == [frozenset(["api-1"])]
    # Slices may have only the address or the name, and another pod may have either.
    assert watched.readiness.is_ready("", "198.19.0.1") is None
    assert watched.readiness.is_ready("default/web", "198.19.0.1") is None
    watched.note("ProbesPassing")
    assert watched.is_ready() is False


def test_name_is_of_the_pod_that_has_it_now() -> None:
    """Its predecessor ends after it has started."""
    watched = Watched()
    watched.set_pod(pod())
    watched.set_pod(pod("False", uid="api-2", ip="198.19.0.2"))
    watched.readiness.set_probes("api-2", Condition(GATE, FALSE, "ProbeFailing", "", watched.now))
    watched.readiness.end("api-1")
    assert watched.readiness.is_ready("default/web", "") is False
    assert watched.readiness.is_ready("api-2", "") is False


def test_pod_that_comes_back_with_its_uid_is_evaluated_again() -> None:
    """As a static pod whose manifest is put back."""
    watched = Watched()
    watched.set_pod(pod())
    watched.readiness.end("api-1")
    watched.set_pod(pod())
    assert watched.is_ready() is None


def test_static_pod_that_has_ended_is_not_ready_by_the_uid_of_slices() -> None:
    watched = Watched()
    mirror, static = pod(uid="mirror"), pod(uid="hash")
    watched.readiness.set_pod("hash", PodReports(of_api=mirror, of_kubelet=static))
    watched.readiness.end("hash")
    assert watched.readiness.is_ready("mirror", "198.19.0.1") is False


def test_only_so_many_ended_pods_are_kept() -> None:
    watched = Watched()
    for number in range(1001):
        watched.readiness.end(f"job-{number}")
    assert watched.readiness.is_ready("job-0", "") is None
    assert watched.readiness.is_ready("job-1", "") is False
    assert watched.readiness.is_ready("job-1000", "") is False


@pytest.mark.parametrize("is_ready", [False, True])
def test_saved_result_counts_until_the_first_of_this_agent(is_ready: bool) -> None:
    watched = Watched()
    watched.set_pod(pod("False" if is_ready else "True"))
    watched.readiness.restore({"api-1": ProbeReadiness(is_ready, at(1))})
    assert watched.is_ready() is is_ready
    watched.readiness.set_probes("api-1", None)
    assert watched.is_ready() is is_ready
    for reason in ("PodSpecUnknown", "NoNetns", "NotScheduled", "ProbePending"):
        watched.note(reason)
        assert watched.is_ready() is is_ready
    assert watched.readiness.probed == {"api-1": ProbeReadiness(is_ready, at(1))}
    watched.note("ProbeFailing" if is_ready else "ProbesPassing")
    assert watched.is_ready() is not is_ready


def test_saved_result_ends_with_a_newer_report_or_without_probes() -> None:
    watched = Watched()
    watched.readiness.restore({"api-1": ProbeReadiness(False, at(1))})
    watched.set_pod(pod("True", "2026-01-01T12:00:20Z"))
    assert watched.is_ready() is None
    watched.set_pod(pod())
    assert watched.is_ready() is False
    watched.note("NoProbes")
    assert watched.is_ready() is None


def test_saved_result_of_a_pod_that_this_agent_has_probed_is_ignored() -> None:
    watched = Watched()
    watched.set_pod(pod())
    watched.note("ProbeFailing")
    watched.readiness.restore({"api-1": ProbeReadiness(True, at(1))})
    assert watched.readiness.probed == {"api-1": ProbeReadiness(False, at(10))}
    watched.note("NoProbes")
    assert watched.readiness.probed == {}


def test_saved_result_of_a_pod_that_ends_is_dropped() -> None:
    watched = Watched()
    watched.readiness.restore({"api-1": ProbeReadiness(False, at(1))})
    watched.readiness.end("api-1")
    watched.set_pod(pod())
    assert (watched.is_ready(), watched.readiness.probed) == (None, {})
    watched.note("ProbeFailing")
    assert watched.is_ready() is False


@pytest.mark.parametrize(
    ("found", "is_enough"),
    [
        ({"initContainers": [{"name": "side", "readinessProbe": PROBE}]}, True),
        ({"initContainers": [{"name": "side", "readinessProbe": None}]}, False),
        ({"initContainers": [{"name": "other", "readinessProbe": PROBE}]}, False),
    ],
    ids=str,
)
def test_sidecar_that_podgate_probes_is_not_missing(found: dict[str, Any], is_enough: bool) -> None:
    api = pod("False", is_container_ready=False, **found)
    waiting = msgspec.structs.replace(api.status.container_statuses[0], name="side", ready=False)
    status = msgspec.structs.replace(api.status, init_container_statuses=(waiting,))
    reports = PodReports(of_api=msgspec.structs.replace(api, status=status))
    expected = True if is_enough else None
    assert effective_readiness(ProbeReadiness(True, at(1)), reports) is expected


@pytest.mark.parametrize("gates", [("other", "another"), ("another", "other")])
def test_each_other_gate_must_be_true(gates: tuple[str, ...]) -> None:
    found = pod("False", gates=(*gates, GATE), conditions={"other": "True"})
    assert effective_readiness(ProbeReadiness(True, at(1)), PodReports(of_api=found)) is None


WHEN = {"older": "2026-01-01T12:00:00Z", "newer": "2026-01-01T12:00:20Z"}
SOURCES = [None, *itertools.product(("True", "False"), WHEN)]


@pytest.mark.parametrize("is_current", [True, False], ids=["stream open", "stream ended"])
@pytest.mark.parametrize("kubelet", SOURCES, ids=str)
@pytest.mark.parametrize("api", SOURCES, ids=str)
@pytest.mark.parametrize("probed", [None, True, False], ids=str)
def test_sources_by_the_rule(
    probed: bool | None,
    api: tuple[str, str] | None,
    kubelet: tuple[str, str] | None,
    is_current: bool,
) -> None:
    """Each report of each source, older and newer than the probes' last change."""
    of_api, of_kubelet = (
        pod(source[0], WHEN[source[1]]) if source else None for source in (api, kubelet)
    )
    reports = PodReports(of_api=of_api, of_kubelet=of_kubelet, is_current=is_current)
    word = None if probed is None else ProbeReadiness(probed, at(10))
    # The kubelet's own report, unless its stream has ended and the API server has a later one.
    is_later = (api or "")[-1:] == ("newer",) and (kubelet or "")[-1:] == ("older",)
    own = None if is_later and not is_current else kubelet
    reported = own or api
    expected = None if own is None else own[0] == "True"
    if probed is not None:
        if reported is None:
            # Passing probes are not enough: no object shows what else the pod needs.
            expected = None if probed else False
        elif reported[1] == "older" or reported[0] == str(probed):
            expected = probed
    assert effective_readiness(word, reports) is expected
