"""What the kubelet sees of the ladder: admitted by the gate under enforce, carried under strict."""

import contextlib
import os
import signal
from collections.abc import Callable

from agent import labels
from agent.admin.report import AgentReport
from agent.demo import events
from agent.lab import agent_process, attempts
from agent.lab import lab as labs
from agent.lab.agent_process import Operator
from agent.lab.attempts import FAMILIES
from agent.lab.kubelet_stub import StandIn
from agent.lab.lab import LabPod

RELAY_OPTIONS = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")

_UNDECLARED_PORT = 9999
_CLOSED_PORT = 81


class KubeletActs:
    """The acts in which the stand-in for the kubelet plays."""

    def __init__(
        self,
        kubelet: StandIn,
        operator: Operator,
        *,
        http: LabPod,
        tcp: LabPod,
        grpc: LabPod,
        port: int,
    ) -> None:
        """http, tcp, grpc: routed or bridged pods that declare such a probe at `port`."""
        self._kubelet = kubelet
        self._operator = operator
        self._pods = {"http": http, "tcp": tcp, "grpc": grpc}
        self._port = port

    def under_enforce(self, refusal: str) -> None:
        """refusal: how an attempt ends that is refused."""
        http = self._pods["http"]
        with attempts.openings_seen(http) as seen:
            for family in FAMILIES:
                node = str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)
                observed = self._probe("http", family)
                name = f"kubelet's http probe under enforce, {family}"
                events.check(name, f"success: {node}", observed)
            events.check("openings from the node that the pod saw", "2", str(seen()))
        self._refused("enforce", refusal)

    def under_strict(self, refusal: str, wait: Callable[[], AgentReport]) -> None:
        """wait: until every pod is in strict."""
        with contextlib.ExitStack() as stack:
            watches = [
                stack.enter_context(attempts.openings_seen(pod)) for pod in self._pods.values()
            ]
            for family in FAMILIES:
                pod = self._pods["http"]
                own = attempts.address_of(pod, family)
                name = f"kubelet's http probe under strict, {family}"
                events.check(name, f"success: {own}", self._probe("http", family))
                for kind in ("tcp", "grpc"):
                    name = f"kubelet's {kind} probe under strict, {family}"
                    events.check(name, "success", self._probe(kind, family))
                observed = self._kubelet.probe("http", own, _CLOSED_PORT)
                name = f"kubelet to a closed port under strict, {family}"
                events.check(name, "Connection refused", observed)
                observed = attempts.connect_from_node(pod, family, self._port, is_refused=True)
                events.check(f"node to pod under strict, {family}", refusal, observed)
            self._refused("strict", refusal)
            total = sum(seen() for seen in watches)
            events.check("openings from the node that the pods saw", "0", str(total))
        self._relay_killed(refusal, wait)

    def _relay_killed(self, refusal: str, wait: Callable[[], AgentReport]) -> None:
        events.emit(events.Step("killing the relay with SIGKILL"))
        before = self._relay_pids()
        os.kill(before[-1], signal.SIGKILL)
        agent_process.wait_until("the relay is gone", lambda: not _lives(before[-1]))
        expected = f"success: {labs.NODE_IPV4}"
        events.check("kubelet's next probe goes direct", expected, self._probe("http", "IPv4"))
        pod = self._pods["http"]
        observed = attempts.connect_from_node(pod, "IPv4", self._port, is_refused=True)
        events.check("node to pod, relay killed", refusal, observed)
        agent_process.wait_until(
            "another relay runs", lambda: len(self._relay_pids()) > len(before)
        )
        wait()
        expected = f"success: {pod.ipv4}"
        events.check("kubelet's probe, relay back", expected, self._probe("http", "IPv4"))

    def _refused(self, mode: str, refusal: str) -> None:
        for family in FAMILIES:
            address = attempts.address_of(self._pods["tcp"], family)
            observed = self._kubelet.probe("tcp", address, _UNDECLARED_PORT)
            name = f"kubelet to an undeclared port under {mode}, {family}"
            events.check(name, refusal, observed)

    def _probe(self, kind: str, family: str) -> str:
        return self._kubelet.probe(kind, attempts.address_of(self._pods[kind], family), self._port)

    def _relay_pids(self) -> list[int]:
        """Of all that were started, in their order."""
        return [
            line["pid"] for line in self._operator.log_lines() if line["message"] == "relay started"
        ]


def is_strict(report: AgentReport, pods: tuple[LabPod, ...]) -> bool:
    """Whether the relay has all of them."""
    found = [agent_process.condition_of(report, pod.name, labels.ISOLATION_READY) for pod in pods]
    return all(condition and condition.reason == "Strict" for condition in found)


def _lives(pid: int) -> bool:
    """A process that has ended has no namespaces, even before somebody has asked for its status."""
    return os.path.exists(f"/proc/{pid}/ns/net")
