"""What is sent to IPVS, as pyroute2 reads it; tests/proxy has the kernel's part."""

import ipaddress
import socket
from typing import Any

import pytest
from pyroute2.netlink.generic.ipvs import ipvsmsg

from agent.services.linux import ipvs
from agent.services.linux.ipvs import Destination, IpvsTable
from bpf.netlink import encode
from bpf.services.tables import ServiceAddress

OWN, PERSISTENT = 0x20, 0x1


class Recorder:
    """In the place of the kernel: acknowledges all, and has nothing."""

    def __init__(self, family: str) -> None:
        assert family == "IPVS"
        self.sent: list[Any] = []

    def change(self, command: int, attributes: bytes) -> None:
        message = ipvsmsg(encode(0x20, 0, bytes((command, 1, 0, 0)) + attributes))
        message.decode()
        self.sent.append(message)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> IpvsTable:
    monkeypatch.setattr(ipvs, "GenericSocket", Recorder)
    return IpvsTable()


def sent(table: IpvsTable) -> Any:
    recorder: Any = table._netlink
    (message,) = recorder.sent
    return message


@pytest.mark.parametrize(
    ("address", "family", "netmask"),
    [("198.18.0.7", socket.AF_INET, "255.255.255.255"), ("fd00:18::7", socket.AF_INET6, None)],
)
@pytest.mark.parametrize(("seconds", "flags"), [(0, OWN), (600, OWN | PERSISTENT)])
def test_service_is_read_back(
    table: IpvsTable, address: str, family: int, netmask: str | None, seconds: int, flags: int
) -> None:
    service = ServiceAddress(ipaddress.ip_address(address), 53, socket.IPPROTO_UDP)
    table.put_service(service, seconds, is_new=True)
    message = sent(table)
    assert message["cmd"] == 1
    record = message.get_attr("IPVS_CMD_ATTR_SERVICE")
    assert record.get_attr("IPVS_SVC_ATTR_AF") == family
    assert record.get_attr("IPVS_SVC_ATTR_ADDR") == address
    assert record.get_attr("IPVS_SVC_ATTR_PORT") == 53
    assert record.get_attr("IPVS_SVC_ATTR_PROTOCOL") == socket.IPPROTO_UDP
    assert record.get_attr("IPVS_SVC_ATTR_SCHED_NAME") == "rr"
    assert record.get_attr("IPVS_SVC_ATTR_FLAGS")["flags"] == flags
    assert record.get_attr("IPVS_SVC_ATTR_TIMEOUT") == seconds
    if netmask:
        assert record.get_attr("IPVS_SVC_ATTR_NETMASK") == netmask


def test_destination_is_read_back(table: IpvsTable) -> None:
    service = ServiceAddress(ipaddress.ip_address("198.18.0.7"), 80, socket.IPPROTO_TCP)
    endpoint = ServiceAddress(ipaddress.ip_address("198.18.1.2"), 8080, socket.IPPROTO_TCP)
    table.put_destination(Destination(service, endpoint), 1, is_new=False)
    message = sent(table)
    assert message["cmd"] == 6
    assert message.get_attr("IPVS_CMD_ATTR_SERVICE").get_attr("IPVS_SVC_ATTR_PORT") == 80
    record = message.get_attr("IPVS_CMD_ATTR_DEST")
    assert record.get_attr("IPVS_DEST_ATTR_ADDR") == "198.18.1.2"
    assert record.get_attr("IPVS_DEST_ATTR_PORT") == 8080
    assert record.get_attr("IPVS_DEST_ATTR_WEIGHT") == 1
    assert record.get_attr("IPVS_DEST_ATTR_FWD_METHOD") == 0
    for limit in ("U", "L"):
        assert record.get_attr(f"IPVS_DEST_ATTR_{limit}_THRESH") == 0
