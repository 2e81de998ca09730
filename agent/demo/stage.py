"""The demo itself: `python -m agent.demo.stage`, as process 1 of a PID namespace of its own.

Prints messages as JSON lines. Nothing is simulated: interfaces, programs, servers, probes and the
agent are real, and every check compares an observed result with the expected one.
"""

import asyncio
import contextlib
import functools
import os
import pathlib
import signal
import socket
import statistics
import sys
import time

from agent import labels
from agent.admin.report import AgentReport
from agent.demo import events
from agent.demo.kubelet_acts import RELAY_OPTIONS, KubeletActs
from agent.demo.pods import (
    FAILURE_FILE,
    FAILURE_THRESHOLD,
    PERIOD_SECONDS,
    PORT,
    DemoPods,
    has_status,
)
from agent.lab import agent_process, attempts, leftovers
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.attempts import FAMILIES
from agent.lab.kubelet_stub import KubeletStub
from agent.lab.lab import BPFFS, Lab, LabPod
from agent.logs import Event
from agent.pods.conditions import FALSE, TRUE
from agent.relay import interfaces as relay_interfaces
from bpf import cleanup, pins
from bpf.pinning import Origin
from probes.engine.prober import probe
from probes.spec.specs import Grpc, Handler, HttpGet, Probe, TcpSocket

_NODE_PORT = 9090
# For the response itself, and the log's resolution of milliseconds.
_RESPONSE_SECONDS = 0.1


