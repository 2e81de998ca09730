"""What strict mode costs the kubelet, and how soon it goes direct: bench `relay`.

A real agent, its relay, and a stand-in kubelet. Probes by the relay and direct ones take turns: one
pod is in strict, the other in enforce, both are served by one process.
"""

import asyncio
import contextlib
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from agent.app import removal
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.relay.messages import Answer, HttpRequest
from bpf import loader, pins
from probes.clock import boot_clock_ns
from tests import processes
from tests.bench import answering, figures
from tests.bench.relayclient import REQUEST, RelayClient
from tests.kernel import cgroups, fleet
from tests.kernel.relayprocess import relay_process
from tests.kernel.strictnode import Node, wait_until

_RUNS = 9
_ROUNDS = 1000
_WARM_UP = 200
# More would fill half of the pod's ports, and then the kernel searches for long.
_CONNECTS = 1000
_IDLE = 5000
_FAILOVERS = 30
_IDLE_SECONDS = 10
# Of 100 pods with three probes of the default period.
_PROBES_PER_SECOND = 100 * 3 / 10
_HOUR_NS = 3600 * 10**9
# Of 100 pods with two probes of the default period, as in bench `cluster`.
_RESTING_PROBES_PER_SECOND = 100 * 2 / 10
_RESTING_RUNS, _RESTING_ROUNDS = 5, 100
_BARE = "tests.bench.bare_relay"


def main() -> None:
    labs.isolate()
    with _node() as (node, client):
        _memory(node, client)  # while the relay is small
        _latency(node, client)
        _rate(node, client)
        _fail_over(node, client)
    with _node() as (node, client):
        _at_rest(node, client)
    with Lab() as network, cgroups.cgroup() as kubelet:
        _answered(network, kubelet)


@contextlib.contextmanager
def _node() -> Iterator[tuple[Node, RelayClient]]:
    """For each measurement pods of its own: TIME-WAIT keeps the ports of the one before."""
    with (
        Lab() as network,
        tempfile.TemporaryDirectory() as folder,
        cgroups.cgroup() as kubelet,
        fleet.fleet(pathlib.Path(folder)) as served,
    ):
        operator = AgentProcess(pathlib.Path(folder))
        node = Node(network, served, operator, kubelet)
        for number, purpose in enumerate(("tcp", "http", "rate", "idle")):
            for mode in ("strict", "enforce"):
                node.add(
                    f"{purpose}-{mode}",
                    2 * number + 1 + (mode == "strict"),
                    ports=(),
                    probes=(fleet.http_probe(answering.PORT),),
                    mode=mode,
                )
        with _served(*(pod.pod for pod in node.pods.values())):
            client = RelayClient(kubelet)
            try:
                node.start()
                yield node, client
            finally:
                client.end()
                operator.stop(signal.SIGKILL)
                asyncio.run(removal.remove_relays())
                pins.Pins(operator.bpffs).remove_everything()


def _hosts(node: Node, purpose: str) -> list[str]:
    """Of the pod that the relay carries to, and of the one that is reached directly."""
    return [node.pods[f"{purpose}-{mode}"].pod.ipv4 for mode in ("strict", "enforce")]


@contextlib.contextmanager
def _served(*pods: LabPod) -> Iterator[None]:
    paths = [pod.netns.path for pod in pods]
    command = [sys.executable, "-m", "tests.bench.answering", "http", "", ""]
    with processes.served([*command, *paths]):
        yield


