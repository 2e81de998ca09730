"""Traffic between pods and from outside works with enforcing gates as without gates."""

import contextlib
import socket
import struct
import subprocess
from collections.abc import Callable, Iterable, Iterator

import pytest

from agent.lab import lab as labs
from bpf.gates import Attachment, GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import conversations, links, traffic
from tests.kernel.conftest import MakeGates
from tests.kernel.counting import CONTROL, Counting
from tests.kernel.reply_tables import start_reply_table

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
PATHS = pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])
FAMILY = {4: "ip", 6: "ip6"}
SERVICE = {4: "198.18.0.80", 6: "fd00:18::80"}
TCP_NODE_PORT, UDP_NODE_PORT = 30080, 30053
ESTABLISHED = (Verdict.PASS, Reason.ESTABLISHED)

# The host's kernel sends pods redirects, IPv6 has no setting against it, and gates drop them.
REDIRECT = (Verdict.DROP, Reason.NODE)

Key = tuple[Verdict, Reason]
Enforce = Callable[..., list[Counting]]


@pytest.fixture
def enforce(gates: Gates) -> Enforce:
    return enforcing_by(gates)


def enforcing_by(gates: Gates) -> Enforce:
    """Enforces for pods; returns the counts of their gates from then on."""

    def enforce(*pods: labs.LabPod, rules: tuple[Rule, ...] = ()) -> list[Counting]:
        for pod in pods:
            gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, rules))
            start_reply_table(gates, pod.ifindex)
        return [Counting(gates, pod.ifindex) for pod in pods]

    return enforce


def expect_nothing_counted(countings: list[Counting], *, but: Iterable[Key] = ()) -> None:
    """Gates do not count forwarded packets. They count what the host's kernel itself sends to
    resolve neighbours."""
    for counting in countings:
        assert counting.moved().keys() <= {*CONTROL, *but}


@contextlib.contextmanager
def tracked() -> Iterator[None]:
    """The node tracks what it forwards, so it puts fragments together and takes them apart."""
    with links.table(
        "inet", "chain c { type filter hook forward priority 0; ct state invalid counter; }"
    ):
        yield


@contextlib.contextmanager
def seen_by_netfilter(value: str) -> Iterator[None]:
    """Whether bridged frames pass the hooks of IP (br_netfilter)."""
    with (
        links.sysctl("net/bridge/bridge-nf-call-iptables", value),
        links.sysctl("net/bridge/bridge-nf-call-ip6tables", value),
    ):
        yield


@pytest.mark.parametrize("is_tracked", [False, True], ids=["untracked", "tracked"])
@pytest.mark.parametrize("from_bridge", [False, True], ids=["from-routed", "from-bridged"])
@PATHS
@VERSIONS
def test_pods_talk_to_each_other(
    lab: labs.Lab,
    enforce: Enforce,
    version: int,
    bridged: bool,
    from_bridge: bool,
    is_tracked: bool,
) -> None:
    server = lab.add_pod("server", 1, bridged=bridged)
    client = lab.add_pod("client", 2, bridged=from_bridge)
    with tracked() if is_tracked else contextlib.nullcontext():
        countings = enforce(server, client)
        with conversations.served_by(server.open_socket) as serving:
            conversations.exchange_all(client, serving, traffic.address(server, version))
        expect_nothing_counted(countings)


@pytest.mark.parametrize("value", ["0", "1"])
@VERSIONS
def test_pods_talk_over_a_bridge(lab: labs.Lab, enforce: Enforce, version: int, value: str) -> None:
    """With bridge-nf-call-iptables=0 the frames keep the sending pod's socket."""
    server, client = (lab.add_pod(name, i, bridged=True) for i, name in enumerate("ab", 1))
    with tracked(), seen_by_netfilter(value):
        countings = enforce(server, client)
        with conversations.served_by(server.open_socket) as serving:
            conversations.exchange_all(client, serving, traffic.address(server, version))
        expect_nothing_counted(countings)


@pytest.mark.parametrize(("version", "value"), [(4, "0"), (4, "1"), (6, "0"), (6, "1")])
@pytest.mark.parametrize("position", [0, 1, 2], ids=["first", "middle", "last"])
def test_pods_talk_over_a_bridge_that_floods(
    lab: labs.Lab, enforce: Enforce, version: int, position: int, value: str
) -> None:
    """One port gets the frames themselves, the others copies."""
    pods = [lab.add_pod(name, number, bridged=True) for number, name in enumerate("abc", 1)]
    server, client = pods[position], pods[position - 1]
    target = traffic.address(server, version)
    with tracked(), seen_by_netfilter(value):
        conversations.ping(client, target)
        traffic.forget_ports(labs.BRIDGE, pods)
        countings = enforce(server, client)
        with conversations.served_by(server.open_socket) as serving:
            conversations.exchange_all(client, serving, target)
        # Copies of what conntrack put together are taken apart in the slow way.
        expect_nothing_counted(countings, but=[(Verdict.PASS, Reason.FORWARDED)])


