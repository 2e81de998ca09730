"""Sources that connect(2) redirects to the relay, getpeername(2), and other sources."""

import contextlib
import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from agent.lab import lab as labs
from bpf import abi, loader, pins, program_specs
from bpf.attachment import Attachment
from bpf.gates import GateConfig, Gates
from bpf.hooks import Hooks
from bpf.host_devices import HostDevicePrograms
from bpf.kubelet_unit import KubeletUnit
from bpf.node_config import NodeConfig
from bpf.redirect import Redirect
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.kernel import cgroups, frames, redirecting, skb, syns, traffic
from tests.kernel.counting import Counting
from tests.kernel.redirecting import OTHER_PORT, PORT, Scene
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])

# Connects once and prints the result: 0, or the errno.
CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.settimeout(float(sys.argv[3]))
print(sock.connect_ex((sys.argv[1], int(sys.argv[2]))))
"""


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    with redirecting.kubelet_config(loaded) as made:
        yield made


@pytest.fixture
def redirect(
    config: NodeConfig, loaded: loader.Loaded, installation: pins.Pins
) -> Iterator[Redirect]:
    with redirecting.engaged(loaded, installation) as made:
        yield made


@pytest.fixture
def scene(lab: labs.Lab, redirect: Redirect) -> Iterator[Scene]:
    """The relay's address represents the pod's at any port."""
    with redirecting.scene(lab) as made:
        made.publish(redirect)
        yield made


@pytest.fixture
def refusing(config: NodeConfig, loaded: loader.Loaded, installation: pins.Pins) -> Iterator[None]:
    """The hooks that reject are attached as well."""
    hooks = Hooks(loaded, installation, redirecting.root_cgroup())
    assert [hook.problem for hook in hooks.attach()] == [None] * len(program_specs.HOOKS)
    yield
    hooks.detach()


@BOTH
def test_the_kubelet_s_connect_goes_to_the_relay_and_shows_the_pod(
    scene: Scene, version: int
) -> None:
    pod = traffic.address(scene.pod, version)
    with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert scene.reached(sock, pod) == "relay"
        assert sock.getpeername()[:2] == (pod, PORT)


def test_mapped_address_goes_there_too_and_is_shown_mapped(scene: Scene) -> None:
    pod = f"::ffff:{scene.pod.ipv4}"
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
        assert scene.reached(sock, pod) == "relay"
        assert sock.getpeername()[:2] == (pod, PORT)


@BOTH
def test_port_of_its_own_comes_before_any_port(
    scene: Scene, redirect: Redirect, version: int
) -> None:
    scene.publish(redirect, scene.successor, (OTHER_PORT,))
    assert scene.reached_from_node(version, OTHER_PORT) == "successor"
    assert scene.reached_from_node(version, PORT) == "relay"


@BOTH
def test_port_that_is_not_published_goes_direct(
    scene: Scene, redirect: Redirect, version: int
) -> None:
    scene.withdraw(redirect)
    scene.publish(redirect, ports=(OTHER_PORT,))
    assert scene.reached_from_node(version, PORT) == "pod"
    assert scene.reached_from_node(version, OTHER_PORT) == "relay"


@BOTH
def test_only_the_kubelet_is_redirected(scene: Scene, config: NodeConfig, version: int) -> None:
    with cgroups.cgroup() as other:
        config.set_kubelet(other.id)
        assert scene.reached_from_node(version) == "pod"
        address = traffic.address(scene.pod, version)
        assert connected(other, address) == 0
        assert scene.who_has_it() == "relay"
        with cgroups.cgroup("below", below=other) as below:
            assert connected(below, address) == 0
            assert scene.who_has_it() == "pod"


@BOTH
def test_while_the_kubelet_is_unknown_no_process_is_redirected(
    scene: Scene, config: NodeConfig, version: int
) -> None:
    """Each of them may be the kubelet, and connects to the pod itself, where the gate decides."""
    address = traffic.address(scene.pod, version)
    with cgroups.cgroup() as pods, cgroups.cgroup("container", below=pods) as container:
        config.set_kubelet(None)
        config.set_pods(pods.id, pods.level)
        assert scene.reached_from_node(version) == "pod"
        assert connected(container, address) == 0
        assert scene.who_has_it() == "pod"


@BOTH
def test_kubelet_that_the_kernel_followed_is_redirected(
    scene: Scene,
    config: NodeConfig,
    loaded: loader.Loaded,
    installation: pins.Pins,
    version: int,
) -> None:
    address = traffic.address(scene.pod, version)
    unit = KubeletUnit(loaded, installation, config)
    unit.attach()
    with cgroups.cgroup() as kubelet:
        config.set_kubelet(kubelet.id)
        unit.follow(kubelet.path)
        try:
            cgroups.remove(kubelet)
            kubelet.directory.mkdir()
            assert connected(kubelet, address) == 0
            assert scene.who_has_it() == "relay"
        finally:
            unit.forget()
            os.unlink(installation.links / program_specs.FOLLOW_KUBELET.name)


def connected(sender: cgroups.Cgroup, address: str, seconds: float = traffic.LIMIT_SECONDS) -> int:
    """How the connect of a process in this cgroup ended: 0, or the errno."""
    command = [*BARE_PYTHON, "-c", CONNECT, address, str(PORT), str(seconds)]
    return int(sender.run(command).stdout)


@BOTH
@pytest.mark.parametrize("age_ns", [abi.RELAY_BEAT_LIMIT_NS, 60 * 10**9, None])
def test_without_a_fresh_beat_it_goes_direct(
    scene: Scene, loaded: loader.Loaded, version: int, age_ns: int | None
) -> None:
    redirecting.beat(loaded, 0 if age_ns is None else time.monotonic_ns() - age_ns)
    assert scene.reached_from_node(version) == "pod"
    redirecting.beat(loaded)
    assert scene.reached_from_node(version) == "relay"


def test_beat_stores_the_time(redirect: Redirect, loaded: loader.Loaded) -> None:
    before = time.monotonic_ns()
    redirect.beat()
    assert before <= redirecting.last_beat_ns(loaded) <= time.monotonic_ns()


def test_while_paused_it_goes_direct(scene: Scene, redirect: Redirect) -> None:
    redirect.pause()
    assert scene.reached_from_node(4) == "pod"


@BOTH
def test_socket_bound_to_an_interface_goes_where_it_is_bound(scene: Scene, version: int) -> None:
    with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, scene.pod.interface.encode())
        assert scene.reached(sock, traffic.address(scene.pod, version)) == "pod"


@BOTH
def test_datagrams_go_direct(scene: Scene, version: int) -> None:
    with (
        scene.pod.open_socket(traffic.family(version), socket.SOCK_DGRAM) as inside,
        socket.socket(traffic.family(version), socket.SOCK_DGRAM) as sock,
    ):
        inside.settimeout(traffic.LIMIT_SECONDS)
        inside.bind(("", PORT))
        sock.connect((traffic.address(scene.pod, version), PORT))
        sock.send(b"hello")
        assert inside.recv(64) == b"hello"


@BOTH
def test_multipath_connection_goes_to_the_relay_too(scene: Scene, version: int) -> None:
    pod = traffic.address(scene.pod, version)
    with socket.socket(traffic.family(version), socket.SOCK_STREAM, syns.IPPROTO_MPTCP) as sock:
        assert scene.reached(sock, pod) == "relay"
        assert sock.getpeername()[:2] == (pod, PORT)


@BOTH
def test_sockets_of_other_namespaces_go_direct_and_see_their_peer(
    lab: labs.Lab, scene: Scene, version: int
) -> None:
    other = lab.add_pod("other", 9)
    pod, relay = (traffic.address(one, version) for one in (scene.pod, scene.relay))
    with other.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert scene.reached(sock, pod) == "pod"
    with other.open_socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert scene.reached(sock, relay) == "relay"
        assert sock.getpeername()[0] == relay


@BOTH
def test_target_of_another_pod_is_not_used(scene: Scene, redirect: Redirect, version: int) -> None:
    """As if the entry's memory were reused before it is read."""
    relay, other = (
        frames.address(traffic.address(one, version)) for one in (scene.relay, scene.successor)
    )
    redirect.publish(relay, other, (), scene.relay.ifindex)
    assert scene.reached_from_node(version) == "pod"


