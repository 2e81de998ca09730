"""Istio's ambient mode: its own rules, and the real ztunnel, which carries HBONE between pods.

What istio-cni's agent does, the test does: it lets `istio-cni-rules` write the rules, and hands
ztunnel the pods' namespaces. ztunnel reads workloads and the policy from a file, and its authority
is its own (FAKE_CA). The policy is that of PeerAuthentication in STRICT.
"""

import array
import contextlib
import json
import os
import pathlib
import socket
from collections.abc import Iterator, Sequence

from agent.lab.lab import LabPod
from tests.meshes import programs, running
from tests.meshes.programs import ISTIO_CNI_RULES, ZTUNNEL
from tests.meshes.running import MeshProcess, MeshProcesses
from tests.polling import PATIENCE_SECONDS

PROGRAMS = (ISTIO_CNI_RULES, ZTUNNEL)
ZTUNNEL_POD = "ztunnel"
_RECEIVED = 1024
# istio-cni's agent reads the node's processes at /host/proc, a mount of its container.
_WITH_HOST_PROC = (
    'mount -t tmpfs tmpfs "$0" && mkdir -p "$0/extra/host/proc" "$0/root"'
    ' && touch "$0/extra/host/program"'
    ' && mount -t overlay overlay -o lowerdir="$0/extra:/" "$0/root"'
    ' && mount --bind "$1" "$0/root/host/program"'
    ' && mount --rbind /dev "$0/root/dev" && mount --rbind /proc "$0/root/proc"'
    ' && mount --rbind /proc "$0/root/host/proc"'
    ' && root="$0/root" && shift && exec chroot "$root" /host/program "$@"'
)
_ANY_PRINCIPAL = "any principal"


def start(processes: MeshProcesses, pods: Sequence[LabPod], backend: str) -> MeshProcess:
    """The last one of the pods is ztunnel's own. backend: iptables or nftables."""
    *members, own = pods
    write_rules(members, backend, processes.folder)
    return start_ztunnel(processes, own, members)


def write_rules(pods: Sequence[LabPod], backend: str, folder: pathlib.Path) -> None:
    """In the pods and on the node, for the node's probes to them. For nftables a process named
    kubelet must run: the rule on the node names its user. folder: for mounts."""
    program = programs.path(ISTIO_CNI_RULES)
    for pod in pods:
        running.run_in(pod, program, "pod", backend)
    addresses = [address for pod in pods for address in (pod.ipv4, pod.ipv6)]
    place = folder / "istio-cni"
    place.mkdir()
    as_container = ("unshare", "--mount", "sh", "-c", _WITH_HOST_PROC, str(place))
    running.run(*as_container, program, "host", backend, *addresses)


def start_ztunnel(processes: MeshProcesses, own: LabPod, pods: Sequence[LabPod]) -> MeshProcess:
    """own: ztunnel's pod."""
    configuration = processes.folder / "ztunnel.json"
    # A variant of an enumeration is a tag in serde's YAML.
    content = json.dumps(_configuration(pods)).replace(f'"{_ANY_PRINCIPAL}"', "!Presence []")
    configuration.write_text(content)
    path = processes.folder / "ztunnel.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(PATIENCE_SECONDS)
        process = processes.start(
            own,
            [programs.path(ZTUNNEL)],
            environment={
                "PROXY_MODE": "shared",
                "INPOD_UDS": str(path),
                "LOCAL_XDS_PATH": str(configuration),
                "XDS_ADDRESS": "",
                "FAKE_CA": "true",
                "NODE_NAME": "node",
                "ZTUNNEL_WORKER_THREADS": "1",
                "RUST_LOG": "warn",
            },
        )
        connection, _ = listener.accept()
    _hand_over(connection, pods)
    # ztunnel keeps its pods while the connection is open.
    processes.undo.callback(connection.close)
    for pod in pods:
        running.wait_for_listener(pod, 15006, process)
    return process


def _hand_over(connection: socket.socket, pods: Sequence[LabPod]) -> None:
    """By the protocol ZDS (ztunnel: proto/zds.proto): each message is acknowledged."""
    connection.settimeout(PATIENCE_SECONDS)
    connection.recv(_RECEIVED)  # ZdsHello
    for pod in pods:
        workload = _field(1, pod.name) + _field(2, "demo") + _field(3, "default")
        added = _field(1, f"uid-{pod.name}") + _field(2, workload)
        with _opened(pod.netns.path) as descriptor:
            rights = array.array("i", [descriptor])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            connection.sendmsg([_field(1, added)], ancillary)
        connection.recv(_RECEIVED)
    connection.sendall(_field(3, b""))  # SnapshotSent
    connection.recv(_RECEIVED)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _field(number: int, content: str | bytes) -> bytes:
    """A field of less than 128 bytes, length-delimited, as protobuf encodes it."""
    encoded = content.encode() if isinstance(content, str) else content
    assert len(encoded) < 0x80
    return bytes([number << 3 | 2, len(encoded)]) + encoded


def _configuration(pods: Sequence[LabPod]) -> object:
    """YAML's subset JSON. istiod sends such a policy for PeerAuthentication in STRICT: it denies
    connections that have no principal."""
    strict = "istio_converted_static_strict"
    return {
        "workloads": [
            {
                "uid": f"cluster1//v1/Pod/demo/{pod.name}",
                "name": pod.name,
                "namespace": "demo",
                "serviceAccount": "default",
                "workloadIps": [pod.ipv4, pod.ipv6],
                "protocol": "HBONE",
                "node": "node",
                "network": "",
                "services": {},
                "authorizationPolicies": [f"istio-system/{strict}"],
            }
            for pod in pods
        ],
        "policies": [
            {
                "name": strict,
                "namespace": "istio-system",
                "scope": "WorkloadSelector",
                "action": "Deny",
                "rules": [[[{"notPrincipals": [_ANY_PRINCIPAL]}]]],
                "dryRun": False,
            }
        ],
        "services": [],
    }
