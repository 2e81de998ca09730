"""A pod that claims a foreign address gains no traffic, and the address's owner loses none."""

import asyncio
import contextlib
import ipaddress
import socket
import subprocess
from collections.abc import Callable, Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.gates.address_claims import AddressAuthority
from agent.lab import lab as labs
from agent.lab.agent_process import AgentProcess, condition_of, pod_of
from agent.lab.lab import Lab, LabPod
from agent.linux.pod_network import PodNetworkReader
from agent.pods.conditions import Conditions
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims
from agent.pods.store import PodStore
from tests.kernel import cgroups, fleet, nodeclient, offers, traffic

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
LAYOUTS = pytest.mark.parametrize("is_bridged", [False, True], ids=["routed", "bridged"])
PORT = fleet.TCP


def ip(*arguments: object, inside: LabPod | None = None) -> None:
    """Run iproute2, in the node's namespace or in a pod's."""
    enter = ["nsenter", f"--net={inside.netns.path}"] if inside else []
    subprocess.run([*enter, "ip", *map(str, arguments)], check=True)


def claim(pod: LabPod, *addresses: str) -> None:
    for address in addresses:
        flags = ["nodad"] if ":" in address else []
        prefix = f"{address}/{128 if flags else 32}"
        ip("address", "add", prefix, "dev", "eth0", *flags, inside=pod)


def node_address(version: int) -> str:
    return str(labs.NODE_IPV4 if version == 4 else labs.NODE_IPV6)


class Checked:
    """Confirmed addresses of pods, without a whole agent."""

    def __init__(self) -> None:
        self._pods: list[tuple[LabPod, Pod]] = []

    def add(self, pod: LabPod, *reported: str) -> None:
        addresses = tuple(map(ipaddress.ip_address, reported))
        made = Pod(uid=pod.name, namespace="demo", name=pod.name, reported_addresses=addresses)
        self._pods.append((pod, made))

    def check(
        self, name: str, *, times: int = 1, change: Callable[[], None] = lambda: None
    ) -> AddressClaims:
        """The last of these checks; change: called before all but the first."""
        return asyncio.run(self._check(name, times, change))

    async def _check(self, name: str, times: int, change: Callable[[], None]) -> AddressClaims:
        store = PodStore(Conditions())
        authority, reader = AddressAuthority(store), PodNetworkReader()
        for _, pod in self._pods:
            store.set_pod(pod)
        ((lab_pod, pod),) = [pair for pair in self._pods if pair[1].uid == name]
        for number in range(times):
            if number:
                change()
            network = await reader.read(lab_pod.netns)
            found = await authority.check(pod, lab_pod.netns, network)
        return found


@pytest.fixture
def checked() -> Checked:
    return Checked()


@LAYOUTS
def test_the_node_s_routes_confirm_a_pod_s_addresses(
    lab: Lab, checked: Checked, is_bridged: bool
) -> None:
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    checked.add(pod)
    assert checked.check("web") == AddressClaims(pod.addresses)


@LAYOUTS
@VERSIONS
def test_the_node_s_own_address_is_never_a_pod_s(
    lab: Lab, checked: Checked, version: int, is_bridged: bool
) -> None:
    pod = lab.add_pod("web", 1, bridged=is_bridged)
    own = node_address(version)
    claim(pod, own)
    checked.add(pod, pod.ipv4, pod.ipv6, own)
    found = checked.check("web")
    assert found.confirmed == pod.addresses
    assert found.unconfirmed == {ipaddress.ip_address(own): "an address of the node"}


@VERSIONS
def test_an_address_that_the_node_routes_elsewhere_is_not_confirmed(
    lab: Lab, checked: Checked, version: int
) -> None:
    thief, victim = lab.add_pod("thief", 1), lab.add_pod("victim", 2)
    stolen = traffic.address(victim, version)
    claim(thief, stolen)
    checked.add(thief)
    found = checked.check("thief")
    assert found.confirmed == thief.addresses
    assert "another interface" in found.unconfirmed[ipaddress.ip_address(stolen)]


@VERSIONS
def test_a_neighbour_of_the_bridge_keeps_its_address(
    lab: Lab, checked: Checked, version: int
) -> None:
    thief = lab.add_pod("thief", 1, bridged=True)
    victim = lab.add_pod("victim", 2, bridged=True)
    stolen = traffic.address(victim, version)
    with victim.listen(PORT), socket.create_connection((stolen, PORT), 1):
        claim(thief, stolen)
        checked.add(thief)
        found = checked.check("thief")
    assert found.confirmed == thief.addresses
    assert "another port" in found.unconfirmed[ipaddress.ip_address(stolen)]


