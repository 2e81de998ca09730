"""Listeners of watched pods report listen and close; other sockets report and cost nothing."""

import asyncio
import ctypes
import pathlib
import select
import socket
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import listeners, pins
from probes.netns import NetnsGoneError
from tests.kernel import offers

pytestmark = pytest.mark.kernel

_SO_NETNS_COOKIE = 71
_SO_REUSEPORT = 15

ROOT_CGROUP = cgroup2_mount() or pathlib.Path("/sys/fs/cgroup")


@pytest.fixture(scope="module")
def directory(installation: pins.Pins) -> pathlib.Path:
    offers.need_netns_cookie()
    installation.prepare()
    return asyncio.run(listeners.load(installation))


@pytest.fixture
def events(directory: pathlib.Path) -> Iterator[listeners.ListenerEvents]:
    with listeners.ListenerEvents(directory, ROOT_CGROUP) as opened:
        yield opened


@pytest.fixture
def pod(lab: labs.Lab) -> labs.LabPod:
    return lab.add_pod("web", 1)


def cookie(pod: labs.LabPod) -> int:
    with pod.open_socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        value = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    return int.from_bytes(value, "little")


def reported(events: listeners.ListenerEvents) -> list[tuple[int, bool]]:
    return [(hint.port, hint.is_open) for hint in events.read()]


def test_twin_has_the_layout_of_the_c_side() -> None:
    assert ctypes.sizeof(listeners.CListenerEvent) == 24


def test_nothing_is_compiled_twice(directory: pathlib.Path, installation: pins.Pins) -> None:
    before = (directory / listeners.PROGRAM).stat().st_ino
    assert asyncio.run(listeners.load(installation)) == directory
    assert (directory / listeners.PROGRAM).stat().st_ino == before


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_listen_and_close_are_reported(
    events: listeners.ListenerEvents, pod: labs.LabPod, family: int
) -> None:
    events.watch(cookie(pod))
    sock = pod.listen(8080, family)
    assert reported(events) == [(8080, True)]
    sock.close()
    assert reported(events) == [(8080, False)]


def test_descriptor_polls_readable_when_there_is_a_hint(
    events: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    events.watch(cookie(pod))
    assert not select.select([events], [], [], 0)[0]
    with pod.listen(8080):
        assert select.select([events], [], [], 5)[0]
        (hint,) = events.read()
    assert (hint.netns_cookie, hint.port) == (cookie(pod), 8080)


def test_other_pods_and_the_host_are_not_reported(
    events: listeners.ListenerEvents, pod: labs.LabPod, lab: labs.Lab
) -> None:
    events.watch(cookie(pod))
    other = lab.add_pod("shop", 2)
    with other.listen(8080), socket.create_server(("127.0.0.1", 0)):
        pass
    assert reported(events) == []


def test_forgotten_pod_is_silent(events: listeners.ListenerEvents, pod: labs.LabPod) -> None:
    events.watch(cookie(pod))
    with pod.listen(8080):
        events.forget(cookie(pod))
    assert reported(events) == [(8080, True)]


def test_listener_from_before_does_not_report_by_itself(
    events: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    with pod.listen(8080):
        events.watch(cookie(pod))
    assert reported(events) == []


def test_listeners_from_before_report_when_they_are_adopted(
    events: listeners.ListenerEvents, directory: pathlib.Path, pod: labs.LabPod, lab: labs.Lab
) -> None:
    offers.need_adoption_of_listeners(directory)
    other = lab.add_pod("shop", 2)
    with other.listen(8080):
        with pod.listen(8080), pod.listen(8081, socket.AF_INET) as server:
            client = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
            client.connect(("127.0.0.1", 8081))
            for one in (pod, other):
                events.watch(cookie(one))
            assert listeners.adopt(directory, pod.netns.run_inside) == 2
            assert listeners.adopt(directory, pod.netns.run_inside) == 2
            # What is accepted from now on inherits the flag only until it is established.
            server.accept()[0].close()
            client.close()
        assert reported(events) == [(8081, False), (8080, False)]
    assert reported(events) == []


def test_adoption_in_a_deleted_namespace_is_an_error(
    directory: pathlib.Path, pod: labs.LabPod, lab: labs.Lab
) -> None:
    offers.need_adoption_of_listeners(directory)
    lab.remove_pod(pod.name)
    with pytest.raises(NetnsGoneError):
        listeners.adopt(directory, pod.netns.run_inside)


def test_accepted_connections_report_nothing(
    events: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    events.watch(cookie(pod))
    with pod.listen(8080, socket.AF_INET) as server:
        for _ in range(10):
            client = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
            client.connect(("127.0.0.1", 8080))
            accepted, _ = server.accept()
            accepted.close()
            client.close()
        assert reported(events) == [(8080, True)]


def test_each_listener_of_a_shared_port_reports(
    events: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    events.watch(cookie(pod))
    shared = []
    for _ in range(2):
        sock = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, _SO_REUSEPORT, 1)
        sock.bind(("", 8080))
        sock.listen()
        shared.append(sock)
    shared[0].close()
    assert reported(events) == [(8080, True), (8080, True), (8080, False)]
    shared[1].close()


def test_events_beyond_the_ring_are_counted(
    events: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    events.watch(cookie(pod))
    for _ in range(2000):
        pod.listen(8080).close()
    kept = len(reported(events))
    assert events.lost() == 2 * 2000 - kept
    # 24 bytes and a header each; a ring is never filled to its last byte.
    assert kept == 65536 // 32 - 1
    with pod.listen(8080):
        assert reported(events) == [(8080, True)]


def test_detached_program_reports_nothing(directory: pathlib.Path, pod: labs.LabPod) -> None:
    with listeners.ListenerEvents(directory, ROOT_CGROUP) as first:
        first.watch(cookie(pod))
    with pod.listen(8080), listeners.ListenerEvents(directory, ROOT_CGROUP) as second:
        assert reported(second) == []
