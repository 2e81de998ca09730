"""The way to the relay is tried: what is podgate's own is repaired, and what is not steps back to
enforce before a probe fails twice."""

import pathlib
import subprocess
import time
from collections.abc import Iterator

import pytest

from agent import labels
from agent.admin.report import AgentReport
from agent.lab.agent_process import AgentProcess, condition_of
from agent.lab.lab import Lab, LabPod
from agent.logs import Event
from tests import polling
from tests.kernel import cgroups, offers
from tests.kernel.cgroups import Cgroup
from tests.kernel.test_relay_conditions import RANGES, dial

pytestmark = pytest.mark.kernel

PORT = 8080
PROBE = {"livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1}}
RELAY = "podgate-relay0"

REPAIRED_SECONDS = 1.0 * polling.PATIENCE**2
STEPPED_BACK_SECONDS = 2.0 * polling.PATIENCE**2
"""One short probe period until the relay is released, and one until a connect has ended."""


@pytest.fixture
def kubelet() -> Iterator[Cgroup]:
    offers.need_netns_cookie()
    with cgroups.cgroup() as made:
        yield made


@pytest.fixture
def pod(lab: Lab) -> Iterator[LabPod]:
    made = lab.add_pod("web", 1)
    with made.listen(PORT) as listener:
        # Nothing accepts: the queue has to hold all connections of a test.
        listener.listen(4096)
        yield made


@pytest.fixture
def strict(operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None) -> AgentProcess:
    operator.write_manifest(pod, mode="strict", container=PROBE)
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
    operator.wait_for("strict", lambda report: isolation(report)[0] == "Strict")
    assert connects(kubelet, pod)
    return operator


def isolation(report: AgentReport) -> tuple[str, str]:
    """Reason and message."""
    condition = condition_of(report, "web", labels.ISOLATION_READY)
    return (condition.reason, condition.message) if condition else ("", "")


def is_strict(report: AgentReport) -> bool:
    return isolation(report)[0] == "Strict"


def connects(kubelet: Cgroup, pod: LabPod) -> bool:
    return all(dial(kubelet, address) == address for address in (pod.ipv4, pod.ipv6))


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def nft(script: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


def lose_routes() -> None:
    ip("-4", "route", "flush", "dev", RELAY)
    ip("-6", "route", "flush", "dev", RELAY, "proto", "112")


def flap() -> None:
    ip("link", "set", RELAY, "down")
    ip("link", "set", RELAY, "up")


def take_down() -> None:
    ip("link", "set", RELAY, "down")


def lose_addresses() -> None:
    ip("addr", "flush", "dev", RELAY)


def lose_neighbours() -> None:
    ip("neigh", "flush", "nud", "permanent", "dev", RELAY)


def disable_ipv6() -> None:
    """As hardening does by `sysctl --system`."""
    _set("ipv6", "disable_ipv6", "1")


def change_the_links_address() -> None:
    """As networkd's MACAddressPolicy does."""
    ip("link", "set", RELAY, "address", "02:00:00:00:00:77")


def shrink_the_link() -> None:
    """IPv6 ends on a link whose packets are below 1280 bytes."""
    ip("link", "set", RELAY, "mtu", "1200")


def _set(family: str, name: str, value: str) -> None:
    path = pathlib.Path("/proc/sys/net", family, "conf", RELAY, name)
    path.write_text(value, encoding="ascii")


@pytest.mark.parametrize(
    "fault",
    [
        lose_routes,
        flap,
        take_down,
        lose_addresses,
        lose_neighbours,
        disable_ipv6,
        change_the_links_address,
        shrink_the_link,
    ],
)
def test_way_that_another_program_takes_away_is_repaired(
    strict: AgentProcess, pod: LabPod, kubelet: Cgroup, fault: object
) -> None:
    """As networkd, netplan or a link's flap do."""
    assert callable(fault)
    fault()
    lost_at = time.monotonic()
    polling.wait_until("the kubelet connects", lambda: connects(kubelet, pod))
    assert time.monotonic() - lost_at < REPAIRED_SECONDS + 2  # a connect that fails takes 2 s
    report = strict.report()
    assert report is not None
    assert is_strict(report)
    assert len(list(strict.log_lines(Event.RELAY_STARTED))) == 1


def test_firewall_that_does_not_know_the_relay_steps_back_to_enforce(
    strict: AgentProcess, pod: LabPod, kubelet: Cgroup
) -> None:
    nft(
        "table inet fw { chain o { type filter hook output priority 0; policy drop;\n"
        "ct state established,related accept\n"
        'oifname { "lo", "pg*" } accept\n}\n}\n'
    )
    try:
        blocked_at = time.monotonic()
        line = strict.event(Event.STRICT_UNAVAILABLE)
        assert time.monotonic() - blocked_at < STEPPED_BACK_SECONDS
        assert "inet fw o, policy drop" in line["problem"]
        # The relay receives its release some milliseconds later.
        polling.wait_until("the kubelet connects", lambda: connects(kubelet, pod))
        report = strict.wait_for("enforce", lambda r: isolation(r)[0] == "Enforced")
        assert "the node does not reach the relay" in isolation(report)[1]
        # Another relay is tried before it is engaged: no connect is lost in between.
        ends_at = time.monotonic() + 4
        while time.monotonic() < ends_at:
            assert connects(kubelet, pod)
    finally:
        nft("delete table inet fw")
    strict.wait_for("strict again", is_strict)
    assert connects(kubelet, pod)


VPN = {
    # All traffic without the VPN's mark, as an exit node of Tailscale has it.
    "elsewhere": ("add", "default", "dev", "lo", "table", "4242"),
    # A kill switch: what does not go through the tunnel does not go.
    "nowhere": ("add", "prohibit", "default", "table", "4242"),
}


@pytest.mark.parametrize("route", VPN.values(), ids=VPN)
def test_routing_rule_before_the_relays_route_steps_back_and_is_named(
    strict: AgentProcess, pod: LabPod, kubelet: Cgroup, route: tuple[str, ...]
) -> None:
    """What is podgate's own, route, link and addresses, is as it was."""
    rule = ("rule", "del", "to", "198.18.64.0/18", "table", "4242")
    ip("route", *route)
    ip("rule", "add", *rule[2:], "priority", "100")
    try:
        line = strict.event(Event.STRICT_UNAVAILABLE)
        assert "the node's routing" in line["problem"]
        strict.wait_for("enforce", lambda report: isolation(report)[0] == "Enforced")
        polling.wait_until("the kubelet connects", lambda: connects(kubelet, pod))
    finally:
        ip(*rule)
        ip("route", "flush", "table", "4242")
    strict.wait_for("strict again", is_strict)
    assert connects(kubelet, pod)


def test_way_is_tried_without_a_trace_in_the_relays_counts(strict: AgentProcess) -> None:
    time.sleep(2)  # eight tries
    report = strict.report()
    assert report is not None
    assert report.relay.is_up
    assert report.relay.unknown_address == 0


def test_pod_whose_loopback_is_down_stays_in_enforce_until_it_is_up(
    operator: AgentProcess, pod: LabPod, kubelet: Cgroup, no_relays: None
) -> None:
    """The relay dials the pod from inside, by the loopback; the kubelet's own way is another."""
    inside = ["nsenter", f"--net={pod.netns.path}", "ip", "link", "set", "lo"]
    subprocess.run([*inside, "down"], check=True)
    operator.write_manifest(pod, mode="strict", container=PROBE)
    operator.start("--kubelet", f"cgroup:{kubelet.path}", *RANGES)
    report = operator.wait_for("enforce", lambda r: isolation(r)[0] == "Enforced")
    assert "The loopback interface of the pod is down" in isolation(report)[1]
    assert connects(kubelet, pod)
    subprocess.run([*inside, "up"], check=True)
    operator.wait_for("strict", is_strict)
    assert connects(kubelet, pod)
    subprocess.run([*inside, "down"], check=True)
    operator.wait_for("enforce again", lambda r: isolation(r)[0] == "Enforced")
    # The condition may come first.
    polling.wait_until("the pod without the relay", lambda: connects(kubelet, pod))