@VERSIONS
def test_an_address_reported_for_another_pod_is_not_confirmed_by_a_route(
    lab: Lab, checked: Checked, version: int
) -> None:
    thief, victim = lab.add_pod("thief", 1), lab.add_pod("victim", 2)
    stolen = traffic.address(thief, version)
    checked.add(victim, stolen)
    checked.add(thief)
    found = checked.check("thief")
    assert found.unconfirmed == {ipaddress.ip_address(stolen): "that of pod demo/victim"}


def test_what_the_runtime_reports_needs_no_route(lab: Lab, checked: Checked) -> None:
    pod = lab.add_pod("web", 1)
    claim(pod, "198.18.77.1")
    checked.add(pod, "198.18.77.1", pod.ipv4)
    assert {str(a) for a in checked.check("web").confirmed} == {"198.18.77.1", pod.ipv4, pod.ipv6}


def test_two_pods_may_be_reported_with_one_address(lab: Lab, checked: Checked) -> None:
    one, other = lab.add_pod("one", 1), lab.add_pod("other", 2)
    claim(other, one.ipv4)
    checked.add(one, one.ipv4)
    checked.add(other, one.ipv4)
    assert one.addresses[0] in checked.check("one").confirmed
    assert one.addresses[0] in checked.check("other").confirmed


def test_a_neighbour_confirms_nothing_if_the_runtime_reports_addresses(
    lab: Lab, checked: Checked
) -> None:
    pod = lab.add_pod("web", 1, bridged=True)
    claim(pod, "198.18.2.99")
    checked.add(pod, pod.ipv4, pod.ipv6)
    found = checked.check("web", times=2)
    assert found.confirmed == pod.addresses
    assert list(map(str, found.unconfirmed)) == ["198.18.2.99"]


def test_a_confirmed_address_stays_so_when_its_route_changes(lab: Lab, checked: Checked) -> None:
    pod, other = lab.add_pod("web", 1), lab.add_pod("other", 2)
    checked.add(pod)

    def detour() -> None:
        ip("route", "replace", f"{pod.ipv4}/32", "dev", other.interface)

    assert checked.check("web", times=2, change=detour).confirmed == pod.addresses


def test_a_confirmed_address_that_becomes_the_node_s_is_lost(lab: Lab, checked: Checked) -> None:
    pod, other = lab.add_pod("web", 1), lab.add_pod("other", 2)
    checked.add(pod)

    def take() -> None:
        # On an interface that goes with its pod.
        ip("address", "add", f"{pod.ipv4}/32", "dev", other.interface)

    found = checked.check("web", times=2, change=take)
    assert list(map(str, found.confirmed)) == [pod.ipv6]


@pytest.fixture
def server(lab: Lab) -> LabPod:
    """A stand-in for the API server: the host has a route to it, and it is no pod."""
    return lab.add_pod("server", 200)


def knows_claim(report: AgentReport, address: str) -> bool:
    pod = pod_of(report, "thief")
    return pod is not None and bool(pod.gates) and address in pod.unconfirmed


def start(operator: AgentProcess, thief: LabPod, *extra: str, mode: str = "enforce") -> None:
    operator.write_file("thief.yaml", fleet.manifest(thief, mode, (fleet.tcp_probe(PORT),)))
    operator.start(*extra)


