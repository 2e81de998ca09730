"""The nftables backstop: closed from birth, and nothing else touched."""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator

import pytest

from agent import backstop as backstops
from agent import nft, ruleset
from agent.backstop import Backstop, BackstopError
from agent.demo import lab as labs
from bpf.gates import GateConfig, Gates
from bpf.verdicts import Mode
from tests.kernel import cgroups, traffic

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PATHS = pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])

_CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.settimeout(float(sys.argv[2]))
sock.connect((sys.argv[1], 80))
"""


class Driven:
    """A backstop whose calls wait: the lab's netlink allows no running event loop."""

    def __init__(self, runner: asyncio.Runner, stale_seconds: int, pods: Iterable[str]) -> None:
        self._run = runner.run
        self.made = self._run(Backstop.open(stale_seconds=stale_seconds, pods=pods))
        self.reason_unavailable = self.made.reason_unavailable
        self.covers_bridges = self.made.covers_bridges
        self.covers_datagrams = self.made.covers_datagrams

    @property
    def available(self) -> bool:
        return self.made.available

    def gate(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.gate(ifindexes))

    def exempt(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.exempt(ifindexes))

    def release(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.release(ifindexes))

    def admit(self, kubelet: str | None) -> None:
        self._run(self.made.admit(kubelet))

    def beat(self) -> None:
        self._run(self.made.beat())

    def ensure(self) -> bool:
        return self._run(self.made.ensure())

    def remove(self) -> None:
        self._run(self.made.remove())

    def all_at_once(self, *calls: Coroutine[None, None, None]) -> None:
        async def gather() -> None:
            await asyncio.gather(*calls)

        self._run(gather())


OpenBackstop = Callable[..., Driven]


@pytest.fixture
def open_backstop(
    lab: labs.Lab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenBackstop]:
    """The node's namespace outlives a test, and so would its tables and tracked connections."""
    if "tracked" not in request.fixturenames:
        monkeypatch.setattr(backstops, "_CONNTRACK_COUNT", pathlib.Path("/dev/null"))
    with asyncio.Runner() as runner:
        yield lambda stale_seconds=60, pods=(): Driven(runner, stale_seconds, pods)
        runner.run(backstops.remove())


@pytest.fixture
def backstop(open_backstop: OpenBackstop) -> Driven:
    """On a node without pods: those that come are born closed."""
    opened = open_backstop()
    assert opened.reason_unavailable == ""
    return opened


def remove_without_agent() -> None:
    asyncio.run(backstops.remove())


def tables() -> list[str]:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


OURS = ["table inet podgate", "table bridge podgate"]


@PATHS
@VERSIONS
def test_a_new_pod_is_closed_to_the_node(
    lab: labs.Lab, backstop: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with pod.listen(80):
        assert traffic.node_is_dropped(pod, version)


@PATHS
@VERSIONS
def test_after_gate_the_gate_alone_decides(
    lab: labs.Lab, gates: Gates, backstop: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    with pod.listen(80):
        gates.install(pod.ifindex, GateConfig(Mode.AUDIT, pod.addresses))
        assert traffic.node_is_dropped(pod, version)
        backstop.gate([pod.ifindex])
        assert traffic.node_reaches(pod, version)
        gates.configure(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses))
        assert traffic.node_is_dropped(pod, version)


@PATHS
def test_what_is_no_pods_is_left_alone(lab: labs.Lab, backstop: Driven, bridged: bool) -> None:
    pod = lab.add_pod("other", 1, bridged=bridged)
    backstop.exempt([pod.ifindex])
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)
        backstop.release([pod.ifindex])
        assert traffic.node_is_dropped(pod, 4)


def test_interfaces_from_before_the_first_run_stay_open_until_gated(
    lab: labs.Lab, open_backstop: OpenBackstop
) -> None:
    """Among them is the uplink of a node that is itself a container."""
    pod = lab.add_pod("old", 1)
    opened = open_backstop()
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)
        opened.gate([pod.ifindex])
        opened.release([pod.ifindex])
        assert traffic.node_is_dropped(pod, 4)