def _latency(node: Node, client: RelayClient) -> None:
    """Of both kinds, and again of the one to which the relay adds more."""
    _note("time of a whole probe, by the relay and direct in turn")
    pid = _relay(node)
    runs, cpu_us = {}, {}
    for kind in ("tcp", "http"):
        hosts = _hosts(node, kind)
        client.probe(kind, hosts, _WARM_UP)
        runs[kind], cpu_us[kind] = _probes(client, kind, hosts, pid)
        figures.emit("relay", f"cpu_us_per_{kind}_probe", cpu_us[kind], "us")
    idle = _idle_percent(pid)
    percent = [idle + _PROBES_PER_SECOND * cost / 1e6 * 100 for cost in cpu_us["http"]]
    figures.emit("relay", "core_percent_100_pods", percent, "%", baseline=[idle])
    for figure, at in (("added_p50_us", 0.5), ("added_p99_us", 0.99)):
        added, direct = {}, {}
        for kind, samples in runs.items():
            times = [[_quantile(host, at) * 1e6 for host in run] for run in samples]
            added[kind] = [carried - plain for carried, plain in times]
            direct[kind] = [plain for _, plain in times]
            figures.emit("relay", f"{figure}_{kind}", added[kind], "us", baseline=direct[kind])
        worst = max(added, key=lambda kind: statistics.median(added[kind]))
        figures.emit("relay", figure, added[worst], "us", baseline=direct[worst])


def _probes(
    client: RelayClient, kind: str, hosts: list[str], pid: int
) -> tuple[list[list[list[float]]], list[float]]:
    """By run: times as of `RelayClient.probe`, and the relay's CPU for one probe of the first
    host."""
    times, cpu_us = [], []
    for _ in range(_RUNS):
        before = _cpu_seconds(pid)
        times.append(client.probe(kind, hosts, _ROUNDS))
        cpu_us.append((_cpu_seconds(pid) - before) / _ROUNDS * 1e6)
    return times, cpu_us


def _idle_percent(pid: int) -> float:
    """Of one core, for heartbeats and reports."""
    before, started = _cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - started) * 100


def _answered(network: Lab, kubelet: cgroups.Cgroup) -> None:
    """A relay without agent, gates and hooks: the client connects to its address of the pod."""
    _note("time of a whole http probe, answered by the relay and direct in turn")
    installation = pins.Pins(labs.LAB_DIRECTORY / "bpf/answered")
    pathlib.Path(installation.bpffs).mkdir()
    asyncio.run(loader.load(installation)).close()
    pod = network.add_pod("answered", 1)
    client = RelayClient(kubelet)
    try:
        with _served(pod), relay_process(installation, pod) as relay:
            relay.set_answers(Answer(1, answering.PORT, HttpRequest(REQUEST), needs_pod=False))
            relay.set_verdict(1, is_healthy=True, ends_ns=boot_clock_ns() + _HOUR_NS)
            hosts = [relay.ipv4, pod.ipv4]
            client.probe("http", hosts, _WARM_UP)
            runs, cpu_us = _probes(client, "http", hosts, relay.process.pid)
    finally:
        client.end()
        installation.remove_everything()
    times = [[_quantile(host, 0.5) * 1e6 for host in run] for run in runs]
    added = [answered - direct for answered, direct in times]
    direct = [plain for _, plain in times]
    figures.emit("relay", "answered_added_p50_us", added, "us", baseline=direct)
    figures.emit("relay", "cpu_us_per_answered_probe", cpu_us, "us")


def _rate(node: Node, client: RelayClient) -> None:
    _note(f"{_CONNECTS} connections, 50 at a time; CPU of the relay's process")
    pid = _relay(node)
    strict, direct = _hosts(node, "rate")
    carried, plain, cpu_us = [], [], []
    for _ in range(_RUNS):
        plain.append(_CONNECTS / client.connect(direct, _CONNECTS))
        before = _cpu_seconds(pid)
        carried.append(_CONNECTS / client.connect(strict, _CONNECTS))
        cpu_us.append((_cpu_seconds(pid) - before) / _CONNECTS * 1e6)
    figures.emit("relay", "connections_per_s", carried, "1/s", baseline=plain)
    figures.emit("relay", "cpu_us_per_probe", cpu_us, "us")


