"""The agent follows the host's interfaces, on which packets get a stamp, and tuns that forward."""

import contextlib
import errno
import ipaddress
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from bpf import abi, cleanup, clsact, loader, map_specs, maps, pins, program_specs, syscalls
from bpf.gates import Attachment
from bpf.host_devices import HostDevicePrograms
from tests import polling
from tests.kernel import frames, links, offers, othernode, syns, traffic
from tests.kernel.test_agent import LISTENING, PORT, isolated_as, start_enforcing, web  # noqa: F401

pytestmark = pytest.mark.kernel

VERSIONS = pytest.mark.parametrize("version", [4, 6])
ATTACHMENTS = pytest.mark.parametrize("attachment", list(Attachment), ids=str)
OTHER_PODS = {4: "198.18.64.0/18", 6: "fd00:18:64::/48"}
OTHER_POD = {4: "198.18.64.7", 6: "fd00:18:64::7"}


def has_program(operator: AgentProcess, interface: str, attachment: Attachment) -> bool:
    """Attached, and pinned: a link without a pin ends with the agent."""
    ifindex = links.index_of(interface)
    if attachment is Attachment.TCX:
        pinned = pins.Pins(operator.bpffs).links.glob(f"*-{ifindex}")
        is_attached = bool(syscalls.query_programs(ifindex, syscalls.BPF_TCX_EGRESS))
        return is_attached and any(True for _ in pinned)
    filters = clsact.ClsactFilters(pins.Pins(), "", 0, clsact.EGRESS)
    with contextlib.closing(filters):
        return filters.is_attached(ifindex)


def wait_for_program(operator: AgentProcess, interface: str, attachment: Attachment) -> None:
    polling.wait_until(f"{interface} stamps", lambda: has_program(operator, interface, attachment))


@ATTACHMENTS
def test_interfaces_get_their_program_when_they_appear_and_keep_it_without_the_agent(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
    lab: Lab,
    attachment: Attachment,
) -> None:
    if attachment is Attachment.TCX:
        offers.need_tcx()
    off = lab.add_pod("off", 2)
    operator.write_manifest(off, mode="off", container=LISTENING)
    operator.write_manifest(web, mode="enforce", container=LISTENING)
    operator.start("--attach", attachment.value)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    with contextlib.ExitStack() as undo:
        # The loopback's filter is there for the next tests otherwise.
        undo.callback(cleanup.detach_everything, pins.Pins(operator.bpffs))
        pair = undo.enter_context(links.pair())
        for interface in ("lo", off.interface, *pair):
            wait_for_program(operator, interface, attachment)
        operator.stop(signal.SIGKILL)
        for interface in ("lo", off.interface, *pair):
            assert has_program(operator, interface, attachment)


@ATTACHMENTS
def test_program_that_another_program_removes_is_back_at_once(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
    attachment: Attachment,
) -> None:
    """As felix deletes the qdiscs of the host's interfaces that it takes over, and as `bpftool link
    detach` does."""
    if attachment is Attachment.TCX:
        offers.need_tcx()
    operator.write_manifest(web, mode="enforce", container=LISTENING)
    operator.start("--attach", attachment.value)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    with contextlib.ExitStack() as undo:
        undo.callback(cleanup.detach_everything, pins.Pins(operator.bpffs))
        (interface, _) = undo.enter_context(links.pair())
        wait_for_program(operator, interface, attachment)
        ifindex = links.index_of(interface)
        if attachment is Attachment.TCX:
            (pinned,) = pins.Pins(operator.bpffs).links.glob(f"*-{ifindex}")
            with pins.opened(pinned) as link_fd:
                syscalls.link_detach(link_fd)
        else:
            subprocess.run(["tc", "qdisc", "del", "dev", interface, "clsact"], check=True)
        removed_at = time.monotonic()
        wait_for_program(operator, interface, attachment)
        assert time.monotonic() - removed_at < 1.0 * polling.PATIENCE**2
        assert operator.event(Event.HOST_DEVICE_PUT_BACK)["ifindex"] == ifindex


def test_many_interfaces_get_filters_at_once_and_then_links(
    lab: Lab, loaded: loader.Loaded, installation: pins.Pins
) -> None:
    """One that vanishes meanwhile delays no other."""
    offers.need_tcx()
    programs = HostDevicePrograms(loaded, installation, Attachment.TCX)
    with contextlib.closing(programs), many_pairs() as interfaces:
        desired = set(map(links.index_of, interfaces))
        programs.ensure_devices(desired)
        assert filtered(desired) == desired
        assert linked(desired) == set()
        assert not programs.settle(is_calm=False)
        programs.ensure_devices(desired)
        assert filtered(desired) == desired
        links.ip(f"link del {interfaces[0]}")
        left = set(map(links.index_of, interfaces[2:]))
        assert not programs.settle(is_calm=True)
        assert linked(left)
        polling.wait_until("all are links", lambda: programs.settle(is_calm=True))
        assert filtered(desired) == set()
        assert linked(left) == left
        programs.ensure_devices(set())
        assert linked(left) == set()


