"""CPU time of tcp probes by listener lookups, and by connections: a part of bench `probe`.

All as an agent does them: scheduled, counted in its metrics, in the event loop. The three ways are
measured in turns. What a server saves, which accepts and closes, is not counted.
"""

import asyncio
import contextlib
import os
import pathlib
import shlex
import time
from collections.abc import Iterator, Sequence

from agent.lab import lab as labs
from agent.linux import pod_network
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.store import PodStore
from agent.probing import lookups
from agent.probing.metrics import ProbeMetrics
from agent.probing.recent import RecentProbes
from agent.settings import Settings
from bpf import listener_lookup, pins
from probes.engine import prober, scheduler
from probes.redirection import Acceptors
from probes.results import ProbeOutcome
from probes.spec.definitions import ContainerProbes, Probe, TcpSocket
from tests.bench import answering, figures, probe_cpu
from tests.probes.conftest import Sandbox

_SAMPLES = 7
_PER_SECOND = 1000
_NAMESPACES = 10
# Between two scrapes, which get all durations: Prometheus, documentation/examples/prometheus.yml.
_SECONDS = 15
_WAYS = {"connect": 1, "lookup": 1_000_000, "default": Settings().probe_connect_every}
"""In which periods probes connect. The agent's default is a mixture of the other two."""
_SWEPT, _SWEEPS_PER_SECOND = 100, 10


def main(cert: str, key: str) -> None:
    command = shlex.split(os.environ.get("KUBELET_PROBER", ""))
    with contextlib.ExitStack() as stack:
        lookup = stack.enter_context(_lookup())
        sandboxes = [stack.enter_context(probe_cpu.sandbox()) for _ in range(_NAMESPACES)]
        stack.enter_context(probe_cpu.server("tcp", cert, key, *sandboxes))
        taken: dict[str, list[float]] = {way: [] for way in _WAYS}
        kubelet = []
        for number in range(_SAMPLES):
            probe_cpu.note(f"{_PER_SECOND} tcp probes a second in three ways, {number + 1}")
            for way, connect_every in _WAYS.items():
                used = asyncio.run(_probe(lookup, sandboxes, connect_every))
                taken[way].append(used)
            if command:
                kubelet.append(probe_cpu.kubelet_cpu_us(command, "tcp", sandboxes[0], 16))
        for way, samples in taken.items():
            baseline = None if way == "connect" else taken["connect"]
            figures.emit("probe", f"cpu_us_tcp_by_{way}", samples, "us", baseline=baseline)
            percent = [used * _PER_SECOND / 1e6 * 100 for used in samples]
            figures.emit("probe", f"cpu_percent_1000_tcp_by_{way}", percent, "%")
            if kubelet:
                ratios = [own / other for own, other in zip(samples, kubelet, strict=True)]
                figures.emit("probe", f"tcp_by_{way}_over_kubelet_ratio", ratios, "")
        _sweep(lookup, sandboxes)


def _sweep(lookup: listener_lookup.ListenerLookup, sandboxes: Sequence[Sandbox]) -> None:
    """Looking up all targets ten times a second, without the wake-ups for it."""
    table = lookups.PodListeners(lookup)
    queries = []
    for number in range(_SWEPT):
        made = sandboxes[number % len(sandboxes)]
        netns_id = asyncio.run(pod_network.netns_number(made.path))
        assert netns_id is not None
        query = table.query(made.netns, netns_id, made.v4, answering.PORT)
        assert query is not None
        queries.append(query)
    samples = []
    for _ in range(_SAMPLES):
        started = time.process_time()
        for _ in range(1000):
            assert all(table.look_up(queries))
        samples.append((time.process_time() - started) / 1000 * _SWEEPS_PER_SECOND * 100)
    figures.emit("probe", "cpu_percent_sweep_100_targets", samples, "%")


async def _probe(
    lookup: listener_lookup.ListenerLookup, sandboxes: Sequence[Sandbox], connect_every: int
) -> float:
    """Microseconds of CPU time a probe, of probes once a second, after their first ones."""
    loop = asyncio.get_running_loop()
    metrics, recent = ProbeMetrics(PodStore(Conditions())), RecentProbes()
    acceptors = Acceptors(loop.time)
    counted = 0
    failed: list[ProbeOutcome] = []
    pods: dict[str, Pod] = {}

    def on_probe(key: scheduler.ProbeKey, outcome: ProbeOutcome) -> None:
        nonlocal counted
        counted += 1
        if not outcome.passed:
            failed.append(outcome)
        metrics.count_probe(
            pods[key.uid],
            container=key.container,
            probe_type=key.type.value,
            result="successful",
            seconds=outcome.duration_seconds,
        )
        recent.add(key, outcome)

    def on_lookups(key: scheduler.ProbeKey, seconds: list[float]) -> None:
        nonlocal counted
        counted += len(seconds)
        metrics.count_successes(
            pods[key.uid], container=key.container, probe_type=key.type.value, seconds=seconds
        )
        recent.add_successes(key, seconds)

    running = scheduler.Scheduler(
        on_result=lambda key, result: None,
        on_probe=on_probe,
        on_delay=metrics.start_delay.observe,
        starter=prober.Prober(loop, acceptors),
        spread_seconds=1.0,
    )
    if connect_every > 1:
        running.lookups.use(
            lookups.PodListeners(lookup),
            on_lookups=on_lookups,
            is_direct=acceptors.is_direct,
            connect_every=connect_every,
        )
    probes = ContainerProbes("app", readiness=Probe(TcpSocket(answering.PORT), period_seconds=1.0))
    numbers = [await pod_network.netns_number(made.path) for made in sandboxes]
    for number in range(_PER_SECOND):
        made, netns_id = sandboxes[number % _NAMESPACES], numbers[number % _NAMESPACES]
        uid = f"pod{number}"
        pods[uid] = Pod(uid=uid, namespace="bench", name=uid)
        container = scheduler.ProbedContainer(probes, "c1", time.time())
        running.set_pod(
            scheduler.ProbedPod(uid, made.netns, (made.v4,), (container,), netns_id=netns_id)
        )
    # The first ones, which look up who accepts, and a whole period of the others.
    await asyncio.sleep(2.5)
    running.lookups.settle()
    counted = 0
    waited, used = _waited_seconds(), time.process_time()
    await asyncio.sleep(_SECONDS)
    running.lookups.settle()
    waited, used = _waited_seconds() - waited, time.process_time() - used
    await running.aclose()
    assert not failed, failed[0]
    # Probes that are due while others have the processor for longer than a period run once, as
    # the kubelet's.
    assert counted > 0.9 * _PER_SECOND * (_SECONDS - waited), (counted, waited)
    return used / counted * 1e6


def _waited_seconds() -> float:
    """How long the main thread could have run, but other threads or processes had the processor
    (Documentation/scheduler/sched-stats.rst)."""
    times = pathlib.Path("/proc/self/schedstat").read_text(encoding="ascii").split()
    return int(times[1]) / 1e9


@contextlib.contextmanager
def _lookup() -> Iterator[listener_lookup.ListenerLookup]:
    installation = pins.Pins(labs.BPFFS)
    installation.prepare()
    directory: pathlib.Path = asyncio.run(listener_lookup.load(installation))
    with contextlib.closing(listener_lookup.ListenerLookup(directory)) as lookup:
        yield lookup
