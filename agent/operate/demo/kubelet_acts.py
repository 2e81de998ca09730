"""The demo's checks with the kubelet stub: admitted by the gate in enforce, proxied in strict."""

import contextlib

from agent.lab import attempts
from agent.lab import lab as labs
from agent.lab.attempts import FAMILIES
from agent.operate.demo import events
from agent.operate.demo.events import Danger, Fact, Subject
from agent.operate.demo.host_acts import HOST_DROPPED
from agent.operate.demo.node import DemoNode
from agent.operate.demo.pods import PORT

UNDECLARED_PORT = 9999
_CLOSED_PORT = 81

KUBELET_DIRECT = Fact("kubelet admitted", Danger.CLOSED, Subject.KUBELET)
KUBELET_RELAYED = Fact("kubelet by the relay", Danger.CLOSED, Subject.KUBELET)
_NO_SYNS = Fact("no SYN from the host", Danger.CLOSED)


class KubeletActs:
    """The checks that need a kubelet."""

    def __init__(self, node: DemoNode) -> None:
        self._node = node
        self._pods = {"http": node.pods.web, "tcp": node.pods.cart, "grpc": node.pods.rpc}

    def by_the_gate(self, mode: str) -> None:
        """In enforce, and in strict without a relay. mode: as checks name it."""
        http = self._pods["http"]
        with attempts.syns_seen(http) as seen:
            for family in FAMILIES:
                node = str(labs.NODE_IPV4 if family == "IPv4" else labs.NODE_IPV6)
                name = f"kubelet: http probe in {mode}, {family}"
                observed = self.probe("http", family)
                events.check(name, f"success: {node}", observed, fact=KUBELET_DIRECT)
            events.check(f"host SYNs that arrive in the pod in {mode}", "2", str(seen()))
        self._undeclared_ports(mode)

    def in_strict(self) -> None:
        with contextlib.ExitStack() as stack:
            watches = [stack.enter_context(attempts.syns_seen(pod)) for pod in self._pods.values()]
            for family in FAMILIES:
                pod = self._pods["http"]
                own = attempts.address_of(pod, family)
                name = f"kubelet: http probe in strict, {family}"
                observed = self.probe("http", family)
                events.check(name, f"success: {own}", observed, fact=KUBELET_RELAYED)
                for kind in ("tcp", "grpc"):
                    name = f"kubelet: {kind} probe in strict, {family}"
                    events.check(name, "success", self.probe(kind, family), fact=KUBELET_RELAYED)
                observed = self._node.kubelet.probe("http", own, _CLOSED_PORT)
                name = f"kubelet to closed port in strict, {family}"
                events.check(name, "Connection refused", observed)
                observed = self._node.connect(pod, family, is_rejected=True)
                name = f"host to pod in strict, {family}"
                events.check(name, self._node.drop_result, observed, fact=HOST_DROPPED)
            self._undeclared_ports("strict")
            total = sum(seen() for seen in watches)
            name = "host SYNs that arrive in the pods in strict"
            events.check(name, "0", str(total), fact=_NO_SYNS)

    def probe(self, kind: str, family: str) -> str:
        """The kubelet's result, with the peer's address that the pod saw for http."""
        address = attempts.address_of(self._pods[kind], family)
        return self._node.kubelet.probe(kind, address, PORT)

    def _undeclared_ports(self, mode: str) -> None:
        for family in FAMILIES:
            address = attempts.address_of(self._pods["tcp"], family)
            observed = self._node.kubelet.probe("tcp", address, UNDECLARED_PORT)
            name = f"kubelet to undeclared port in {mode}, {family}"
            events.check(name, self._node.drop_result, observed)
