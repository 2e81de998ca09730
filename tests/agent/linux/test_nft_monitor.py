"""Which messages about nftables are deletions, and of what."""

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Set

import pytest

from agent.linux import netlink_groups
from agent.linux.nft_monitor import NftMonitor, deleted_in
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


@contextlib.asynccontextmanager
async def followed(
    monkeypatch: pytest.MonkeyPatch, received: list[list[bytes] | None]
) -> AsyncIterator[list[Set[tuple[str, str]] | None]]:
    """What a monitor calls back for what its socket receives."""
    seen: list[Set[tuple[str, str]] | None] = []
    monitor = NftMonitor(seen.append)
    ours, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.setblocking(False)
    ours.send(b"wake")

    def next_received(_: socket.socket) -> list[bytes] | None:
        if len(received) == 1:
            end.recv(16)
        return received.pop(0)

    monkeypatch.setattr(netlink_groups, "joined", lambda protocol, groups: end)
    monkeypatch.setattr(netlink_groups, "received", next_received)
    with ours, end:
        running = asyncio.create_task(monitor.run())
        yield seen
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.looptime
async def test_deletions_of_a_moment_are_one_and_lost_messages_may_be_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables = [message(_NFTABLES | _DELTABLE, name(1, table)) for table in ("fw", "nat")]
    new = message(_NFTABLES | _NEWTABLE, name(1, "fw"))
    async with followed(monkeypatch, [[*tables, new], [new], None]) as seen:
        await asyncio.sleep(1)
        assert seen == [{("fw", ""), ("nat", "")}, None]


@pytest.mark.looptime
async def test_monitor_that_runs_again_has_lost_messages() -> None:
    seen: list[Set[tuple[str, str]] | None] = []
    monitor = NftMonitor(seen.append)
    for expected in ([], [None]):
        running = asyncio.create_task(monitor.run())
        await asyncio.sleep(1)
        assert seen == expected
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.looptime
async def test_kernel_without_nftables_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> socket.socket:
        raise OSError(errno.EPROTONOSUPPORT, os.strerror(errno.EPROTONOSUPPORT))

    monkeypatch.setattr(netlink_groups, "joined", fail)
    seen: list[Set[tuple[str, str]] | None] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3600):
            await NftMonitor(seen.append).run()
    assert seen == []
