"""Listeners of watched pods report listen and close; other sockets report and cost nothing."""

import asyncio
import ctypes
import pathlib
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.linux.cgroups import cgroup2_mount
from bpf import listeners, pins
from probes import listening
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
    assert ctypes.sizeof(listeners.CWatchedSocket) == 16


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


@pytest.fixture
def tracing(events: listeners.ListenerEvents, directory: pathlib.Path) -> listeners.ListenerEvents:
    offers.need_tracing_of_closes(directory)
    return events


def is_tracing() -> bool:
    """Whether this process has a program at a tracepoint."""
    found = pathlib.Path("/proc/self/fdinfo")
    return any("raw_tracepoint" in one.read_text() for one in found.iterdir() if one.exists())


def adopt_by_cookie(events: listeners.ListenerEvents, pod: labs.LabPod) -> int:
    return events.adopt(cookie(pod), listening.ports_by_cookie(pod.netns))


def test_listeners_from_before_report_by_the_tracepoint(
    tracing: listeners.ListenerEvents, pod: labs.LabPod, lab: labs.Lab
) -> None:
    other = lab.add_pod("shop", 2)
    with other.listen(8080):
        with pod.listen(8080), pod.listen(8081, socket.AF_INET):
            assert adopt_by_cookie(tracing, pod) == 2
            assert adopt_by_cookie(tracing, pod) == 2
        assert reported(tracing) == [(8081, False), (8080, False)]
    assert reported(tracing) == []


def test_shutdown_of_an_adopted_listener_is_reported(
    tracing: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    with pod.listen(8080) as server:
        adopt_by_cookie(tracing, pod)
        server.shutdown(socket.SHUT_RDWR)
        assert reported(tracing) == [(8080, False)]
    assert reported(tracing) == []


def test_connections_of_an_adopted_listener_report_nothing(
    tracing: listeners.ListenerEvents, pod: labs.LabPod
) -> None:
    """Accepted sockets have listened before, for the kernel, and are reset while they wait."""
    with pod.listen(8080, socket.AF_INET) as server:
        adopt_by_cookie(tracing, pod)
        for is_accepted in (True, False):
            client = pod.open_socket(socket.AF_INET, socket.SOCK_STREAM)
            client.connect(("127.0.0.1", 8080))
            if is_accepted:
                server.accept()[0].close()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        assert reported(tracing) == []
        assert is_tracing()
    assert reported(tracing) == [(8080, False)]


def test_tracepoint_is_used_only_while_an_adopted_listener_is_open(
    tracing: listeners.ListenerEvents, pod: labs.LabPod, lab: labs.Lab
) -> None:
    other = lab.add_pod("shop", 2)
    assert not is_tracing()
    with pod.listen(8080), other.listen(8080):
        for each in (pod, other):
            adopt_by_cookie(tracing, each)
        assert is_tracing()
        tracing.forget(cookie(other))
        assert is_tracing()
    assert reported(tracing) == [(8080, False)]
    assert not is_tracing()
    with pod.listen(8080):
        adopt_by_cookie(tracing, pod)
        assert is_tracing()
    assert reported(tracing) == [(8080, False)]


def test_listeners_that_a_previous_reader_adopted_are_forgotten(
    directory: pathlib.Path, pod: labs.LabPod
) -> None:
    offers.need_tracing_of_closes(directory)
    with pod.listen(8080):
        with listeners.ListenerEvents(directory, ROOT_CGROUP) as first:
            adopt_by_cookie(first, pod)
        with listeners.ListenerEvents(directory, ROOT_CGROUP) as second:
            with pod.listen(8081):
                adopt_by_cookie(second, pod)
                second.forget(cookie(pod))
            assert not is_tracing()
            assert reported(second) == []


def test_kernel_without_the_tracepoint_adopts_no_listener(
    events: listeners.ListenerEvents, pod: labs.LabPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "CLOSES", "none")
    with pod.listen(8080):
        assert adopt_by_cookie(events, pod) == 0
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
