"""Keys and values of maps as plain objects."""

import ctypes
import ipaddress

import pytest

from bpf import abi, map_values


def test_address_is_text_and_padding_is_left_out() -> None:
    packed = abi.pack_address(ipaddress.ip_address("198.18.0.1"))
    key = abi.CRelayTargetKey(abi.CAddress.from_buffer_copy(packed), 8080)
    assert map_values.decode(abi.CRelayTargetKey, bytes(key)) == {"pod": "198.18.0.1", "port": 8080}
    rule = abi.CRule(cgroup=7, pad=1)
    assert "pad" not in map_values.decode(abi.CRule, bytes(rule))


def test_raw_values_have_all_members_as_numbers() -> None:
    packed = abi.pack_address(ipaddress.ip_address("::2"))
    assert map_values.decode(abi.CAddress, packed, raw=True) == {"word": [0, 0, 0, 2 << 24]}
    assert map_values.decode(abi.CRule, bytes(abi.CRule(pad=1)), raw=True)["pad"] == 1


def test_integer_is_itself() -> None:
    assert map_values.decode(ctypes.c_uint64, b"\x01" + bytes(7)) == 1


def test_name_ends_at_the_first_zero_and_may_be_no_text() -> None:
    source = abi.CDropSource(process_name=b"cu\xffrl")
    assert map_values.decode(abi.CDropSource, bytes(source))["process_name"] == "cu\ufffdrl"


def test_short_content_is_an_error() -> None:
    with pytest.raises(ValueError, match="Buffer"):
        map_values.decode(abi.CRule, b"short", raw=True)