def dnat(version: int, to: labs.LabPod, *, masquerade: bool = False) -> str:
    """A service's address, translated for clients that connect through the host."""
    family, address = FAMILY[version], traffic.address(to, version)
    body = (
        "chain in { type nat hook prerouting priority -100;\n"
        f"{family} daddr {SERVICE[version]} dnat to {address}\n}}\n"
    )
    if masquerade:
        body += (
            "chain out { type nat hook postrouting priority 100;\n"
            f"{family} daddr {address} ct status dnat masquerade\n}}\n"
        )
    return body


@PATHS
@VERSIONS
def test_outside_reaches_pods_through_the_node(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool
) -> None:
    outside, pod = lab.add_pod("outside", 9), lab.add_pod("web", 1, bridged=bridged)
    countings = enforce(pod)
    with conversations.served_by(pod.open_socket) as serving:
        conversations.exchange_all(outside, serving, traffic.address(pod, version))
    with conversations.served_by(outside.open_socket) as serving:
        conversations.exchange_all(pod, serving, traffic.address(outside, version))
    expect_nothing_counted(countings)


@pytest.mark.parametrize("masquerade", [False, True], ids=["dnat", "dnat-and-masquerade"])
@PATHS
@VERSIONS
def test_outside_reaches_a_service_through_the_node(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool, masquerade: bool
) -> None:
    """With masquerade the packets bear the node's own address, and are forwarded all the same."""
    outside, pod = lab.add_pod("outside", 9), lab.add_pod("web", 1, bridged=bridged)
    countings = enforce(pod)
    with (
        links.table(FAMILY[version], dnat(version, pod, masquerade=masquerade)),
        conversations.served_by(pod.open_socket) as serving,
    ):
        conversations.exchange_all(outside, serving, SERVICE[version])
    expect_nothing_counted(countings, but=[REDIRECT] if version == 6 else ())


def node_ports(version: int, to: labs.LabPod) -> str:
    """A NodePort service: two ports of the node's address, translated and masqueraded."""
    own, address = f"{FAMILY[version]} daddr {traffic.NODE[version]}", traffic.address(to, version)
    shown = address if version == 4 else f"[{address}]"
    return (
        "chain in { type nat hook prerouting priority -100;\n"
        f"{own} tcp dport {TCP_NODE_PORT} dnat to {shown}:{conversations.TCP_PORT}\n"
        f"{own} udp dport {UDP_NODE_PORT} dnat to {shown}:{conversations.UDP_PORT}\n}}\n"
        "chain out { type nat hook postrouting priority 100; ct status dnat masquerade; }\n"
    )


@PATHS
@VERSIONS
def test_outside_reaches_a_node_port(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool
) -> None:
    outside, pod = lab.add_pod("outside", 9), lab.add_pod("web", 1, bridged=bridged)
    countings = enforce(pod)
    with (
        links.table(FAMILY[version], node_ports(version, pod)),
        conversations.served_by(pod.open_socket) as serving,
    ):
        node = traffic.NODE[version]
        conversations.exchange_streams(outside, serving, node, TCP_NODE_PORT)
        conversations.exchange_datagrams(outside, serving, node, UDP_NODE_PORT)
        expect_nothing_counted(countings, but=[REDIRECT] if version == 6 else ())
        assert traffic.node_is_dropped(pod, version, conversations.TCP_PORT)


@pytest.mark.parametrize("value", ["0", "1"])
@PATHS
@VERSIONS
def test_pod_reaches_itself_by_its_service(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool, value: str
) -> None:
    """Hairpin: the pod's packets return to it with the host's address as their source."""
    pod = lab.add_pod("web", 1, bridged=bridged)
    lab.add_pod("other", 2, bridged=True)
    countings = enforce(pod)
    with (
        seen_by_netfilter(value),
        links.table(FAMILY[version], dnat(version, pod, masquerade=True)),
        conversations.served_by(pod.open_socket) as serving,
    ):
        if bridged:  # as the CNI's bridge plugin does by hairpinMode
            links.ip(f"link set {pod.interface} type bridge_slave hairpin on")
        conversations.exchange_streams(pod, serving, SERVICE[version])
        conversations.exchange_datagrams(pod, serving, SERVICE[version])
    expect_nothing_counted(countings, but=[REDIRECT] if version == 6 else ())


