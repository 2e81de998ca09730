"""The veth pair that connects a relay with the host, in real namespaces."""

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from agent.admin import finding_kinds as kinds
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab
from agent.linux import link_setup
from agent.linux.cgroups import cgroup2_mount
from agent.linux.namespaces import in_new_network
from agent.relay import interfaces as relay_interfaces
from agent.settings import RelayRanges, parse_range4, parse_range6
from agent.strict import check as strict_check
from agent.strict import veth_pair
from agent.strict.veth_pair import PairError
from bpf import pins
from probes.netns import OWN_NETNS, Netns
from tests.kernel import links, offers
from tests.kernel.test_findings import document, reported_by_all, sentence_of
from tests.polling import wait_until

pytestmark = pytest.mark.kernel

RANGES = RelayRanges(parse_range4("198.18.64.0/18"), parse_range6("fd00:18:64::/64"))
# Any address of slot 0, and one of the range that is in no share.
TARGETS = ("198.18.64.77", "fd00:18:64::77")
ELSEWHERE = ("198.18.127.1", "fd00:18:64:0:f000::1")


@pytest.fixture
def relay(lab: Lab, no_relays: None) -> Iterator[Netns]:
    """A namespace without a name, as a relay creates it."""
    process = subprocess.Popen(["unshare", "--net", "sleep", "60"])
    try:
        own = os.stat("/proc/self/ns/net").st_ino
        path = pathlib.Path(f"/proc/{process.pid}/ns/net")
        wait_until("the process has its own namespace", lambda: path.stat().st_ino != own)
        yield Netns.open(str(path))
    finally:
        process.kill()
        process.wait()
        asyncio.run(veth_pair.remove_everything())


async def no_gate(ifindex: int) -> None:
    assert socket.if_indextoname(ifindex) == "podgate-relay0"


async def make(relay: Netns) -> veth_pair.VethPair:
    await veth_pair.add_range_routes(RANGES)
    return await veth_pair.make(veth_pair.reserve_slot(), RANGES, relay, gate=no_gate)


def shown(*arguments: str) -> Any:
    output = subprocess.run(["ip", "-j", *arguments], check=True, capture_output=True).stdout
    return json.loads(output or b"[]")


def routes() -> set[tuple[str, str | None]]:
    """Destination and type of the node's routes, but for its local table."""
    found = [*shown("-4", "route"), *shown("-6", "route")]
    return {(route["dst"], route.get("type")) for route in found}


def connect(address: str) -> str:
    """How a connect from the node ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        try:
            sock.connect((address, 8080))
        except OSError as error:
            return type(error).__name__ if error.errno is None else os.strerror(error.errno)
        return f"from {sock.getsockname()[0]}"


@contextlib.contextmanager
def listening(relay: Netns) -> Iterator[None]:
    """A server in the relay's namespace."""
    with relay.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        sock.bind(("", 8080))
        sock.listen()
        yield


def setting(name: str) -> str:
    return pathlib.Path("/proc/sys/net", name).read_text().strip()


async def test_all_addresses_of_the_share_are_local_in_the_relay(relay: Netns) -> None:
    await make(relay)
    for address, node in zip(TARGETS, ("198.18.64.1", "fd00:18:64::1"), strict=True):
        with listening(relay):
            assert connect(address) == f"from {node}"


async def test_host_accepts_its_own_addresses_once_the_pair_is_set_up(relay: Netns) -> None:
    await make(relay)
    for node in ("198.18.64.1", "fd00:18:64::1"):
        assert shown("route", "get", node)[0]["type"] == "local"


async def test_neighbours_are_permanent(relay: Netns) -> None:
    await make(relay)
    neighbours = shown("neigh", "show", "dev", "podgate-relay0")
    assert {each["dst"]: each["state"] for each in neighbours} == {
        "198.18.64.2": ["PERMANENT"],
        "fd00:18:64::2": ["PERMANENT"],
    }


