"""The meshes that are tested: their rules in pods and on the node, and their proxies."""

import dataclasses
import json
from collections.abc import Callable, Sequence

from agent.lab.lab import LabPod
from tests.kernel import fleet
from tests.meshes import ambient, envoy, linkerd, programs, running
from tests.meshes.envoy import Identity, Ports
from tests.meshes.programs import ENVOY, ISTIO_IPTABLES, PILOT_AGENT_STATUS
from tests.meshes.running import MeshProcess, MeshProcesses

ISTIO_USER = 1337
_ISTIO = Ports(inbound=15006)
_ISTIO_OWN_PORTS = (15020, 15021, 15090)

CONSUL_USER = 5995
_CONSUL = Ports(inbound=20000)
# Of consul's SDK (iptables): IPv4, and no exemption of the loopback.
_CONSUL_RULES = """
table ip consul {
  chain proxy_output {
    type nat hook output priority -100
    meta l4proto tcp jump proxy_output_redirect
  }
  chain proxy_output_redirect {
    meta skuid 5995 return
    ip daddr 127.0.0.1 return
    meta l4proto tcp redirect to :15001
  }
  chain proxy_inbound {
    type nat hook prerouting priority -100
    tcp dport { 15020, 15021, 15090 } return
    meta l4proto tcp redirect to :20000
  }
}
"""

REWRITTEN = "/app-health/app/readyz"
REWRITTEN_CLOSED = "/app-health/closed/readyz"
_REWRITTEN_PROBES = {
    REWRITTEN: {"httpGet": {"path": "/healthz", "port": fleet.HTTP}, "timeoutSeconds": 1},
    REWRITTEN_CLOSED: {"tcpSocket": {"port": fleet.CLOSED}, "timeoutSeconds": 1},
}
"""As the injector writes them into ISTIO_KUBE_APP_PROBERS."""


@dataclasses.dataclass(slots=True)
class InPods:
    """A mesh in force. proxies: the processes of the first pod's proxy."""

    proxies: list[MeshProcess]


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """name: of the mesh and of its way to redirect; programs: that it needs; ports: of its proxy
    that others can reach; start: brings it into force in pods; is_rewritten: whether its injector
    rewrites probes."""

    name: str
    programs: tuple[str, ...]
    ports: tuple[int, ...]
    start: Callable[[MeshProcesses, Sequence[LabPod]], InPods]
    is_rewritten: bool = False


def sidecar_rules(pod: LabPod, mode: str = "REDIRECT", *, is_nft: bool = False) -> None:
    """By Istio's own program, with the arguments of its init container."""
    running.run_in(
        pod,
        programs.path(ISTIO_IPTABLES),
        *("-p", "15001", "-z", "15006", "-u", str(ISTIO_USER), "-g", str(ISTIO_USER), "-m", mode),
        *("-i", "*", "-x", "", "-b", "*", "-d", "15090,15021,15020"),
        environment={
            "INSTANCE_IP": pod.ipv4,
            "ISTIO_DUAL_STACK": "true",
            **({"NATIVE_NFTABLES": "true"} if is_nft else {}),
        },
    )


def _sidecar(mode: str, *, is_nft: bool = False) -> Callable[..., InPods]:
    def start(processes: MeshProcesses, pods: Sequence[LabPod]) -> InPods:
        identity = envoy.make_identity(processes.folder)
        first: list[MeshProcess] = []
        for pod in pods:
            sidecar_rules(pod, mode, is_nft=is_nft)
            made = [
                start_envoy(processes, pod, identity, _ISTIO, ISTIO_USER, mode == "TPROXY"),
                _start_status(processes, pod),
            ]
            first = first or made
        return InPods(first)

    return start


def start_envoy(
    processes: MeshProcesses,
    pod: LabPod,
    identity: Identity,
    ports: Ports,
    user: int,
    is_transparent: bool = False,
) -> MeshProcess:
    """In the pod, as this user; returns when it listens."""
    process = processes.start(
        pod,
        [
            programs.path(ENVOY),
            *envoy.arguments(identity, (pod.ipv4, pod.ipv6), ports, is_transparent=is_transparent),
        ],
        user=user,
        capabilities="+net_admin" if is_transparent else "",
    )
    for port in (ports.inbound, ports.outbound):
        running.wait_for_listener(pod, port, process)
    return process


def _start_status(processes: MeshProcesses, pod: LabPod) -> MeshProcess:
    """pilot-agent's server of rewritten probes."""
    process = processes.start(
        pod,
        [programs.path(PILOT_AGENT_STATUS)],
        user=ISTIO_USER,
        environment={
            "INSTANCE_IP": pod.ipv4,
            "ISTIO_KUBE_APP_PROBERS": json.dumps(_REWRITTEN_PROBES),
        },
    )
    running.wait_for_listener(pod, envoy.STATUS, process)
    return process


def _consul(processes: MeshProcesses, pods: Sequence[LabPod]) -> InPods:
    identity = envoy.make_identity(processes.folder)
    rules = processes.folder / "consul.nft"
    rules.write_text(_CONSUL_RULES)
    made = []
    for pod in pods:
        running.run_in(pod, "nft", "-f", str(rules))
        made.append(start_envoy(processes, pod, identity, _CONSUL, CONSUL_USER))
    return InPods(made[:1])


def _ambient(backend: str) -> Callable[..., InPods]:
    def start(processes: MeshProcesses, pods: Sequence[LabPod]) -> InPods:
        return InPods([ambient.start(processes, pods, backend)])

    return start


def _linkerd(processes: MeshProcesses, pods: Sequence[LabPod]) -> InPods:
    return InPods([linkerd.start(processes, pod) for pod in pods][:1])


_SIDECAR = (ISTIO_IPTABLES, ENVOY, PILOT_AGENT_STATUS)
_SIDECAR_PORTS = (15001, 15006, *_ISTIO_OWN_PORTS)
_AMBIENT_PORTS = (15001, 15006, 15008)

MESHES = [
    Mesh("istio-redirect", _SIDECAR, _SIDECAR_PORTS, _sidecar("REDIRECT"), is_rewritten=True),
    Mesh("istio-tproxy", _SIDECAR, _SIDECAR_PORTS, _sidecar("TPROXY"), is_rewritten=True),
    Mesh(
        "istio-nftables",
        _SIDECAR,
        _SIDECAR_PORTS,
        _sidecar("REDIRECT", is_nft=True),
        is_rewritten=True,
    ),
    Mesh("ambient-iptables", ambient.PROGRAMS, _AMBIENT_PORTS, _ambient("iptables")),
    Mesh("ambient-nftables", ambient.PROGRAMS, _AMBIENT_PORTS, _ambient("nftables")),
    Mesh("linkerd", linkerd.PROGRAMS, linkerd.PORTS, _linkerd),
    Mesh("consul", (ENVOY,), (15001, 20000, 15021, 15090), _consul),
]
