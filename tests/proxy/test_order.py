"""Translation comes before all other hooks: those judge the endpoint."""

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from agent.services.proxy.ebpf import EbpfBackend
from bpf import abi, loader, map_specs, pins, program_specs, syscalls
from bpf.gates import Attachment, GateConfig, Gates
from bpf.hooks import Hooks
from bpf.node_config import NodeConfig
from bpf.rules import Rule, SourceKind
from bpf.services import links as service_links
from bpf.verdicts import Mode
from probes.netns import netns_cookie
from tests.kernel import cgroups, offers, redirecting
from tests.proxy import scene
from tests.proxy.conftest import Proxy
from tests.proxy.scene import cluster_ip, endpoints, request, service

pytestmark = pytest.mark.kernel

BOTH = pytest.mark.parametrize("version", [4, 6])
KUBELET = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)
CONNECT4, CONNECT6 = 10, 11
# No cgroup has it: ids of cgroups begin with 1, which is the root's.
OTHER_CGROUP = 1 << 62


@pytest.fixture
def agent(fresh_pins: pins.Pins) -> Iterator[loader.Loaded]:
    """The agent's programs, which know this node, and a kubelet that is another process: gates
    admit every host process to declared ports until the kubelet is identified."""
    offers.need_netns_cookie()
    loaded = asyncio.run(loader.load(fresh_pins))
    config = NodeConfig(loaded)
    config.set_netns(netns_cookie())
    config.set_kubelet(OTHER_CGROUP)
    yield loaded
    loaded.map(map_specs.CONFIG).set(bytes(4), bytes(abi.CConfig()))
    loaded.close()


@pytest.fixture
def hooks(
    agent: loader.Loaded, fresh_pins: pins.Pins, own_cgroup: cgroups.Cgroup
) -> Iterator[Hooks]:
    """At the cgroup of the proxy, as on a node both are at the root."""
    made = Hooks(agent, fresh_pins, own_cgroup.directory)
    assert [hook.problem for hook in made.attach()] == [None] * len(program_specs.HOOKS)
    yield made
    made.detach()


@pytest.fixture
def gates(agent: loader.Loaded, fresh_pins: pins.Pins) -> Iterator[Gates]:
    made = Gates(agent, fresh_pins, Attachment.CLSACT)
    yield made
    for ifindex in made.installed():
        made.remove(ifindex)
    made.close()


@pytest.fixture(params=["before", "in the place of the agent's"])
def first(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    pods: list[labs.LabPod],
    servers: scene.Servers,
    gates: Gates,
    hooks: Hooks,
    fresh_pins: pins.Pins,
    own_cgroup: cgroups.Cgroup,
) -> Iterator[Proxy]:
    """A proxy that comes after the agent; without order among programs, too (before 6.16)."""
    if request.param != "before":
        monkeypatch.setattr(service_links, "_link_first", lambda *_: None)
    backend = asyncio.run(EbpfBackend.open(fresh_pins.bpffs, own_cgroup.directory))
    proxy = Proxy(backend)
    proxy.serve(service("web", endpoints(pods[0])))
    yield proxy
    service_links.detach(fresh_pins)
    asyncio.run(backend.close())


def names(cgroup: cgroups.Cgroup, attach_type: int) -> list[str]:
    """Of the programs attached to it, in the order in which they run."""
    cgroup_fd = os.open(cgroup.directory, os.O_RDONLY)
    try:
        ids, _ = syscalls.query_cgroup_programs(cgroup_fd, attach_type)
    finally:
        os.close(cgroup_fd)
    found = []
    for number in ids:
        fd = syscalls.fd_by_id(syscalls.Command.PROG_GET_FD_BY_ID, number)
        try:
            # struct bpf_prog_info: name is at 64, after load_time, created_by_uid, map ids.
            name = syscalls.object_info(fd, 80)[64:80]
        finally:
            os.close(fd)
        found.append(name.rstrip(b"\0").decode())
    return found


def enforce(gates: Gates, pod: labs.LabPod) -> None:
    gates.install(pod.ifindex, GateConfig(Mode.ENFORCE, pod.addresses, (KUBELET,)))


@pytest.mark.parametrize("attach_type", [CONNECT4, CONNECT6])
def test_later_proxy_runs_first(first: Proxy, own_cgroup: cgroups.Cgroup, attach_type: int) -> None:
    translating, judging = names(own_cgroup, attach_type)
    assert translating.startswith("service_connec")
    assert judging.startswith("hook_connect")


@BOTH
def test_host_process_is_rejected_at_an_enforced_endpoint_of_a_service(
    first: Proxy, gates: Gates, pods: list[labs.LabPod], version: int
) -> None:
    assert request(cluster_ip(version)) == "one"
    enforce(gates, pods[0])
    with pytest.raises(PermissionError):
        request(cluster_ip(version))
    assert request(cluster_ip(version), client=pods[1]) == "one"


@BOTH
def test_kubelet_reaches_what_the_pod_declares(
    first: Proxy, agent: loader.Loaded, gates: Gates, pods: list[labs.LabPod], version: int
) -> None:
    enforce(gates, pods[0])
    NodeConfig(agent).set_kubelet(redirecting.own_cgroup())
    pod = pods[0].ipv4 if version == 4 else pods[0].ipv6
    assert request(pod, scene.PORT) == "one"
    assert request(cluster_ip(version)) == "one"


@BOTH
def test_running_agent_keeps_its_hook_beside_a_new_proxy(
    first: Proxy,
    hooks: Hooks,
    gates: Gates,
    own_cgroup: cgroups.Cgroup,
    pods: list[labs.LabPod],
    version: int,
) -> None:
    """An agent's start swaps the programs of the links that it finds by name."""
    before = names(own_cgroup, CONNECT4)
    assert [hook.problem for hook in hooks.attach()] == [None] * len(program_specs.HOOKS)
    assert names(own_cgroup, CONNECT4) == before
    enforce(gates, pods[0])
    with pytest.raises(PermissionError):
        request(cluster_ip(version))


@BOTH
def test_agent_that_detaches_its_hooks_leaves_translation(
    first: Proxy, hooks: Hooks, gates: Gates, pods: list[labs.LabPod], version: int
) -> None:
    hooks.detach()
    assert request(cluster_ip(version)) == "one"


@BOTH
def test_gate_drops_datagrams_translated_to_an_enforced_pod(
    first: Proxy, gates: Gates, pods: list[labs.LabPod], version: int
) -> None:
    first.serve(service("dns", endpoints(pods[0]), protocol=pb.PROTOCOL_UDP))
    enforce(gates, pods[0])
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(0.3)
        sock.sendto(b"who?", (cluster_ip(version), scene.SERVICE_PORT))
        with pytest.raises(TimeoutError):
            sock.recv(100)
