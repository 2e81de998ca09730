"""The demo: `python -m agent.operate.demo.stage`, as process 1 of a PID namespace of its own.

Prints messages as JSON lines. Nothing is simulated: interfaces, programs, servers, probes and the
agent are real, and every check compares an observed result with the expected one.
"""

import asyncio
import contextlib
import os
import pathlib
import select
import signal
import sys
import threading
import time

from agent import labels
from agent.admin.report import AgentReport
from agent.lab import agent_process, leftovers, polling
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import BPFFS, Lab
from agent.logs import Event
from agent.operate.demo import events
from agent.operate.demo.events import Act, Danger, Fact
from agent.operate.demo.failure_act import FailureAct
from agent.operate.demo.host_acts import HostActs
from agent.operate.demo.kubelet_acts import KubeletActs
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import PORT
from agent.pods.conditions import TRUE
from agent.relay import interfaces as relay_interfaces
from bpf import cleanup, errors, loader, pins
from bpf.pinning import Origin
from probes.netns import netns_cookie

OPEN = Act("open", "Without podgate, every process of the node reaches every port of every pod.")
AUDIT = Act("audit", "podgate counts what enforce would drop, with its source; all of it passes.")
ENFORCE = Act("enforce", "Gates drop what the host starts, except the kubelet's probes.")
STRICT = Act("strict", "A relay carries the kubelet's probes into the pod: nothing else gets in.")
FAILURE = Act(
    "failure",
    "Gates are in the kernel and stay without the agent. After 15 s without it, declared ports "
    "open only where the kernel cannot follow the kubelet's restarts.",
)
CLEAN_UP = Act("clean-up", "The agent returns, all is removed, and the pods are open again.")
ACTS = (OPEN, AUDIT, ENFORCE, STRICT, FAILURE, CLEAN_UP)

_NOT_RUNNING = Fact("not running", Danger.OPEN)
_RUNNING = Fact("running", Danger.CLOSED)
_NOTHING_LEFT = Fact("nothing left in the kernel", Danger.CLOSED)
_FALLS_BACK = Fact("strict needs Linux 5.14, falls back to enforce", Danger.COUNTED)


