"""A lookup of a listener beside a connection from inside the pod: room where it would succeed.

What is between the two is not the lookup's: tests/kernel/test_lookup_probes.py.
"""

import asyncio
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from agent.linux import pod_network
from bpf import errors, listener_lookup, pins
from bpf.listener_lookup import ListenerLookup
from probes.netns import connect_inside
from tests import redirected
from tests.kernel import offers
from tests.probes.conftest import sandbox_netns

pytestmark = pytest.mark.kernel

PORT = 8080
NO_LISTENER, HAS_ROOM, QUEUE_FULL, UNDECIDED = 1, 2, 3, 4
_SO_REUSEPORT, _SO_ATTACH_FILTER = 15, 26
_LOSES_ANSWERS = """
table inet lost {
  chain out {
    type filter hook output priority 0
    oifname eth0 drop
  }
}
"""
_ACCEPT_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0xFFFFFFFF)


@pytest.fixture(scope="module")
def lookup(installation: pins.Pins) -> Iterator[ListenerLookup]:
    offers.need_listener_lookups()
    installation.prepare()
    opened = ListenerLookup(asyncio.run(listener_lookup.load(installation)))
    yield opened
    opened.close()


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


def query(pod: labs.LabPod, address: str, port: int = PORT) -> bytes:
    cookie = pod.netns.cookie()
    assert cookie is not None
    return listener_lookup.query(cookie, number_of(pod), address, port)


def number_of(pod: labs.LabPod) -> int:
    number = asyncio.run(pod_network.netns_number(pod.netns.path))
    assert number is not None
    return number


def state(lookup: ListenerLookup, pod: labs.LabPod, address: str) -> int:
    (found,) = lookup.states([query(pod, address)])
    return found