async def test_rest_of_the_range_is_unreachable_despite_a_default_route(
    relay: Netns, lab: Lab
) -> None:
    with links.pair() as (one, _), links.route("default", one), links.route("::/0", one):
        await make(relay)
        for address in ELSEWHERE:
            assert connect(address) == "No route to host"


async def test_range_stays_unreachable_after_the_relay_exits(relay: Netns) -> None:
    pair = await make(relay)
    await veth_pair.remove(pair.ifindex)
    assert relay_interfaces.present() == {}
    assert {connect(address) for address in TARGETS} == {"No route to host"}
    assert ("198.18.64.0/18", "unreachable") in routes()


async def test_packets_from_the_relay_are_not_forwarded(relay: Netns) -> None:
    await make(relay)
    assert setting("ipv4/conf/podgate-relay0/forwarding") == "0"
    assert setting("ipv4/ip_forward") == "1"


async def test_host_end_has_only_its_own_addresses_and_ignores_routers(relay: Netns) -> None:
    await make(relay)
    (link,) = shown("addr", "show", "dev", "podgate-relay0")
    assert {each["local"] for each in link["addr_info"]} == {"198.18.64.1", "fd00:18:64::1"}
    assert setting("ipv6/conf/podgate-relay0/accept_ra") == "0"


async def test_gate_is_attached_before_the_interface_is_up(relay: Netns) -> None:
    seen: list[str] = []

    async def gate(ifindex: int) -> None:
        (link,) = shown("link", "show", "dev", socket.if_indextoname(ifindex))
        seen.append(link["operstate"])

    await veth_pair.make(0, RANGES, relay, gate=gate)
    assert seen == ["DOWN"]


async def test_pair_whose_gate_fails_is_removed(relay: Netns) -> None:
    async def gate(ifindex: int) -> None:
        raise OSError("no gate today")

    with pytest.raises(PairError, match="no gate today"):
        await veth_pair.make(0, RANGES, relay, gate=gate)
    assert relay_interfaces.present() == {}


@pytest.mark.parametrize(
    ("network", "option"), [("198.18.65.0/24", "range4"), ("fd00:18:64::/48", "range6")]
)
async def test_foreign_route_in_the_range_is_reported(
    relay: Netns, network: str, option: str
) -> None:
    before = routes()
    with links.pair() as (one, _), links.route(network, one):
        with pytest.raises(PairError, match=f"overlaps the node's route .* dev {one}.*{option}"):
            await veth_pair.add_range_routes(RANGES)
        problem = await veth_pair.overlap(RANGES)
        assert problem is not None
        assert network.partition("/")[0].rstrip(":") in problem
    assert routes() == before


async def test_host_address_in_the_range_is_a_conflict(relay: Netns) -> None:
    with links.pair() as (one, _):
        links.ip(f"addr add 198.18.100.1/32 dev {one}")
        assert "198.18.100.1/32" in str(await veth_pair.overlap(RANGES))


async def test_routes_of_other_relays_are_no_conflict(relay: Netns) -> None:
    await make(relay)
    await veth_pair.add_range_routes(RANGES)
    assert await veth_pair.overlap(RANGES) is None


async def test_removed_route_is_restored(relay: Netns) -> None:
    await veth_pair.add_range_routes(RANGES)
    links.ip("route del unreachable 198.18.64.0/18")
    await veth_pair.ensure_range_routes(RANGES)
    assert ("198.18.64.0/18", "unreachable") in routes()


async def test_routes_of_a_previous_range_are_removed(relay: Netns) -> None:
    await veth_pair.add_range_routes(RANGES)
    other = RelayRanges(parse_range4("198.19.64.0/18"), RANGES.ipv6)
    await veth_pair.add_range_routes(other)
    assert ("198.18.64.0/18", "unreachable") not in routes()
    assert ("198.19.64.0/18", "unreachable") in routes()


async def test_next_relay_gets_the_next_slot_and_share(relay: Netns) -> None:
    await make(relay)
    assert veth_pair.reserve_slot() == 1
    for slot in range(1, 8):
        links.ip(f"link add podgate-relay{slot} type bridge")
    with pytest.raises(PairError, match="8 relays still proxy"):
        veth_pair.reserve_slot()
    assert await veth_pair.remove_everything() >= 8


