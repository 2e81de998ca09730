"""What probes cost and how soon they are there: bench `probe`."""

import asyncio
import contextlib
import gc
import pathlib
import resource
import subprocess
import tempfile
import time

from agent.lab import lab as labs
from probes.engine import prober, scheduler
from probes.results import ProbeOutcome
from probes.spec.definitions import ContainerProbes, Grpc, HttpGet, Probe, TcpSocket
from tests.bench import answering, figures, probe_cpu, probe_flips, probe_lookups
from tests.probes import servers
from tests.probes.conftest import Sandbox

_SAMPLES = 7
_PORT = answering.PORT

_PODS = 500
_NAMESPACES = 10  # 50 pods share one: what is measured is podgate, and not 500 servers
_SCHEDULED_SECONDS = 15
# The kubelet's scale_test.go: as long as TIME-WAIT would keep a port.
_PER_SECOND = 600
_PACED_SECONDS = 60


def main() -> None:
    labs.isolate()
    _raise_file_limit()
    with tempfile.TemporaryDirectory() as folder:
        cert, key = servers.certificate(pathlib.Path(folder))
        _memory()
        _cpu(str(cert), str(key))
        probe_cpu.beside_kubelet(str(cert), str(key))
        probe_lookups.main(str(cert), str(key))
        _ports(str(cert), str(key))
        _scheduling(str(cert), str(key))
    probe_flips.main()


def _memory() -> None:
    """Before all else, while the process is small."""
    probe_cpu.note("memory of 5000 idle probes")

    async def measure() -> float:
        running = scheduler.Scheduler(
            on_result=lambda key, result: None, on_probe=lambda key, outcome: None
        )
        with probe_cpu.sandbox() as sandbox:
            gc.collect()
            before = _rss_mb()
            for number in range(5000):
                probe = Probe(HttpGet(9, f"/healthz?{number}"), 3600.0, period_seconds=3600.0)
                container = scheduler.ProbedContainer(
                    ContainerProbes("app", readiness=probe), f"c{number}", time.time()
                )
                running.set_pod(
                    scheduler.ProbedPod(
                        f"pod{number}", sandbox.netns, (sandbox.v4, sandbox.v6), (container,)
                    )
                )
            gc.collect()
            grown = _rss_mb() - before
        await running.aclose()
        return grown / 5

    figures.emit("probe", "mb_per_1000_probes", [asyncio.run(measure())], "MB")


def _cpu(cert: str, key: str) -> None:
    http, tcp, grpc = HttpGet(_PORT, "/healthz"), TcpSocket(_PORT), Grpc(probe_cpu.GRPC_PORT)
    https = HttpGet(_PORT, "/healthz", "HTTPS")
    for figure, kind, handler, in_flight, count in (
        ("cpu_us_http_1", "http", http, 1, 2000),
        ("cpu_us_http_50", "http", http, 50, 4000),
        ("cpu_us_tcp_50", "tcp", tcp, 50, 4000),
        ("cpu_us_grpc_50", "grpc", grpc, 50, 1000),
        ("cpu_us_https_50", "https", https, 50, 1000),
    ):
        probe_cpu.note(f"CPU of {count} probes, {in_flight} in flight: {kind}")
        samples = []
        for _ in range(_SAMPLES):
            # A namespace of its own for each: ports left by one sample are not the next one's.
            with probe_cpu.sandbox() as sandbox, probe_cpu.server(kind, cert, key, sandbox):
                samples.append(asyncio.run(probe_cpu.cpu_us(handler, sandbox, in_flight, count)))
        figures.emit("probe", figure, samples, "us")


def _ports(cert: str, key: str) -> None:
    """Two addresses at once: one's server leaves the end to the probe, the other's comes first."""
    probe_cpu.note(f"{_PER_SECOND} probes a second of one address, for {_PACED_SECONDS} s")
    with contextlib.ExitStack() as stack:
        sandboxes = {}
        for kind in ("http", "closing"):
            sandboxes[kind] = stack.enter_context(probe_cpu.sandbox())
            stack.enter_context(probe_cpu.server(kind, cert, key, sandboxes[kind]))
        asyncio.run(_pace(list(sandboxes.values())))
        left = {kind: _in_time_wait(sandbox) for kind, sandbox in sandboxes.items()}
    figures.emit("probe", "time_wait_600_per_s", [left["http"]], "ports")
    probe_cpu.note(
        f"all passed; with a server that ends first, TIME-WAIT holds {left['closing']} ends of it"
    )


