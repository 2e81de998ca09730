"""Honest servers answer pods in names that a process could forge (tests/attacks/tricks/speaking.py
has those that do)."""

import asyncio
import contextlib
import functools
import socket
import time
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.linux import own_addresses, rtnetlink
from bpf import loader
from bpf.abi import IPNetwork
from bpf.gates import Gates
from bpf.node_addresses import NodeAddressMap
from bpf.node_config import NodeConfig
from bpf.verdicts import Mode, Reason, Verdict
from tests import polling
from tests.attacks.topologies import SERVICE
from tests.attacks.tricks.speaking import PORT, packet_info, translated
from tests.kernel import guarded, links, traffic
from tests.kernel.guarded import PodState

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("attached_hooks")]

REPLIES = (Verdict.PASS, Reason.REPLY)
VERSIONS = pytest.mark.parametrize("version", [4, 6])


@pytest.fixture(params=[False, True], ids=["routed", "bridged"])
def watched(
    request: pytest.FixtureRequest, lab: labs.Lab, gates: Gates, loaded: loader.Loaded
) -> Iterator[PodState]:
    """The node's addresses are listed, as by an agent; `attached_hooks` ends that."""
    pod = lab.add_pod("web", 1, bridged=request.param)
    neighbour = lab.add_pod("neighbour", 2, bridged=request.param)
    list_addresses(loaded)
    with guarded.guarded(gates, pod, neighbour) as made:
        yield made


def list_addresses(loaded: loader.Loaded) -> None:
    async def read() -> set[IPNetwork]:
        return await own_addresses.read(await rtnetlink.read())

    NodeAddressMap(loaded).set(asyncio.run(read()))
    NodeConfig(loaded).set_node_addresses(are_kept=True)


@VERSIONS
def test_server_replies_from_the_address_that_the_pod_sent_to(
    watched: PodState, version: int
) -> None:
    """By the node's own address, chosen for each datagram, and by a service's translated one."""
    pod, family = watched.pod, traffic.family(version)
    node = traffic.NODE[version]
    watched.set_mode(Mode.ENFORCE)
    with (
        translated(SERVICE[version], node),
        socket.socket(family, socket.SOCK_DGRAM) as server,
        pod.open_socket(family, socket.SOCK_DGRAM) as client,
    ):
        server.bind(("", PORT))
        server.settimeout(traffic.LIMIT_SECONDS)
        client.settimeout(traffic.LIMIT_SECONDS)
        for target in (node, SERVICE[version]):
            client.sendto(b"question", (target, PORT))
            _, whence = server.recvfrom(64)
            server.sendmsg([b"answer"], [packet_info(node)], 0, whence)
            answer, answerer = client.recvfrom(64)
            assert (answer, answerer[0]) == (b"answer", target)
    assert watched.moved() == {REPLIES: 2}


NEW_ADDRESS = {4: "198.18.0.90", 6: "fd00:18::90"}


@VERSIONS
def test_server_replies_from_a_new_address_of_the_node_while_no_agent_lists_it(
    watched: PodState, loaded: loader.Loaded, version: int
) -> None:
    """A heartbeat of 20 s; with a younger one an agent would have listed the address."""
    family, address = traffic.family(version), NEW_ADDRESS[version]
    watched.set_mode(Mode.ENFORCE)
    with contextlib.ExitStack() as stack:
        # Without duplicate address detection.
        options = " nodad" if version == 6 else ""
        links.ip(f"address add {address} dev lo{options}")
        stack.callback(links.ip, f"address del {address} dev lo")
        # The kernel adds the route of an IPv6 address in a worker of its own.
        polling.wait_until("the address is local", lambda: links.is_local(address))
        server = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
        server.bind((address, PORT))
        server.settimeout(traffic.LIMIT_SECONDS)
        for age_seconds, outcome in ((20, REPLIES), (1, (Verdict.DROP, Reason.NODE))):
            beat_ns = time.monotonic_ns() - age_seconds * 10**9
            NodeConfig(loaded, now_ns=functools.partial(int, beat_ns)).beat()
            with watched.pod.open_socket(family, socket.SOCK_DGRAM) as client:
                client.sendto(b"question", (address, PORT))
                server.sendto(b"answer", server.recvfrom(64)[1])
            watched.arrived()
            assert watched.moved() == {outcome: 1}