@contextlib.contextmanager
def many_pairs() -> Iterator[list[str]]:
    """More interfaces than are settled at a time; each has its peer beside it."""
    ends = [(f"many{number}", f"other{number}") for number in range(8)]
    links.ip(*(f"link add {one} type veth peer name {other}" for one, other in ends))
    try:
        yield [name for pair in ends for name in pair]
    finally:
        present = {name for _, name in socket.if_nameindex()}
        links.ip(*(f"link del {one}" for one, _ in ends if one in present))


def filtered(among: set[int]) -> set[int]:
    """Interfaces with podgate's filters."""
    filters = clsact.ClsactFilters(pins.Pins(), "", 0, clsact.EGRESS)
    with contextlib.closing(filters):
        return among & filters.programs().keys()


def linked(among: set[int]) -> set[int]:
    return {i for i in among if syscalls.query_programs(i, syscalls.BPF_TCX_EGRESS)}


def test_a_pod_that_is_no_longer_off_is_gated_instead(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
) -> None:
    operator.write_manifest(web, mode="off", container=LISTENING)
    operator.start("--attach", "clsact")
    operator.wait_for("off", isolated_as("web", "Off"))
    wait_for_program(operator, web.interface, Attachment.CLSACT)
    operator.write_manifest(web, mode="enforce", container=LISTENING)
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    polling.wait_until("the stamp's program is gone", lambda: programs_of(web) == {"gate_egress"})


def programs_of(pod: LabPod) -> set[str]:
    filters = clsact.ClsactFilters(pins.Pins(), "", 0, clsact.EGRESS)
    with contextlib.closing(filters):
        return {entry.program for entry in filters._ours(pod.ifindex)}


@contextlib.contextmanager
def tun_to_other_pods(version: int, *, has_route: bool) -> Iterator[int]:
    """As of flannel's udp backend."""
    with links.tun() as (name, descriptor):
        if has_route:
            links.ip(f"route add {OTHER_PODS[version]} dev {name}")
        yield descriptor


def answers(descriptor: int, pod: LabPod, version: int, port: int) -> bool:
    """Whether the pod answers a SYN that comes from the tun with SYN+ACK."""
    source = frames.address(OTHER_POD[version])
    own = frames.address(traffic.address(pod, version))
    ends = frames.Ends(source, own, source_port=port, port=PORT)
    os.write(descriptor, syns.packet(ends, frames.TCP, frames.tcp(ends, frames.SYN)))
    header = 20 if version == 4 else 40
    while select.select([descriptor], [], [], 0.5)[0]:
        answer = os.read(descriptor, 1 << 16)
        if answer[0] >> 4 != version or len(answer) < header + 20:
            continue
        (to_port,) = struct.unpack_from("!H", answer, header + 2)
        both = frames.SYN | frames.ACK
        if to_port == port and answer[header + 13] & both == both:
            return True
    return False


@pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])
@VERSIONS
def test_pods_of_other_nodes_behind_a_tun_and_an_enforced_pod_talk(
    operator: AgentProcess, lab: Lab, version: int, bridged: bool
) -> None:
    """As by flannel's udp backend, both ways."""
    other, pod = othernode.add(lab), lab.add_pod("web", 1, bridged=bridged)
    with othernode.tun_to(other, [pod]) as remote, pod.listen(PORT + 1):
        operator.write_manifest(pod, mode="enforce", container={})
        operator.start()
        operator.wait_for("the gate", isolated_as("web", "Enforced"))
        assert not is_marked(operator, "tun-pg")
        othernode.talk(other, pod, remote[version])
        assert traffic.is_dropped(traffic.address(pod, version), PORT + 1)


@VERSIONS
def test_tun_is_the_host_s_until_a_route_to_other_nodes_uses_it(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
    version: int,
) -> None:
    with tun_to_other_pods(version, has_route=False) as descriptor:
        start_enforcing(operator, web)
        polling.wait_until("tun is marked", lambda: is_marked(operator, "tun-pg"))
        assert not answers(descriptor, web, version, 31000)
        links.ip(f"route add {OTHER_PODS[version]} dev tun-pg")
        polling.wait_until("tun forwards", lambda: not is_marked(operator, "tun-pg"))
        assert answers(descriptor, web, version, 31001)


