"""The demo's node: its pods, its agent and its kubelet stub, and how the acts show them."""

import pathlib
import signal
from concurrent import futures

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import agent_process, attempts
from agent.lab.agent_process import AgentProcess
from agent.lab.kubelet_stub import KubeletStub
from agent.lab.lab import Lab, LabPod
from agent.operate.demo import events
from agent.operate.demo.events import Danger, Fact
from agent.operate.demo.pods import PORT, DemoPods
from agent.pods.conditions import TRUE

RELAY_OPTIONS = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")

# What `podgate drops` shows as the source process of the demo's attempts (at most 15 bytes).
PROCESS_NAME = "host-process"

# Commands that read pinned maps.
_READ_PINS = ("drops", "explain", "status")

_GATE_DANGER = {"Audit": Danger.COUNTED, "Enforced": Danger.CLOSED, "Strict": Danger.CLOSED}
_NO_GATE = Fact("no gate", Danger.OPEN)
_UNKNOWN = Fact("")


class DemoNode:
    """All acts share it."""

    def __init__(self, network: Lab, cgroup: pathlib.Path) -> None:
        """cgroup: of the kubelet stub."""
        self.agent = AgentProcess()
        self.pods = DemoPods(network, self.agent)
        self.options = ("--kubelet", f"cgroup:/{cgroup.name}", *RELAY_OPTIONS)
        self.kubelet = KubeletStub(cgroup)
        self.timings: dict[str, float] = {}
        self.drop_result = ""
        """The result of a connect that is dropped; known once an agent runs."""
        self._source_port = 40000
        self._drawn: list[events.PodScene] = []
        pathlib.Path("/proc/self/comm").write_text(PROCESS_NAME, encoding="utf-8")

    def end(self) -> None:
        """Stop all processes; the kernel would do it as well."""
        self.agent.stop(signal.SIGKILL)
        self.kubelet.stop()
        self.pods.kill_servers()

    def report(self) -> AgentReport:
        return self.agent.wait_for("a status report", lambda report: True)

    def connect(self, pod: LabPod, family: str, *, is_rejected: bool) -> str:
        """The result of a host process's connect to the port that the pod declares."""
        return attempts.connect_from_node(pod, family, PORT, is_rejected=is_rejected)

    def inject(self, pod: LabPod, source: str, family: str) -> str:
        """The result of a SYN by a packet socket of the host."""
        # A new port each time: a retransmission of a previous SYN must not count.
        self._source_port += 1
        return attempts.inject_syn(pod, source, family, PORT, self._source_port)

    def draw(self, agent: Fact) -> None:
        """Show the node, with its pods as a running agent reports them, else as they were."""
        if self.agent.is_running:
            report = self.report()
            self._drawn = [_pod_scene(pod, report) for pod in self.pods.all]
        events.emit(events.Scene(agent, self._drawn))

    def draw_open(self, agent: Fact) -> None:
        """Show the node with its pods without gates."""
        self._drawn = [events.PodScene(pod.name, _NO_GATE, _UNKNOWN) for pod in self.pods.all]
        events.emit(events.Scene(agent, self._drawn))

    def show(self, *commands: str) -> None:
        """Run commands of podgate at the same time, and show what they print."""
        with futures.ThreadPoolExecutor() as pool:
            outputs = list(pool.map(self._output, commands))
        for command, output in zip(commands, outputs, strict=True):
            events.emit(events.Evidence(f"podgate {command}", output))

    def _output(self, command: str) -> str:
        where = ["--run-directory", str(self.agent.run_directory)]
        if command.startswith(_READ_PINS):
            where += ["--bpffs", str(self.agent.bpffs)]
        done = self.agent.run(*command.split(), *where)
        return (done.stderr + done.stdout).rstrip("\n")


def _pod_scene(pod: LabPod, report: AgentReport) -> events.PodScene:
    status = agent_process.pod_of(report, pod.name)
    if status is None or not status.gates:
        return events.PodScene(pod.name, _NO_GATE, _UNKNOWN)
    isolation = agent_process.condition_of(report, pod.name, labels.ISOLATION_READY)
    reason = isolation.reason if isolation else "unknown"
    gate = Fact(reason, _GATE_DANGER.get(reason, Danger.OPEN))
    probes = agent_process.condition_of(report, pod.name, labels.PROBES_PASSING)
    if probes is None or probes.reason == "ProbePending":
        return events.PodScene(pod.name, gate, _UNKNOWN)
    is_passing = probes.status == TRUE
    state = Fact(
        "ready" if is_passing else "not ready", Danger.CLOSED if is_passing else Danger.COUNTED
    )
    return events.PodScene(pod.name, gate, state)
