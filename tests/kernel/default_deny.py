"""Fixtures and helpers for tests of the default-deny table."""

import asyncio
import contextlib
import json
import pathlib
import re
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterable, Iterator

import pytest

from agent.default_deny import installed
from agent.default_deny import table as default_deny_table
from agent.default_deny.table import DefaultDenyTable
from agent.lab import lab as labs
from agent.linux import nft
from tests.kernel import cgroups, offers, traffic
from tests.processes import BARE_PYTHON

VERSIONS = pytest.mark.parametrize("version", [4, 6])


PATHS = pytest.mark.parametrize("bridged", [False, True], ids=["routed", "bridged"])


_CONNECT = """
import socket, sys
sock = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
sock.settimeout(float(sys.argv[2]))
sock.connect((sys.argv[1], 80))
"""


class Driven:
    """A table with blocking calls, because the lab's netlink allows no running event loop."""

    def __init__(
        self,
        runner: asyncio.Runner,
        stale_seconds: int = 60,
        abandoned_seconds: int = 3600,
        pods: Iterable[str] = (),
    ) -> None:
        self._run = runner.run
        self.made = self._run(
            DefaultDenyTable.open(
                stale_seconds=stale_seconds, abandoned_seconds=abandoned_seconds, pods=pods
            )
        )
        self.reason_unavailable = self.made.reason_unavailable
        self.covers_bridges = self.made.covers_bridges
        self.covers_datagrams = self.made.covers_datagrams

    @property
    def available(self) -> bool:
        return self.made.available

    def gate(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.gate(ifindexes))

    def exempt(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.exempt(ifindexes))

    def release(self, ifindexes: Iterable[int]) -> None:
        self._run(self.made.release(ifindexes))

    def admit(self, kubelet: str | None, priority: int | None = None) -> None:
        self._run(self.made.admit(kubelet, priority))

    def beat(self) -> None:
        self._run(self.made.beat())

    def ensure(self) -> bool:
        return self._run(self.made.ensure())

    def remove(self) -> None:
        self._run(self.made.remove())

    def all_at_once(self, *calls: Coroutine[None, None, None]) -> None:
        async def gather() -> None:
            await asyncio.gather(*calls)

        self._run(gather())


OpenTable = Callable[..., Driven]


@pytest.fixture
def open_table(
    lab: labs.Lab, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenTable]:
    """Opens tables. Removes them afterwards: the host's namespace, with its tables and tracked
    connections, outlives the test."""
    offers.need_default_deny()
    if "tracked" not in request.fixturenames:
        monkeypatch.setattr(installed, "_CONNTRACK_COUNT", pathlib.Path("/dev/null"))
    with asyncio.Runner() as runner:
        yield lambda **options: Driven(runner, **options)
        runner.run(default_deny_table.remove())


@pytest.fixture
def default_deny(open_table: OpenTable) -> Driven:
    """A table opened before any pod exists: each pod that follows is blocked when it is created."""
    opened = open_table()
    assert opened.reason_unavailable == ""
    return opened


def remove_without_agent() -> None:
    asyncio.run(default_deny_table.remove())


def tables() -> list[str]:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


OURS = ["table inet podgate", "table bridge podgate"]


def connect_from(group: cgroups.Cgroup, pod: labs.LabPod, version: int, seconds: float) -> bool:
    address = traffic.address(pod, version)
    done = group.run([*BARE_PYTHON, "-c", _CONNECT, address, str(seconds)])
    assert done.returncode == 0 or b"TimeoutError" in done.stderr, done.stderr
    return done.returncode == 0


def record_scripts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the scripts that are applied from now on."""
    scripts = []
    apply = nft.apply

    async def recording(script: str, *, only_check: bool = False) -> None:
        scripts.append(script)
        await apply(script, only_check=only_check)

    monkeypatch.setattr(nft, "apply", recording)
    return scripts


def flush_ruleset() -> None:
    """Deletes all tables, as a restart of nftables.service does."""
    subprocess.run(["nft", "flush", "ruleset"], check=True)


@pytest.fixture
def tracked(lab: labs.Lab) -> Iterator[None]:
    """Connection tracking in the host's namespace, with one tracked connection."""
    script = "table inet test-ct { chain c { type filter hook output priority 0; ct state new; }; }"
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)
    with socket.socket(type=socket.SOCK_DGRAM) as one, socket.socket(type=socket.SOCK_DGRAM) as two:
        two.bind(("127.0.0.1", 0))
        one.sendto(b"tracked", two.getsockname())
        yield
    subprocess.run(["nft", "delete", "table", "inet", "test-ct"], check=True)


@pytest.fixture
def tracking(tracked: None, default_deny: Driven) -> Driven:
    assert default_deny.covers_datagrams
    return default_deny


def exchange(client: socket.socket, server: socket.socket, target: str) -> bytes:
    """A datagram and its answer, the server on port 53 of its address."""
    server.settimeout(traffic.LIMIT_SECONDS)
    client.settimeout(traffic.LIMIT_SECONDS)
    client.sendto(b"question", (target, server.getsockname()[1]))
    question, source = server.recvfrom(100)
    server.sendto(b"answer to " + question, source)
    return client.recv(100)


def ping(
    target: str,
    open_socket: Callable[..., socket.socket],
    version: int,
    seconds: float = traffic.DROPPED_AFTER_SECONDS,
) -> bool:
    protocol = socket.IPPROTO_ICMP if version == 4 else socket.IPPROTO_ICMPV6
    request, reply = (8, 0) if version == 4 else (128, 129)
    packet = bytes([request, 0, 0, 0, 0, 1, 0, 1])
    if version == 4:
        packet = packet[:2] + (0xFFFF - (request << 8) - 2).to_bytes(2, "big") + packet[4:]
    with open_socket(traffic.family(version), socket.SOCK_RAW, protocol) as sock:
        sock.settimeout(seconds)
        with contextlib.suppress(PermissionError):
            sock.sendto(packet, (target, 0))
        try:
            while True:
                answer = sock.recv(1500)
                if answer[20 if version == 4 else 0] == reply:
                    return True
        except TimeoutError:
            return False


def tcp_header(flags: int) -> bytes:
    return (
        bytes.fromhex("9999005000000001000000005002ffff00000000")[:13] + bytes([flags]) + bytes(6)
    )


def packets_of(family: str) -> int:
    listed = subprocess.check_output(
        ["nft", "--json", "list", "counter", family, "test-mark", "seen"], text=True
    )
    return int(json.loads(listed)["nftables"][1]["counter"]["packets"])


def elements(name: str) -> set[int]:
    """Interface indexes in a set. nft prints the index if no such interface exists."""
    text = subprocess.check_output(["nft", "list", "set", "bridge", "podgate", name], text=True)
    return {int(number) for number in re.findall(r"\b\d{4}\b", text)}
