"""The time from a container's start to the first success of a probe."""

from agent.pods.conditions import Conditions
from agent.pods.container_runs import ContainerRun
from agent.pods.store import PodStore
from agent.probing.first_successes import FirstSuccesses
from agent.probing.metrics import ProbeMetrics
from probes.engine.scheduler import ProbeKey
from probes.engine.workers import ProbeType

READINESS = ProbeKey("uid", "app", ProbeType.READINESS)
LIVENESS = ProbeKey("uid", "app", ProbeType.LIVENESS)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0


class Observed(FirstSuccesses):
    def __init__(self) -> None:
        self.clock = Clock()
        self.found: list[tuple[str, float]] = []
        super().__init__(
            lambda probe_type, seconds: self.found.append((probe_type, seconds)),
            lambda: self.clock.now,
        )


def running(identity: str, started_at: float) -> dict[str, ContainerRun]:
    return {"app": ContainerRun(identity, started_at, is_running=True)}


def test_first_success_of_each_probe_counts_once() -> None:
    firsts = Observed()
    firsts.set_containers("uid", running("a", 1_001.0))
    firsts.clock.now = 1_003.5
    firsts.passed(READINESS)
    firsts.clock.now = 1_004.0
    firsts.set_containers("uid", running("a", 1_001.0))
    firsts.passed(READINESS)
    firsts.passed(LIVENESS)
    assert firsts.found == [("Readiness", 2.5), ("Liveness", 3.0)]


def test_restarted_container_counts_again() -> None:
    firsts = Observed()
    firsts.clock.now = 1_010.0
    firsts.set_containers("uid", running("a", 1_001.0))
    firsts.passed(READINESS)
    firsts.set_containers("uid", running("b", 1_009.0))
    firsts.passed(READINESS)
    assert firsts.found == [("Readiness", 9.0), ("Readiness", 1.0)]


def test_container_from_before_the_agent_does_not_count() -> None:
    firsts = Observed()
    firsts.set_containers("uid", running("a", 999.0))
    firsts.passed(READINESS)
    assert firsts.found == []


def test_start_in_the_future_by_another_clock_counts_as_now() -> None:
    firsts = Observed()
    firsts.set_containers("uid", running("a", 1_007.0))
    firsts.passed(READINESS)
    assert firsts.found == [("Readiness", 0.0)]


def test_pod_of_the_same_uid_after_its_removal_counts_again() -> None:
    firsts = Observed()
    container = running("a", 1_000.0)
    firsts.set_containers("uid", container)
    firsts.passed(READINESS)
    firsts.forget("uid")
    firsts.passed(READINESS)
    firsts.set_containers("uid", container)
    firsts.passed(READINESS)
    assert len(firsts.found) == 2


def test_container_that_no_runtime_knows_does_not_count() -> None:
    firsts = Observed()
    firsts.passed(READINESS)
    assert firsts.found == []


def test_metric_has_the_probes_type_and_no_pod() -> None:
    made = ProbeMetrics(PodStore(Conditions()))
    made.observe_first_success("Startup", 0.3)
    families = {family.name: family for family in made.collect(in_flight=0, queued=0)}
    samples = families["podgate_probe_first_success_seconds"].samples
    (count,) = (sample for sample in samples if sample.name.endswith("_count"))
    assert (count.labels, count.value) == ({"probe_type": "Startup"}, 1.0)
