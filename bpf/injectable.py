"""The injectable map: interfaces by which the host can make its own packets come in again."""

import struct

from bpf import abi, errors, loader, map_specs, maps, pins

_BITS = 64
_WORD_BYTES = 8
# Interfaces have low numbers, so nearly all of the map's MiB is zeros, which are compared at once.
_ZEROS = bytes(1024)


class InjectableMap:
    """One bit per ifindex of the host's namespace. One writer: the agent."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self._map = loaded.map(map_specs.INJECTABLE)

    def inherit(self, installation: pins.Pins) -> None:
        """Copy another schema's map, if ours is empty.

        Otherwise the first gates taken over would treat injected packets as forwarded, until the
        host's interfaces are read. This happens if that map has another layout. Raises `BpfError`.
        """
        others = installation.other_schemas()
        if not others or self.marked():
            return
        for schema in others:
            try:
                other = maps.Map.open(
                    str(schema / "maps" / map_specs.INJECTABLE.name), map_specs.INJECTABLE
                )
            except errors.PinError:
                continue
            with other:
                for key, value in other.items():
                    if any(value):
                        self._map.set(key, value)
            return

    def mark(self, ifindex: int, *, is_node_sent: bool) -> None:
        """Set whether packets that came in by `ifindex` count as host-sent.

        Raises `ValueError` beyond the map's end (8 million interfaces since boot).
        """
        if not 0 < ifindex < abi.INJECTABLE_IFINDEXES:
            raise ValueError(
                f"interface number {ifindex} is beyond the injectable map; "
                "its packets count as the host's until the node is rebooted"
            )
        key = struct.pack("=I", ifindex // _BITS)
        before = self._word(key)
        bit = 1 << (ifindex % _BITS)
        after = before | bit if is_node_sent else before & ~bit
        if after != before:
            self._map.set(key, struct.pack("=Q", after))

    def marked(self) -> set[int]:
        """All marked interfaces."""
        words = self._map.array_values()
        found = set()
        for start in range(0, len(words), len(_ZEROS)):
            part = words[start : start + len(_ZEROS)]
            if part == _ZEROS:
                continue
            for index, word in enumerate(memoryview(part).cast("Q"), start // _WORD_BYTES):
                found |= {index * _BITS + bit for bit in range(_BITS) if word >> bit & 1}
        return found

    def _word(self, key: bytes) -> int:
        value = self._map.get(key)
        return int(struct.unpack("=Q", value)[0]) if value else 0
