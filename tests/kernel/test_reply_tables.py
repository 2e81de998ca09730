"""What a pod's reply table holds: answers that it awaits, beside its flows to other hosts."""

import functools
import ipaddress
import itertools
import socket
import time

import pytest

from agent.lab import lab as labs
from bpf import loader
from bpf.abi import IPAddress
from bpf.gates import Gates
from bpf.replies import ReplyFlow, ReplyTables
from bpf.verdicts import Reason, Verdict
from tests import polling
from tests.attacks.topologies import SERVICE
from tests.attacks.tricks.speaking import translated
from tests.kernel import links, questions, traffic
from tests.kernel.test_replies import PORT, QUESTION_SLOTS, VERSIONS, count, enforce, node_udp

pytestmark = pytest.mark.kernel

# The port of flows to other hosts, at both ends; queries to the node use others.
OUTSIDE_PORT = 53
OUTSIDE: dict[int, IPAddress] = {
    4: ipaddress.IPv4Address("198.19.0.1"),
    6: ipaddress.IPv6Address("fd00:18:19::1"),
}


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def pod(request: pytest.FixtureRequest, lab: labs.Lab) -> labs.LabPod:
    made = lab.add_pod("asker", 1, bridged=request.param)
    if made.is_bridged:
        links.wait_for_port(made.interface)
    return made


@VERSIONS
def test_no_answer_is_lost_while_a_thousand_are_outstanding(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    enforce(gates, pod)
    with node_udp(version, PORT) as server:
        answered = questions.send(pod, server, version, total=30_000, outstanding=1000)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == answered
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0


@VERSIONS
def test_two_thousand_answers_in_a_service_s_name_are_outstanding_at_once(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    """As of a DNS server on the node, behind the service's address."""
    pending, service = 2000, SERVICE[version]
    enforce(gates, pod)
    with (
        translated(service, traffic.gateway(pod, version)),
        node_udp(version, PORT) as server,
    ):
        ports = range(10_000, 10_000 + pending)
        for whence in list(questions.query(pod, server, version, ports, service)):
            server.sendto(b"answer", whence)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == pending
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0


def send_outside(loaded: loader.Loaded, pod: labs.LabPod, version: int, flows: int) -> None:
    """To as many addresses of other hosts, and wait until the gate has seen the last."""
    addresses = [OUTSIDE[version] + number for number in range(flows)]
    questions.send_outside(pod, version, OUTSIDE_PORT, map(str, addresses))
    own = ipaddress.ip_address(traffic.address(pod, version))
    last = ReplyFlow(socket.IPPROTO_UDP, own, OUTSIDE_PORT, addresses[-1], OUTSIDE_PORT)
    tables = ReplyTables(loaded)
    is_recorded = functools.partial(tables.contains, pod.ifindex, last)
    polling.wait_until("the last flow is recorded", lambda: is_recorded(time.monotonic_ns()))


@VERSIONS
def test_answers_are_not_lost_while_the_pod_sends_to_thousands_of_other_hosts(
    gates: Gates, loaded: loader.Loaded, pod: labs.LabPod, version: int
) -> None:
    """Together as many flows as 61 % of the table's slots."""
    pending = 500
    enforce(gates, pod)
    with node_udp(version, PORT) as server:
        queried = list(questions.query(pod, server, version, range(10_000, 10_000 + pending)))
        send_outside(loaded, pod, version, 2000)
        for whence in queried:
            server.sendto(b"answer", whence)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == pending
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0


@VERSIONS
def test_clients_of_the_pod_displace_no_question_of_it(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    """The pod answers 50,000 clients from its server's port while its questions are outstanding,
    and 50,000 more while it sends others."""
    pending = 1000
    enforce(gates, pod)
    # More than a table holds, so each is new to it when its turn comes again.
    clients = itertools.cycle([str(OUTSIDE[version] + number) for number in range(60_000)])
    with node_udp(version, PORT) as server:
        queried = list(questions.query(pod, server, version, range(10_000, 10_000 + pending)))
        questions.send_outside(pod, version, OUTSIDE_PORT, itertools.islice(clients, 50_000))
        for port in range(20_000, 20_000 + pending):
            questions.send_outside(pod, version, OUTSIDE_PORT, itertools.islice(clients, 50))
            queried += questions.query(pod, server, version, [port])
        for whence in queried:
            server.sendto(b"answer", whence)
    assert count(gates, pod, Verdict.DROP, Reason.NODE) == 0
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == 2 * pending


@VERSIONS
def test_answer_from_one_of_thousands_of_peers_of_one_port_passes(
    gates: Gates, pod: labs.LabPod, version: int
) -> None:
    """As of a VPN's or a game's only socket."""
    peers = [str(OUTSIDE[version] + number) for number in range(2000)]
    enforce(gates, pod)
    with node_udp(version, PORT) as server:
        questions.send_outside(pod, version, PORT, peers[:1000])
        (whence,) = questions.query(pod, server, version, [PORT])
        questions.send_outside(pod, version, PORT, peers[1000:])
        server.sendto(b"answer", whence)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == 1


def test_more_questions_than_the_table_holds_displace_the_oldest(
    gates: Gates, pod: labs.LabPod
) -> None:
    """The same flow is recorded again with the pod's next datagram."""
    enforce(gates, pod)
    with node_udp(4, PORT) as server:
        (whence,) = questions.query(pod, server, 4, [10_000])
        for _ in questions.query(pod, server, 4, range(20_000, 20_000 + 3 * QUESTION_SLOTS)):
            pass
        server.sendto(b"answer", whence)
        assert count(gates, pod, Verdict.DROP, Reason.NODE) == 1
        (whence,) = questions.query(pod, server, 4, [10_000])
        server.sendto(b"answer", whence)
    assert count(gates, pod, Verdict.PASS, Reason.REPLY) == 1
