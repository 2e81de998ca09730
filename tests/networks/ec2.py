"""What AWS' programs request from EC2, without EC2. `python -m tests.networks.ec2 SOCKET NETWORK
ADDRESS PORT` serves until its end.

At SOCKET the addresses of NETWORK for pods, instead of ipamd, which gets them from the addresses of
network interfaces; at PORT of the loopback the node's ADDRESS, as instance metadata.
"""

import http.server
import ipaddress
import pathlib
import sys
import threading
from collections.abc import Iterable
from concurrent import futures

import grpc

from tests.networks import ipamd_pb2

POLICY_MODE = "standard"
"""NETWORK_POLICY_ENFORCING_MODE, whose default it is: pods without a policy are open."""
MAIN_TABLE, SECOND_TABLE = 254, 2
"""Routing tables for what pods send: of the node's first network interface, and of its second."""
_METADATA = "/latest/meta-data/local-ipv4"
_TOKEN = "/latest/api/token"
_TOKEN_SECONDS = "X-aws-ec2-metadata-token-ttl-seconds"


class Addresses:
    """Of pods, by the id of the sandbox."""

    def __init__(self, network: ipaddress.IPv4Network) -> None:
        self._network = network
        self._given: dict[str, ipaddress.IPv4Address] = {}
        self._lock = threading.Lock()
        self._last = network.network_address

    def give(self, sandbox: str) -> ipaddress.IPv4Address:
        """One that was not given for the longest time; the same for a repeated call."""
        with self._lock:
            if sandbox not in self._given:
                taken = set(self._given.values())
                self._last = next(one for one in self._following() if one not in taken)
                self._given[sandbox] = self._last
            return self._given[sandbox]

    def take(self, sandbox: str) -> ipaddress.IPv4Address | None:
        """None: the sandbox has none."""
        with self._lock:
            return self._given.pop(sandbox, None)

    def _following(self) -> Iterable[ipaddress.IPv4Address]:
        size = self._network.num_addresses
        first = int(self._last) - int(self._network.network_address) + 1
        for number in range(first, first + size):
            if 0 < number % size < size - 1:
                yield self._network[number % size]


class Ipamd:
    """The methods of three services."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def add_network(
        self, request: ipamd_pb2.AddNetworkRequest, context: grpc.ServicerContext
    ) -> ipamd_pb2.AddNetworkReply:
        return ipamd_pb2.AddNetworkReply(
            success=True,
            allocations=[_allocation(self._addresses.give(request.container_id))],
            network_policy_mode=POLICY_MODE,
        )

    def delete_network(
        self, request: ipamd_pb2.DelNetworkRequest, context: grpc.ServicerContext
    ) -> ipamd_pb2.DelNetworkReply:
        address = self._addresses.take(request.container_id)
        if address is None:
            # The plugin looks for this text (pkg/ipamd/datastore, ErrUnknownPod).
            context.abort(grpc.StatusCode.UNKNOWN, "datastore: unknown pod")
        assert address is not None  # abort raises
        return ipamd_pb2.DelNetworkReply(
            success=True, allocations=[_allocation(address)], network_policy_mode=POLICY_MODE
        )

    def policy_configs(
        self, request: ipamd_pb2.Empty, context: grpc.ServicerContext
    ) -> ipamd_pb2.NetworkPolicyAgentConfigReply:
        return ipamd_pb2.NetworkPolicyAgentConfigReply(network_policy_mode=POLICY_MODE)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        calls = (
            ("rpc.CNIBackend", "AddNetwork", self.add_network, ipamd_pb2.AddNetworkRequest),
            ("rpc.CNIBackend", "DelNetwork", self.delete_network, ipamd_pb2.DelNetworkRequest),
            (
                "rpc.ConfigServerBackend",
                "GetNetworkPolicyConfigs",
                self.policy_configs,
                ipamd_pb2.Empty,
            ),
        )
        return [
            grpc.method_handlers_generic_handler(
                service,
                {
                    method: grpc.unary_unary_rpc_method_handler(
                        call,
                        request_deserializer=request.FromString,
                        response_serializer=lambda reply: reply.SerializeToString(),
                    )
                },
            )
            for service, method, call, request in calls
        ]


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Instance metadata, version 2: a token first."""

    address = ""

    def do_PUT(self) -> None:
        self._answer("token" if self.path == _TOKEN else "")

    def do_GET(self) -> None:
        self._answer(self.address if self.path == _METADATA else "")

    def _answer(self, text: str) -> None:
        self.send_response(200 if text else 404)
        self.send_header(_TOKEN_SECONDS, "21600")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


def _allocation(address: ipaddress.IPv4Address) -> ipamd_pb2.IPAllocationMetadata:
    """Every other pod has an address of the node's second network interface."""
    is_second = int(address) % 2
    return ipamd_pb2.IPAllocationMetadata(
        ipv4_address=str(address),
        device_number=is_second,
        route_table_id=SECOND_TABLE if is_second else MAIN_TABLE,
    )


def serve(socket: pathlib.Path, network: str, address: str, port: int) -> None:
    addresses = Addresses(ipaddress.IPv4Network(network))
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    for handler in Ipamd(addresses).handlers():
        server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    handler_class = type("Metadata", (_Metadata,), {"address": address})
    http.server.ThreadingHTTPServer(("127.0.0.1", port), handler_class).serve_forever()


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