@VERSIONS
@pytest.mark.parametrize("gated", [False, True])
def test_pods_reach_each_other_and_the_node(
    lab: labs.Lab, backstop: Driven, gated: bool, version: int
) -> None:
    pods = [
        lab.add_pod("routed", 1),
        lab.add_pod("bridged", 2, bridged=True),
        lab.add_pod("routed2", 3),
        lab.add_pod("bridged2", 4, bridged=True),
    ]
    if gated:
        backstop.gate(pod.ifindex for pod in pods)
    with traffic.listen_on_node(81) as node:
        for client in pods:
            traffic.pod_connects(client, traffic.NODE[version], version, node)
    for server in pods:
        with server.listen(80) as listening:
            for client in pods:
                if client is not server:
                    target = traffic.address(server, version)
                    traffic.pod_connects(client, target, version, listening)


@PATHS
@VERSIONS
@pytest.mark.parametrize("filters_bridged", ["0", "1"])
def test_bridged_frames_of_pods_pass_whether_or_not_netfilter_sees_them(
    lab: labs.Lab, backstop: Driven, bridged: bool, version: int, filters_bridged: str
) -> None:
    server = lab.add_pod("server", 1, bridged=True)
    client = lab.add_pod("client", 2, bridged=bridged)
    with (
        sysctl("net/bridge/bridge-nf-call-iptables", filters_bridged),
        sysctl("net/bridge/bridge-nf-call-ip6tables", filters_bridged),
        server.listen(80) as listening,
    ):
        traffic.pod_connects(client, traffic.address(server, version), version, listening)


@contextlib.contextmanager
def sysctl(name: str, value: str) -> Iterator[None]:
    path = pathlib.Path("/proc/sys", name)
    before = path.read_text()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


@PATHS
def test_from_outside_through_the_node(lab: labs.Lab, backstop: Driven, bridged: bool) -> None:
    """A client beyond an exempt interface; plain, and translated on the node (a NodePort)."""
    outside = lab.add_pod("outside", 9)
    backstop.exempt([outside.ifindex])
    server = lab.add_pod("server", 1, bridged=bridged)
    with server.listen(80) as listening:
        traffic.pod_connects(outside, server.ipv4, 4, listening)
        with nat(f"ip daddr {traffic.NODE[4]} tcp dport 80 dnat to {server.ipv4}"):
            traffic.pod_connects(outside, traffic.NODE[4], 4, listening)


def test_connections_that_synproxy_carries_on_reach_new_pods(
    lab: labs.Lab, backstop: Driven
) -> None:
    """It answers the client itself, then sends a SYN of its own to the pod: without a socket."""
    outside, server = lab.add_pod("outside", 9), lab.add_pod("server", 1)
    script = """table inet test-synproxy {
      chain before {
        type filter hook prerouting priority -300;
        iifname "pgoutside" tcp flags & (syn | ack) == syn notrack
      }
      chain forward {
        type filter hook forward priority 0;
        iifname != "pgoutside" accept
        ct state { invalid, untracked } synproxy mss 1460 wscale 7 timestamp sack-perm
      }
    }"""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        with sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"), server.listen(80) as listening:
            traffic.pod_connects(outside, server.ipv4, 4, listening)
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "test-synproxy"], check=True)


@contextlib.contextmanager
def nat(rule: str) -> Iterator[None]:
    """Destination translation as kube-proxy does it, for what arrives and what the node sends."""
    chains = "".join(
        f"chain {hook} {{ type nat hook {hook} priority -100; {rule}; }}\n"
        for hook in ("prerouting", "output")
    )
    script = f"table ip test-nat {{\n{chains}}}\n"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "ip", "test-nat"], check=True)


@PATHS
def test_a_translated_address_does_not_help_the_node(
    lab: labs.Lab, backstop: Driven, bridged: bool
) -> None:
    """Before translation the packet's way out is another interface."""
    pod = lab.add_pod("web", 1, bridged=bridged)
    with (
        pod.listen(80),
        nat(f"ip daddr 198.18.0.80 tcp dport 80 dnat to {pod.ipv4}"),
        socket.socket() as sock,
    ):
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        subprocess.run(["ip", "route", "add", "198.18.0.80", "dev", "lo"], check=True)
        with pytest.raises(TimeoutError):
            sock.connect(("198.18.0.80", 80))
        backstop.gate([pod.ifindex])
        with socket.socket() as again:
            again.settimeout(traffic.LIMIT_SECONDS)
            again.connect(("198.18.0.80", 80))


