"""DNS for one node: names of services, and of the pods of headless ones. It needs podgate-client
only; docs/guides/node-dns.md is its tutorial."""

import argparse
import contextlib
import ipaddress
import socketserver
import struct
import threading

from podgate_client import diff, services
from podgate_client.v1alpha1 import endpoints_pb2 as api

TYPE_A, TYPE_CNAME, TYPE_AAAA, TYPE_SRV = 1, 5, 28, 33
NO_ERROR, FORMAT_ERROR, SERVER_FAILURE, NO_SUCH_NAME, NOT_IMPLEMENTED, REFUSED = range(6)
# Short, since a pod may end at any time, and another query stays on the node.
TTL_SECONDS = 5
# Without EDNS, which this server does not have (RFC 1035, section 4.2.1).
MAX_UDP_BYTES = 512

Record = tuple[int, bytes]


def wire_name(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"


def address_record(text: str) -> Record:
    address = ipaddress.ip_address(text)
    return (TYPE_A if address.version == 4 else TYPE_AAAA, address.packed)


def records_of(service: api.ServiceEndpoints, zone: str) -> dict[str, list[Record]]:
    """All names of one service, by Kubernetes' specification of DNS."""
    name = f"{service.name}.{service.namespace}.svc.{zone}"
    if service.external_name:
        return {name: [(TYPE_CNAME, wire_name(service.external_name.rstrip(".")))]}
    records = {name: [address_record(address) for address in service.cluster_ips]}
    for port in service.ports:
        hosts = {} if service.is_headless else {name: port.port}
        for endpoint in port.endpoints if service.is_headless else ():
            label = endpoint.hostname or endpoint.address.replace(".", "-").replace(":", "-")
            hosts[f"{label}.{name}"] = endpoint.port
            for host in (name, f"{label}.{name}"):
                records.setdefault(host, []).append(address_record(endpoint.address))
        if port.name:
            protocol = api.Protocol.Name(port.protocol).removeprefix("PROTOCOL_").lower()
            records[f"_{port.name}._{protocol}.{name}"] = [
                (TYPE_SRV, struct.pack("!HHH", 0, 100, number) + wire_name(host))
                for host, number in hosts.items()
            ]
    # An endpoint of two ports has one address.
    return {one: list(dict.fromkeys(found)) for one, found in records.items()}


class Names:
    """The records of all services, as of the last state."""

    def __init__(self, zone: str) -> None:
        self.zone = zone
        self._is_complete = False
        self._differ: diff.Differ[tuple[str, str], api.ServiceEndpoints] = diff.Differ()
        self._records: dict[tuple[str, str], dict[str, list[Record]]] = {}

    def update(self, state: services.ServicesState) -> None:
        change = self._differ.compare(state.by_name())
        for key in change.removed:
            del self._records[key]
        for key, service in {**change.added, **change.changed}.items():
            self._records[key] = records_of(service, self.zone)
        self._differ.accept()
        self._is_complete = True

    def find(self, name: str, kind: int) -> tuple[int, list[Record]]:
        """Status and records of one question."""
        if not name.endswith(f".{self.zone}"):
            return REFUSED, []
        if not self._is_complete:
            return SERVER_FAILURE, []
        *_, service, namespace = ["", "", *name.removesuffix(f".svc.{self.zone}").split(".")]
        found = self._records.get((namespace, service), {}).get(name)
        if found is None:
            return NO_SUCH_NAME, []
        return NO_ERROR, [one for one in found if one[0] in (kind, TYPE_CNAME)]

    def respond(self, query: bytes, max_bytes: int) -> bytes:
        """The response to a query; empty: there is none."""
        if len(query) < 12 or query[2] & 0x80:
            return b""
        number, flags, count = struct.unpack_from("!HHH", query)
        status = NOT_IMPLEMENTED if flags & 0x7800 else FORMAT_ERROR
        found: list[Record] = []
        question = b""
        if status == FORMAT_ERROR and count == 1 and (read := read_question(query)):
            name, kind, question = read
            status, found = self.find(name, kind)
        answers = b"".join(
            b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, TTL_SECONDS, len(data)) + data
            for kind, data in found
        )
        # An authoritative response, with the query's opcode and RD; TC makes the client use TCP.
        flags = 0x8400 | flags & 0x7900 | status
        if 12 + len(question) + len(answers) > max_bytes:
            flags, found, answers = flags | 0x0200, [], b""
        return (
            struct.pack("!6H", number, flags, bool(question), len(found), 0, 0) + question + answers
        )


def read_question(query: bytes) -> tuple[str, int, bytes] | None:
    """Name, type and bytes of the question; None: it is malformed."""
    labels, at = [], 12
    while at < len(query) and 0 < query[at] < 64:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("latin-1").lower())
        at += 1 + query[at]
    if at + 5 > len(query) or query[at]:
        return None
    return ".".join(labels), int.from_bytes(query[at + 1 : at + 3]), query[12 : at + 5]


class DatagramHandler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        query, sock = self.request
        if response := NAMES.respond(query, MAX_UDP_BYTES):
            sock.sendto(response, self.client_address)


class StreamHandler(socketserver.StreamRequestHandler):
    timeout = 10.0

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            query = self.rfile.read(int.from_bytes(self.rfile.read(2)))
            response = NAMES.respond(query, 0xFFFF)
            self.wfile.write(len(response).to_bytes(2) + response)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Other options are those of podgate_client's run.")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--zone", default="cluster.local")
    options, others = parser.parse_known_args()
    NAMES = Names(options.zone)
    for server in (
        socketserver.UDPServer((options.address, 53), DatagramHandler),
        socketserver.ThreadingTCPServer((options.address, 53), StreamHandler),
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
    services.run(NAMES.update, [*(f"--type={kind}" for kind in services.TYPES), *others])
