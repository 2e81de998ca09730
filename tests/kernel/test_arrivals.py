"""Whether a pod's packet arrives at another pod is seen, whatever answers or drops it."""

import contextlib
import json
import select
import socket
import subprocess
from collections.abc import Iterator

import pytest

from agent.lab import polling
from agent.lab.lab import Lab, LabPod
from agent.network_policy.arrivals import Arrivals, Sent
from agent.network_policy.checks import Flow
from bpf.counters import Counters
from bpf.gates import Gates
from bpf.loader import Loaded
from bpf.verdicts import Verdict
from tests.kernel import traffic
from tests.kernel.test_attach import enforcing

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
FLOWS = pytest.mark.parametrize("flow", [Flow("TCP", 7000), Flow("UDP", 7000)], ids=["tcp", "udp"])
TABLE = "test-engine"


@pytest.fixture
def pods(lab: Lab) -> tuple[LabPod, LabPod]:
    return lab.add_pod("witness", 1), lab.add_pod("web", 2)


@contextlib.contextmanager
def between(pods: tuple[LabPod, LabPod], version: int) -> Iterator[Arrivals]:
    source, destination = (
        (pod.netns, next(one for one in pod.addresses if one.version == version)) for pod in pods
    )
    with contextlib.closing(Arrivals(source, destination)) as made:
        yield made


@contextlib.contextmanager
def engine(statement: str) -> Iterator[None]:
    """Rules on the node's side, as those of an engine, for forwarded packets to port 7000."""
    rules = f"""table inet {TABLE} {{
        counter seen {{ }}
        chain forward {{
            type filter hook forward priority 0;
            th dport 7000 counter name seen {statement}
        }}
    }}"""
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", TABLE], check=True)


def has_counted() -> bool:
    command = ["nft", "-j", "list", "counter", "inet", TABLE, "seen"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return any(one["counter"]["packets"] for one in found["nftables"] if "counter" in one)


def await_arrival(arrivals: Arrivals, sent: Sent) -> None:
    while not arrivals.has(sent):
        readable, _, _ = select.select([arrivals], [], [], traffic.LIMIT_SECONDS)
        assert readable


@VERSIONS
@FLOWS
def test_packet_to_a_port_where_nothing_listens_arrives(
    pods: tuple[LabPod, LabPod], version: int, flow: Flow
) -> None:
    with between(pods, version) as arrivals:
        await_arrival(arrivals, arrivals.send(flow))


@VERSIONS
@FLOWS
@pytest.mark.parametrize("statement", ["drop", "reject"])
def test_what_an_engine_drops_does_not_arrive(
    pods: tuple[LabPod, LabPod], version: int, flow: Flow, statement: str
) -> None:
    with engine(statement), between(pods, version) as arrivals:
        sent = arrivals.send(flow)
        polling.wait_until("the engine has seen the packet", has_counted)
        assert not arrivals.has(sent)
        # The path works meanwhile: what the engine admits arrives.
        await_arrival(arrivals, arrivals.send(Flow(flow.protocol, 7001)))
        assert not arrivals.has(sent)


@VERSIONS
def test_packets_of_one_pod_are_distinguished(pods: tuple[LabPod, LabPod], version: int) -> None:
    with engine("drop"), between(pods, version) as arrivals:
        dropped = arrivals.send(Flow("UDP", 7000))
        for _ in range(2):
            await_arrival(arrivals, arrivals.send(Flow("UDP", 7001)))
        assert not arrivals.has(dropped)


@VERSIONS
def test_pod_that_floods_the_witness_takes_a_bounded_time_of_its_agent(
    pods: tuple[LabPod, LabPod], version: int
) -> None:
    source = next(one for one in pods[0].addresses if one.version == version)
    target = next(one for one in pods[1].addresses if one.version == version)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with between(pods, version) as arrivals:
        sent = arrivals.send(Flow("UDP", 7001))
        await_arrival(arrivals, sent)
        with pods[0].netns.socket(family, socket.SOCK_DGRAM) as flooding:
            flooding.bind((str(source), 0))

            def leaves_the_rest() -> bool:
                """For the next turn of the event loop."""
                for port in range(100):
                    with contextlib.suppress(ConnectionRefusedError):
                        flooding.sendto(b"", (str(target), 8000 + port))
                assert arrivals.has(sent)
                return bool(select.select([arrivals], [], [], 0)[0])

            polling.wait_until("more than one turn reads", leaves_the_rest)


@VERSIONS
@FLOWS
def test_gates_of_both_pods_pass_it(
    attached_hooks: None,
    gates: Gates,
    loaded: Loaded,
    pods: tuple[LabPod, LabPod],
    version: int,
    flow: Flow,
) -> None:
    """For hooks and gates a socket inside a pod's namespace is the pod's, whichever process
    created it; the same process is rejected outside."""
    for pod in pods:
        gates.install(pod.ifindex, enforcing(pod))
    with between(pods, version) as arrivals:
        await_arrival(arrivals, arrivals.send(flow))
    counters = Counters(loaded)
    for pod in pods:
        assert not any(
            count
            for (verdict, _), count in counters.of_gate(pod.ifindex).items()
            if verdict is Verdict.DROP
        )
    with pytest.raises(PermissionError):
        traffic.node_reaches(pods[1], version)
