"""Messages of netlink, and requests to the kernel's."""

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from bpf import netlink
from bpf.netlink import Message, NetlinkError

_GETLINK, _SETLINK, _NEWLINK = 18, 19, 16
_LINK = struct.Struct("=BxHiII")
_ERROR, _DONE = 2, 3


def test_attributes_are_padded_and_read_back() -> None:
    content = netlink.attribute(1, b"eth0\0") + netlink.attribute(5, b"\1\0\0\0")
    assert content == b"\x09\0\1\0eth0\0\0\0\0" + b"\x08\0\5\0\1\0\0\0"
    assert netlink.attributes(content, 0) == {1: b"eth0\0", 5: b"\1\0\0\0"}
    assert netlink.attributes(b"head" + content, 4) == {1: b"eth0\0", 5: b"\1\0\0\0"}


@pytest.mark.parametrize("content", [b"\x02\0\1\0", b"\x08\0\1\0a", b"\x08", b"\x03\0\1\0"])
def test_attribute_that_is_cut_off_ends_the_reading(content: bytes) -> None:
    whole = netlink.attribute(3, b"abcd")
    assert netlink.attributes(whole + content, 0)[3] == b"abcd"


def test_attribute_that_is_too_short_is_none_and_an_empty_one_is_one() -> None:
    last = netlink.attribute(7, b"last")
    assert netlink.attributes(b"\3\0\1\0" + last) == {}
    assert netlink.attributes(b"\4\0\1\0" + last) == {1: b"", 7: b"last"}
    assert netlink.attributes(last + b"\4\0\1\0") == {7: b"last", 1: b""}


def test_flags_of_an_attribute_are_no_part_of_its_kind() -> None:
    assert netlink.attributes(netlink.attribute(0xC000 | 0x3ABC, b"nest")) == {0x3ABC: b"nest"}


def test_text_ends_before_its_zero_and_may_be_no_utf_8() -> None:
    assert netlink.text(b"eth\xff0\0") == "eth\ufffd0"


def message(kind: int, body: bytes, flags: int = 0, sequence: int = 1) -> bytes:
    content = struct.pack("=IHHII", 16 + len(body), kind, flags, sequence, 0) + body
    return content + bytes(-len(content) % 4)


def test_request_has_a_header_before_its_body() -> None:
    assert netlink.encode(_GETLINK, netlink.NLM_F_DUMP, b"body", 7) == struct.pack(
        "=IHHII4s", 20, _GETLINK, 0x301, 7, 0, b"body"
    )


def test_messages_of_a_datagram_are_read_one_by_one() -> None:
    first, second = message(_NEWLINK, b"odd", 0x10, 3), message(_ERROR, bytes(4), 0x2, 4)
    end = message(_DONE, b"")
    assert list(netlink.decode(first + second + end)) == [
        Message(first[:19], 3, is_last=False, is_interrupted=True),
        Message(second, 4, is_last=True, is_interrupted=False),
        Message(end, 1, is_last=True, is_interrupted=False),
    ]


@pytest.mark.parametrize("cut", [message(_DONE, b"")[:15], struct.pack("=IHHII", 15, 3, 0, 1, 0)])
def test_message_that_is_shorter_than_its_header_ends_the_reading(cut: bytes) -> None:
    whole = message(_NEWLINK, b"link")
    assert [one.content for one in netlink.decode(whole + cut + whole)][:1] == [whole]
    assert len(list(netlink.decode(whole + cut))) == 1


@pytest.mark.parametrize("body", [b"", bytes(3), struct.pack("=i", 0), struct.pack("=i", 5)])
def test_response_without_an_error_is_none(body: bytes) -> None:
    (last,) = netlink.decode(message(_DONE, body))
    netlink.check(last)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENODEV])
def test_error_of_the_kernel_has_its_number_and_text(number: int) -> None:
    (last,) = netlink.decode(message(_ERROR, struct.pack("=i", -number)))
    with pytest.raises(NetlinkError) as caught:
        netlink.check(last)
    assert (caught.value.errno, caught.value.strerror) == (number, os.strerror(number))


def interfaces(requests: netlink.RequestSocket) -> dict[int, str]:
    """Numbers and names of this namespace's."""
    return {
        _LINK.unpack_from(one, netlink.HEADER_BYTES)[2]: netlink.text(
            netlink.attributes(one, netlink.HEADER_BYTES + _LINK.size)[3]
        )
        for one in requests.dump(_GETLINK, _LINK.pack(0, 0, 0, 0, 0))
    }


@pytest.fixture
def requests() -> Iterator[netlink.RequestSocket]:
    with contextlib.closing(netlink.RequestSocket()) as opened:
        yield opened


def test_table_is_read_as_a_whole_and_again(requests: netlink.RequestSocket) -> None:
    expected = dict(socket.if_nameindex())
    assert [interfaces(requests), interfaces(requests)] == [expected, expected]
    requests.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        interfaces(requests)


def test_change_is_acknowledged_or_an_error(requests: netlink.RequestSocket) -> None:
    missing, loopback = (_LINK.pack(0, 0, number, 0, 0) for number in (2**31 - 1, 1))
    with pytest.raises(NetlinkError) as caught:
        requests.change(_SETLINK, 0, missing)
    assert caught.value.errno == errno.ENODEV
    # A change of nothing.
    assert requests.change(_SETLINK, 0, loopback) == []
    (found,) = requests.change(_GETLINK, 0, loopback)
    assert _LINK.unpack_from(found, netlink.HEADER_BYTES)[2] == 1


def test_requests_of_several_threads_do_not_mix(requests: netlink.RequestSocket) -> None:
    found: list[dict[int, str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(interfaces(requests))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [dict(socket.if_nameindex())] * 8


class Answered(socket.socket):
    """Its other end answers in the kernel's place."""

    def connect(self, address: object) -> None:
        assert address == netlink.KERNEL


def test_messages_of_another_request_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    answered = Answered(fileno=end.detach())
    monkeypatch.setattr("bpf.netlink.socket.socket", lambda *_: answered)
    with ours, contextlib.closing(netlink.RequestSocket()) as requests:
        # A kernel that does not answer is an error some time later.
        assert answered.gettimeout()
        ours.send(message(_NEWLINK, b"late", 0, 0) + message(_DONE, b"", 0, 0))
        ours.send(message(_NEWLINK, b"link"))
        ours.send(message(_DONE, b""))
        assert requests.dump(_GETLINK, b"") == [message(_NEWLINK, b"link")]
