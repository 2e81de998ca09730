"""A hundred concurrent flows of all kinds have the same results with and without gates."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Callable

import pytest

from agent.lab import lab as labs
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import conversations, links, traffic
from tests.kernel.counting import CONTROL, Counting
from tests.kernel.reply_tables import start_reply_table

pytestmark = pytest.mark.kernel

FLOWS = 100
AT_ONCE = 20
FIRST_PORT, CLOSED_PORT = 10_000, 9
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
# The host's kernel sends pods redirects (IPv6), which gates drop.
REDIRECT = (Verdict.DROP, Reason.NODE)
ANSWERS = {
    (Verdict.PASS, Reason.ESTABLISHED),
    (Verdict.PASS, Reason.REPLY),
    REDIRECT,
    *CONTROL,
}
OPEN = ("tcp", "udp", "fragments", "ping")
CLOSED = ("closed-tcp", "closed-udp")


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """One conversation. server: None is the node; service: by an address that is translated."""

    number: int
    kind: str
    client: labs.LabPod
    server: labs.LabPod | None
    version: int
    by_service: bool

    @property
    def address(self) -> str:
        if self.by_service:
            return SERVICE[self.version]
        if self.server is None:
            return traffic.NODE[self.version]
        return traffic.address(self.server, self.version)

    def run(self) -> str:
        """The result: "ok", or the error's name."""
        try:
            if self.kind == "ping":
                conversations.ping(self.client, self.address)
            elif self.kind == "tcp":
                self._stream()
            elif self.kind in CLOSED:
                self._connect_to_closed_port()
            else:
                self._datagram(5000 if self.kind == "fragments" else 50)
        except (OSError, AssertionError) as error:
            return type(error).__name__
        return "ok"

    def _stream(self) -> None:
        with self._serve(socket.SOCK_STREAM) as listening:
            traffic.pod_connects(self.client, self.address, self.version, listening, 20_000)

    def _datagram(self, size: int) -> None:
        family = traffic.family(self.version)
        with (
            self._serve(socket.SOCK_DGRAM) as server,
            self.client.open_socket(family, socket.SOCK_DGRAM) as client,
        ):
            client.settimeout(traffic.LIMIT_SECONDS)
            client.connect((self.address, FIRST_PORT + self.number))
            client.send(bytes(size))
            question, whence = server.recvfrom(1 << 16)
            server.sendto(question, whence)
            assert len(client.recv(1 << 16)) == size

    def _connect_to_closed_port(self) -> None:
        kind = socket.SOCK_STREAM if self.kind == "closed-tcp" else socket.SOCK_DGRAM
        with self.client.open_socket(traffic.family(self.version), kind) as client:
            conversations.request(client, self.address, CLOSED_PORT)

    def _serve(self, kind: int) -> socket.socket:
        make: Callable[..., socket.socket] = (
            socket.socket if self.server is None else self.server.open_socket
        )
        sock = make(traffic.family(self.version), kind)
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of the previous run
        # The node answers a pod from the address that it was sent to, wherever that lies.
        where = traffic.NODE[self.version] if self.server is None else ""
        sock.bind((where, FIRST_PORT + self.number))
        if kind == socket.SOCK_STREAM:
            sock.listen()
        return sock


def make_flows(pods: list[labs.LabPod], outside: labs.LabPod) -> list[Flow]:
    ends = [
        (client, server, by_service)
        for client in (*pods, outside)
        for server, by_service in (
            *((pod, False) for pod in (*pods, outside)),
            (pods[0], True),
            (None, False),
        )
        if server is not client or by_service
    ]
    everything = list(itertools.product((4, 6), (*OPEN, *CLOSED), ends))
    # A stride that divides nothing, so that some of each version, kind and end are among them.
    chosen = (everything[number * 7 % len(everything)] for number in range(FLOWS))
    return [
        Flow(number, kind, client, server, version, by_service)
        for number, (version, kind, (client, server, by_service)) in enumerate(chosen)
    ]


def run(flows: list[Flow]) -> list[tuple[str, str]]:
    """Kind and result of each."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        return list(zip((flow.kind for flow in flows), threads.map(Flow.run, flows), strict=True))


def services(server: labs.LabPod) -> contextlib.AbstractContextManager[None]:
    """The address of a service, translated for all but the node itself."""
    rules = "".join(
        f"{family} daddr {SERVICE[version]} dnat {family} to {traffic.address(server, version)}\n"
        for version, family in ((4, "ip"), (6, "ip6"))
    )
    return links.table(
        "inet",
        f"chain in {{ type nat hook prerouting priority -100;\n{rules}}}\n"
        "chain out { type nat hook postrouting priority 100; ct status dnat masquerade; }\n",
    )


def test_hundred_concurrent_flows_work_as_without_gates(lab: labs.Lab, gates: Gates) -> None:
    pods = [
        lab.add_pod("routed", 1),
        lab.add_pod("bridged", 2, bridged=True),
        lab.add_pod("routed2", 3),
        lab.add_pod("bridged2", 4, bridged=True),
    ]
    flows = make_flows(pods, lab.add_pod("outside", 9))
    assert len(flows) == FLOWS
    for pod in pods:  # neighbours are resolved, ports of the bridge are up
        with pod.listen(80):
            assert traffic.node_reaches(pod, 4)
            assert traffic.node_reaches(pod, 6)
    with services(pods[0]):
        without = run(flows)
        for pod in pods:
            gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
            start_reply_table(gates, pod.ifindex)
        countings = [Counting(gates, pod.ifindex) for pod in pods]
        assert run(flows) == without

    assert {kind for kind, _ in without} == {*OPEN, *CLOSED}
    assert {flow.version for flow in flows if flow.server is None} == {4, 6}
    assert {result for kind, result in without if kind in OPEN} == {"ok"}
    assert {result for kind, result in without if kind in CLOSED} == {"ConnectionRefusedError"}
    counted = {key for counting in countings for key in counting.moved()}
    assert (Verdict.PASS, Reason.ESTABLISHED) in counted  # gates were attached
    assert counted <= ANSWERS
