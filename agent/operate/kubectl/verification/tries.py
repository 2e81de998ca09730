"""Tries to reach addresses over TCP, UDP and ICMP; one line of JSON for each.

It runs in a pod on the node's network, as `python3 -m agent.operate.kubectl.verification.tries
JSON`, where JSON is a list of `[address, protocol, port]`. Each try sends one connection, datagram
or echo request, and waits a second. ICMP needs CAP_NET_RAW.
"""

import concurrent.futures
import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

OPEN, CLOSED, UNCLEAR = "open", "closed", "unclear"
MOST = 256
"""Of tries of one run."""

# A pod on the same node answers within a millisecond. A lost SYN is sent again after one second.
_SECONDS = 1.0
_AT_ONCE = 16
_ECHO_BYTES = 8
_ICMP, _ICMP6 = (8, 0), (128, 129)
"""Types of echo request and reply (RFC 792, RFC 4443)."""


def main(arguments: Sequence[str]) -> int:
    tries = json.loads(arguments[0])[:MOST]
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        for (address, protocol, port), (outcome, detail) in zip(
            tries, pool.map(lambda one: attempt(*one), tries), strict=True
        ):
            found = {"address": address, "protocol": protocol, "port": port}
            sys.stdout.write(f"{json.dumps({**found, 'outcome': outcome, 'detail': detail})}\n")
    return 0


def attempt(address: str, protocol: str, port: int) -> tuple[str, str]:
    """Whether the address can be reached, and how that shows.

    Only an answer shows that a packet arrived; a reset is one, since the pod's kernel sends it.
    Without an answer TCP and ICMP are closed, and UDP is unclear: a process need not answer.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    reach = {"TCP": _tcp, "UDP": _udp, "ICMP": _icmp}[protocol]
    try:
        return OPEN, reach(family, address, port)
    except ConnectionRefusedError:
        return OPEN, "the port is closed, but the pod responds"
    except ConnectionResetError:
        return OPEN, "the pod reset it"
    except TimeoutError:
        return UNCLEAR if protocol == "UDP" else CLOSED, "no answer"
    except OSError as error:
        if error.errno == errno.EPERM:
            return CLOSED, "EPERM"
        # A gate's drop is the device's to a raw IPv6 socket (net_xmit_errno).
        if error.errno == errno.ENOBUFS:
            return CLOSED, "dropped at the interface"
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.ECONNABORTED):
            return CLOSED, os.strerror(error.errno)
        return UNCLEAR, str(error)


def _tcp(family: int, address: str, port: int) -> str:
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(_SECONDS)
        client.connect((address, port))
    return "connected"


def _udp(family: int, address: str, port: int) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(_SECONDS)
        client.connect((address, port))
        client.send(b"")
        client.recv(1)
    return "answered"


def _icmp(family: int, address: str, _: int) -> str:
    """An echo request, from a raw socket: those for datagrams depend on a sysctl."""
    request, reply = _ICMP6 if family == socket.AF_INET6 else _ICMP
    protocol = socket.IPPROTO_ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
    try:
        client = socket.socket(family, socket.SOCK_RAW, protocol)
    except PermissionError as error:
        # Not an answer of the gate's.
        raise OSError("no CAP_NET_RAW") from error
    with contextlib.closing(client):
        identity = int.from_bytes(os.urandom(2))
        packet = struct.pack("!BBHHH", request, 0, 0, identity, 1)
        if family == socket.AF_INET:  # the kernel fills in that of IPv6
            packet = struct.pack("!BBHHH", request, 0, _checksum(packet), identity, 1)
        client.connect((address, 0))
        client.send(packet)
        deadline = time.monotonic() + _SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([client], [], [], left)[0]:
                break
            received = client.recv(256)
            if family == socket.AF_INET:
                received = received[(received[0] & 0xF) * 4 :]
            if len(received) < _ECHO_BYTES:
                continue
            kind, _, _, echoed, _ = struct.unpack("!BBHHH", received[:_ECHO_BYTES])
            if (kind, echoed) == (reply, identity):
                return "answered"
    raise TimeoutError


def _checksum(packet: bytes) -> int:
    """RFC 1071, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(packet) // 2}H", packet))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return 0xFFFF - total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
