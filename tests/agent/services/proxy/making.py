"""Addresses and frontends, for tests of this package."""

import ipaddress
import socket
from typing import Any

from agent.services.proxy.frontends import Frontend
from bpf.services.tables import ServiceAddress


def address(text: str, port: int = 80, protocol: int = socket.IPPROTO_TCP) -> ServiceAddress:
    return ServiceAddress(ipaddress.ip_address(text), port, protocol)


def frontend(*endpoints: ServiceAddress, **more: Any) -> Frontend:
    """Of port 7, whose endpoints are on other nodes."""
    fields: dict[str, Any] = {
        "port_id": 7,
        "endpoints": endpoints,
        "outside": endpoints,
        "local": frozenset(),
    } | more
    return Frontend(**fields)
