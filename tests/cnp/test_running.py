"""The runner of the cases, with a cluster that the test makes up: what it reports and removes."""

import itertools
import signal
from collections.abc import Iterator, Sequence

import pytest

from tests.cnp import __main__ as command
from tests.cnp import cases, running
from tests.cnp.cases import ADMITTED, DROPPED, ORIGINS
from tests.cnp.kubectl import Json, Kubectl, KubectlError
from tests.cnp.running import NotRunnableError, Report, Run

SUITE = cases.read()
DENIED = {one.name for one in SUITE if one.host_process == DROPPED}
READY = {"conditions": [{"type": "Ready", "status": "True"}]}


class Cluster(Kubectl):
    """Drops what `dropped` has by origin, once there are policies."""

    def __init__(self) -> None:
        self.objects: list[Json] = []
        self.removed: list[str] = []
        self.dropped: dict[str, set[str]] = {origin: set() for origin in ORIGINS}
        self.failing = ""
        """A step of removal."""
        self.rounds_until_enforced = 0

    def has(self, *what: str) -> bool:
        return True

    def get(self, *what: str) -> Json:
        if what == ("nodes",):
            info = {"kubeletVersion": "v1.36.2"}
            return {"items": [{"metadata": {"name": "n1"}, "status": {**READY, "nodeInfo": info}}]}
        closed = self._dropped("kubelet")
        pods = [one for one in self.objects if one["kind"] == "Pod"]
        return {
            "items": [
                {
                    **pod,
                    "status": {
                        "podIP": f"198.18.0.{number}",
                        **({} if pod["metadata"]["name"] in closed else READY),
                    },
                }
                for number, pod in enumerate(pods, start=1)
            ]
        }

    def create(self, objects: Sequence[Json]) -> None:
        self.objects += objects

    def delete(self, *what: str) -> None:
        self.removed.append(what[0])
        if what[0] == self.failing:
            raise KubectlError(f"{what[0]} cannot be deleted")

    def shell(self, namespace: str, pod: str, script: str) -> str:
        if "rmdir" in script:
            return ""
        self.rounds_until_enforced -= pod == "host-process" and self._has_policies
        closed = self._dropped(pod) if pod in self.dropped else set()
        return "\n".join(one.name for one in SUITE if one.name not in closed)

    @property
    def _has_policies(self) -> bool:
        return any(one["kind"] == "ClusterNetworkPolicy" for one in self.objects)

    def _dropped(self, origin: str) -> set[str]:
        is_enforced = self._has_policies and self.rounds_until_enforced < 0
        return self.dropped[origin] if is_enforced else set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Without signals and waiting."""
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.0)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Cluster()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(cluster: Cluster) -> Report:
    """Each reading of the clock takes a second."""
    clock = itertools.count()
    return Run(
        *(cluster, SUITE),
        name="run",
        image="busybox",
        least_seconds=2,
        most_seconds=30,
        clock=lambda: float(next(clock)),
    ).run()


def test_implementation_that_closes_the_host_side_has_no_differences(cluster: Cluster) -> None:
    """Also one that takes a while."""
    cluster.dropped |= {"host-process": DENIED, "host-network": DENIED}
    cluster.rounds_until_enforced = 10
    report = run(cluster)
    assert report.differing == []
    assert not report.pods_are_dropped
    assert " !" not in command.table(report)


def test_implementation_that_drops_probes_is_marked(cluster: Cluster) -> None:
    cluster.dropped = dict.fromkeys(ORIGINS, DENIED)
    report = run(cluster)
    assert set(report.differing) == DENIED
    (row,) = (line for line in command.table(report).splitlines() if line.startswith("admin-deny "))
    assert row.split() == ["admin-deny", DROPPED, "!", DROPPED, DROPPED]


def test_implementation_that_admits_the_node_is_marked(cluster: Cluster) -> None:
    report = run(cluster)
    assert set(report.differing) == DENIED
    (row,) = (line for line in command.table(report).splitlines() if line.startswith("admin-deny "))
    assert row.split() == ["admin-deny", ADMITTED, ADMITTED, "!", ADMITTED, "!"]


def test_cluster_that_drops_without_policies_shows_nothing(cluster: Cluster) -> None:
    cluster.dropped["host-process"] = {"none"}
    cluster.objects = [{"kind": "ClusterNetworkPolicy"}]  # of someone else
    cluster.rounds_until_enforced = -1
    with pytest.raises(NotRunnableError, match="host-process does not reach none without"):
        run(cluster)
    assert cluster.removed == [running.POLICIES, "namespace"]


def test_removal_goes_on_after_a_step_that_fails(cluster: Cluster) -> None:
    cluster.failing = running.POLICIES
    with pytest.raises(KubectlError, match="cannot be deleted"):
        run(cluster)
    assert cluster.removed == [running.POLICIES, "namespace"]