async def test_cleanup_removes_everything(relay: Netns) -> None:
    before = routes()
    await make(relay)
    assert await veth_pair.remove_everything() > 0
    assert relay_interfaces.present() == {}
    assert routes() == before
    assert await veth_pair.remove_everything() == 0


async def test_check_finds_no_problem_and_leaves_nothing(lab: Lab, fresh_pins: pins.Pins) -> None:
    offers.need_netns_cookie()
    interfaces, before = socket.if_nameindex(), routes()
    cgroup = cgroup2_mount()
    assert cgroup is not None
    assert await strict_check.find_problem(RANGES, cgroup, fresh_pins) is None
    assert (socket.if_nameindex(), routes()) == (interfaces, before)
    with links.pair() as (one, _), links.route("198.18.64.0/24", one):
        problem = await strict_check.find_problem(RANGES, cgroup, fresh_pins)
    assert problem is not None
    assert problem.startswith("The relay's range 198.18.64.0/18 overlaps")


def test_cleanup_removes_the_agents_relay(operator: AgentProcess, lab: Lab) -> None:
    offers.need_netns_cookie()
    before = routes()
    operator.start("--mode", "strict", *_options())
    operator.wait_for("a relay", lambda report: report.relay.is_up)
    operator.stop(signal.SIGTERM)
    _cleanup(operator)
    assert relay_interfaces.present() == {}
    assert routes() == before


def test_range_in_use_is_reported_and_strict_falls_back_to_enforce(
    operator: AgentProcess, lab: Lab
) -> None:
    offers.need_netns_cookie()
    with links.pair() as (one, _), links.route("198.18.64.0/24", one):
        operator.start("--mode", "strict", *_options())
        report = operator.wait_for("the reason", lambda report: "overlaps" in report.relay.problem)
        assert "--relay-range4" in report.relay.problem
        sentence = reported_by_all(operator, report, kinds.RELAY_MISSING)
        assert sentence == f"Strict unavailable, falling back to enforce: {report.relay.problem}"
        found = document(operator, "doctor", *_options())["findings"]
        assert "overlaps" in sentence_of(found, kinds.RELAY_RANGES_TAKEN)
        assert relay_interfaces.present() == {}


def _options() -> list[str]:
    return ["--relay-range4", str(RANGES.ipv4), "--relay-range6", str(RANGES.ipv6)]


def _cleanup(operator: AgentProcess) -> None:
    assert operator.cleanup().returncode == 0


async def test_packets_of_the_relay_leave_as_soon_as_the_pair_is_made(
    lab: Lab, no_relays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel activates an interface when a work queue gets RTNL, after the carrier,
    and drops what is sent until then. Addresses and routes of the host's end only take time."""

    async def link_up(pair: veth_pair.VethPair) -> None:
        await link_setup.set_up(pair.ifindex)

    monkeypatch.setattr(veth_pair, "_set_up_host", link_up)
    frame = bytes(12) + b"\x88\xb5" + bytes(46)
    with links.busy():
        for _ in range(20):
            descriptor = in_new_network(lambda: os.open(OWN_NETNS, os.O_RDONLY | os.O_CLOEXEC))
            try:
                relay = Netns.open(f"/proc/self/fd/{descriptor}")
                pair = await make(relay)
                before = dropped(relay)
                with relay.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
                    sock.sendto(frame, (veth_pair.INSIDE, 0))
                assert dropped(relay) == before
                await veth_pair.remove(pair.ifindex)
            finally:
                os.close(descriptor)
    await veth_pair.remove_everything()


def dropped(relay: Netns) -> int:
    """Packets that the relay's end has not sent, by the fourth field of its transmit part."""
    (line,) = (
        line
        for line in relay.read_proc_net("dev").splitlines()
        if line.lstrip().startswith(f"{veth_pair.INSIDE}:")
    )
    return int(line.partition(":")[2].split()[11])
