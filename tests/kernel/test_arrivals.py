"""Whether a pod's packet arrives at another pod is seen, whatever answers or drops it."""

import contextlib
import json
import select
import subprocess
from collections.abc import Iterator

import pytest

from agent.lab import polling
from agent.lab.lab import Lab, LabPod
from agent.network_policy.arrivals import Attempt
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
def attempt(pods: tuple[LabPod, LabPod], version: int, flow: Flow) -> Iterator[Attempt]:
    source, destination = (
        (pod.netns, next(one for one in pod.addresses if one.version == version)) for pod in pods
    )
    with contextlib.closing(Attempt(flow, source, destination)) as made:
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


def await_arrival(made: Attempt) -> None:
    readable, _, _ = select.select([made], [], [], traffic.LIMIT_SECONDS)
    assert readable
    assert made.has_arrived()


@VERSIONS
@FLOWS
def test_packet_to_a_port_where_nothing_listens_arrives(
    pods: tuple[LabPod, LabPod], version: int, flow: Flow
) -> None:
    with attempt(pods, version, flow) as made:
        await_arrival(made)


@VERSIONS
@FLOWS
@pytest.mark.parametrize("statement", ["drop", "reject"])
def test_what_an_engine_drops_does_not_arrive(
    pods: tuple[LabPod, LabPod], version: int, flow: Flow, statement: str
) -> None:
    with engine(statement), attempt(pods, version, flow) as made:
        polling.wait_until("the engine has seen the packet", has_counted)
        assert not made.has_arrived()
        # The path works meanwhile: what the engine admits arrives.
        with attempt(pods, version, Flow(flow.protocol, 7001)) as admitted:
            await_arrival(admitted)
        assert not made.has_arrived()


@VERSIONS
def test_attempts_to_one_port_are_distinguished(pods: tuple[LabPod, LabPod], version: int) -> None:
    flow = Flow("UDP", 7001)
    with attempt(pods, version, flow) as first:
        await_arrival(first)
        with attempt(pods, version, flow) as second:
            await_arrival(second)
        assert not first.has_arrived()


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
    with attempt(pods, version, flow) as made:
        await_arrival(made)
    counters = Counters(loaded)
    for pod in pods:
        assert not any(
            count
            for (verdict, _), count in counters.of_gate(pod.ifindex).items()
            if verdict is Verdict.DROP
        )
    with pytest.raises(PermissionError):
        traffic.node_reaches(pods[1], version)
