"""The kernel's list of listeners shows which addresses of a pod are served."""

from __future__ import annotations

import socket

import pytest

from probes import listening, netns
from probes.listening import ListeningSocket
from tests.probes.conftest import Sandbox, sandbox_netns


@pytest.mark.parametrize(
    ("listener", "taken", "left"),
    [
        (ListeningSocket("0.0.0.0", 1), ["10.0.0.1", "127.0.0.1"], ["fd00::1"]),
        (ListeningSocket("::", 1), ["10.0.0.1", "fd00::1"], []),
        (ListeningSocket("::", 1, True), ["fd00::1"], ["10.0.0.1"]),
        (ListeningSocket("10.0.0.1", 1), ["10.0.0.1"], ["10.0.0.2", "fd00::1"]),
        (ListeningSocket("fd00::1", 1), ["fd00::1", "fd00:0::1"], ["fd00::2", "10.0.0.1"]),
        (ListeningSocket("::ffff:10.0.0.1", 1), ["10.0.0.1"], ["10.0.0.2"]),
    ],
)
def test_a_listener_takes_what_the_kernel_would_give_it(
    listener: ListeningSocket, taken: list[str], left: list[str]
) -> None:
    assert all(listener.accepts(address) for address in taken)
    assert not any(listener.accepts(address) for address in left)


@pytest.mark.kernel
def test_listeners_of_both_families_are_found(sandbox: Sandbox) -> None:
    assert listening.listeners(sandbox.netns) == []
    with sandbox.listen("198.18.0.1", 80), sandbox.listen("fd00:18::1", 81):
        assert listening.listeners(sandbox.netns) == [
            ListeningSocket("198.18.0.1", 80),
            ListeningSocket("fd00:18::1", 81, True),
        ]
        assert listening.listeners(sandbox.netns, 81) == [ListeningSocket("fd00:18::1", 81, True)]
        assert listening.listeners(sandbox.netns, 82) == []


@pytest.mark.kernel
def test_dual_stack_listener_is_distinguished_from_a_v6_only_one(sandbox: Sandbox) -> None:
    with sandbox.netns.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::", 80))
        sock.listen()
        assert listening.listeners(sandbox.netns) == [ListeningSocket("::", 80, False)]


@pytest.mark.kernel
def test_hundreds_of_listeners_are_all_found(sandbox: Sandbox) -> None:
    socks = [sandbox.listen(port=port) for port in range(1000, 1800)]
    assert len(listening.listeners(sandbox.netns)) == 800
    for sock in socks:
        sock.close()
    assert listening.listeners(sandbox.netns) == []


@pytest.mark.kernel
def test_connections_are_no_listeners(sandbox: Sandbox) -> None:
    with (
        sandbox.listen() as server,
        sandbox.netns.socket(socket.AF_INET, socket.SOCK_STREAM) as client,
    ):
        client.connect_ex(server.getsockname())
        assert len(listening.listeners(sandbox.netns)) == 1


@pytest.mark.kernel
def test_deleted_namespace_is_an_error() -> None:
    with sandbox_netns() as made:
        pass
    with pytest.raises(netns.NetnsGoneError):
        listening.listeners(made.netns)
