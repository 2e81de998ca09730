"""Pods that send their names over TCP and UDP, and services as the API publishes them."""

import contextlib
import ipaddress
import selectors
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence

from agent.lab import lab as labs
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests.kernel import traffic

PORT = 8080
CLUSTER_IP = {4: "198.18.96.1", 6: "fd00:18:96::1"}
SERVICE_PORT = 80
NODE_PORT = 30080
_UPLINK = "uplink"
_NETWORKS = ("198.18.96.0/19", "198.18.128.0/19", "fd00:18:96::/48")


class Servers:
    """One thread that responds for all pods, with the name of the pod."""

    def __init__(self, pods: Sequence[labs.LabPod]) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._sockets: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        for pod in pods:
            self.start(pod)
        self._thread = threading.Thread(target=self._serve, name="servers")
        self._thread.start()

    def start(self, pod: labs.LabPod, port: int = PORT) -> None:
        tcp = pod.listen(port)
        udp = pod.open_socket(socket.AF_INET6, socket.SOCK_DGRAM)
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        udp.bind(("", port))
        with self._lock:
            self._sockets.setdefault(pod.name, []).extend((tcp, udp))
            for sock in (tcp, udp):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, pod.name.encode())

    def stop(self, pod: labs.LabPod) -> None:
        """Close the pod's listener."""
        with self._lock:
            for sock in self._sockets.pop(pod.name):
                self._selector.unregister(sock)
                sock.close()

    def close(self) -> None:
        self._wake.send(b"end")
        self._thread.join()
        for sockets in self._sockets.values():
            for sock in sockets:
                sock.close()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                with contextlib.suppress(BlockingIOError, OSError):
                    if sock.type == socket.SOCK_STREAM:
                        peer, _ = sock.accept()
                        with peer:
                            peer.sendall(key.data)
                    else:
                        _, sender = sock.recvfrom(100)
                        sock.sendto(key.data, sender)


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """The node has a way to services' addresses, as by an uplink: else nothing leaves it."""
    try:
        _ip("link", "add", _UPLINK, "type", "veth", "peer", "name", f"{_UPLINK}-far")
        _ip("link", "set", _UPLINK, "up")
        _ip("link", "set", f"{_UPLINK}-far", "up")
        for network in _NETWORKS:
            _ip("route", "add", network, "dev", _UPLINK)
        yield
    finally:
        _ip("link", "del", _UPLINK)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def service(
    name: str,
    endpoints: Sequence[pb.Endpoint],
    *,
    number: int = 0,
    protocol: "pb.Protocol" = pb.PROTOCOL_TCP,
    node_port: int = 0,
    affinity_seconds: int = 0,
    is_local: bool = False,
    is_anywhere: bool | None = None,
) -> pb.ServiceEndpoints:
    """number: added to the cluster IPs; is_local: externalTrafficPolicy."""
    return pb.ServiceEndpoints(
        namespace="shop",
        name=name,
        type=pb.SERVICE_TYPE_NODE_PORT if node_port else pb.SERVICE_TYPE_CLUSTER_IP,
        cluster_ips=[cluster_ip(version, number) for version in (4, 6)],
        session_affinity=(
            pb.SESSION_AFFINITY_CLIENT_IP if affinity_seconds else pb.SESSION_AFFINITY_NONE
        ),
        session_affinity_timeout_seconds=affinity_seconds,
        internal_traffic_policy=pb.TRAFFIC_POLICY_CLUSTER,
        external_traffic_policy=pb.TRAFFIC_POLICY_LOCAL if is_local else pb.TRAFFIC_POLICY_CLUSTER,
        ports=[
            pb.ServicePort(
                protocol=protocol,
                port=SERVICE_PORT,
                node_port=node_port,
                endpoints=endpoints,
                has_endpoints_anywhere=bool(endpoints) if is_anywhere is None else is_anywhere,
            )
        ],
    )


def cluster_ip(version: int, number: int = 0) -> str:
    return str(ipaddress.ip_address(CLUSTER_IP[version]) + number)


def endpoints(*pods: labs.LabPod, is_external: bool = True, port: int = PORT) -> list[pb.Endpoint]:
    """Both families of each pod."""
    return [
        pb.Endpoint(
            address=str(address),
            port=port,
            is_local=True,
            is_internal=True,
            is_external=is_external,
            is_external_from_node=True,
        )
        for pod in pods
        for address in pod.addresses
    ]


def responder_of(sock: socket.socket, address: str, port: int) -> str:
    """Connect (a datagram socket: only send); returns the name of the pod that responds."""
    sock.settimeout(traffic.LIMIT_SECONDS)
    with sock:
        if sock.type == socket.SOCK_STREAM:
            sock.connect((address, port))
            return sock.recv(100).decode()
        sock.sendto(b"who?", (address, port))
        answer, sender = sock.recvfrom(100)
        assert sender[:2] == (address, port)
        return answer.decode()


def request(
    address: str,
    port: int = SERVICE_PORT,
    *,
    kind: int = socket.SOCK_STREAM,
    client: labs.LabPod | None = None,
) -> str:
    """The name of the pod that responds to the node, or to a pod."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = client.open_socket(family, kind) if client else socket.socket(family, kind)
    return responder_of(sock, address, port)
