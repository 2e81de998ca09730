"""With connection tracking the default-deny table also drops datagrams of new flows."""

import contextlib
import pathlib
import socket
import subprocess

import pytest

from agent.default_deny import installed
from agent.lab import lab as labs
from tests.kernel import traffic
from tests.kernel.default_deny import (
    PATHS,
    VERSIONS,
    Driven,
    OpenTable,
    default_deny,
    exchange,
    open_table,
    tracked,
    tracking,
)

pytestmark = pytest.mark.kernel

__all__ = ["default_deny", "open_table", "tracked", "tracking"]


@PATHS
@VERSIONS
def test_with_connection_tracking_datagrams_are_dropped(
    lab: labs.Lab, tracking: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with (
        pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as server,
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as client,
    ):
        server.bind(("", 53))
        with pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as other:
            other.bind(("", 54))
            other.settimeout(traffic.DROPPED_AFTER_SECONDS)
            with contextlib.suppress(PermissionError):
                client.sendto(b"hello", (traffic.address(pod, version), 54))
            with pytest.raises(TimeoutError):
                other.recv(100)
        tracking.gate([pod.ifindex])
        assert exchange(client, server, traffic.address(pod, version)) == b"answer to question"


@PATHS
@VERSIONS
def test_host_services_answer_datagrams_of_new_pods(
    lab: labs.Lab, tracking: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with (
        pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as client,
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as server,
    ):
        server.bind((traffic.NODE[version], 53))
        assert exchange(client, server, traffic.NODE[version]) == b"answer to question"


def test_untracked_answers_pass(lab: labs.Lab, tracking: Driven) -> None:
    """NodeLocal DNSCache excludes its packets from connection tracking."""
    script = """table inet test-raw {
      chain in { type filter hook prerouting priority -300; udp dport 53 notrack; }
      chain out { type filter hook output priority -300; udp sport 53 notrack; }
    }"""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        pod = lab.add_pod("web", 1)
        with (
            pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
            socket.socket(type=socket.SOCK_DGRAM) as server,
        ):
            server.bind((traffic.NODE[4], 53))
            assert exchange(client, server, traffic.NODE[4]) == b"answer to question"
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "test-raw"], check=True)


def test_without_tracking_datagrams_pass_and_tracking_stays_off(
    lab: labs.Lab, open_table: OpenTable
) -> None:
    opened = open_table()
    assert not opened.covers_datagrams
    pod = lab.add_pod("web", 1)
    with (
        pod.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as server,
        socket.socket(type=socket.SOCK_DGRAM) as client,
    ):
        server.bind(("", 53))
        assert exchange(client, server, pod.ipv4) == b"answer to question"
    assert "ct state" not in subprocess.check_output(["nft", "list", "ruleset"], text=True)


@VERSIONS
def test_dhcp_answers_reach_new_pods(lab: labs.Lab, tracking: Driven, version: int) -> None:
    """Connection tracking considers them new, because the request was a broadcast."""
    pod = lab.add_pod("web", 1)
    server_port, client_port = (67, 68) if version == 4 else (547, 546)
    family, kind = traffic.family(version), socket.SOCK_DGRAM
    with (
        pod.open_socket(family, kind) as client,
        socket.socket(family, kind) as server,
        socket.socket(family, kind) as other,
    ):
        client.bind(("", client_port))
        server.bind(("", server_port))
        for sock, text in ((other, b"no answer"), (server, b"offer")):
            with contextlib.suppress(PermissionError):
                sock.sendto(text, (traffic.address(pod, version), client_port))
        client.settimeout(traffic.LIMIT_SECONDS)
        assert client.recv(100) == b"offer"


@PATHS
@pytest.mark.parametrize("group", ["224.0.0.251", "255.255.255.255", "ff02::fb"])
def test_multicast_of_the_node_reaches_new_pods(
    lab: labs.Lab, tracking: Driven, bridged: bool, group: str
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    interface = socket.if_nametoindex(labs.BRIDGE if bridged else pod.interface)
    family = socket.AF_INET6 if ":" in group else socket.AF_INET
    with (
        pod.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0003)) as sniffer,
        socket.socket(family, socket.SOCK_DGRAM) as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        name = socket.if_indextoname(interface).encode()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        sniffer.settimeout(traffic.DROPPED_AFTER_SECONDS)
        # A bridge port that is still coming up loses what is sent meanwhile.
        for _ in range(10):
            # Right after the interface is created there is no route for groups either.
            with contextlib.suppress(OSError):
                sock.sendto(b"to everybody", (group, 5353))
            with contextlib.suppress(TimeoutError):
                while not sniffer.recv(1500).endswith(b"to everybody"):
                    pass
                return
    pytest.fail("nothing came")


def test_datagrams_are_dropped_once_tracking_starts(
    default_deny: Driven, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """kube-proxy may start after podgate."""
    assert not default_deny.covers_datagrams
    (tmp_path / "count").write_text("5\n")
    monkeypatch.setattr(installed, "_CONNTRACK_COUNT", tmp_path / "count")
    assert not default_deny.ensure()  # the ruleset is unchanged
    assert default_deny.made.covers_datagrams
    listed = subprocess.check_output(["nft", "list", "chain", "inet", "podgate", "opening"])
    assert b"ct state new" in listed
    assert not default_deny.ensure()