class Stage:
    """The pods, the agent, and the checks in their order."""

    def __init__(self, network: Lab, cgroup: pathlib.Path) -> None:
        """cgroup: of the kubelet stub."""
        self._agent = agent_process.AgentProcess()
        self._pods = DemoPods(network, self._agent)
        self._options = ("--kubelet", f"cgroup:/{cgroup.name}", *RELAY_OPTIONS)
        self._kubelet = KubeletStub(cgroup)
        self._kubelet_acts = KubeletActs(
            self._kubelet,
            self._agent,
            http=self._pods.web,
            tcp=self._pods.cart,
            grpc=self._pods.rpc,
            port=PORT,
        )
        self._timings: dict[str, float] = {}
        self._source_port = 40000
        self._drop_result = ""

    def play(self) -> None:
        """All acts in order. Raises `LabTimeoutError` when one cannot continue."""
        events.emit(events.Step("starting servers in the pods"))
        self._pods.start_servers()
        with _listen_on_node():
            self._before()
            self._audit()
            self._enforce()
            self._probes()
            self._failing_probe()
            self._agent_killed()
            self._strict()
            self._cleanup()
        events.emit(events.Timings(self._timings))

    def end(self) -> None:
        """Stop all processes; the kernel would do it as well."""
        self._agent.stop(signal.SIGKILL)
        self._kubelet.stop()
        self._pods.kill_servers()

    def _before(self) -> None:
        events.emit(events.Step("connecting before gates are attached"))
        for family in FAMILIES:
            observed = attempts.connect_from_node(self._pods.web, family, PORT, is_rejected=False)
            events.check(f"host to pod before the gate, {family}", "connects", observed)
            observed = self._inject(self._pods.web, family)
            events.check(f"host packet socket before the gate, {family}", "arrives", observed)

    def _audit(self) -> None:
        events.emit(events.Step("starting podgate in audit: compiling, loading, attaching"))
        self._pods.write_manifests("audit")
        self._agent.start(*self._options)
        report = self._agent.wait_for("isolation in audit", self._pods.are_isolated("Audit"))
        self._timings["compile_load"] = round(report.load_ms, 1)
        self._drop_result = agent_process.drop_result(report)
        for family in FAMILIES:
            before = agent_process.packets(self._report(), "web", "would-drop")
            observed = attempts.connect_from_node(self._pods.web, family, PORT, is_rejected=False)
            counted = agent_process.packets(self._report(), "web", "would-drop") - before
            events.check(
                f"host to pod in audit, {family}",
                "connects, counted as would-drop",
                f"{observed}, {'counted as would-drop' if counted else 'not counted'}",
            )

    def _enforce(self) -> None:
        events.emit(events.Step("switching every pod to enforce"))
        self._pods.write_manifests("enforce")
        self._agent.wait_for("isolation in enforce", self._pods.are_isolated("Enforced"))
        self._timings["attach_per_pod"] = statistics.median(
            line["milliseconds"] for line in self._agent.log_lines(Event.INTERFACE_GATED)
        )
        agent_process.wait_until(
            "the end of the pods' grace periods",
            functools.partial(self._is_evaluated, self._pods.cart),
        )
        for family in FAMILIES:
            for pod in (self._pods.web, self._pods.shop):
                before = agent_process.packets(self._report(), pod.name, "drop")
                observed = attempts.connect_from_node(pod, family, PORT, is_rejected=True)
                counted = agent_process.packets(self._report(), pod.name, "drop") - before
                events.check(
                    f"host to {_kind(pod)} pod in enforce, {family}",
                    f"{self._drop_result}, counted as drop",
                    f"{observed}, {'counted as drop' if counted else 'not counted'}",
                )
            for source, target in (
                (self._pods.rpc, self._pods.web),
                (self._pods.cart, self._pods.shop),
                (self._pods.web, self._pods.shop),
            ):
                address = attempts.address_of(target, family)
                observed = attempts.connect_from_pod(source, address, family, PORT)
                route = f"{_kind(source)} pod to {_kind(target)} pod"
                events.check(f"{route} in enforce, {family}", "connects", observed)
            for source in (self._pods.web, self._pods.shop):
                node = str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)
                observed = attempts.connect_from_pod(source, node, family, _NODE_PORT)
                events.check(
                    f"{_kind(source)} pod to host in enforce, {family}", "connects", observed
                )
                observed = attempts.query_from_pod(source, node, family)
                events.check(
                    f"host reply to {_kind(source)} pod's datagram, {family}", "arrives", observed
                )
            observed = attempts.datagram_from_node(self._pods.cart, family)
            events.check(f"host datagram to pod in enforce, {family}", "does not arrive", observed)
            observed = self._inject(self._pods.web, family)
            events.check(f"host packet socket in enforce, {family}", "does not arrive", observed)
        self._kubelet_acts.in_enforce(self._drop_result)

    def _probes(self) -> None:
        events.emit(events.Step("probing from inside the pods"))
        handlers: tuple[tuple[str, LabPod, Handler], ...] = (
            ("http", self._pods.web, HttpGet(port=PORT, path="/healthz")),
            ("tcp", self._pods.cart, TcpSocket(port=PORT)),
            ("grpc", self._pods.rpc, Grpc(port=PORT)),
        )
        for family in FAMILIES:
            for name, pod, handler in handlers:
                outcome = asyncio.run(
                    probe(
                        Probe(handler),
                        netns=pod.netns,
                        addresses=[attempts.address_of(pod, family)],
                    )
                )
                events.check(
                    f"podgate: in-netns {name} probe, {family}", "success", outcome.result.value
                )
        report = self._agent.wait_for("every probe passing", self._pods.are_passing)
        reasons = {
            str(condition and condition.status)
            for pod in self._pods.all
            for condition in [agent_process.condition_of(report, pod.name, labels.PROBES_PASSING)]
        }
        events.check(
            "podgate: condition probes-passing of all pods", TRUE, ", ".join(sorted(reasons))
        )
        self._timings["first_probe"] = _first_probe_ms(self._agent, "demo/web")

    def _failing_probe(self) -> None:
        bound = FAILURE_THRESHOLD * PERIOD_SECONDS + _RESPONSE_SECONDS
        for text, act, status in (
            ("pod becomes unready", FAILURE_FILE.touch, FALSE),
            ("pod becomes ready", FAILURE_FILE.unlink, TRUE),
        ):
            events.emit(events.Step(f"{text}: waiting for its condition"))
            started = time.time()
            act()
            report = self._agent.wait_for(
                f"probes-passing {status}",
                functools.partial(has_status, pod=self._pods.shop, status=status),
            )
            condition = agent_process.condition_of(
                report, self._pods.shop.name, labels.PROBES_PASSING
            )
            assert condition is not None
            seconds = condition.last_transition_time.timestamp() - started
            expected = f"{status} within {bound:.1f} s"
            observed = f"{condition.status} after {seconds:.1f} s"
            events.check(f"{text}: probes-passing", expected, observed, 0 <= seconds <= bound)

    def _agent_killed(self) -> None:
        events.emit(events.Step("killing the agent with SIGKILL"))
        self._agent.stop(signal.SIGKILL)
        for family in FAMILIES:
            observed = attempts.connect_from_node(self._pods.web, family, PORT, is_rejected=True)
            events.check(f"host to pod, agent killed, {family}", self._drop_result, observed)
        self._agent.start(*self._options)
        report = self._agent.wait_for(
            "the state before the restart",
            lambda report: (
                self._pods.are_isolated("Enforced")(report) and self._pods.are_passing(report)
            ),
        )
        expected = Origin.PINNED.value
        events.check("agent restarts with pinned programs", expected, report.programs)

    def _strict(self) -> None:
        events.emit(events.Step("switching every pod to strict: starting the relay"))

        def wait() -> AgentReport:
            return self._agent.wait_for("isolation in strict", self._pods.are_isolated("Strict"))

        started = time.monotonic()
        self._pods.write_manifests("strict")
        wait()
        self._timings["strict"] = round((time.monotonic() - started) * 1000, 1)
        self._kubelet_acts.in_strict(self._drop_result, wait)

    def _cleanup(self) -> None:
        events.emit(events.Step("cleaning up"))
        installation = pins.Pins(BPFFS)
        program_ids = leftovers.program_ids(installation)
        inodes = [pod.netns.inode for pod in self._pods.all] + [os.stat("/proc/self/ns/net").st_ino]
        events.emit(events.Leftovers(inodes, program_ids))
        self._agent.stop(signal.SIGTERM)
        observed = attempts.connect_from_node(self._pods.web, "IPv4", PORT, is_rejected=True)
        events.check("host to pod, agent stopped", self._drop_result, observed)
        done = self._agent.cleanup()
        if done.returncode:
            raise agent_process.LabTimeoutError(f"podgate cleanup failed: {done.stderr}")
        # A released relay exits after a moment.
        with contextlib.suppress(agent_process.LabTimeoutError):
            agent_process.wait_until(
                "removal of all links", lambda: not leftovers.links_to(program_ids)
            )
        left = {
            "pins": len(list(installation.root.rglob("*"))) + installation.root.exists(),
            "links": len(leftovers.links_to(program_ids)),
            "filters": cleanup.remove_everything(installation).filters,
            "relays": len(relay_interfaces.present()),
        }
        expected = "0 pins, 0 links, 0 filters, 0 relays"
        events.check(
            "cleanup", expected, ", ".join(f"{count} {kind}" for kind, count in left.items())
        )
        for family in FAMILIES:
            observed = attempts.connect_from_node(self._pods.web, family, PORT, is_rejected=False)
            events.check(f"host to pod after cleanup, {family}", "connects", observed)

    def _inject(self, pod: LabPod, family: str) -> str:
        # A new port each time: a retransmission of a previous SYN must not count.
        self._source_port += 1
        source = str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)
        return attempts.inject_syn(pod, source, family, PORT, self._source_port)

    def _is_evaluated(self, pod: LabPod) -> bool:
        """Whether a UDP packet is dropped: for some seconds after its attachment a gate passes
        possible replies to flows of the pod that were open before."""
        return attempts.datagram_from_node(pod, "IPv4") == "does not arrive"

    def _report(self) -> AgentReport:
        return self._agent.wait_for("a status report", lambda report: True)