def test_copies_that_a_bridge_floods_are_closed_too(lab: labs.Lab, backstop: Driven) -> None:
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    with pods[0].listen(80):
        backstop.gate([pods[0].ifindex])
        assert traffic.node_reaches(pods[0], 4)  # the node knows the pod's MAC now
        traffic.forget_ports(labs.BRIDGE, pods)
        assert traffic.node_reaches(pods[0], 4)  # flooding to its gated port works
        backstop.release([pods[0].ifindex])
        assert traffic.node_is_dropped(pods[0], 4)


def connect_from(group: cgroups.Cgroup, pod: labs.LabPod, version: int, seconds: float) -> bool:
    address = traffic.address(pod, version)
    done = group.run([sys.executable, "-c", _CONNECT, address, str(seconds)])
    assert done.returncode == 0 or b"TimeoutError" in done.stderr, done.stderr
    return done.returncode == 0


@PATHS
@VERSIONS
def test_the_kubelet_reaches_a_new_pod_and_others_do_not(
    lab: labs.Lab, backstop: Driven, bridged: bool, version: int
) -> None:
    with (
        cgroups.cgroup() as system,
        cgroups.cgroup("kubelet.service", below=system) as kubelet,
        cgroups.cgroup("other.service", below=system) as other,
    ):
        backstop.admit(kubelet.path)
        pod = lab.add_pod("web", 1, bridged=bridged)
        with pod.listen(80):
            assert connect_from(kubelet, pod, version, traffic.LIMIT_SECONDS)
            assert not connect_from(other, pod, version, traffic.DROPPED_AFTER_SECONDS)
            assert not connect_from(system, pod, version, traffic.DROPPED_AFTER_SECONDS)


def test_a_kubelet_in_a_fresh_cgroup_of_the_same_name_is_admitted_anew(
    lab: labs.Lab, backstop: Driven
) -> None:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), cgroups.cgroup() as kubelet:
        backstop.admit(kubelet.path)
        before = kubelet.id
        cgroups.remove(kubelet)
        kubelet.directory.mkdir()
        assert kubelet.id != before
        assert not connect_from(kubelet, pod, 4, traffic.DROPPED_AFTER_SECONDS)
        backstop.admit(kubelet.path)
        assert connect_from(kubelet, pod, 4, traffic.LIMIT_SECONDS)
        backstop.admit(None)
        assert not connect_from(kubelet, pod, 4, traffic.DROPPED_AFTER_SECONDS)


@pytest.mark.parametrize("path", ["/", "/../elsewhere", "/podgate-test-no-such-cgroup"])
def test_a_cgroup_that_tells_nobody_apart_is_refused_and_the_last_one_stays(
    lab: labs.Lab, backstop: Driven, path: str
) -> None:
    pod = lab.add_pod("web", 1)
    with pod.listen(80), cgroups.cgroup() as kubelet:
        backstop.admit(kubelet.path)
        with pytest.raises(BackstopError, match="cgroup"):
            backstop.admit(path)
        backstop.ensure()
        assert connect_from(kubelet, pod, 4, traffic.LIMIT_SECONDS)


def test_while_no_agent_lives_any_process_outside_of_pods_may_be_the_kubelet(
    lab: labs.Lab, open_backstop: OpenBackstop
) -> None:
    with (
        cgroups.cgroup() as pods,
        cgroups.cgroup("host-network-pod", below=pods) as host_network_pod,
        cgroups.cgroup() as restarted_kubelet,
    ):
        open_backstop(stale_seconds=1, pods=[pods.path])
        web, bridged = lab.add_pod("web", 1), lab.add_pod("bridged", 2, bridged=True)
        with web.listen(80), bridged.listen(80):
            # Its SYN is sent again until the heartbeat is stale.
            assert connect_from(restarted_kubelet, web, 4, traffic.LIMIT_SECONDS)
            assert connect_from(restarted_kubelet, bridged, 6, traffic.LIMIT_SECONDS)
            limit = traffic.DROPPED_AFTER_SECONDS
            assert not connect_from(host_network_pod, web, 4, limit)
            assert not connect_from(host_network_pod, bridged, 6, limit)