def test_hooks_end_with_their_process(
    scene: Scene, redirect: Redirect, installation: pins.Pins
) -> None:
    redirect.disengage()
    with redirecting.engaged_child(installation) as relay:
        assert scene.reached_from_node(4) == "relay"
        redirecting.kill(relay)
        assert scene.reached_from_node(4) == "pod"


def test_disengaging_takes_effect_at_once_and_engaging_twice_does_no_harm(
    scene: Scene, redirect: Redirect
) -> None:
    redirect.engage(redirecting.root_cgroup())
    redirect.disengage()
    assert scene.reached_from_node(4) == "pod"
    redirect.engage(redirecting.root_cgroup())
    assert scene.reached_from_node(4) == "relay"


@BOTH
def test_two_engaged_relays_redirect_once_and_each_works_alone(
    scene: Scene, redirect: Redirect, installation: pins.Pins, version: int
) -> None:
    pod = traffic.address(scene.pod, version)
    with redirecting.engaged_child(installation) as other:
        with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
            assert scene.reached(sock, pod) == "relay"
            assert sock.getpeername()[:2] == (pod, PORT)
        redirecting.kill(other)
        assert scene.reached_from_node(version) == "relay"
    with redirecting.engaged_child(installation):
        redirect.disengage()
        assert scene.reached_from_node(version) == "relay"
    assert scene.reached_from_node(version) == "pod"