@PATHS
@VERSIONS
def test_connection_that_the_network_s_policy_rejects_ends_at_once(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool
) -> None:
    """The host's kernel answers with the other pod's address."""
    server = lab.add_pod("server", 1)
    client = lab.add_pod("client", 2, bridged=bridged)
    enforce(server, client)
    body = (
        "chain c { type filter hook forward priority 0;\n"
        f"tcp dport {conversations.TCP_PORT} reject with tcp reset\n"
        f"udp dport {conversations.UDP_PORT} reject\n}}\n"
    )
    address = traffic.address(server, version)
    with links.table("inet", body):
        for kind, port in (
            (socket.SOCK_STREAM, conversations.TCP_PORT),
            (socket.SOCK_DGRAM, conversations.UDP_PORT),
        ):
            with (
                client.open_socket(traffic.family(version), kind) as sock,
                pytest.raises(ConnectionRefusedError),
            ):
                conversations.request(sock, address, port)


@VERSIONS
def test_members_of_a_group_receive_each_other_over_a_bridge(
    lab: labs.Lab, enforce: Enforce, version: int
) -> None:
    sender, *members = [lab.add_pod(n, i, bridged=True) for i, n in enumerate("abc", 1)]
    countings = enforce(sender, *members)
    group = "239.18.0.1" if version == 4 else "ff15::18"
    with contextlib.ExitStack() as stack:
        listening = [
            stack.enter_context(listen_to_group(member, version, group)) for member in members
        ]
        traffic_kind = (traffic.family(version), socket.SOCK_DGRAM)
        sock = stack.enter_context(sender.open_socket(*traffic_kind))
        # A port of a bridge may still be coming up, and a group's datagram is not sent again.
        for member in members:
            conversations.ping(sender, traffic.address(member, version))
        sock.sendto(b"to the group", (group, conversations.UDP_PORT))
        assert [member.recv(100) for member in listening] == [b"to the group"] * 2
    expect_nothing_counted(countings)


def listen_to_group(pod: labs.LabPod, version: int, group: str) -> socket.socket:
    family = traffic.family(version)
    sock = pod.open_socket(family, socket.SOCK_DGRAM)
    sock.settimeout(traffic.LIMIT_SECONDS)
    sock.bind(("", conversations.UDP_PORT))
    packed = socket.inet_pton(family, group)
    if version == 4:
        request = packed + socket.inet_aton(pod.ipv4)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    else:
        request = packed + struct.pack("=I", 0)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
    return sock


SYNPROXY = """
chain before {
  type filter hook prerouting priority -300;
  iifname "pgoutside" tcp flags & (syn | ack) == syn notrack
}
chain forward {
  type filter hook forward priority 0;
  iifname != "pgoutside" accept
  ct state { invalid, untracked } synproxy mss 1460 wscale 7 timestamp sack-perm
}
"""


@PATHS
@VERSIONS
def test_synproxy_of_the_node_reaches_pods_by_a_rule_for_the_kernel(
    lab: labs.Lab, enforce: Enforce, version: int, bridged: bool
) -> None:
    """It answers the client itself, then sends a SYN of its own: no socket, no interface."""
    outside, pod = lab.add_pod("outside", 9), lab.add_pod("web", 1, bridged=bridged)
    port = conversations.TCP_PORT
    with (
        links.table("inet", SYNPROXY),
        links.sysctl("net/netfilter/nf_conntrack_tcp_loose", "0"),
        conversations.served_by(pod.open_socket) as serving,
    ):
        conversations.ping(outside, traffic.address(pod, version))
        rule = Rule(SourceKind.KERNEL, socket.IPPROTO_TCP, port, port)
        (counting,) = enforce(pod, rules=(rule,))
        conversations.exchange_streams(outside, serving, traffic.address(pod, version))
        moved = counting.moved()
        assert moved[Verdict.PASS, Reason.RULE] == 1
        assert moved.keys() <= {(Verdict.PASS, Reason.RULE), ESTABLISHED, *CONTROL}
        assert traffic.node_is_dropped(pod, version, port)  # the rule admits the kernel only


@PATHS
def test_traffic_that_a_shaper_redirects_is_still_the_pod_s(
    lab: labs.Lab, make_gates: MakeGates, bridged: bool
) -> None:
    """As the CNI's bandwidth plugin: what a pod sends takes a turn through an ifb interface."""
    enforce = enforcing_by(make_gates(Attachment.TCX))  # its qdisc is in the place of clsact
    server = lab.add_pod("server", 1, bridged=bridged)
    client = lab.add_pod("client", 2, bridged=bridged)
    shaped = f"tc qdisc add dev {client.interface} ingress"
    redirect = (
        f"tc filter add dev {client.interface} parent ffff: u32 match u32 0 0 "
        "action mirred egress redirect dev ifb-pg"
    )
    with links.made("ifb-pg", "link add ifb-pg type ifb", "link set ifb-pg up"):
        for command in (shaped, redirect):
            subprocess.run(command.split(), check=True)
        countings = enforce(server, client)
        for version in (4, 6):
            with conversations.served_by(server.open_socket) as serving:
                conversations.exchange_all(client, serving, traffic.address(server, version))
        expect_nothing_counted(countings)
