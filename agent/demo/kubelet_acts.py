"""The demo's checks with the kubelet stub: admitted by the gate in enforce, proxied in strict."""

import contextlib
import os
import signal
from collections.abc import Callable

from agent.admin.report import AgentReport
from agent.demo import events
from agent.lab import agent_process, attempts
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess
from agent.lab.attempts import FAMILIES
from agent.lab.kubelet_stub import KubeletStub
from agent.lab.lab import LabPod
from agent.logs import Event

RELAY_OPTIONS = ("--relay-range4", "198.18.64.0/18", "--relay-range6", "fd00:18:64::/64")

_UNDECLARED_PORT = 9999
_CLOSED_PORT = 81


class KubeletActs:
    """The acts that need a kubelet."""

    def __init__(
        self,
        kubelet: KubeletStub,
        agent: AgentProcess,
        *,
        http: LabPod,
        tcp: LabPod,
        grpc: LabPod,
        port: int,
    ) -> None:
        """http, tcp, grpc: routed or bridged pods that declare such a probe at `port`."""
        self._kubelet = kubelet
        self._agent = agent
        self._pods = {"http": http, "tcp": tcp, "grpc": grpc}
        self._port = port

    def in_enforce(self, drop_result: str) -> None:
        """drop_result: the result of a connect that is dropped."""
        http = self._pods["http"]
        with attempts.syns_seen(http) as seen:
            for family in FAMILIES:
                node = str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)
                observed = self._probe("http", family)
                name = f"kubelet: http probe in enforce, {family}"
                events.check(name, f"success: {node}", observed)
            events.check("host SYNs that arrive in the pod in enforce", "2", str(seen()))
        self._undeclared_ports("enforce", drop_result)

    def in_strict(self, drop_result: str, wait: Callable[[], AgentReport]) -> None:
        """wait: returns when every pod is in strict."""
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(attempts.syns_seen(pod)) for pod in self._pods.values()]
            for family in FAMILIES:
                pod = self._pods["http"]
                own = attempts.address_of(pod, family)
                name = f"kubelet: http probe in strict, {family}"
                events.check(name, f"success: {own}", self._probe("http", family))
                for kind in ("tcp", "grpc"):
                    name = f"kubelet: {kind} probe in strict, {family}"
                    events.check(name, "success", self._probe(kind, family))
                observed = self._kubelet.probe("http", own, _CLOSED_PORT)
                name = f"kubelet to closed port in strict, {family}"
                events.check(name, "Connection refused", observed)
                observed = attempts.connect_from_node(pod, family, self._port, is_rejected=True)
                events.check(f"host to pod in strict, {family}", drop_result, observed)
            self._undeclared_ports("strict", drop_result)
            total = sum(seen() for seen in watches)
            events.check("host SYNs that arrive in the pods in strict", "0", str(total))
        self._relay_killed(drop_result, wait)

    def _relay_killed(self, drop_result: str, wait: Callable[[], AgentReport]) -> None:
        events.emit(events.Step("killing the relay with SIGKILL"))
        before = self._relay_pids()
        os.kill(before[-1], signal.SIGKILL)
        agent_process.wait_until("exit of the relay", lambda: not _is_running(before[-1]))
        expected = f"success: {labs.NODE_IPV4}"
        events.check("kubelet: next probe, relay killed", expected, self._probe("http", "IPv4"))
        pod = self._pods["http"]
        observed = attempts.connect_from_node(pod, "IPv4", self._port, is_rejected=True)
        events.check("host to pod, relay killed", drop_result, observed)
        agent_process.wait_until(
            "start of another relay", lambda: len(self._relay_pids()) > len(before)
        )
        wait()
        expected = f"success: {pod.ipv4}"
        events.check("kubelet: probe by the new relay", expected, self._probe("http", "IPv4"))

    def _undeclared_ports(self, mode: str, drop_result: str) -> None:
        for family in FAMILIES:
            address = attempts.address_of(self._pods["tcp"], family)
            observed = self._kubelet.probe("tcp", address, _UNDECLARED_PORT)
            name = f"kubelet to undeclared port in {mode}, {family}"
            events.check(name, drop_result, observed)

    def _probe(self, kind: str, family: str) -> str:
        return self._kubelet.probe(kind, attempts.address_of(self._pods[kind], family), self._port)

    def _relay_pids(self) -> list[int]:
        """Of all relays, in the order of their start."""
        return [line["pid"] for line in self._agent.log_lines(Event.RELAY_STARTED)]


def _is_running(pid: int) -> bool:
    """A zombie has no namespaces, so it does not count."""
    return os.path.exists(f"/proc/{pid}/ns/net")