KUBELET = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)


Guard = Callable[[labs.LabPod], Counting]


@pytest.fixture
def guard(gates: Gates, loaded: loader.Loaded, installation: pins.Pins) -> Iterator[Guard]:
    """Guards a relay's pair as the agent does."""
    with contextlib.closing(HostDevicePrograms(loaded, installation, Attachment.CLSACT)) as guards:

        def install(pair: labs.LabPod) -> Counting:
            gate = GateConfig(Mode.ENFORCE, (), (KUBELET,), any_address=True)
            gates.install(pair.ifindex, gate)
            guards.ensure_pairs({pair.ifindex})
            return Counting(gates, pair.ifindex)

        yield install
        guards.ensure_pairs(set())


def verdicts(counting: Counting) -> dict[tuple[Verdict, Reason], int]:
    """Counts of new connections, without the kernels' own traffic."""
    reasons = (Reason.PROBE, Reason.NODE, Reason.RELAY)
    return {key: count for key, count in counting.moved().items() if key[1] in reasons}


@BOTH
def test_other_sources_get_eperm_from_the_relay_and_are_counted(
    refusing: None, scene: Scene, guard: Guard, version: int
) -> None:
    counting = guard(scene.relay)
    address = traffic.address(scene.relay, version)
    with cgroups.cgroup() as stranger:
        assert connected(stranger, address) == errno.EPERM
    assert verdicts(counting) == {(Verdict.DROP, Reason.NODE): 1}
    assert scene.reached_from_node(version) == "relay"
    assert verdicts(counting) == {(Verdict.PASS, Reason.PROBE): 1}


@BOTH
def test_enforced_pod_s_hook_lets_the_kubelet_through_to_the_relay(
    refusing: None, scene: Scene, gates: Gates, guard: Guard, version: int
) -> None:
    """Whichever of the two programs the kernel runs first, and although its gate stays closed."""
    gates.install(scene.pod.ifindex, GateConfig(Mode.STRICT, scene.pod.addresses, (KUBELET,)))
    guard(scene.relay)
    counting = Counting(gates, scene.pod.ifindex)
    assert scene.reached_from_node(version) == "relay"
    assert verdicts(counting) == {}
    with cgroups.cgroup() as stranger:
        assert connected(stranger, traffic.address(scene.pod, version)) == errno.EPERM


# A range behind the relay's pair, and one address of it that is in no gate's list.
RANGES = {4: ("198.18.64.0/24", "198.18.64.77"), 6: ("fd00:18:64::/64", "fd00:18:64::77")}


@BOTH
def test_gate_for_any_address_admits_the_kubelet_only(
    scene: Scene, guard: Guard, version: int
) -> None:
    span, address = RANGES[version]
    gateway = traffic.address(scene.relay, version)
    inside = ["nsenter", f"--net={scene.relay.netns.path}"]
    subprocess.run([*inside, "ip", "route", "add", "local", span, "dev", "lo"], check=True)
    subprocess.run(["ip", "route", "add", span, "via", gateway], check=True)
    counting = guard(scene.relay)
    with socket.socket(traffic.family(version), socket.SOCK_STREAM) as sock:
        assert scene.reached(sock, address) == "relay"
    assert verdicts(counting) == {(Verdict.PASS, Reason.PROBE): 1}
    with cgroups.cgroup() as stranger:
        dropped = connected(stranger, address, traffic.DROPPED_AFTER_SECONDS)
    assert dropped == errno.EAGAIN  # a time limit's end, as connect_ex returns it
    assert verdicts(counting) == {(Verdict.DROP, Reason.NODE): 1}


@BOTH
def test_pod_that_dials_the_relay_is_dropped_beside_the_gate(
    scene: Scene, guard: Guard, version: int
) -> None:
    counting = guard(scene.relay)
    family = traffic.family(version)
    with scene.successor.open_socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(traffic.DROPPED_AFTER_SECONDS)
        with pytest.raises(TimeoutError):
            sock.connect((traffic.address(scene.relay, version), PORT))
    assert verdicts(counting) == {(Verdict.DROP, Reason.RELAY): 1}


@BOTH
def test_gate_for_any_address_drops_no_strays(
    lab: labs.Lab, gates: Gates, loaded: loader.Loaded, version: int
) -> None:
    ends = frames.Ends(
        frames.address(traffic.NODE[version]), frames.address(RANGES[version][1]), port=PORT
    )
    gate = lab.add_pod("any", 1).ifindex
    for any_address, reason in ((True, Reason.NODE), (False, Reason.STRAY)):
        gates.install(gate, GateConfig(Mode.ENFORCE, (), (), any_address))
        counting = Counting(gates, gate)
        assert skb.run_gate(loaded, frames.segment(ends, frames.SYN), gate) == skb.TCX_DROP
        assert counting.moved_but_control() == {(Verdict.DROP, reason): 1}
