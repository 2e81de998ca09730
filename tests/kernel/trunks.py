"""What holds for a pod with a VLAN of its own on its veth pair, however its tags are made."""

import dataclasses
import socket

from agent.lab.lab import LabPod
from bpf.gates import Gates
from bpf.verdicts import Reason, Verdict
from tests.kernel import traffic

PORT = 5300


@dataclasses.dataclass(frozen=True, slots=True)
class Trunk:
    """node, address: of the node and of the pod in the VLAN, of one IP version."""

    pod: LabPod
    gates: Gates
    version: int
    node: str
    address: str

    def count(self, verdict: Verdict, reason: Reason) -> int:
        return self.gates.counts()[self.pod.ifindex].get((verdict, reason), 0)

    def pod_connects(self) -> None:
        with traffic.listen_on_node(PORT) as server:
            traffic.pod_connects(self.pod, self.node, self.version, server)

    def pod_sends_a_question(self) -> None:
        """By a datagram, and a server of the node answers. Raises `TimeoutError` without answer."""
        family = traffic.family(self.version)
        with (
            socket.socket(family, socket.SOCK_DGRAM) as server,
            self.pod.open_socket(family, socket.SOCK_DGRAM) as client,
        ):
            server.bind(("", PORT))
            for sock in (server, client):
                sock.settimeout(traffic.LIMIT_SECONDS)
            client.sendto(b"question", (self.node, PORT))
            server.sendto(b"answer", server.recvfrom(64)[1])
            assert client.recvfrom(64)[0] == b"answer"

    def node_reaches_pod(self, limit_seconds: float = traffic.DROPPED_AFTER_SECONDS) -> bool:
        try:
            socket.create_connection((self.address, PORT), limit_seconds).close()
        except TimeoutError:
            return False
        return True


def expect_gated(trunk: Trunk) -> None:
    """The gate judges by what is behind the tag: what the pod begins goes both ways, and what the
    node begins is dropped."""
    trunk.pod_connects()
    trunk.pod_sends_a_question()
    assert trunk.count(Verdict.PASS, Reason.ESTABLISHED) > 0
    assert trunk.count(Verdict.PASS, Reason.REPLY) == 1
    assert trunk.count(Verdict.DROP, Reason.NODE) == 0
    with trunk.pod.listen(PORT):
        assert not trunk.node_reaches_pod()
    assert trunk.count(Verdict.DROP, Reason.NODE) == 1
    assert trunk.count(Verdict.DROP, Reason.UNPARSABLE) == 0
