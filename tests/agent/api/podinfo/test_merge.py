"""Conditions from several sources: the newest report is published, with its source."""

import datetime
from typing import Any

import msgspec

from agent import labels
from agent.api.podinfo.merge import PodRecord
from agent.api.podinfo.observed_pods import PodObserver
from agent.client.v1alpha1 import podinfo_pb2
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import PodReports
from agent.pods.conditions import Condition
from agent.pods.pod import Pod

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SINCE = "2026-01-01T00:00:00Z"
API, KUBELET, PODGATE = (
    podinfo_pb2.CONDITION_SOURCE_API,
    podinfo_pb2.CONDITION_SOURCE_KUBELET,
    podinfo_pb2.CONDITION_SOURCE_PODGATE,
)
TRUE, FALSE = podinfo_pb2.CONDITION_STATUS_TRUE, podinfo_pb2.CONDITION_STATUS_FALSE


def pod(version: str, *, uid: str = "u", mirrors: str = "", **conditions: str) -> ApiPod:
    annotations = {"kubernetes.io/config.mirror": mirrors} if mirrors else {}
    thing: dict[str, Any] = {
        "metadata": {
            "name": "web",
            "namespace": "tests",
            "uid": uid,
            "resourceVersion": version,
            "annotations": annotations,
        },
        "status": {
            "conditions": [
                {"type": kind.replace("__", "/"), "status": status, "lastTransitionTime": SINCE}
                for kind, status in conditions.items()
            ]
        },
    }
    return msgspec.convert(thing, ApiPod)


def own(kind: str, status: str) -> Condition:
    return Condition(kind, status, "Reason", "message", START)


def record_of(**reports: Any) -> PodRecord:
    """A pod of which podgate itself reports nothing."""
    return PodRecord(reports=PodReports(**reports))


def encoded(record: PodRecord, at: datetime.datetime = START) -> podinfo_pb2.PodConditions:
    content = PodObserver().observe(record, at).content
    response = podinfo_pb2.ListPodConditionsResponse.FromString(content)
    first: podinfo_pb2.PodConditions = response.pods[0]
    return first


def effective(record: PodRecord) -> dict[str, tuple[int, int]]:
    return {one.type: (one.status, one.source) for one in encoded(record).conditions}


def test_own_conditions_override_the_api_servers_copy() -> None:
    echo = pod("7")
    stale = msgspec.json.encode(echo).replace(
        b'"status":{}',
        b'"status":{"conditions":[{"type":"%s","status":"False"}]}'
        % labels.PROBES_PASSING.encode(),
    )
    record = PodRecord(
        reports=PodReports(of_api=msgspec.json.decode(stale, type=ApiPod)),
        own=(own(labels.PROBES_PASSING, "True"),),
    )
    assert effective(record) == {labels.PROBES_PASSING: (TRUE, PODGATE)}


def test_kubelet_overrides_for_conditions_that_it_computes() -> None:
    record = record_of(
        of_api=pod("9", Ready="True", Initialized="True"), of_kubelet=pod("7", Ready="False")
    )
    assert effective(record) == {"Ready": (FALSE, KUBELET), "Initialized": (TRUE, API)}


def test_newer_object_counts_for_other_conditions() -> None:
    older, newer = pod("7", custom="False"), pod("9", custom="True")
    assert effective(record_of(of_api=newer, of_kubelet=older)) == {"custom": (TRUE, API)}
    assert effective(record_of(of_api=older, of_kubelet=newer)) == {"custom": (TRUE, KUBELET)}


def test_pod_without_api_object_has_own_conditions() -> None:
    record = PodRecord(
        pod=Pod(uid="u", namespace="tests", name="web"), own=(own(labels.ISOLATION_READY, "True"),)
    )
    assert effective(record) == {labels.ISOLATION_READY: (TRUE, PODGATE)}
    assert (encoded(record).pod_uid, encoded(record).static) == ("u", False)


def test_unknown_status_is_unspecified_and_a_wrong_time_left_out() -> None:
    one = pod("7", Ready="Perhaps")
    wrong = msgspec.json.encode(one).replace(SINCE.encode(), b"yesterday")
    (condition,) = encoded(record_of(of_api=msgspec.json.decode(wrong, type=ApiPod))).conditions
    assert condition.status == podinfo_pb2.CONDITION_STATUS_UNSPECIFIED
    assert not condition.HasField("last_transition_time")


def test_static_pod_has_both_uids() -> None:
    mirror = pod("7", uid="api-uid", mirrors="config-hash")
    alone = record_of(of_kubelet=pod("", uid="config-hash"))
    assert (encoded(alone).static, encoded(alone).mirror_pod_uid) == (True, "")
    both = record_of(of_api=mirror, of_kubelet=alone.reports.of_kubelet)
    assert encoded(both).static
    assert (encoded(both).pod_uid, encoded(both).mirror_pod_uid) == ("config-hash", "api-uid")
    assert set(PodObserver().observe(both, START).uids) == {"config-hash", "api-uid"}


def test_pod_being_deleted_has_its_deletion_timestamp() -> None:
    leaving = msgspec.structs.replace(
        pod("7"), metadata=msgspec.structs.replace(pod("7").metadata, deletion_timestamp=SINCE)
    )
    assert encoded(record_of(of_api=leaving)).deletion_timestamp.seconds == START.timestamp()


class Ageing:
    """One pod's `PodObserver` over time."""

    def __init__(self) -> None:
        self.sightings = PodObserver()

    def seconds(self, at: float, record: PodRecord) -> float | None:
        """When its only condition was first seen as it is; None if that is not record."""
        entry = self.sightings.observe(record, START + datetime.timedelta(seconds=at))
        response = podinfo_pb2.ListPodConditionsResponse.FromString(entry.content)
        (condition,) = response.pods[0].conditions
        if not condition.HasField("observe_time"):
            return None
        observed: datetime.datetime = condition.observe_time.ToDatetime(datetime.UTC)
        return (observed - START).total_seconds()


def test_age_counts_from_the_last_change_of_anything_about_a_condition() -> None:
    age = Ageing()
    assert age.seconds(0, record_of(of_api=pod("7", Ready="True"))) == 0
    assert age.seconds(5, record_of(of_api=pod("8", Ready="True"))) == 0
    assert age.seconds(9, record_of(of_api=pod("9", Ready="False"))) == 9


def test_saved_condition_has_no_age_until_it_is_confirmed() -> None:
    age = Ageing()
    saved = record_of(of_api=pod("7", Ready="True"), is_confirmed=False)
    assert age.seconds(0, saved) is None
    assert age.seconds(5, saved) is None
    assert age.seconds(9, record_of(of_api=pod("7", Ready="True"))) == 9
