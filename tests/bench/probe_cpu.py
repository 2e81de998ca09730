"""CPU time of one probe, alone and beside the kubelet's own prober: parts of bench `probe`.

The kubelet's prober is a program of its own, which this repository does not have: KUBELET_PROBER
names it. It is called as `PROBER http|https|tcp|grpc ADDRESS PORT COUNT IN_FLIGHT`, runs that many
probes by the kubelet's pkg/probe/http (path /healthz), pkg/probe/tcp or pkg/probe/grpc (no
service), of which all must pass, and prints its CPU time for one, user and kernel, in microseconds.
"""

import asyncio
import contextlib
import gc
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from agent.lab import lab as labs
from probes.engine import prober
from probes.netns import Netns
from probes.results import ProbeOutcome
from probes.spec.definitions import Grpc, Handler, HttpGet, Probe, TcpSocket
from tests import processes
from tests.bench import answering, figures
from tests.probes.conftest import Sandbox, sandbox_netns

GRPC_PORT = 50051
_SAMPLES = 7
_COUNT, _SLOW_COUNT = 4000, 1000
_BARE = "tests.bench.bare_probe"
"""Called as the kubelet's prober."""


def beside_kubelet(cert: str, key: str) -> None:
    """Ratios to the kubelet's prober: both inside the pod's namespace, in turns, in one run."""
    command = shlex.split(os.environ.get("KUBELET_PROBER", ""))
    if not command:
        note("KUBELET_PROBER is not set: no comparison with the kubelet's prober")
        return
    handlers: tuple[tuple[str, Handler, int], ...] = (
        ("http", HttpGet(answering.PORT, "/healthz"), _COUNT),
        ("tcp", TcpSocket(answering.PORT), _COUNT),
        ("https", HttpGet(answering.PORT, "/healthz", "HTTPS"), _SLOW_COUNT),
        ("grpc", Grpc(GRPC_PORT), _SLOW_COUNT),
    )
    for kind, handler, count in handlers:
        for in_flight in (1, 16, 50):
            note(f"CPU beside the kubelet's prober, {in_flight} in flight: {kind}")
            own, others = [], []
            for _ in range(_SAMPLES):
                with sandbox() as made, server(kind, cert, key, made):
                    own.append(asyncio.run(cpu_us(handler, made, in_flight, count)))
                with sandbox() as made, server(kind, cert, key, made):
                    others.append(kubelet_cpu_us(command, kind, made, in_flight, count))
            ratios = [one / other for one, other in zip(own, others, strict=True)]
            figures.emit(
                "probe", f"{kind}_cpu_over_kubelet_ratio_{in_flight}", ratios, figures.RATIO
            )
            medians = f"{statistics.median(own):.1f} and {statistics.median(others):.1f}"
            note(f"medians: {medians} us")
    for kind, count in (("http", _COUNT), ("https", _SLOW_COUNT)):
        note(f"CPU of a loop of calls in Python beside the kubelet's prober: {kind}")
        ratios = []
        for _ in range(_SAMPLES):
            with sandbox() as made, server(kind, cert, key, made):
                bare = kubelet_cpu_us([sys.executable, "-m", _BARE], kind, made, 1, count)
            with sandbox() as made, server(kind, cert, key, made):
                ratios.append(bare / kubelet_cpu_us(command, kind, made, 1, count))
        figures.emit("probe", f"bare_{kind}_cpu_over_kubelet_ratio_1", ratios, figures.RATIO)


def kubelet_cpu_us(
    command: list[str], kind: str, made: Sandbox, in_flight: int, count: int = _COUNT
) -> float:
    """CPU time of the kubelet's prober for one probe in this namespace, in microseconds."""
    port = GRPC_PORT if kind == "grpc" else answering.PORT
    arguments = [kind, made.v4, str(port), str(count), str(in_flight)]
    result = subprocess.run(
        ["nsenter", f"--net={made.path}", *command, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        timeout=300,
    )
    return float(result.stdout)


async def cpu_us(handler: Handler, made: Sandbox, in_flight: int, count: int) -> float:
    """CPU time of this process a probe, user and kernel; every probe must pass."""
    loop = asyncio.get_running_loop()
    running = prober.Prober(loop)
    plan = prober.plan(Probe(handler, timeout_seconds=10.0), [made.v4])
    over = loop.create_future()
    left, under_way = count, 0

    def begin() -> None:
        nonlocal left, under_way
        while left and under_way < in_flight:
            left -= 1
            under_way += 1
            running.start(plan, made.netns, done)

    def done(outcome: ProbeOutcome) -> None:
        nonlocal left, under_way
        under_way -= 1
        if not outcome.passed:
            left = 0
            if not over.done():
                over.set_exception(AssertionError(outcome))
        elif left:
            loop.call_soon(begin)
        elif not under_way and not over.done():
            over.set_result(None)

    gc.collect()
    started = time.process_time()
    begin()
    await over
    used = time.process_time() - started
    running.close()
    return used / count * 1e6


@contextlib.contextmanager
def server(kind: str, cert: str, key: str, *sandboxes: Sandbox) -> Iterator[None]:
    """Serves the namespaces: http, closing, tcp, https (answering.PORT), or grpc of one."""
    if kind == "grpc":
        (made,) = sandboxes
        command = [
            *("nsenter", f"--net={made.path}", sys.executable, "-m", "tests.probes.grpc_server"),
            f"[::]:{GRPC_PORT}",
        ]
    else:
        paths = [made.path for made in sandboxes]
        command = [sys.executable, "-m", "tests.bench.answering", kind, cert, key, *paths]
    with processes.served(command):
        yield


@contextlib.contextmanager
def sandbox() -> Iterator[Sandbox]:
    """A namespace with a name of its own, as container runtimes make them: /proc costs more."""
    with sandbox_netns() as made:
        path = labs.LAB_DIRECTORY / "netns" / f"bench{made.pid}"
        path.touch()
        subprocess.run(["mount", "--bind", made.path, str(path)], check=True)
        try:
            yield Sandbox(Netns.open(str(path)), made.pid)
        finally:
            subprocess.run(["umount", str(path)], check=True)
            path.unlink()


def note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")