def test_a_heartbeat_closes_again(lab: labs.Lab, open_backstop: OpenBackstop) -> None:
    opened = open_backstop(stale_seconds=1)
    pod = lab.add_pod("web", 1)
    with pod.listen(80):
        assert traffic.node_reaches(pod, 4)  # stale by now
        opened.made._wanted.stale_seconds = 60
        for _ in range(2):
            opened.beat()
            assert traffic.node_is_dropped(pod, 4)


@pytest.mark.parametrize("name", ["kubepods", "x/kubepods", "kubepods.slice", "x/x-kubepods.slice"])
def test_pods_cgroups_are_found_by_their_names(
    lab: labs.Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, name: str
) -> None:
    (tmp_path / name / "pod1").mkdir(parents=True)
    (tmp_path / "system.slice" / "kubelet.service").mkdir(parents=True)
    scripts = record_scripts(monkeypatch)
    asyncio.run(Backstop.open(cgroup2=tmp_path))
    level = name.count("/") + 1
    relative = os.path.relpath(tmp_path / name, "/sys/fs/cgroup")
    rules = [line.strip() for line in scripts[-1].splitlines() if line.endswith(" return")]
    assert rules == [f'socket cgroupv2 level {level} "{relative}" return']
    remove_without_agent()


def record_scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that is applied from now on."""
    scripts = []
    apply = nft.apply

    async def recording(script: str, *, only_check: bool = False) -> None:
        scripts.append(script)
        await apply(script, only_check=only_check)

    monkeypatch.setattr(nft, "apply", recording)
    return scripts


def test_a_kubelets_cgroup_that_is_gone_does_not_stop_changes(
    lab: labs.Lab, backstop: Driven
) -> None:
    with cgroups.cgroup() as kubelet:
        backstop.admit(kubelet.path)
    assert not backstop.ensure()
    flush_ruleset()
    assert backstop.ensure()
    assert tables() == OURS


def flush_ruleset() -> None:
    """What a restart of nftables.service does."""
    subprocess.run(["nft", "flush", "ruleset"], check=True)


@pytest.fixture
def tracked(lab: labs.Lab) -> Iterator[None]:
    """A node that tracks connections, and has one."""
    script = "table inet test-ct { chain c { type filter hook output priority 0; ct state new; }; }"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
        two.bind(("127.0.0.1", 0))
        one.sendto(b"tracked", two.getsockname())
        yield
    subprocess.run(["nft", "delete", "table", "inet", "test-ct"], check=True)


@pytest.fixture
def tracking(tracked: None, backstop: Driven) -> Driven:
    assert backstop.covers_datagrams
    return backstop


def exchange(client: socket.socket, server: socket.socket, target: str) -> bytes:
    """A datagram and its answer, the server on port 53 of its address."""
    server.settimeout(traffic.LIMIT_SECONDS)
    client.settimeout(traffic.LIMIT_SECONDS)
    client.sendto(b"question", (target, server.getsockname()[1]))
    question, source = server.recvfrom(100)
    server.sendto(b"answer to " + question, source)
    return client.recv(100)


@PATHS
@VERSIONS
def test_where_connections_are_tracked_datagrams_are_held_back_too(
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
def test_the_nodes_services_answer_new_pods_datagrams(
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
    """NodeLocal DNSCache tells tracking to leave its packets alone."""
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
    lab: labs.Lab, open_backstop: OpenBackstop
) -> None:
    opened = open_backstop()
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
def test_dhcps_answers_reach_new_pods(lab: labs.Lab, tracking: Driven, version: int) -> None:
    """To tracking they are new: the question was a broadcast."""
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
            # Nor is there a route for groups before the interface's first moment is over.
            with contextlib.suppress(OSError):
                sock.sendto(b"to everybody", (group, 5353))
            with contextlib.suppress(TimeoutError):
                while not sniffer.recv(1500).endswith(b"to everybody"):
                    pass
                return
    pytest.fail("nothing came")


def test_datagrams_are_held_back_from_when_tracking_begins(
    backstop: Driven, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """kube-proxy may start after podgate."""
    assert not backstop.covers_datagrams
    (tmp_path / "count").write_text("5\n")
    monkeypatch.setattr(backstops, "_CONNTRACK_COUNT", tmp_path / "count")
    assert not backstop.ensure()  # nobody changed anything
    assert backstop.made.covers_datagrams
    listed = subprocess.check_output(["nft", "list", "chain", "inet", "podgate", "opening"])
    assert b"ct state new" in listed
    assert not backstop.ensure()


@PATHS
@VERSIONS
def test_ping_of_the_node_by_a_new_pod_is_answered_and_not_the_other_way(
    lab: labs.Lab, tracking: Driven, bridged: bool, version: int
) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    assert ping(traffic.NODE[version], pod.open_socket, version, traffic.LIMIT_SECONDS)
    assert not ping(traffic.address(pod, version), socket.socket, version)
    tracking.gate([pod.ifindex])
    assert ping(traffic.address(pod, version), socket.socket, version, traffic.LIMIT_SECONDS)


def ping(
    target: str,
    open_socket: Callable[..., socket.socket],
    version: int,
    seconds: float = traffic.DROPPED_AFTER_SECONDS,
) -> bool:
    protocol = socket.IPPROTO_ICMP if version == 4 else socket.IPPROTO_ICMPV6
    request, reply = (8, 0) if version == 4 else (128, 129)
    packet = bytes([request, 0, 0, 0, 0, 1, 0, 1])
    if version == 4:
        packet = packet[:2] + (0xFFFF - (request << 8) - 2).to_bytes(2, "big") + packet[4:]
    with open_socket(traffic.family(version), socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(seconds)
        with contextlib.suppress(PermissionError):
            sock.sendto(packet, (target, 0))
        try:
            while True:
                answer = sock.recv(1500)
                if answer[20 if version == 4 else 0] == reply:
                    return True
        except TimeoutError:
            return False


def tcp_header(flags: int) -> bytes:
    return (
        bytes.fromhex("9999005000000001000000005002ffff00000000")[:13] + bytes([flags]) + bytes(6)
    )


@pytest.mark.parametrize("cut", [8, 16])
def test_fragments_of_tcp_that_a_raw_socket_sends_are_dropped(
    lab: labs.Lab, backstop: Driven, cut: int
) -> None:
    pod = lab.add_pod("web", 1)
    segment = tcp_header(0x10 if cut == 16 else 0x02)
    sniffer = pod.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    with sniffer, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        sniffer.settimeout(traffic.DROPPED_AFTER_SECONDS)
        for offset, part in ((0x2000, segment[:cut]), (cut // 8, segment[cut:])):
            header = (
                bytes([0x45, 0, 0, 0, 0x12, 0x34])
                + offset.to_bytes(2, "big")
                + bytes([64, 6, 0, 0])
                + socket.inet_aton(traffic.NODE[4])
                + socket.inet_aton(pod.ipv4)
            )
            with contextlib.suppress(PermissionError):
                raw.sendto(header + part, (pod.ipv4, 0))
        seen = []
        with contextlib.suppress(TimeoutError):
            while True:
                seen.append(sniffer.recv(100)[6:8])
    # A first fragment that opens nothing may pass; without the rest it is nothing.
    assert (cut // 8).to_bytes(2, "big") not in seen
    assert cut == 16 or seen == []


@pytest.mark.parametrize("cuts", [(0, 20), (0, 8, 20)], ids=["atomic", "two"])
def test_fragments_of_tcp_over_ipv6_never_arrive_whole(
    lab: labs.Lab, backstop: Driven, cuts: tuple[int, ...]
) -> None:
    pod = lab.add_pod("web", 1)
    segment = tcp_header(0x02)
    sniffer = pod.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x86DD))
    with sniffer, socket.socket(socket.AF_INET6, socket.SOCK_RAW, 44) as raw:
        sniffer.settimeout(traffic.DROPPED_AFTER_SECONDS)
        for start, end in itertools.pairwise(cuts):
            more = end < len(segment)
            header = bytes([6, 0, 0, start | more, 0, 0, 0, 1])
            with contextlib.suppress(PermissionError):
                raw.sendto(header + segment[start:end], (pod.ipv6, 0))
        seen = []
        with contextlib.suppress(TimeoutError):
            while True:
                seen.append(sniffer.recv(100))
    # A later fragment may pass; without the first, which says what it is, it is nothing.
    arrived = [packet[42:44] for packet in seen if packet[6] == 44]
    assert b"\x00\x00" not in [bytes([high, low & 0xF8]) for high, low in arrived]


@PATHS
def test_a_mark_of_the_processs_own_does_not_help_it_and_is_kept(
    lab: labs.Lab, backstop: Driven, bridged: bool
) -> None:
    """Half of the mark carries the tag for a moment; kube-proxy's bits are in the other half."""
    pod = lab.add_pod("web", 1, bridged=bridged)
    family = "bridge" if bridged else "inet"
    script = f"""table {family} test-mark {{
      counter seen {{ }}
      chain c {{ type filter hook postrouting priority 0; meta mark 0x4000 counter name seen; }}
    }}"""
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    try:
        with pod.listen(80):
            for mark in (0x4000, ruleset.TAG, 0xFFFFFFFF, 0x00E80000):
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, struct.pack("=I", mark))
                    sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
                    with pytest.raises(TimeoutError):
                        sock.connect((pod.ipv4, 80))
            assert packets_of(family) == 0
            backstop.gate([pod.ifindex])
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 0x4000)
                sock.settimeout(traffic.LIMIT_SECONDS)
                sock.connect((pod.ipv4, 80))
                # The SYN's and the ACK's, which was never tagged.
                assert packets_of(family) == 2
    finally:
        subprocess.run(["nft", "delete", "table", family, "test-mark"], check=True)