def main() -> None:
    labs.isolate()
    try:
        with Lab() as network:
            stage = Stage(network, pathlib.Path(sys.argv[1]))
            try:
                stage.play()
            finally:
                stage.end()
        left = sorted(path.name for path in (labs.LAB_DIRECTORY / "netns").iterdir())
        events.check("lab removes its namespaces", "0 left", f"{len(left)} left")
    except agent_process.LabTimeoutError as error:
        events.check("demo completes", "yes", str(error))


def _listen_on_node() -> socket.socket:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", _NODE_PORT))
    sock.listen()
    return sock


def _kind(pod: LabPod) -> str:
    return "bridged" if pod.is_bridged else "routed"


def _first_probe_ms(agent: AgentProcess, pod: str) -> float:
    """From the agent's start to the pod's first probes-passing True, by the agent's own log."""
    started = next(agent.log_lines(Event.AGENT_STARTED))
    passed = next(
        line
        for line in agent.log_lines(Event.CONDITION_CHANGED)
        if (line["pod"], line["type"], line["status"]) == (pod, labels.PROBES_PASSING, TRUE)
    )
    seconds = (agent_process.log_time(passed) - agent_process.log_time(started)).total_seconds()
    return round(seconds * 1000, 1)


if __name__ == "__main__":
    main()
