"""Which messages about nftables are deletions, and of what."""

import struct

from agent.linux.nft_monitor import deleted_in
from bpf.netlink import attribute

_NFTABLES = 10 << 8
_NEWTABLE, _DELTABLE, _DELCHAIN, _DELRULE = 0, 2, 5, 8


def message(kind: int, *attributes: bytes) -> bytes:
    body = bytes(4) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def name(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + b"\0")


def test_deleted_tables_chains_and_rules_are_named() -> None:
    received = (
        message(_NFTABLES | _DELRULE, name(1, "fw"), name(2, "in"))
        + message(_NFTABLES | _DELCHAIN, name(1, "fw"), name(3, "in"))
        + message(_NFTABLES | _DELTABLE, name(1, "other"))
    )
    assert deleted_in(received) == {("fw", "in"), ("other", "")}


def test_other_messages_are_no_deletions() -> None:
    received = message(_NFTABLES | _NEWTABLE, name(1, "fw")) + message(5 << 8 | _DELTABLE)
    assert deleted_in(received) == set()
