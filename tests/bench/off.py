"""How fast a node with a hundred enforced pods is open, and how fast nothing is attached any more:
bench `policy`, figures off_ms and detached_ms."""

import pathlib
import signal
import socket
import tempfile
import time

from agent.admin.report import AgentReport
from agent.lab import agent_process
from agent.lab import lab as labs
from agent.lab.lab import Lab, LabPod
from agent.pods import off_marks
from tests.bench import figures

_RUNS = 3
_PODS = 100
# Not declared: without an identified kubelet, declared ports are open.
_OTHER_PORT = 9090
_ATTEMPT_SECONDS = 0.02
_LIMIT_SECONDS = 60.0
_PROBE = {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 3600}}


def main() -> None:
    """From the file, which agents poll as an API server's label arrives: to a host process that
    reaches every pod, and to an empty `in_force`."""
    labs.isolate()
    with Lab() as network, tempfile.TemporaryDirectory() as directory:
        agent = agent_process.AgentProcess(pathlib.Path(directory))
        pods = [network.add_pod(f"pod{number}", number) for number in range(1, _PODS + 1)]
        for pod in pods:
            agent.write_manifest(pod, mode="enforce", container=_PROBE)
        try:
            agent.start("--mode", "enforce")
            file = off_marks.file(agent.run_directory)
            opened, detached = [], []
            for _ in range(_RUNS):
                agent.wait_for("all gates", _are_all_gated)
                started = time.monotonic()
                file.touch()
                for pod in pods:
                    _wait_until_open(pod)
                opened.append((time.monotonic() - started) * 1000)
                agent.wait_for("off", _is_off)
                detached.append((time.monotonic() - started) * 1000)
                file.unlink()
            figures.emit("policy", "off_ms", opened, "ms")
            figures.emit("policy", "detached_ms", detached, "ms")
        finally:
            agent.stop(signal.SIGKILL)
            agent.cleanup()


def _wait_until_open(pod: LabPod) -> None:
    """The pod has no server: it rejects what reaches it (RST)."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while True:
        with socket.socket() as sock:
            # Without a wait for the retransmission of a SYN that was dropped.
            sock.settimeout(_ATTEMPT_SECONDS)
            try:
                sock.connect((pod.ipv4, _OTHER_PORT))
            except ConnectionRefusedError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise


def _are_all_gated(report: AgentReport) -> bool:
    return len(report.pods) == _PODS and all(pod.gates for pod in report.pods)


def _is_off(report: AgentReport) -> bool:
    return report.max_mode == "off" and not report.in_force


if __name__ == "__main__":
    main()