def packets_of(family: str) -> int:
    listed = subprocess.check_output(
        ["nft", "--json", "list", "counter", family, "test-mark", "seen"], text=True
    )
    return int(json.loads(listed)["nftables"][1]["counter"]["packets"])


def test_the_nodes_own_conversations_go_on(lab: labs.Lab, backstop: Driven) -> None:
    with traffic.listen_on_node(81) as listening, socket.socket() as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((traffic.NODE[4], 81))
        peer, _ = listening.accept()
        peer.close()


@PATHS
def test_a_connection_from_before_goes_on(lab: labs.Lab, backstop: Driven, bridged: bool) -> None:
    pod = lab.add_pod("web", 1, bridged=bridged)
    backstop.gate([pod.ifindex])
    with pod.listen(80) as listening, socket.socket() as sock:
        sock.settimeout(traffic.LIMIT_SECONDS)
        sock.connect((pod.ipv4, 80))
        peer, _ = listening.accept()
        backstop.release([pod.ifindex])
        with peer:
            sock.sendall(b"still here")
            peer.settimeout(traffic.LIMIT_SECONDS)
            assert peer.recv(100) == b"still here"


def test_remove_leaves_no_table(lab: labs.Lab, backstop: Driven) -> None:
    assert tables() == OURS
    backstop.remove()
    assert tables() == []
    assert not backstop.available
    backstop.gate([1])
    remove_without_agent()
    assert tables() == []


