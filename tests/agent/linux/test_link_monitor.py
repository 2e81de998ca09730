"""A burst of netlink messages is one change, and lost messages cost no more than one resync.

The socket is a pair of datagram sockets, so that the test sends the messages; time is fake.
"""

import _socket
import asyncio
import errno
import itertools
import socket
import struct
from typing import Any

import pytest

from agent.linux import netlink_groups
from agent.linux.link_monitor import LinkMonitor

pytestmark = pytest.mark.looptime

_NSID = struct.pack("=i", 7)


class Netlink:
    """Messages that wait, as the kernel keeps them for a netlink socket."""

    def __init__(self) -> None:
        self._socket = socket.socket
        self._open()
        self.options: list[tuple[int, ...]] = []
        self.waiting: list[bytes | None] = []
        """A namespace's number, or None where messages were lost."""
        self.reads = 0

    def _open(self) -> None:
        here, there = _socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._here, self._there = (self._socket(fileno=one.detach()) for one in (here, there))
        self._here.setblocking(False)

    def __call__(self, *_: Any) -> "Netlink":
        if self._here.fileno() < 0:
            self._open()
        return self

    def setsockopt(self, *option: int) -> None:
        self.options.append(option)

    def bind(self, _: Any) -> None: ...

    def fileno(self) -> int:
        return self._here.fileno()

    def close(self) -> None:
        self._here.close()
        self._there.close()

    def send(self, *messages: bytes | None) -> None:
        if not self.waiting:
            self._there.send(b"wake")
        self.waiting += messages

    def recvmsg(self, *_: Any) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
        self.reads += 1
        if not self.waiting:
            self._here.recv(16)
            raise BlockingIOError
        message = self.waiting.pop(0)
        if message is None:
            raise OSError(errno.ENOBUFS, "No buffer space available")
        ancillary = [(netlink_groups.SOL_NETLINK, netlink_groups.NETLINK_LISTEN_ALL_NSID, message)]
        return b"", ancillary if message else [], 0, None


class Monitored:
    """What a monitor called back, with times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.netlink = Netlink()
        monkeypatch.setattr("socket.socket", self.netlink)
        self.calls: list[str] = []
        self.monitor = LinkMonitor(
            on_link_changed=lambda: self.calls.append("links"),
            on_address_changed=lambda nsid: self.calls.append(f"addresses of {nsid}"),
            on_overrun=lambda: self.calls.append("overrun"),
        )

    async def run(self, seconds: float, *messages: bytes | None, every: float) -> None:
        """Send the same messages again and again, for some time."""
        task = asyncio.create_task(self.monitor.run())
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        ends = loop.time() + seconds
        while loop.time() < ends:
            self.netlink.send(*messages)
            await asyncio.sleep(every)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_first_change_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.01, _NSID, b"", every=0.01)
    assert monitored.calls == ["links", "addresses of 7"]


async def test_a_burst_is_one_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.01, *[_NSID] * 1000, every=0.01)
    assert monitored.calls == ["addresses of 7"]


async def test_changes_that_go_on_are_read_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(10, _NSID, every=0.004)
    assert len(monitored.calls) <= 50 + 10 * 20 + 1


async def test_no_message_of_another_pod_is_lost_in_a_burst(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch)
    other = struct.pack("=i", 8)
    await monitored.run(0.5, *[_NSID] * 100, other, every=1)
    assert sorted(monitored.calls) == ["addresses of 7", "addresses of 8"]


async def test_lost_messages_are_reported_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(300, None, _NSID, every=0.2)
    overruns = monitored.calls.count("overrun")
    # At once, after 1, 2, 4, 8, 16 and from then on after 30 s.
    assert 10 <= overruns <= 16
    assert "addresses of 7" in monitored.calls


async def test_the_last_loss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    task = asyncio.create_task(monitored.monitor.run())
    for _ in range(2):
        monitored.netlink.send(None)
        await asyncio.sleep(0.1)
    assert monitored.calls == ["overrun"]
    await asyncio.sleep(1)
    assert monitored.calls == ["overrun", "overrun"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_messages_after_a_loss_are_read_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(0.5, _NSID, None, None, _NSID, b"", every=1)
    assert monitored.calls == ["links", "addresses of 7", "overrun"]


async def test_nothing_is_read_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(3600, _NSID, every=3600)
    # The message, and that there is no other.
    assert monitored.netlink.reads == 2


async def test_other_tasks_run_while_a_burst_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    reads: list[int] = []

    async def watch() -> None:
        for _ in range(100):
            reads.append(monitored.netlink.reads)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await monitored.run(0.1, *[_NSID] * 1000, every=1)
    await watching
    steps = [after - before for before, after in itertools.pairwise(reads)]
    assert sum(steps) == 1001
    assert max(steps) <= 100


async def test_monitor_that_runs_again_has_lost_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)
    await monitored.run(1, _NSID, every=1)
    assert monitored.netlink.fileno() < 0
    await monitored.run(1, b"", every=1)
    assert monitored.calls == ["addresses of 7", "overrun", "links"]
    all_namespaces = (netlink_groups.SOL_NETLINK, netlink_groups.NETLINK_LISTEN_ALL_NSID, 1)
    assert monitored.netlink.options.count(all_namespaces) == 2


async def test_error_of_the_socket_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monitored = Monitored(monkeypatch)

    def fail(*_: Any) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(monitored.netlink, "recvmsg", fail)
    monitored.netlink.send(_NSID)
    with pytest.raises(OSError, match="Bad file descriptor"):
        await monitored.monitor.run()
