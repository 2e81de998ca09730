"""States of pods in strict, for tests of targets and supervisor."""

import ipaddress
from typing import Any

from agent.linux.pod_network import HostInterface, PodNetwork
from agent.pods.pod import Pod
from agent.pods.pod_state import AddressClaims, PathTestRecord, PathTestResult, PodState
from bpf.verdicts import Mode
from probes.netns import Netns
from probes.spec.specs import parse_pod

HTTP_8080 = {"readinessProbe": {"httpGet": {"port": 8080}}}


def tcp(port: int) -> dict[str, Any]:
    return {"livenessProbe": {"tcpSocket": {"port": port}}}


def record_path(state: PodState, result: PathTestResult) -> None:
    """The path test of the pod as it is, with this result for each address."""
    assert state.gated_netns is not None
    results = dict.fromkeys(state.own_addresses, result)
    state.path_test = PathTestRecord(
        state.gated_netns, state.pod.mode, frozenset(state.gates), results
    )


def strict_pod(
    name: str,
    *addresses: str,
    container: dict[str, Any] = HTTP_8080,
    mode: Mode = Mode.STRICT,
    is_gated: bool = True,
    is_relayed: bool = True,
    taps: tuple[str, ...] = (),
    claimed: tuple[str, ...] = (),
    is_valid: bool = True,
    is_tried: bool = True,
) -> PodState:
    """container: its probes; claimed: addresses in its namespace that nothing confirms; is_valid:
    whether podgate accepts the probes; is_tried: from inside, where nothing is redirected."""
    spec = parse_pod({"spec": {"containers": [{"name": "app", **container}]}})
    assert is_valid is not bool(spec.errors)
    pod = Pod(
        uid=f"uid-{name}", namespace="shop", name=name, mode=mode, spec=spec, is_relayed=is_relayed
    )
    netns = Netns(f"/run/netns/{name}", 4, sum(name.encode()))
    veth = HostInterface(sum(name.encode()), f"veth{name}")
    own = tuple(map(ipaddress.ip_address, addresses))
    shown = (*own, *map(ipaddress.ip_address, claimed))
    network = PodNetwork((veth,), shown, (), 0, (), taps)
    claims = AddressClaims(tuple(address for address in own if not address.is_link_local))
    state = PodState(pod, netns=netns, network=network, claims=claims)
    if is_gated:
        state.gates, state.gated_netns = {veth.ifindex: veth}, netns
    if is_tried:
        state.inner_ways = {}
    return state
