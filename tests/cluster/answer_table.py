"""When the kubelet concludes something from probes, compared with its own rule.

The rule is the kubelet's, 1.36.2: pkg/kubelet/prober/worker.go (doProbe) counts equal results in a
row, and stores one whose count has reached its threshold; pkg/kubelet/kubelet.go
(syncLoopIteration) syncs the pod at once when a stored result changes; pkg/kubelet/kuberuntime
(computePodActions) kills a container whose liveness or startup result is a failure. So what the
kubelet concludes has the time of the result that crosses the threshold, and each test computes that
time from the results in the kubelet's own log.
"""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import parser

from tests import polling
from tests.cluster import switched, switching
from tests.cluster.deployment import Deployment
from tests.cluster.kubelet_log import Result
from tests.cluster.one_node import OneNode
from tests.cluster.switching import Row, SwitchedPod
from tests.cluster.workloads import Workloads

# The kubelet's sync after a result takes milliseconds, and the grace period is 1 s. A loaded
# machine is late.
_LATE_SECONDS = 5
MORE_RESULTS = 4
"""Of the kubelet, after which a change would have shown."""
# Many servers start at once.
_PATIENCE_SECONDS = 180
# Of the kubelet's own texts, by its handler (pkg/probe).
_TEXTS = {
    "http": "HTTP probe failed with statuscode: 503",
    "grpc": 'service unhealthy (responded with \\"NOT_SERVING\\")',
    "tcp": "connect: connection refused",
}


def crossing(results: Iterable[Result], row: Row, *, is_success: bool) -> float:
    """When a result first crossed its threshold, by the kubelet's rule; infinite if none did."""
    threshold = row.successes if is_success else row.failures
    run = 0
    for result in results:
        run = run + 1 if result.is_success == is_success else 0
        if run == threshold:
            return result.seconds
    return float("inf")


class Table:
    """The pods of all rows, and a line of output for each."""

    def __init__(
        self,
        users: Workloads,
        node: OneNode,
        podgate: Deployment,
        rows: Sequence[Row],
        lines: list[str],
    ) -> None:
        switching.provide(users, node)
        self._users = users
        self._podgate = podgate
        self.pods = [SwitchedPod(users, node, row) for row in rows]
        self.lines = lines

    def until_ready(self) -> None:
        self.until("Ready", lambda pod: pod.status().get("ready"))

    def until_answered(self) -> None:
        """No further probe of the kubelet reaches the part `own` of rows that are answered."""
        seen: dict[str, tuple[int, float]] = {}

        def is_answered(pod: SwitchedPod) -> bool:
            if not pod.row.is_answered:
                return True
            requests, since = seen.setdefault(pod.row.name, (-1, 0.0))
            if requests != (now := pod.requests()):
                seen[pod.row.name] = (now, time.time())
                return False
            return len(pod.results(since)) >= MORE_RESULTS

        self.until("answered", is_answered)

    def switch(self, health: Callable[[Row], str]) -> float:
        """Switch the part on which each row depends; the seconds of the wall clock before."""
        before = time.time()
        for pod in self.pods:
            pod.switch(**{pod.row.part: health(pod.row)})
        return before

    def break_own(self) -> None:
        """The server of the kubelet's probes of answered rows ends, and they pass."""
        since = time.time()
        for pod in self.pods:
            if pod.row.is_answered:
                pod.switch(own=switched.DEAD)
        self.until("probed again", lambda pod: len(pod.results(since)) >= MORE_RESULTS)
        for pod in self.pods:
            failed = [one for one in pod.results(since) if not one.is_success]
            assert failed == [], pod.row.name

    def until(self, what: str, holds: Callable[[SwitchedPod], object]) -> None:
        """Wait until this holds of each row."""
        left = list(self.pods)

        def check() -> bool:
            left[:] = [pod for pod in left if not holds(pod)]
            if left:
                time.sleep(0.5)
            return not left

        try:
            polling.wait_until(f"each row is {what}", check, seconds=_PATIENCE_SECONDS)
        except polling.TimedOutError as error:
            found = [(pod.row.name, pod.status(), pod.results()[-5:]) for pod in left]
            raise AssertionError(f"{error}; not {what}: {found}") from error

    def check(self, pod: SwitchedPod, since: float, *, is_success: bool, conclusion: str) -> None:
        """What the kubelet concluded first has the time that its rule gives for its results."""
        row = pod.row
        results = pod.results(since)
        rule = crossing(results, row, is_success=is_success)
        found = [one for one in pod.conclusions(since) if one.what == conclusion]
        assert found, f"{row.name}: the kubelet did not conclude {conclusion}: {results}"
        late = found[0].seconds - rule
        counted = [one for one in results if one.seconds <= rule and one.is_success == is_success]
        self.lines.append(
            f"{row.kind:9} {row.name:32} {conclusion:20} {len(counted)} results, "
            f"{rule - since:5.1f} s by the rule, concluded {late * 1000:+4.0f} ms"
        )
        assert 0 <= late < _LATE_SECONDS, self.lines[-1]
        found_by_podgate = self._failures(pod)
        self.lines[-1] += f", podgate found {found_by_podgate} failures"
        if row.is_answered and not is_success:
            assert found_by_podgate > 0, self.lines[-1]
            texts = {one.output for one in counted}
            assert all(_TEXTS[row.own] in text for text in texts), (row.name, texts)

    def _failures(self, pod: SwitchedPod) -> int:
        """Of podgate's own probe."""
        found = {
            (sample.labels["pod"], sample.labels["probe_type"]): sample.value
            for family in parser.text_string_to_metric_families(self._podgate.metrics())
            for sample in family.samples
            if sample.name == "prober_probe_total" and sample.labels["result"] == "failed"
        }
        return int(found.get((pod.row.name, pod.row.kind.capitalize()), 0))

    def check_restart(self, pod: SwitchedPod, since: float) -> None:
        """The container that ended did so when its grace period was over, for this reason."""
        rule = crossing(pod.results(since), pod.row, is_success=False)
        late = pod.ended() - rule
        self.lines[-1] += f", container ended {late:+.1f} s"
        assert 0 <= late < _LATE_SECONDS, self.lines[-1]
        killed = [one["message"] for one in pod.events("Killing")]
        assert killed == [f"Container app failed {pod.row.kind} probe, will be restarted"]
