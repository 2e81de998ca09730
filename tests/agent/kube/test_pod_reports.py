"""Which report of a pod counts: the API server's or the kubelet's."""

import datetime
from typing import Any

import msgspec
import pytest

from agent.kube import pod_reports
from agent.kube.objects import ApiPod
from agent.kube.pod_reports import API, KUBELET, PodReports

OTHER = "example.com/other"


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02}Z"


def pod(
    version: str, kind: str = "Ready", status: str = "True", changed: str | None = None, **more: Any
) -> ApiPod:
    condition = {"type": kind, "status": status, "lastTransitionTime": changed}
    return msgspec.convert(
        {
            "metadata": {"name": "web", "uid": "u", "resourceVersion": version, **more},
            "status": {"conditions": [condition]},
        },
        ApiPod,
    )


@pytest.mark.parametrize(
    ("kind", "is_current", "api", "kubelet", "counts"),
    [
        # The kubelet computes Ready: while it reports, nothing is newer.
        ("Ready", True, at(9), at(1), KUBELET),
        ("Ready", True, at(1), at(9), KUBELET),
        ("Ready", False, at(9), at(1), API),
        ("Ready", False, at(1), at(9), KUBELET),
        ("Ready", False, at(5), at(5), KUBELET),
        ("Ready", False, None, at(5), KUBELET),
        ("Ready", False, "yesterday", at(5), KUBELET),
        # Of others both have copies: the later one, or the one of the newer object.
        (OTHER, True, at(9), at(1), API),
        (OTHER, True, at(1), at(9), KUBELET),
        (OTHER, True, at(5), at(5), API),
        (OTHER, False, None, None, API),
    ],
)
def test_condition_counts_by_the_time_it_changed(
    kind: str, is_current: bool, api: str | None, kubelet: str | None, counts: str
) -> None:
    reports = PodReports(
        of_api=pod("9", kind, "False", api),
        of_kubelet=pod("7", kind, "True", kubelet),
        is_current=is_current,
    )
    assert reports.origin_of(kind) == counts
    condition = reports.condition(kind)
    assert condition is not None
    assert condition.status == ("False" if counts == API else "True")


def test_only_origin_that_has_a_condition_counts() -> None:
    reports = PodReports(of_api=pod("9", OTHER), of_kubelet=pod("7"))
    assert reports.origin_of(OTHER) == API
    assert reports.origin_of("Ready") == KUBELET
    assert PodReports(of_api=pod("9")).origin_of("Ready") == API
    assert PodReports(of_api=pod("9")).condition(OTHER) is None


def test_deletion_is_reported_by_either() -> None:
    deleted = pod("7", deletionTimestamp=at(30))
    assert PodReports(of_api=pod("9"), of_kubelet=deleted).deletion_timestamp == at(30)
    assert PodReports(of_api=deleted).deletion_timestamp == at(30)
    assert PodReports(of_api=pod("9")).deletion_timestamp is None


@pytest.mark.parametrize(
    ("status", "changed", "before", "counts"),
    [
        ("False", at(5), at(5), API),
        ("False", at(1), at(5), API),
        ("False", None, at(5), API),
        ("False", at(6), at(5), KUBELET),
        # Since the stream was opened, even in the same second, and by clocks that differ.
        ("False", at(20), at(5), KUBELET),
        ("False", at(20), at(40), KUBELET),
        ("False", at(19), at(40), API),
        ("True", at(1), at(5), KUBELET),
    ],
)
def test_other_status_from_a_started_kubelet_counts_if_it_is_later(
    status: str, changed: str | None, before: str, counts: str
) -> None:
    started = datetime.datetime(2026, 1, 1, 0, 0, 20, 900_000, datetime.UTC)
    by = {API: pod("9", changed=before), KUBELET: pod("7", "Ready", status, changed)}
    found = pod_reports.without_unverified(by[KUBELET], PodReports(of_api=by[API]), started)
    assert found.condition("Ready") == by[counts].condition("Ready")


def test_first_condition_of_a_pod_counts_from_a_started_kubelet() -> None:
    started = datetime.datetime(2026, 1, 1, 0, 0, 20, tzinfo=datetime.UTC)
    new = pod("7", "Ready", "False", at(1))
    assert pod_reports.without_unverified(new, PodReports(of_api=pod("9", OTHER)), started) == new


def test_conditions_of_others_from_a_started_kubelet_count() -> None:
    started = datetime.datetime(2026, 1, 1, 0, 0, 20, tzinfo=datetime.UTC)
    previous = PodReports(of_api=pod("9", OTHER, changed=at(5)))
    new = pod("7", OTHER, "False", at(5))
    assert pod_reports.without_unverified(new, previous, started) == new
    assert pod_reports.without_unverified(new, PodReports(), started) == new
