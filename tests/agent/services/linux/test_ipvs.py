"""What is sent to IPVS, as pyroute2 reads it; tests/proxy has the kernel's part."""

import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
from pyroute2.netlink.generic.ipvs import ipvsmsg

from agent.services.linux import ipvs
from agent.services.linux.ipvs import Destination, IpvsError, IpvsTable
from bpf.netlink import NetlinkError, encode
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


SERVICE = ServiceAddress(ipaddress.ip_address("198.18.0.7"), 80, socket.IPPROTO_TCP)
DESTINATION = Destination(
    SERVICE, ServiceAddress(ipaddress.ip_address("198.18.1.2"), 8080, socket.IPPROTO_TCP)
)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.ENOENT, "this kernel has no IPVS, or its module ip_vs is not loaded"),
        (errno.EPERM, "IPVS cannot be read: Operation not permitted"),
    ],
)
def test_kernel_without_ipvs_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    def fail(family: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ipvs, "GenericSocket", fail)
    with pytest.raises(IpvsError) as caught:
        IpvsTable()
    assert str(caught.value) == problem


GONE = {errno.ESRCH: {"service", "destination"}, errno.ENOENT: {"destination"}}


@pytest.mark.parametrize("number", [errno.ESRCH, errno.ENOENT, errno.EPERM])
def test_only_what_another_program_removed_is_no_error_of_a_removal(
    table: IpvsTable, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(self: Recorder, command: int, attributes: bytes) -> None:
        raise NetlinkError(number, os.strerror(number))

    monkeypatch.setattr(Recorder, "change", fail)
    changes: dict[str, Callable[[], None]] = {
        "service": lambda: table.remove_service(SERVICE),
        "destination": lambda: table.remove_destination(DESTINATION),
        "new service": lambda: table.put_service(SERVICE, 0, is_new=True),
        "new destination": lambda: table.put_destination(DESTINATION, 1, is_new=True),
    }
    for name, change in changes.items():
        if name in GONE.get(number, ()):
            change()
        else:
            with pytest.raises(IpvsError, match=f"^{os.strerror(number)}$"):
                change()


def test_failed_request_is_an_error(table: IpvsTable, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Recorder, command: int, attributes: bytes) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(Recorder, "change", fail)
    monkeypatch.setattr(Recorder, "dump", fail, raising=False)
    for call in (
        lambda: table.remove_service(SERVICE),
        lambda: table.services(),
        lambda: table.destinations(SERVICE),
    ):
        with pytest.raises(IpvsError, match=r"^No buffer space available$"):
            call()