def test_sources_are_checked_at_a_tun_while_it_is_the_host_s(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
) -> None:
    with tun_to_other_pods(4, has_route=False):
        operator.write_manifest(web, mode="enforce", container=LISTENING)
        operator.start("--attach", "clsact")
        polling.wait_until("tun is checked", lambda: has_source_check("tun-pg"))
        links.ip(f"route add {OTHER_PODS[4]} dev tun-pg")
        polling.wait_until("tun forwards", lambda: not has_source_check("tun-pg"))


def has_source_check(interface: str) -> bool:
    filters = clsact.ClsactFilters(pins.Pins(), program_specs.STAMP_SPOOFED, 0, clsact.INGRESS)
    with contextlib.closing(filters):
        return filters.is_attached(links.index_of(interface))


def test_tun_forwards_if_the_operator_names_it(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
) -> None:
    with links.tun():
        operator.write_manifest(web, mode="enforce", container=LISTENING)
        operator.start("--forwarding-interfaces", "flannel*,tun-*")
        operator.wait_for("the gate", isolated_as("web", "Enforced"))
        assert not is_marked(operator, "tun-pg")


def test_doctor_names_a_tun_that_forwards(operator: AgentProcess) -> None:
    with tun_to_other_pods(4, has_route=True):
        shown = operator.run("doctor", "--bpffs", str(operator.bpffs)).stdout
    assert "Packets from tun-pg (routes to 198.18.64.0/18) count as forwarded" in " ".join(
        shown.split()
    )


def is_marked(operator: AgentProcess, interface: str) -> bool:
    ifindex = links.index_of(interface)
    with maps.Map.open(
        pins.Pins(operator.bpffs).map(map_specs.INJECTABLE), map_specs.INJECTABLE
    ) as opened:
        value = opened.get(struct.pack("=I", ifindex // 64)) or bytes(8)
    return bool(struct.unpack("=Q", value)[0] >> ifindex % 64 & 1)


@VERSIONS
def test_agent_lists_the_addresses_that_the_node_has(
    operator: AgentProcess, lab: Lab, version: int
) -> None:
    """Those of services are not its own: kube-proxy in ipvs mode has an interface for them."""
    own, service = (f"{OTHER_POD[version]}{digit}" for digit in "19")
    bits = 32 if version == 4 else 128
    name = pins.Pins(operator.bpffs).map(map_specs.NODE_ADDRESSES)

    def is_listed(text: str) -> bool:
        packed = abi.pack_address(ipaddress.ip_address(text))
        with maps.Map.open(name, map_specs.NODE_ADDRESSES) as opened:
            return opened.get(struct.pack("=I", 128) + packed) is not None

    with links.made("kube-ipvs0", "link add kube-ipvs0 type bridge"):
        links.ip(f"address add {service}/{bits} dev kube-ipvs0")
        operator.start()
        polling.wait_until("the node's address", lambda: is_listed(traffic.NODE[version]))
        links.ip(f"address add {own}/{bits} dev lo")
        polling.wait_until("a new address", lambda: is_listed(own))
        assert not is_listed(service)
        links.ip(f"address del {own}/{bits} dev lo")
        polling.wait_until("the address is gone", lambda: not is_listed(own))


@VERSIONS
def test_frames_to_the_node_itself_are_dropped_only_while_a_pod_is_enforced(
    operator: AgentProcess,
    web: LabPod,  # noqa: F811
    version: int,
) -> None:
    node = ipaddress.ip_address(traffic.NODE[version])
    ends = frames.Ends(node, node)
    frame = frames.packet(ends, frames.UDP, frames.udp(ends))
    with links.pair() as (interface, peer), socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as end:
        end.bind((peer, 3))  # ETH_P_ALL
        end.settimeout(0.2)

        def arrives() -> bool:
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender:
                sender.bind((interface, 0))
                try:
                    sender.send(frame)
                except OSError as error:
                    if error.errno != errno.ENOBUFS:  # a tcx program has dropped it
                        raise
                    return False
            with contextlib.suppress(TimeoutError):
                while True:
                    if end.recv(256) == frame:
                        return True
            return False

        operator.write_manifest(web, mode="audit", container=LISTENING)
        operator.start()
        operator.wait_for("the gate", isolated_as("web", "Audit"))
        wait_for_program(operator, interface, Attachment.TCX)
        assert arrives()
        operator.write_manifest(web, mode="enforce", container=LISTENING)
        operator.wait_for("the gate", isolated_as("web", "Enforced"))
        polling.wait_until("it is dropped", lambda: not arrives())
        operator.stop(signal.SIGKILL)
        operator.start()
        while not ((report := operator.report()) and report.is_synced):
            assert not arrives()
        operator.write_manifest(web, mode="audit", container=LISTENING)
        operator.wait_for("the gate", isolated_as("web", "Audit"))
        polling.wait_until("it arrives", arrives)