def _at_rest(node: Node, client: RelayClient) -> None:
    """Of a probe that comes alone, after others have used the processor's caches; without what the
    relay takes meanwhile without any."""
    _note("CPU of one http probe among few: of the relay, and of the least that one does")
    relay = _relay(node)
    strict, direct = _hosts(node, "http")
    idle_us = _idle_percent(relay) / 100 / _RESTING_PROBES_PER_SECOND * 1e6
    costs: dict[str, list[float]] = {"relay": [], "python": [], "c": []}
    with (
        _bare(node, [sys.executable, "-m", _BARE], "127.0.0.2", direct) as python,
        tempfile.TemporaryDirectory() as folder,
        _bare(node, [_compiled(folder)], "127.0.0.3", direct) as in_c,
    ):
        ways = {"relay": (relay, strict), "python": (python, "127.0.0.2"), "c": (in_c, "127.0.0.3")}
        for _ in range(_RESTING_RUNS):
            for name, (pid, host) in ways.items():
                before = _cpu_seconds(pid)
                pause = 1 / _RESTING_PROBES_PER_SECOND
                client.probe("http", [host], _RESTING_ROUNDS, pause_seconds=pause)
                cost = (_cpu_seconds(pid) - before) / _RESTING_ROUNDS * 1e6
                costs[name].append(cost - (idle_us if name == "relay" else 0))
    figures.emit(
        "relay", "cpu_us_per_resting_probe", costs["relay"], "us", baseline=costs["python"]
    )
    figures.emit("relay", "bare_c_cpu_us_per_resting_probe", costs["c"], "us")


@contextlib.contextmanager
def _bare(node: Node, command: list[str], address: str, host: str) -> Iterator[int]:
    """A process of the kubelet's cgroup that carries to a host; its pid."""
    arguments = [*command, address, host, str(answering.PORT)]
    with node.kubelet.popen(arguments, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


def _compiled(folder: str) -> str:
    program = f"{folder}/bare_relay"
    source = pathlib.Path(__file__).with_name("bare_relay.c")
    subprocess.run(["gcc", "-O2", "-o", program, str(source)], check=True)
    return program


def _memory(node: Node, client: RelayClient) -> None:
    _note(f"{_IDLE} idle connections; the kernel's memory for their sockets is not counted")
    pid = _relay(node)
    before = _pss_mb(pid)
    client.hold(_hosts(node, "idle")[0], _IDLE)
    wait_until("all carried", lambda: _open_connections(node) >= _IDLE)
    figures.emit("relay", "mb_5000_idle", [_pss_mb(pid) - before], "MB")
    client.let_go()


def _fail_over(node: Node, client: RelayClient) -> None:
    _note(f"{_FAILOVERS} relays killed, each until the first connection that began afterwards")
    milliseconds = []
    for _ in range(_FAILOVERS):
        # A new agent, since one that lost a relay waits before it starts another.
        node.operator.stop(signal.SIGKILL)
        node.start()
        milliseconds.append(client.fail_over(_hosts(node, "idle")[0], _relay(node)) * 1000)
    figures.emit("relay", "failover_p99_ms", [_quantile(milliseconds, 0.99)], "ms")
    _note(f"median {statistics.median(milliseconds):.2f} ms, longest {max(milliseconds):.2f} ms")


def _relay(node: Node) -> int:
    pid = node.relay_pid()
    assert pid is not None, "no relay runs"
    return pid


def _open_connections(node: Node) -> int:
    report = node.operator.report()
    return report.relay.connections if report else 0


def _cpu_seconds(pid: int) -> float:
    """Of all of its threads; the clock ticks are too coarse."""
    tasks = pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def _pss_mb(pid: int) -> float:
    rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in rollup if line.startswith("Pss:")]
    return int(line.split()[1]) / 1024


def _quantile(samples: list[float], at: float) -> float:
    return sorted(samples)[int(len(samples) * at)]


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
