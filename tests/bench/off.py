"""How fast a node with a hundred enforced pods is off: bench `policy`, figure off_ms."""

import pathlib
import signal
import tempfile
import time

from agent.admin.report import AgentReport
from agent.lab import agent_process
from agent.lab import lab as labs
from agent.lab.lab import Lab
from agent.pods import off_file
from tests.bench import figures

_RUNS = 3
_PODS = 100
_PROBE = {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 3600}}


def main() -> None:
    """From the file, which agents poll as an API server's label arrives, to an empty `in_force`."""
    labs.isolate()
    with Lab() as network, tempfile.TemporaryDirectory() as directory:
        agent = agent_process.AgentProcess(pathlib.Path(directory))
        for number in range(1, _PODS + 1):
            pod = network.add_pod(f"pod{number}", number)
            agent.write_manifest(pod, mode="enforce", container=_PROBE)
        try:
            agent.start("--mode", "enforce")
            file = off_file.path(agent.run_directory)
            samples = []
            for _ in range(_RUNS):
                agent.wait_for("all gates", _are_all_gated)
                started = time.monotonic()
                file.touch()
                agent.wait_for("off", _is_off)
                samples.append((time.monotonic() - started) * 1000)
                file.unlink()
            figures.emit("policy", "off_ms", samples, "ms")
        finally:
            agent.stop(signal.SIGKILL)
            agent.cleanup()


def _are_all_gated(report: AgentReport) -> bool:
    return len(report.pods) == _PODS and all(pod.gates for pod in report.pods)


def _is_off(report: AgentReport) -> bool:
    return report.max_mode == "off" and not report.in_force


if __name__ == "__main__":
    main()
