"""The acts of host processes and pods: open, audit and enforce, and the node after clean-up."""

import asyncio
import functools
import itertools
import socket
import statistics
from concurrent import futures

from agent import labels
from agent.lab import agent_process, attempts, polling
from agent.lab import lab as labs
from agent.lab.attempts import FAMILIES
from agent.lab.lab import LabPod
from agent.logs import Event
from agent.operate.demo import events
from agent.operate.demo.events import Danger, Fact, Subject
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import PORT
from agent.pods.conditions import TRUE
from probes.engine.prober import probe
from probes.spec.specs import Grpc, Handler, HttpGet, Probe, TcpSocket

CONNECTS = "connects"
_ARRIVES = "arrives"
_NOT_ARRIVING = "does not arrive"
_NODE_PORT = 9090

HOST_CONNECTS = Fact("host process connects", Danger.OPEN, Subject.HOST)
_RAW_ARRIVES = Fact("packet socket arrives", Danger.OPEN)
_HOST_COUNTED = Fact("host process connects, counted", Danger.COUNTED, Subject.HOST)
HOST_DROPPED = Fact("host dropped", Danger.CLOSED, Subject.HOST)
_PODS_CONNECT = Fact("pods connect")
_PROBES_PASS = Fact("probes pass")


class HostActs:
    """The checks that need no kubelet."""

    def __init__(self, node: DemoNode) -> None:
        self._node = node
        self._pods = node.pods

    def open(self) -> None:
        for family in FAMILIES:
            observed = self._node.connect(self._pods.web, family, is_rejected=False)
            name = f"host to pod before the gate, {family}"
            events.check(name, CONNECTS, observed, fact=HOST_CONNECTS)
            observed = self._node.inject(self._pods.web, _node_address(family), family)
            name = f"host packet socket before the gate, {family}"
            events.check(name, _ARRIVES, observed, fact=_RAW_ARRIVES)

    def audit(self) -> None:
        for family in FAMILIES:
            before = agent_process.packets(self._node.report(), "web", "would-drop")
            observed = self._node.connect(self._pods.web, family, is_rejected=False)
            counted = agent_process.packets(self._node.report(), "web", "would-drop") - before
            events.check(
                f"host to pod in audit, {family}",
                f"{CONNECTS}, counted as would-drop",
                f"{observed}, {'counted as would-drop' if counted else 'not counted'}",
                fact=_HOST_COUNTED,
            )

    def enforce(self) -> None:
        """From the change of the mode to the last attempt of a host process."""
        self._node.timings["attach_per_pod"] = statistics.median(
            line["milliseconds"] for line in self._node.agent.log_lines(Event.INTERFACE_GATED)
        )
        polling.wait_until(
            "the end of the pods' grace periods",
            functools.partial(self._is_evaluated, self._pods.cart),
        )
        for family in FAMILIES:
            for pod in (self._pods.web, self._pods.shop):
                self._drop_is_counted(pod, family)
        self._unanswered()
        with _listen_on_node():
            for family in FAMILIES:
                self._traffic_of_pods(family)

    def _drop_is_counted(self, pod: LabPod, family: str) -> None:
        before = agent_process.packets(self._node.report(), pod.name, "drop")
        observed = self._node.connect(pod, family, is_rejected=True)
        counted = agent_process.packets(self._node.report(), pod.name, "drop") - before
        events.check(
            f"host to {_kind(pod)} pod in enforce, {family}",
            f"{self._node.drop_result}, counted as drop",
            f"{observed}, {'counted as drop' if counted else 'not counted'}",
            fact=HOST_DROPPED,
        )

    def _unanswered(self) -> None:
        """What only a time limit ends: all at once, each with a socket of its own."""
        with futures.ThreadPoolExecutor() as pool:
            attempted = [
                (
                    family,
                    pool.submit(attempts.datagram_from_node, self._pods.cart, family),
                    pool.submit(self._node.inject, self._pods.web, _node_address(family), family),
                )
                for family in FAMILIES
            ]
        for family, datagram, injected in attempted:
            name = f"host datagram to pod in enforce, {family}"
            events.check(name, _NOT_ARRIVING, datagram.result(), fact=HOST_DROPPED)
            name = f"host packet socket in enforce, {family}"
            events.check(name, _NOT_ARRIVING, injected.result(), fact=HOST_DROPPED)

    def _traffic_of_pods(self, family: str) -> None:
        pods = self._pods
        for source, target in ((pods.rpc, pods.web), (pods.cart, pods.shop), (pods.web, pods.shop)):
            observed = self.connect_pods(source, target, family)
            name = f"{_kind(source)} pod to {_kind(target)} pod in enforce, {family}"
            events.check(name, CONNECTS, observed, fact=_PODS_CONNECT)
        for source in (pods.web, pods.shop):
            node = _node_address(family)
            observed = attempts.connect_from_pod(source, node, family, _NODE_PORT)
            name = f"{_kind(source)} pod to host in enforce, {family}"
            events.check(name, CONNECTS, observed, fact=_PODS_CONNECT)
            observed = attempts.query_from_pod(source, node, family)
            name = f"host reply to {_kind(source)} pod's datagram, {family}"
            events.check(name, _ARRIVES, observed, fact=_PODS_CONNECT)

    def probes(self) -> None:
        handlers: tuple[tuple[str, LabPod, Handler], ...] = (
            ("http", self._pods.web, HttpGet(port=PORT, path="/healthz")),
            ("tcp", self._pods.cart, TcpSocket(port=PORT)),
            ("grpc", self._pods.rpc, Grpc(port=PORT)),
        )
        for family, (name, pod, handler) in itertools.product(FAMILIES, handlers):
            address = attempts.address_of(pod, family)
            running = probe(Probe(handler), netns=pod.netns, addresses=[address])
            result = asyncio.run(running).result.value
            events.check(
                f"podgate: in-netns {name} probe, {family}", "success", result, fact=_PROBES_PASS
            )
        report = self._node.agent.wait_for("every probe passing", self._pods.are_passing)
        statuses = {
            str(condition and condition.status)
            for pod in self._pods.all
            for condition in [agent_process.condition_of(report, pod.name, labels.PROBES_PASSING)]
        }
        name = "podgate: condition probes-passing of all pods"
        events.check(name, TRUE, ", ".join(sorted(statuses)), fact=_PROBES_PASS)

    def after_cleanup(self) -> None:
        for family in FAMILIES:
            observed = self._node.connect(self._pods.web, family, is_rejected=False)
            name = f"host to pod after cleanup, {family}"
            events.check(name, CONNECTS, observed, fact=HOST_CONNECTS)

    def connect_pods(self, source: LabPod, target: LabPod, family: str) -> str:
        address = attempts.address_of(target, family)
        return attempts.connect_from_pod(source, address, family, PORT)

    def _is_evaluated(self, pod: LabPod) -> bool:
        """Whether a UDP packet is dropped: for some seconds after its attachment a gate passes
        possible replies to flows of the pod that were open before."""
        return attempts.datagram_from_node(pod, "IPv4") == _NOT_ARRIVING


def _listen_on_node() -> socket.socket:
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    sock.bind(("::", _NODE_PORT))
    sock.listen()
    return sock


def _node_address(family: str) -> str:
    return str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)


def _kind(pod: LabPod) -> str:
    return "bridged" if pod.is_bridged else "routed"