@contextlib.contextmanager
def served_at(address: str) -> Iterator[socket.socket]:
    """A listener of a host process at one of the host's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, PORT), family=family) as listener:
        listener.settimeout(traffic.LIMIT_SECONDS)
        yield listener


def arrives(address: str, listener: socket.socket) -> bool:
    """Whether a connection of the host to this address is accepted there."""
    with socket.create_connection((address, PORT), traffic.LIMIT_SECONDS) as client:
        accepted, peer = listener.accept()
        with accepted:
            return bool(peer[1] == client.getsockname()[1])


@LAYOUTS
@VERSIONS
def test_host_processes_still_reach_what_a_pod_claims(
    operator: AgentProcess, lab: Lab, server: LabPod, version: int, is_bridged: bool
) -> None:
    thief = lab.add_pod("thief", 1, bridged=is_bridged)
    stolen, own = traffic.address(server, version), node_address(version)
    claim(thief, stolen, own)
    start(operator, thief)
    operator.wait_for("the claims", lambda r: knows_claim(r, stolen) and knows_claim(r, own))
    with server.listen(PORT) as listener:
        assert arrives(stolen, listener)
    with served_at(own) as listener:
        assert arrives(own, listener)


@VERSIONS
def test_an_address_claimed_later_changes_nothing(
    operator: AgentProcess, lab: Lab, server: LabPod, version: int
) -> None:
    thief = lab.add_pod("thief", 1)
    start(operator, thief)
    operator.wait_for("the gate", lambda r: bool((p := pod_of(r, "thief")) and p.gates))
    stolen = traffic.address(server, version)
    claim(thief, stolen)
    operator.wait_for("the claim seen", lambda r: knows_claim(r, stolen))
    with server.listen(PORT) as listener:
        assert arrives(stolen, listener)


@VERSIONS
def test_relay_sends_nothing_to_a_pod_that_claims_the_target(
    operator: AgentProcess, lab: Lab, server: LabPod, version: int
) -> None:
    offers.need_netns_cookie()
    thief = lab.add_pod("thief", 1)
    stolen = traffic.address(server, version)
    claim(thief, stolen)
    with cgroups.cgroup() as group, nodeclient.node_client(group) as kubelet:
        start(operator, thief, "--kubelet", f"cgroup:{group.path}", mode="strict")
        operator.wait_for("strict", is_strict)
        operator.wait_for("the claim seen", lambda r: knows_claim(r, stolen))
        with thief.listen(PORT) as trap, server.listen(PORT) as listener:
            own = f"tcp,{traffic.address(thief, version)},{PORT}"
            assert kubelet.probe([own]) == {own: nodeclient.OK}
            trap.accept()[0].close()
            target = f"tcp,{stolen},{PORT}"
            assert kubelet.probe([target]) == {target: nodeclient.OK}
            listener.accept()[0].close()
            trap.setblocking(False)
            with pytest.raises(BlockingIOError):
                trap.accept()


def is_strict(report: AgentReport) -> bool:
    condition = condition_of(report, "thief", labels.ISOLATION_READY)
    return condition is not None and condition.reason == "Strict"


@VERSIONS
def test_connections_to_a_claimed_address_are_not_closed(
    operator: AgentProcess, lab: Lab, server: LabPod, version: int
) -> None:
    thief = lab.add_pod("thief", 1)
    stolen = traffic.address(server, version)
    with (
        server.listen(PORT) as listener,
        thief.listen(PORT) as trap,
        socket.create_connection((stolen, PORT), traffic.LIMIT_SECONDS) as honest,
        socket.create_connection(
            (traffic.address(thief, version), PORT), traffic.LIMIT_SECONDS
        ) as existing,
    ):
        accepted, _ = listener.accept()
        trapped, _ = trap.accept()
        with accepted, trapped:
            claim(thief, stolen)
            operator.write_manifest(thief, mode="enforce", container={})
            operator.start("--close-existing-flows")
            with pytest.raises(ConnectionAbortedError):
                existing.recv(1)  # so all flows were checked
            honest.send(b"still there")
            assert accepted.recv(64) == b"still there"


def test_claim_is_reported_in_the_condition_and_the_log(
    operator: AgentProcess, lab: Lab, server: LabPod
) -> None:
    thief = lab.add_pod("thief", 1)
    claim(thief, server.ipv4)
    start(operator, thief)

    def names_address(report: AgentReport) -> bool:
        condition = condition_of(report, "thief", labels.ISOLATION_READY)
        return condition is not None and server.ipv4 in condition.message

    operator.wait_for("the condition's message", names_address)
    assert any(server.ipv4 in line.get("problem", "") for line in operator.log_lines())


def test_gate_of_a_claiming_pod_blocks_the_claimed_address(
    operator: AgentProcess, lab: Lab, server: LabPod
) -> None:
    thief = lab.add_pod("thief", 1)
    claim(thief, "198.18.99.9")
    start(operator, thief)
    operator.wait_for("the claim seen", lambda r: knows_claim(r, "198.18.99.9"))
    ip("route", "add", "198.18.99.9/32", "dev", thief.interface)
    with thief.listen(PORT) as listener:
        listener.setblocking(False)
        with pytest.raises((TimeoutError, PermissionError)):
            socket.create_connection(("198.18.99.9", PORT), 0.3)
        with pytest.raises(BlockingIOError):
            listener.accept()
