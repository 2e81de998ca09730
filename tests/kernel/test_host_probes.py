"""The kubelet does not connect where the `host` of a probe or hook sends it, and only there."""

import ipaddress
import socket
from collections.abc import Iterator

import pytest

from agent.kubelet import host_probes
from agent.linux.cgroups import cgroup2_mount
from agent.pods.pod import Pod
from bpf import abi, loader, map_specs, pins
from bpf.hooks import Hooks
from bpf.host_probes import HostProbes, Target
from bpf.node_config import NodeConfig
from probes.netns import netns_cookie
from probes.spec.specs import parse_pod
from tests.kernel import offers
from tests.kernel.cgroups import Cgroup, cgroup
from tests.processes import BARE_PYTHON

pytestmark = pytest.mark.kernel

_CONNECT = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
made = socket.socket(family)
made.settimeout(30)
try:
    made.connect((sys.argv[1], int(sys.argv[2])))
except PermissionError:
    print("EPERM")
else:
    print("connected")
"""
IPV4, IPV6 = "127.0.0.1", "::1"
EVERY_ADDRESS = pytest.mark.parametrize("address", [IPV4, IPV6, "::ffff:127.0.0.1"])


@pytest.fixture
def config(loaded: loader.Loaded) -> Iterator[NodeConfig]:
    offers.need_netns_cookie()
    made = NodeConfig(loaded)
    made.set_netns(netns_cookie())
    yield made
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))


@pytest.fixture
def denied(
    loaded: loader.Loaded, installation: pins.Pins, config: NodeConfig
) -> Iterator[HostProbes]:
    """The map, with the hooks that read it."""
    mount = cgroup2_mount()
    assert mount is not None
    hooks = Hooks(loaded, installation, mount)
    assert not any(hook.problem for hook in hooks.attach())
    made = HostProbes(loaded)
    yield made
    made.replace(set())
    hooks.detach()


@pytest.fixture
def kubelet(config: NodeConfig) -> Iterator[Cgroup]:
    with cgroup() as made:
        config.set_kubelet(made.id)
        yield made


@pytest.fixture
def port(lab: object) -> Iterator[int]:
    """Of a server of the node, on all addresses."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        yield server.getsockname()[1]


def connect(source: Cgroup, address: str, port: int) -> str:
    done = source.run([*BARE_PYTHON, "-c", _CONNECT, address, str(port)])
    return done.stdout.decode().strip() or done.stderr.decode()


def targets(address: str, port: int) -> set[Target]:
    """Of a pod whose probe has this host."""
    probe = {"httpGet": {"host": address, "port": port}}
    containers = [{"name": "app", "image": "example", "livenessProbe": probe}]
    spec = parse_pod({"spec": {"containers": containers}})
    return host_probes.named_targets([Pod(uid="1", namespace="a", name="b", spec=spec)])


@EVERY_ADDRESS
def test_kubelet_is_rejected_where_a_probe_names_host(
    denied: HostProbes, kubelet: Cgroup, port: int, address: str
) -> None:
    assert connect(kubelet, address, port) == "connected"
    denied.replace(targets(address, port))
    assert connect(kubelet, address, port) == "EPERM"
    assert list(denied.counts().values()) == [1]
    denied.replace(set())
    assert connect(kubelet, address, port) == "connected"


def test_kubelet_reaches_other_ports_and_addresses(
    denied: HostProbes, kubelet: Cgroup, port: int
) -> None:
    with socket.create_server((IPV4, 0)) as other:
        denied.replace(targets(IPV4, port))
        assert connect(kubelet, IPV4, other.getsockname()[1]) == "connected"
    assert connect(kubelet, IPV6, port) == "connected"
    assert connect(kubelet, "127.0.0.2", port) == "connected"
    assert sum(denied.counts().values()) == 0


def test_other_processes_are_not_affected(denied: HostProbes, kubelet: Cgroup, port: int) -> None:
    denied.replace(targets(IPV4, port))
    with cgroup() as other:
        assert connect(other, IPV4, port) == "connected"
    assert connect(kubelet, IPV4, port) == "EPERM"


def test_nothing_is_rejected_without_an_agent(
    denied: HostProbes, config: NodeConfig, kubelet: Cgroup, port: int
) -> None:
    """Which would know that the pod is gone."""
    config.set_limits(stale_after_seconds=0.001, dead_man_seconds=0)
    config.beat()
    denied.replace(targets(IPV4, port))
    assert connect(kubelet, IPV4, port) == "connected"
    config.set_limits(stale_after_seconds=3600, dead_man_seconds=0)
    config.beat()
    assert connect(kubelet, IPV4, port) == "EPERM"


def test_counts_of_targets_that_stay_are_kept(
    denied: HostProbes, kubelet: Cgroup, port: int
) -> None:
    denied.replace(targets(IPV4, port))
    connect(kubelet, IPV4, port)
    other = (ipaddress.ip_address("198.18.7.7"), 80)
    assert denied.replace(targets(IPV4, port) | {other}) == 0
    assert denied.counts() == {(ipaddress.ip_address(IPV4), port): 1, other: 0}


def test_targets_without_room_are_left_out_and_counted(denied: HostProbes) -> None:
    address = ipaddress.ip_address("198.18.7.7")
    many = {(address, port) for port in range(1, abi.MAX_DENIED_HOST_PROBES + 11)}
    assert denied.replace(many) == 10
    assert denied.replace(set()) == 0
    assert denied.counts() == {}