_MAKER = """
import asyncio, sys
from agent.backstop import Backstop
async def main():
    opened = await Backstop.open()
    assert opened.available, opened.reason_unavailable
    print("open", flush=True)
    await opened.gate([int(await asyncio.to_thread(sys.stdin.readline))])
    print("gated", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""


def test_it_outlives_its_killed_maker_and_the_next_takes_it_over(
    lab: labs.Lab, open_backstop: OpenBackstop
) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with maker:
        assert maker.stdin is not None
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"open\n"
        gated = lab.add_pod("gated", 1)
        maker.stdin.write(b"%d\n" % gated.ifindex)
        maker.stdin.flush()
        assert maker.stdout.readline() == b"gated\n"
        maker.send_signal(signal.SIGKILL)
    born_after = lab.add_pod("after", 2)
    with gated.listen(80), born_after.listen(80):
        assert traffic.node_is_dropped(born_after, 4)
        opened = open_backstop()
        assert tables() == OURS
        assert traffic.node_is_dropped(born_after, 4)
        assert traffic.node_reaches(gated, 4)
        opened.gate([born_after.ifindex])
        assert traffic.node_reaches(born_after, 4)


def test_it_comes_back_when_somebody_flushes_all_rules(lab: labs.Lab, backstop: Driven) -> None:
    pod, other = lab.add_pod("web", 1), lab.add_pod("other", 2)
    backstop.gate([pod.ifindex])
    assert not backstop.ensure()
    flush_ruleset()
    assert backstop.ensure()
    with pod.listen(80), other.listen(80):
        assert traffic.node_reaches(pod, 4)
        assert traffic.node_is_dropped(other, 4)
    flush_ruleset()
    backstop.gate([other.ifindex])  # does not wait for the next look
    assert tables() == OURS


def test_a_rule_that_somebody_took_out_comes_back(backstop: Driven) -> None:
    subprocess.run(["nft", "flush", "chain", "inet", "podgate", "postrouting"], check=True)
    assert backstop.ensure()
    assert not backstop.ensure()


def test_bursts_become_few_transactions(backstop: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = record_scripts(monkeypatch)
    backstop.all_at_once(*(backstop.made.gate([1000 + number]) for number in range(200)))
    assert len(scripts) <= 2
    assert elements(ruleset.GATED) == set(range(1000, 1200))


def test_changes_of_mind_within_a_burst_end_in_the_last_word(backstop: Driven) -> None:
    made = backstop.made
    backstop.all_at_once(
        made.gate([1000, 1001]),
        made.exempt([1000]),
        made.release([1001]),
        made.gate([1001]),
        made.release([1000]),
    )
    assert elements(ruleset.GATED) == {1001}
    assert 1000 not in elements(ruleset.NOT_PODS)


def elements(name: str) -> set[int]:
    """Numbers of interfaces in a set; those that do not exist are printed as such."""
    text = subprocess.check_output(["nft", "list", "set", "bridge", "podgate", name], text=True)
    return {int(number) for number in re.findall(r"\b\d{4}\b", text)}


def test_an_interface_with_a_number_for_a_name_is_not_taken_for_another(
    lab: labs.Lab, backstop: Driven
) -> None:
    pod = lab.add_pod("web", 1)
    names = ["ip", "link", "add", str(pod.ifindex), "type", "veth", "peer", "name", "pgpeer"]
    subprocess.run(names, check=True)
    try:
        backstop.gate([pod.ifindex])
        with pod.listen(80):
            assert traffic.node_reaches(pod, 4)
    finally:
        subprocess.run(["ip", "link", "del", "pgpeer"], check=True)


def test_without_nft_it_is_one_sentence_and_nothing_happens(
    lab: labs.Lab,
    open_backstop: OpenBackstop,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    opened = open_backstop()
    assert not opened.available
    assert opened.reason_unavailable == (
        "without the nftables backstop a new pod is open to the node until its gate is on: "
        "there is no nft command."
    )
    opened.gate([1])
    opened.admit("/x")
    assert not opened.ensure()
    opened.remove()
    remove_without_agent()


def test_an_nft_that_the_kernel_refuses_is_one_sentence(
    lab: labs.Lab,
    open_backstop: OpenBackstop,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    fake = tmp_path / "nft"
    fake.write_text("#!/bin/sh\necho 'x:0:0-0: Error: Operation not supported' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    opened = open_backstop()
    assert opened.reason_unavailable.endswith("Operation not supported.")
    monkeypatch.undo()
    assert tables() == []


def test_a_kernel_that_cannot_filter_bridges_closes_what_is_routed(
    lab: labs.Lab, open_backstop: OpenBackstop, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = nft.apply

    async def without_bridges(script: str, *, only_check: bool = False) -> None:
        if "table bridge podgate {" in script:
            raise nft.NftError("Could not process rule: Operation not supported")
        await apply(script, only_check=only_check)

    monkeypatch.setattr(nft, "apply", without_bridges)
    opened = open_backstop()
    assert opened.available
    assert not opened.covers_bridges
    pod, bridged = lab.add_pod("web", 1), lab.add_pod("bridged", 2, bridged=True)
    with pod.listen(80), bridged.listen(80):
        assert traffic.node_is_dropped(pod, 4)
        assert traffic.node_reaches(bridged, 4)
        opened.gate([pod.ifindex])
        assert traffic.node_reaches(pod, 4)


def test_an_nft_that_hangs_is_given_up(
    backstop: Driven, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fake = tmp_path / "nft"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        patched.setattr(nft, "_TIMEOUT_SECONDS", 0.2)
        with pytest.raises(BackstopError, match="did not answer in time"):
            backstop.gate([1000])
    backstop.gate([1001])
    assert elements(ruleset.GATED) == {1000, 1001}
