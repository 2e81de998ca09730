"""Drop sources, in the bytes of their maps."""

import struct

from bpf import map_specs
from bpf.drop_sources import DropSource, DropSources
from bpf.verdicts import Mode
from tests.bpf.pinned import Map, loaded

TCP, UDP, ICMP = 6, 17, 1
AUDIT, ENFORCE = 1, 2
NONE = bytes(40)
"""What a CPU has that has seen no source: struct recent_source."""


def key(cgroup: int, ifindex: int, port: int = 80, protocol: int = TCP) -> bytes:
    """struct drop_source_key."""
    return struct.pack("=QIHBB", cgroup, ifindex, port, protocol, ENFORCE)


def entry(first_ns: int, last_ns: int, count: int, process_name: bytes = b"curl") -> bytes:
    """struct drop_source."""
    return struct.pack("=QQQ16s", first_ns, last_ns, count, process_name)


def recent(of: bytes, last_ns: int, packets: int) -> bytes:
    """struct recent_source."""
    return of + struct.pack("=QQQ", 1, last_ns, packets)


class Kernel:
    def __init__(self, entries: dict[bytes, bytes], *of_cpus: bytes) -> None:
        self.sources = Map(entries)
        self.cgroups = Map({})
        lost = struct.pack("=QQ", 3, 4)
        maps = {
            map_specs.DROP_SOURCES: self.sources,
            map_specs.SOURCE_CGROUPS: self.cgroups,
            map_specs.RECENT_SOURCE: Map({bytes(4): b"".join(of_cpus)}),
            map_specs.DROP_SOURCES_LOST: Map({bytes(4): lost}),
        }
        self.reader = DropSources(loaded(maps))

    def give(self, **shares: int) -> None:
        """Cgroups with this many entries."""
        for name, count in shares.items():
            self.cgroups.set(struct.pack("=Q", int(name[1:])), struct.pack("=I", count))

    def shares(self) -> dict[int, int]:
        return {
            struct.unpack("=Q", cgroup)[0]: struct.unpack("=I", count)[0]
            for cgroup, count in self.cgroups.items()
        }


def test_sources_are_read_with_what_each_cpu_adds() -> None:
    kernel = Kernel(
        {key(5, 8): entry(10, 20, 100), key(6, 8, 0, ICMP): entry(1, 50, 1, b"\xff" * 16)},
        recent(key(5, 8), 30, 7),
        NONE,
        recent(key(6, 8, 0, ICMP), 40, 2),
        recent(key(7, 8), 40, 2),
    )
    assert kernel.reader.read() == [
        DropSource(5, 8, TCP, 80, 10, 30, 107, "curl", Mode.ENFORCE),
        DropSource(6, 8, ICMP, 0, 1, 50, 3, "\ufffd" * 16, Mode.ENFORCE),
    ]
    assert kernel.reader.lost() == 7


def test_only_a_protocol_with_ports_has_many() -> None:
    entries = {
        key(5, 8, port, protocol): entry(1, 1, 1)
        for port, protocol in ((0, TCP), (0, UDP), (80, TCP), (0, ICMP))
    }
    found = Kernel(entries, NONE).reader.read()
    assert [source.has_many_ports for source in found] == [True, True, False, False]


def test_sources_of_an_interface_are_forgotten_and_their_shares_returned() -> None:
    """Also those of cgroups of which the kernel has forgotten all sources by itself."""
    kept = key(5, 9), key(5, 9, 443), key(7, 9)
    forgotten = key(5, 8), key(6, 8), key(6, 10, 443)
    kernel = Kernel({one: entry(1, 1, 1) for one in (*forgotten, *kept)}, NONE)
    kernel.give(_5=3, _6=2, _7=9, _8=4)
    assert kernel.reader.cgroups() == {5, 6, 7, 8}
    kernel.reader.forget(8, 10)
    assert set(kernel.sources.entries) == set(kept)
    assert kernel.shares() == {5: 2, 7: 9}