class Stage:
    """The acts in their order."""

    def __init__(self, node: DemoNode) -> None:
        self._node = node
        self._agent = node.agent
        self._pods = node.pods
        self._hosts = HostActs(node)
        self._kubelet = KubeletActs(node)
        self._has_relay = netns_cookie() is not None
        self._isolated = self._pods.are_isolated("Strict" if self._has_relay else "Enforced")
        """Whether pods in strict are as this kernel allows."""

    def play(self) -> None:
        """All acts in order. Raises `TimedOutError` when one cannot continue."""
        events.emit(OPEN)
        self._open()
        events.emit(AUDIT)
        self._audit()
        events.emit(ENFORCE)
        self._enforce()
        events.emit(STRICT)
        self._strict()
        events.emit(FAILURE)
        self._failure()
        events.emit(CLEAN_UP)
        self._clean_up()
        events.emit(events.Timings(self._node.timings))

    def _open(self) -> None:
        self._node.draw_open(_NOT_RUNNING)
        events.emit(events.Step("starting servers in the pods, compiling podgate's programs"))
        # Until an agent attaches them, programs are not part of any packet's way.
        compiling = threading.Thread(target=self._compile, name="compile")
        compiling.start()
        self._pods.start_servers()
        self._hosts.open()
        compiling.join()

    def _compile(self) -> None:
        # The agent compiles what is missing, and reports why that fails.
        with contextlib.suppress(errors.KernelSideError):
            outcome = asyncio.run(loader.ensure_pinned(pins.Pins(BPFFS)))
            self._node.timings["compile_load"] = round(outcome.seconds * 1000, 1)

    def _audit(self) -> None:
        events.emit(events.Step("starting podgate in audit"))
        self._pods.write_manifests("audit")
        self._agent.start(*self._node.options)
        report = self._agent.wait_for("isolation in audit", self._pods.are_isolated("Audit"))
        self._node.drop_result = agent_process.drop_result(report)
        self._node.draw(_RUNNING)
        self._hosts.audit()
        self._node.draw(_RUNNING)
        self._node.show("drops")

    def _enforce(self) -> None:
        events.emit(events.Step("switching every pod to enforce"))
        self._pods.write_manifests("enforce")
        self._agent.wait_for("isolation in enforce", self._pods.are_isolated("Enforced"))
        self._node.draw(_RUNNING)
        self._hosts.enforce()
        self._kubelet.by_the_gate("enforce")
        events.emit(events.Step("probing from inside the pods"))
        self._hosts.probes()
        self._node.timings["first_probe"] = _first_probe_ms(self._agent, "demo/web")
        self._node.draw(_RUNNING)
        self._node.show(f"explain --from pid:{os.getpid()} --to demo/web --port {PORT}")

    def _strict(self) -> None:
        if not self._has_relay:
            self._strict_falls_back()
            return
        events.emit(events.Step("switching every pod to strict: starting the relay"))
        started = time.monotonic()
        self._pods.write_manifests("strict")
        self._wait_for_strict()
        self._node.timings["strict"] = round((time.monotonic() - started) * 1000, 1)
        self._node.draw(_RUNNING)
        self._kubelet.in_strict()
        self._node.show("status")

    def _strict_falls_back(self) -> None:
        events.emit(events.Step("switching every pod to strict, which this kernel does not offer"))
        self._pods.write_manifests("strict")
        report = self._agent.wait_for("the fallback of strict", self._pods.fall_back_from_strict)
        observed = self._pods.isolation_reasons(report)
        events.check("podgate: isolation in strict", "Enforced", observed, fact=_FALLS_BACK)
        self._node.draw(_RUNNING)
        self._kubelet.by_the_gate("strict that falls back")
        self._node.show("status")

    def _wait_for_strict(self) -> AgentReport:
        return self._agent.wait_for("isolation in strict", self._isolated)

    def _failure(self) -> None:
        act = FailureAct(
            self._node,
            self._hosts,
            self._kubelet,
            has_relay=self._has_relay,
            wait_for_strict=self._wait_for_strict,
        )
        act.play()

    def _clean_up(self) -> None:
        events.emit(events.Step("starting the agent again"))
        self._agent.start(*self._node.options)
        report = self._agent.wait_for(
            "the state before the restart",
            lambda report: self._isolated(report) and self._pods.are_passing(report),
        )
        expected = Origin.PINNED.value
        events.check("agent restarts with pinned programs", expected, report.programs)
        self._node.draw(_RUNNING)
        installation = pins.Pins(BPFFS)
        program_ids = leftovers.program_ids(installation)
        cookies = {pod.netns.inode: pod.netns.cookie() for pod in self._pods.all}
        cookies[os.stat("/proc/self/ns/net").st_ino] = netns_cookie()
        events.emit(events.Leftovers(cookies, program_ids))
        events.emit(events.Step("stopping the agent"))
        self._agent.stop(signal.SIGTERM)
        observed = self._node.connect(self._pods.web, "IPv4", is_rejected=True)
        events.check("host to pod, agent stopped", self._node.drop_result, observed)
        events.emit(events.Step("cleaning up"))
        done = self._agent.cleanup()
        if done.returncode:
            raise polling.TimedOutError(f"podgate cleanup failed: {done.stderr}")
        events.emit(events.Evidence("podgate cleanup", done.stdout.rstrip("\n")))
        # A released relay exits after a moment.
        with contextlib.suppress(polling.TimedOutError):
            polling.wait_until("removal of all links", lambda: not leftovers.links_to(program_ids))
        left = {
            "pins": len(list(installation.root.rglob("*"))) + installation.root.exists(),
            "links": len(leftovers.links_to(program_ids)),
            "filters": cleanup.remove_everything(installation).filters,
            "relays": len(relay_interfaces.present()),
        }
        observed = ", ".join(f"{count} {kind}" for kind, count in left.items())
        expected = "0 pins, 0 links, 0 filters, 0 relays"
        events.check("cleanup", expected, observed, fact=_NOTHING_LEFT)
        self._node.draw_open(_NOT_RUNNING)
        self._hosts.after_cleanup()


def _end_without_reader() -> None:
    """Wait until no process reads this process's output, and exit: the kernel kills the others."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # reports errors only
    reader.poll()
    os._exit(1)


def main() -> None:
    labs.isolate(has_own_mounts=True)
    threading.Thread(target=_end_without_reader, name="reader", daemon=True).start()
    try:
        with Lab() as network:
            node = DemoNode(network, pathlib.Path(sys.argv[1]))
            try:
                Stage(node).play()
            finally:
                node.end()
        left = sorted(path.name for path in (labs.LAB_DIRECTORY / "netns").iterdir())
        events.check("lab removes its namespaces", "0 left", f"{len(left)} left")
    except polling.TimedOutError as error:
        events.check("demo completes", "yes", str(error))


def _first_probe_ms(agent: AgentProcess, pod: str) -> float:
    """From the agent's start to the pod's first probes-passing True, by the agent's own log."""
    started = agent.log_lines(Event.AGENT_STARTED)[0]
    passed = next(
        line
        for line in agent.log_lines(Event.CONDITION_CHANGED)
        if (line["pod"], line["type"], line["status"]) == (pod, labels.PROBES_PASSING, TRUE)
    )
    seconds = (agent_process.log_time(passed) - agent_process.log_time(started)).total_seconds()
    return round(seconds * 1000, 1)


if __name__ == "__main__":
    main()
