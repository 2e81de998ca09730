"""What an agent and its relay cost while nothing happens: bench `rest`.

For 0, 100 and 250 pods (PODGATE_BENCH_PODS="0 100" names others), in enforce and in strict, without
probes, with a tcp readiness probe each, every ten seconds, and with two http probes, as the pods of
bench `cluster` have them. One agent for each; its windows are the samples. System calls are counted
apart, since counting costs time.
"""

import contextlib
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from agent.admin.report import AgentReport
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from tests import processes
from tests.bench import answering, figures, resting
from tests.kernel import cgroups
from tests.kernel.strictnode import RANGE4, RANGE6

_PODS = [int(word) for word in (os.environ.get("PODGATE_BENCH_PODS") or "0 100 250").split()]
_MODES = (os.environ.get("PODGATE_BENCH_MODES") or "enforce strict").split()
_HTTP: dict[str, Any] = {"httpGet": {"port": answering.PORT, "path": "/healthz"}}
_PROBES: dict[str, dict[str, Any]] = {
    "no_probes": {},
    "tcp_probes": {"readinessProbe": {"tcpSocket": {"port": answering.PORT}}},
    "http_probes": {"readinessProbe": _HTTP, "livenessProbe": _HTTP},
}
# Of a crowd gates are filters first, and become links one by one (agent/gates/crowds.py).
_LINK_SECONDS = 1.0
# After that: confirmations and the garbage of the start are done.
_SETTLE_SECONDS = 20.0
_WINDOWS = 4
# A period of each probe, and whole periods of most else.
_WINDOW_SECONDS = 10.0


def main() -> None:
    labs.isolate()
    _bare_grpc()
    cpu: dict[tuple[str, int], list[float]] = {}
    """Of agent and relay, by mode and probes, and number of pods."""
    for count in _PODS:
        with Lab() as network, cgroups.cgroup() as kubelet, _process_in(kubelet):
            pods = [network.add_pod(f"pod{number}", number) for number in range(1, count + 1)]
            with _served(pods):
                for mode in _MODES:
                    for probes, container in _PROBES.items():
                        if count or not container:
                            _note(f"{count} pods, {mode}, {probes}")
                            with _agent(pods, kubelet, mode, container) as agent:
                                cpu[f"{mode}_{probes}", count] = _measure(
                                    agent.pid, f"{count}_pods_{mode}_{probes}"
                                )
    for (what, count), samples in cpu.items():
        fewer = [other for other in _PODS if 0 < other < count]
        if fewer:
            baseline = cpu[what, max(fewer)]
            name = f"{what}_cpu_{count}_over_{max(fewer)}_pods"
            figures.emit("rest", name, samples, "%", baseline=baseline)


def _bare_grpc() -> None:
    """What an agent takes for its APIs alone: of the library's own threads, without a call."""
    _note("a server and a client of gRPC, without podgate")
    with (
        tempfile.TemporaryDirectory() as folder,
        processes.served([sys.executable, "-m", "tests.bench.bare_grpc", f"{folder}/sock"]) as pid,
    ):
        time.sleep(_SETTLE_SECONDS)
        taken = [resting.samples([pid], _WINDOW_SECONDS)[pid] for _ in range(_WINDOWS)]
    wakeups = [sample.all_wakeups_per_second for sample in taken]
    figures.emit("rest", "bare_grpc_wakeups_per_second", wakeups, "1/s")


@contextlib.contextmanager
def _process_in(kubelet: cgroups.Cgroup) -> Iterator[None]:
    """A stand-in: an agent follows a process, not an empty cgroup."""
    with kubelet.popen(["sleep", "infinity"]) as process:
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def _served(pods: Sequence[LabPod]) -> Iterator[None]:
    paths = [pod.netns.path for pod in pods]
    with processes.served([sys.executable, "-m", "tests.bench.answering", "http", "", "", *paths]):
        yield


@contextlib.contextmanager
def _agent(
    pods: Sequence[LabPod], kubelet: cgroups.Cgroup, mode: str, container: dict[str, Any]
) -> Iterator[AgentProcess]:
    """An agent whose pods are all as desired."""
    with tempfile.TemporaryDirectory() as directory:
        agent = AgentProcess(pathlib.Path(directory))
        agent.kubelet = (
            *("--kubelet", f"cgroup:{kubelet.path}"),
            *("--relay-range4", RANGE4, "--relay-range6", RANGE6),
        )
        for pod in pods:
            agent.write_manifest(pod, mode=mode, container=container)

        def is_settled(report: AgentReport) -> bool:
            conditions = [one.status for pod in report.pods for one in pod.conditions]
            return (
                report.is_synced
                and len(report.pods) == len(pods)
                and all(status == "True" for status in conditions)
            )

        try:
            agent.start("--mode", mode)
            agent.wait_for("all pods as desired", is_settled)
            for _ in range(len(pods)):
                if len(list(agent.bpffs.glob("podgate/v*/links/gate_*"))) >= 2 * len(pods):
                    break
                time.sleep(_LINK_SECONDS)
            time.sleep(_SETTLE_SECONDS)
            yield agent
        finally:
            agent.stop(signal.SIGTERM)
            agent.cleanup()


def _measure(pid: int, name: str) -> list[float]:
    """CPU of agent and relay together, in % of a core, by window."""
    processes_by_name = {"agent": pid}
    for number, child in enumerate(resting.children(pid)):
        processes_by_name["relay" if not number else f"relay{number}"] = child
    windows = [
        resting.samples(list(processes_by_name.values()), _WINDOW_SECONDS) for _ in range(_WINDOWS)
    ]
    together = [list(window.values()) for window in windows]
    memory = [sum(one.pss_mb for one in window) for window in together]
    figures.emit("rest", f"{name}_agent_and_relay_pss_mb", memory, "MB")
    for process, one in processes_by_name.items():
        taken = [window[one] for window in windows]
        threads = {thread for sample in taken for thread in sample.wakeups_per_second}
        wakeups = {
            f"of_{thread}": statistics.median(
                sample.wakeups_per_second.get(thread, 0) for sample in taken
            )
            for thread in sorted(threads)
        }
        prefix = f"{name}_{process}"
        figures.emit(
            "rest",
            f"{prefix}_wakeups_per_second",
            [sample.all_wakeups_per_second for sample in taken],
            "1/s",
            parts=wakeups,
        )
        figures.emit("rest", f"{prefix}_cpu_percent", [one.cpu_percent for one in taken], "%")
        figures.emit("rest", f"{prefix}_pss_mb", [one.pss_mb for one in taken], "MB")
        calls = resting.system_calls_per_second(one, _WINDOW_SECONDS)
        if calls is not None:
            figures.emit("rest", f"{prefix}_system_calls_per_second", [calls], "1/s")
    return [sum(one.cpu_percent for one in window) for window in together]


def _note(text: str) -> None:
    sys.stderr.write(f"bench: {text}\n")


if __name__ == "__main__":
    main()