async def _pace(sandboxes: list[Sandbox]) -> None:
    """Start each probe at its time, regardless of the others; all must pass."""
    loop = asyncio.get_running_loop()
    running = prober.Prober(loop)
    plan = prober.plan(Probe(HttpGet(_PORT, "/healthz"), timeout_seconds=10.0), [sandboxes[0].v4])
    total = _PER_SECOND * _PACED_SECONDS
    left = total * len(sandboxes)
    over = loop.create_future()
    started = loop.time()

    def begin(number: int) -> None:
        for sandbox in sandboxes:
            running.start(plan, sandbox.netns, done)
        if number < total:
            loop.call_at(started + number / _PER_SECOND, begin, number + 1)

    def done(outcome: ProbeOutcome) -> None:
        nonlocal left
        left -= 1
        if over.done():
            return
        if not outcome.passed:
            over.set_exception(AssertionError(outcome))
        elif not left:
            over.set_result(None)

    begin(1)
    await over
    running.close()


def _in_time_wait(sandbox: Sandbox) -> int:
    command = ["nsenter", f"--net={sandbox.path}", "ss", "-Htan", "state", "time-wait"]
    return len(subprocess.run(command, check=True, capture_output=True).stdout.splitlines())


def _scheduling(cert: str, key: str) -> None:
    probe_cpu.note(f"{_PODS} pods, three probes each, once a second, for {_SCHEDULED_SECONDS} s")
    with contextlib.ExitStack() as stack:
        sandboxes = [stack.enter_context(probe_cpu.sandbox()) for _ in range(_NAMESPACES)]
        stack.enter_context(probe_cpu.server("http", cert, key, *sandboxes))
        delays, percent = asyncio.run(_schedule(sandboxes))
    figures.emit("probe", "sched_delay_p99_ms", delays, "ms")
    figures.emit("probe", "cpu_percent_1500_per_s", percent, "%")


async def _schedule(sandboxes: list[Sandbox]) -> tuple[list[float], list[float]]:
    """The 99th percentile of each second's delays, and each second's CPU."""
    delays: list[float] = []
    failed: list[ProbeOutcome] = []
    running = scheduler.Scheduler(
        on_result=lambda key, result: None,
        on_probe=lambda key, outcome: None if outcome.passed else failed.append(outcome),
        on_delay=delays.append,
        spread_seconds=1.0,
    )
    probes = ContainerProbes(
        "app",
        readiness=Probe(HttpGet(_PORT, "/ready"), period_seconds=1.0),
        liveness=Probe(TcpSocket(_PORT), period_seconds=1.0),
    )
    side = ContainerProbes("side", readiness=Probe(HttpGet(_PORT, "/side"), period_seconds=1.0))
    for number in range(_PODS):
        sandbox = sandboxes[number % len(sandboxes)]
        containers = tuple(
            scheduler.ProbedContainer(each, "c1", time.time()) for each in (probes, side)
        )
        running.set_pod(
            scheduler.ProbedPod(f"pod{number}", sandbox.netns, (sandbox.v4, sandbox.v6), containers)
        )
    await asyncio.sleep(3)
    p99s, percents = [], []
    for _ in range(_SCHEDULED_SECONDS):
        delays.clear()
        used, started = time.process_time(), time.monotonic()
        await asyncio.sleep(1)
        percents.append((time.process_time() - used) / (time.monotonic() - started) * 100)
        assert len(delays) > 0.9 * 3 * _PODS, len(delays)
        p99s.append(figures.p99(delays) * 1000)
    await running.aclose()
    assert not failed, failed[0]
    return p99s, percents


def _rss_mb() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))


if __name__ == "__main__":
    main()