def connects(pod: labs.LabPod, address: str) -> bool:
    """Whether a connection as a probe's succeeds."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(pod.netns.bare_socket(family, socket.SOCK_STREAM)) as sock:
        return connect_inside(sock, (address, PORT)) == 0


def listening(
    pod: labs.LabPod,
    address: str = "",
    *,
    family: int = socket.AF_INET6,
    backlog: int = 16,
    is_v6_only: bool = False,
    device: str = "",
    is_shared: bool = False,
) -> socket.socket:
    sock = pod.open_socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(is_v6_only))
    if device:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    if is_shared:
        sock.setsockopt(socket.SOL_SOCKET, _SO_REUSEPORT, 1)
    sock.bind((address, PORT))
    sock.listen(backlog)
    return sock


Servers = Callable[[labs.LabPod], list[socket.socket]]

SERVERS: dict[str, tuple[Servers, int, int]] = {
    # The states for the pod's IPv4 and its IPv6 address.
    "none": (lambda pod: [], NO_LISTENER, NO_LISTENER),
    "both families": (lambda pod: [listening(pod)], HAS_ROOM, HAS_ROOM),
    "IPv4": (
        lambda pod: [listening(pod, family=socket.AF_INET)],
        *(HAS_ROOM, NO_LISTENER),
    ),
    "IPv6 only": (lambda pod: [listening(pod, is_v6_only=True)], NO_LISTENER, HAS_ROOM),
    "each family alone": (
        lambda pod: [listening(pod, is_v6_only=True), listening(pod, family=socket.AF_INET)],
        *(HAS_ROOM, HAS_ROOM),
    ),
    "own IPv4 address": (
        lambda pod: [listening(pod, pod.ipv4, family=socket.AF_INET)],
        *(HAS_ROOM, NO_LISTENER),
    ),
    "own IPv4 address, mapped": (
        lambda pod: [listening(pod, f"::ffff:{pod.ipv4}")],
        *(HAS_ROOM, NO_LISTENER),
    ),
    "own IPv6 address": (lambda pod: [listening(pod, pod.ipv6)], NO_LISTENER, HAS_ROOM),
    "loopback": (
        lambda pod: [listening(pod, "127.0.0.1", family=socket.AF_INET)],
        *(NO_LISTENER, NO_LISTENER),
    ),
    "bound, not listening": (
        lambda pod: [bound(pod)],
        *(NO_LISTENER, NO_LISTENER),
    ),
    "of the pod's interface": (
        lambda pod: [listening(pod, device="eth0")],
        *(NO_LISTENER, NO_LISTENER),
    ),
    "of the loopback interface": (
        lambda pod: [listening(pod, device="lo")],
        *(UNDECIDED, UNDECIDED),
    ),
    "alone, and may share its port": (
        lambda pod: [listening(pod, is_shared=True)],
        *(HAS_ROOM, HAS_ROOM),
    ),
    "two that share a port": (
        lambda pod: [listening(pod, is_shared=True), listening(pod, is_shared=True)],
        *(UNDECIDED, UNDECIDED),
    ),
    "with a socket filter": (lambda pod: [filtered(pod)], UNDECIDED, UNDECIDED),
}


def bound(pod: labs.LabPod) -> socket.socket:
    sock = pod.open_socket(socket.AF_INET6, socket.SOCK_STREAM)
    sock.bind(("", PORT))
    return sock


def filtered(pod: labs.LabPod) -> socket.socket:
    sock = listening(pod)
    code = ctypes.create_string_buffer(_ACCEPT_ALL)
    program = struct.pack("HL", 1, ctypes.addressof(code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    return sock


@pytest.mark.parametrize("name", SERVERS)
def test_room_is_found_only_where_a_connection_succeeds(
    lookup: ListenerLookup, pod: labs.LabPod, name: str
) -> None:
    make, ipv4, ipv6 = SERVERS[name]
    with contextlib.ExitStack() as stack:
        for server in make(pod):
            stack.enter_context(server)
        for address, expected in ((pod.ipv4, ipv4), (pod.ipv6, ipv6)):
            found = state(lookup, pod, address)
            assert found == expected
            succeeds = connects(pod, address)
            if found == HAS_ROOM:
                assert succeeds
            elif found == NO_LISTENER and name != "of the pod's interface":
                assert not succeeds


def test_a_listener_of_the_loopback_interface_would_mislead(
    lookup: ListenerLookup, pod: labs.LabPod
) -> None:
    """Packets to an own address go by `lo`, but the kernel takes them as the address's interface's;
    so such a listener, which a lookup finds, does not get them."""
    with listening(pod, device="lo"):
        assert state(lookup, pod, pod.ipv4) == UNDECIDED
        assert not connects(pod, pod.ipv4)
        assert state(lookup, pod, "127.0.0.1") == UNDECIDED
        assert connects(pod, "127.0.0.1")
    with listening(pod, device="eth0"):
        assert connects(pod, pod.ipv4)


def test_a_listener_on_the_loopback_address_has_room_there(
    lookup: ListenerLookup, pod: labs.LabPod
) -> None:
    with listening(pod, "127.0.0.1", family=socket.AF_INET):
        assert state(lookup, pod, "127.0.0.1") == HAS_ROOM
        assert state(lookup, pod, "::1") == NO_LISTENER


@pytest.mark.parametrize("backlog", [0, 1, 3])
def test_the_queue_is_full_when_no_further_connection_is_queued(
    lookup: ListenerLookup, pod: labs.LabPod, backlog: int
) -> None:
    with listening(pod, backlog=backlog) as server, contextlib.ExitStack() as clients:
        for _ in range(backlog + 1):
            assert state(lookup, pod, pod.ipv4) == HAS_ROOM
            client = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
            clients.enter_context(client)
            client.connect((pod.ipv4, PORT))
        assert state(lookup, pod, pod.ipv4) == QUEUE_FULL
        assert state(lookup, pod, pod.ipv6) == QUEUE_FULL
        assert not connects(pod, pod.ipv4)
        server.accept()[0].close()
        assert state(lookup, pod, pod.ipv4) == HAS_ROOM


def test_requests_that_are_not_answered_are_undecided(
    lookup: ListenerLookup, pod: labs.LabPod
) -> None:
    """Half-open connections, as of a SYN flood: the kernel may drop further ones, or use cookies.
    Here the answers to the node get lost."""
    with listening(pod, backlog=64):
        assert state(lookup, pod, pod.ipv4) == HAS_ROOM
        with contextlib.ExitStack() as clients:
            redirected.nft(pod.netns, _LOSES_ANSWERS)
            for number in range(12):
                client = socket.socket()
                clients.enter_context(client)
                client.setblocking(False)
                connect_inside(client, (pod.ipv4, PORT))
                if number < 7:
                    assert state(lookup, pod, pod.ipv4) == HAS_ROOM
            assert state(lookup, pod, pod.ipv4) == UNDECIDED


def test_connections_of_a_closed_listener_are_none(
    lookup: ListenerLookup, pod: labs.LabPod
) -> None:
    """Neither an open one nor one in TIME-WAIT at the port."""
    with listening(pod) as server:
        client = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
        client.connect((pod.ipv4, PORT))
        accepted, _ = server.accept()
    assert state(lookup, pod, pod.ipv4) == NO_LISTENER
    accepted.close()
    assert client.recv(1) == b""
    client.close()
    assert state(lookup, pod, pod.ipv4) == NO_LISTENER
    assert not connects(pod, pod.ipv4)
    with listening(pod):
        assert state(lookup, pod, pod.ipv4) == HAS_ROOM
        assert connects(pod, pod.ipv4)


def test_many_namespaces_are_looked_up_in_one_call(lookup: ListenerLookup, lab: labs.Lab) -> None:
    pods = [lab.add_pod(f"pod{number}", number) for number in range(1, 6)]
    with contextlib.ExitStack() as stack:
        for pod in pods[::2]:
            stack.enter_context(listening(pod))
        queries = [query(pod, address) for pod in pods for address in (pod.ipv4, pod.ipv6)]
        expected = [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
        assert list(lookup.look_up(queries)) == expected
        assert list(lookup.look_up(queries * 25)) == expected * 25
        assert lookup.look_up([]) == b""


def test_a_namespace_that_is_gone_has_no_listener(lookup: ListenerLookup, lab: labs.Lab) -> None:
    pod = lab.add_pod("web", 1)
    queried = query(pod, pod.ipv4)
    with listening(pod):
        assert lookup.look_up([queried]) == b"\1"
    lab.remove_pod("web")
    assert lookup.look_up([queried]) == b"\0"


def test_another_namespace_with_the_number_is_not_mistaken_for_it(
    lookup: ListenerLookup, lab: labs.Lab
) -> None:
    """The kernel gives numbers again."""
    old, new = lab.add_pod("old", 1), lab.add_pod("new", 2)
    cookie = old.netns.cookie()
    assert cookie is not None
    with listening(new):
        wrong = listener_lookup.query(cookie, number_of(new), new.ipv4, PORT)
        assert lookup.states([wrong]) == bytes([UNDECIDED])
        assert lookup.look_up([wrong, query(new, new.ipv4)]) == b"\0\1"


def test_a_namespace_without_links_gets_a_number(lookup: ListenerLookup, lab: labs.Lab) -> None:
    """Which is kept."""
    with sandbox_netns() as made:
        numbers = [asyncio.run(pod_network.netns_number(made.path)) for _ in range(2)]
        assert numbers[0] is not None
        assert numbers[0] == numbers[1]
        cookie = made.netns.cookie()
        assert cookie is not None
        with made.listen(port=PORT):
            queried = listener_lookup.query(cookie, numbers[0], made.v4, PORT)
            assert lookup.states([queried]) == bytes([HAS_ROOM])


def test_a_signal_makes_no_room(lookup: ListenerLookup, pod: labs.LabPod) -> None:
    """BPF_PROG_TEST_RUN ends early with EINTR."""
    queries = [query(pod, pod.ipv4)] * 96
    stop = threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)

    def disturb() -> None:
        while not stop.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        assert all(not any(lookup.look_up(queries)) for _ in range(500))
        with listening(pod):
            rounds = itertools.islice(iter(lambda: lookup.look_up(queries), b""), 500)
            assert any(all(answers) for answers in rounds)
    finally:
        stop.set()
        disturber.join()
        signal.signal(signal.SIGUSR1, previous)


def test_it_is_tried_out_on_the_running_kernel(lookup: ListenerLookup, lab: labs.Lab) -> None:
    lookup.try_out()


def test_offsets_that_are_wrong_are_found_by_trying(
    lookup: ListenerLookup, lab: labs.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = bytearray(lookup._header)
    layout = listener_lookup.CListenerQueries.layout.offset
    at = layout + listener_lookup.CSocketLayout.accept_queue.offset
    wrong[at : at + 4] = struct.pack("=I", 0)
    monkeypatch.setattr(lookup, "_header", bytes(wrong))
    with pytest.raises(errors.BpfError, match="looking up own listeners"):
        lookup.try_out()


def test_twins_have_the_layout_of_the_c_side() -> None:
    assert ctypes.sizeof(listener_lookup.CListenerQuery) == 32
    assert listener_lookup.CListenerQueries.queries.offset == 48
    assert listener_lookup.CListenerQuery.state.offset == 15
