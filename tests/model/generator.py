"""Made frames and states for the specification of the gate (gate.py), from a seed.

The world is small, so that frames, rules, flows and addresses often meet. `Generator.sent` makes
most frames from layers, and others from bytes of previous ones: those whose reasons are rarest.
"""

import dataclasses
import ipaddress
import random
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from bpf import abi
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode, Reason, Verdict
from tests.model.facts import (
    LOOPBACK,
    NOWHERE,
    Connect,
    Gate,
    Kind,
    Sent,
    Socket,
    Stamp,
    State,
)
from tests.model.packet import ANY_IPV4, parse

HOUR_NS = 3600 * 10**9
MINUTE_NS = 60 * 10**9


def _packed(text: str) -> bytes:
    return abi.pack_address(ipaddress.ip_address(text))


Address = Callable[[int], bytes]

PODS = {
    4: tuple(_packed(f"198.18.1.{last}") for last in range(1, 5)),
    6: tuple(_packed(f"fd00:18:0:1::{last}") for last in range(1, 5)),
}
OTHERS = {4: _packed("198.18.1.9"), 6: _packed("fd00:18:0:1::9")}
SHARED = {4: _packed("198.18.1.8"), 6: _packed("fd00:18:0:1::8")}
NODES = {4: _packed("198.18.0.1"), 6: _packed("fd00:18::1")}
SERVICES = {4: _packed("198.18.5.1"), 6: _packed("fd00:18:0:5::1")}
REMOTE = {4: _packed("198.19.0.7"), 6: _packed("fd00:19::7")}
CLIENTS = {4: _packed("198.18.7.7"), 6: _packed("fd00:18:0:7::7")}
GROUPS = {
    4: tuple(map(_packed, ("224.0.0.251", "255.255.255.255", "0.0.0.0"))),
    6: tuple(map(_packed, ("ff02::1", "ff05::2", "::"))),
}
OWN_RANGES = {4: _packed("198.18.0.0")[:15], 6: _packed("fd00:18::")[:14]}
ROUTED = {
    4: (_packed("198.19.0.0")[:14], PODS[4][0]),
    6: (_packed("fd00:19::")[:4], PODS[6][0], _packed("fe80::")[:8]),
}
"""What `tests/kernel/gate_runs.py` routes elsewhere."""

PORTS = (0, 53, 67, 68, 80, 8080, 65535)
PROTOCOLS = {
    4: (6, 6, 6, 17, 17, 17, 1, 1, 132, 136, 33, 2, 47, 89, 50, 4, 0, 58),
    6: (6, 6, 6, 17, 17, 17, 58, 58, 132, 136, 33, 47, 89, 50, 41, 59, 1, 135, 2),
}
TYPES = {
    4: (0, 0, 8, 3, 5, 11, 12, 9, 13, 255),
    6: (128, 129, 129, 1, 2, 3, 4, 137, 134, 135, 136, 143, 130, 132, 141, 0),
}
INJECTABLE = 21
FOREIGN = 4242
BEYOND = 9_000_000
POD_MAC, BROADCAST_MAC = bytes.fromhex("0200000000aa"), b"\xff" * 6
RELAYS = {4: _packed("198.18.9.0"), 6: _packed("fd00:18:9::")}
_EXTENSIONS = (0, 43, 44, 44, 51, 60, 60)
_CORPUS = 64
"""Frames of one reason that are kept to be changed."""
_NO_CGROUP = (1 << 40) + 7
_SEQUENCE = bytes(4)


def relay_address(pod: bytes, number: int) -> bytes:
    """Of a relay, in the pod's family: one of the first 256."""
    family = 4 if pod.startswith(ANY_IPV4[:12]) else 6
    return RELAYS[family][:-1] + bytes((number,))


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """How a frame reaches the gate: by a test run with a socket of no kind, or without a socket; by
    a real socket of this number; or by a packet socket and a pair, on which it loses that."""

    name: str
    socket: int = 0


Sockets = Mapping[int, Sequence[tuple[int, Socket]]]
"""The real sockets, by the family of the frames that they send (0: what is not IP), and numbers."""

RUN, LOST, SOCKET, PAIR = "run", "lost", "socket", "pair"


class Generator:
    def __init__(self, seed: str, cgroup: Cgroup, sockets: Sockets | None = None) -> None:
        """cgroup: of all sockets; sockets: the real ones that frames may be sent by."""
        self._random = random.Random(seed)
        self._cgroup = cgroup
        self._sockets = sockets
        self.found: Counter[tuple[Verdict, Reason] | None] = Counter()
        self._corpus: dict[tuple[Verdict, Reason] | None, list[bytes]] = {}
        self._first_fragments: list[bytes] = []
        """Of this state, that passed."""

    def below(self, limit: int) -> int:
        return self._random.randrange(limit)

    def one_of(self, numbers: Sequence[int]) -> int:
        return self._random.choice(numbers)

    # States

    def state(self, now_ns: int) -> State:
        chance, choose = self._random.random, self._random.choice
        self._first_fragments.clear()
        node = self._node(now_ns)
        other = self._gate(now_ns, {OTHERS[4], OTHERS[6]})
        own_addresses = {
            address for family in (4, 6) for address in PODS[family][: choose((0, 1, 1, 1, 2, 3))]
        }
        gate = self._gate(now_ns, own_addresses) if chance() < 0.97 else None
        owners: dict[bytes, Gate | None] = dict.fromkeys(SHARED.values())
        if gate:
            owners |= dict.fromkeys(own_addresses, gate)
        if chance() < 0.8:
            owners |= dict.fromkeys(OTHERS.values(), other)
        proxied = {
            (address, choose((0, 0, 0, *PORTS))): chance() < 0.5
            for address in (*PODS[4][:2], *PODS[6][:2], *OTHERS.values())
            if chance() < 0.6
        }
        return State(
            gate,
            node,
            owners,
            injectable=frozenset({INJECTABLE} if chance() < 0.8 else ()),
            own=(*NODES.values(), *(OWN_RANGES.values() if chance() < 0.2 else ())),
            is_own_listed=chance() < 0.8,
            routed=ROUTED,
            is_relay_alive=chance() < 0.7,
            proxied=proxied,
            connects=self._connects(now_ns),
        )

    def _connects(self, now_ns: int) -> dict[bytes, Connect]:
        """With the number that all segments here have."""
        choose = self._random.choice
        if self._random.random() < 0.5:
            return {}
        cgroup = choose((self._cgroup, self._cgroup, None))
        return {_SEQUENCE: Connect(cgroup, choose((now_ns + HOUR_NS, now_ns // 2)))}

    def _node(self, now_ns: int) -> NodeFacts:
        chance, choose = self._random.random, self._random.choice
        ids = (*self._cgroup.ancestors, _NO_CGROUP)
        is_followed = chance() < 0.5
        # Shares of the time since the machine started: no heartbeat is older.
        heartbeat_ns = choose((0, now_ns + HOUR_NS, now_ns - now_ns // 8, now_ns // 2))
        return NodeFacts(
            kubelet_cgroup=choose((0, self._cgroup.id, self._cgroup.id, *ids)),
            remade_cgroup=choose((0, 0, self._cgroup.id, *ids)) if is_followed else 0,
            is_unit_followed=is_followed,
            pods_cgroup=choose((0, *ids)),
            pods_level=self._random.randrange(5),
            heartbeat_ns=heartbeat_ns,
            stale_after_ns=choose((0, now_ns // 16)),
            dead_man_ns=choose((0, 0, 0, now_ns // 4)),
            has_ovs=chance() < 0.3,
        )

    def _gate(self, now_ns: int, addresses: set[bytes]) -> Gate:
        chance, choose = self._random.random, self._random.choice
        modes = (Mode.OFF, Mode.AUDIT, Mode.AUDIT, *(Mode.ENFORCE,) * 8, *(Mode.STRICT,) * 6)
        count = choose((0, 0, 0, 1, 2, 3, 4, 5, 12, abi.GATE_RULES))
        return Gate(
            choose(modes),
            frozenset(addresses),
            tuple(self._rule() for _ in range(count)),
            has_any_address=chance() < 0.1,
            has_fallback=chance() < 0.8,
            grace_until_ns=choose((0, 0, 0, 0, now_ns - MINUTE_NS, now_ns + HOUR_NS)),
        )

    def _rule(self) -> Rule:
        choose = self._random.choice
        ids = (*self._cgroup.ancestors, _NO_CGROUP, _NO_CGROUP)
        ports = [choose(PORTS), choose(PORTS)]
        if self._random.random() < 0.9:
            ports.sort()
        return Rule(
            choose((SourceKind.KUBELET, *SourceKind)),
            choose((0, 6, 17, 132, 1, 58, 47)),
            first_port=ports[0],
            last_port=ports[1],
            cgroup=choose(ids),
            level=self._random.randrange(len(self._cgroup.ancestors) + 2),
        )

    # Frames

    def pod_frame(self) -> tuple[bytes, bool]:
        """A frame of the pod's, and whether it is to all of its network."""
        is_broadcast = self._random.random() < 0.1
        if self._random.random() < 0.12:
            return self._dhcp_question(), False
        frame = bytearray(self._frame(self._pods, self._hosts))
        frame[:6] = BROADCAST_MAC if is_broadcast else POD_MAC
        if self._random.random() < 0.1:
            frame = self._changed(frame)
        return bytes(frame), bytes(frame[:6]) == BROADCAST_MAC

    def _dhcp_question(self) -> bytes:
        """To the server, as a client renews its address."""
        payload = struct.pack("!HHHH", 68, 67, 28, 0) + bytes(20)
        source, destination = PODS[4][0], self._random.choice((NODES[4], SERVICES[4]))
        return POD_MAC + bytes(6) + self._ipv4(source, destination, 17, payload)

    def answer(self, frame: bytes) -> bytes:
        """A frame to the pod that may be the answer to one of the pod's: ends exchanged."""
        made = bytearray(frame)
        if len(frame) >= 62 and frame[12:14] == b"\x08\x00":
            made[26:30], made[30:34] = frame[30:34], frame[26:30]
            at = 14 + frame[14] % 16 * 4
        elif len(frame) >= 62 and frame[12:14] == b"\x86\xdd":
            made[22:38], made[38:54] = frame[38:54], frame[22:38]
            at = 54 if frame[20] != 44 else 62
        else:
            return frame
        if len(frame) >= at + 8:
            if made[at] in (8, 128) and (frame[23] == 1 or frame[20] == 58):
                made[at] = 0 if made[at] == 8 else 129
            else:
                made[at : at + 2], made[at + 2 : at + 4] = (
                    frame[at + 2 : at + 4],
                    frame[at : at + 2],
                )
        return bytes(made)

    def frame(self, questions: Sequence[bytes]) -> bytes:
        """questions: frames of the pod, which some are answers to."""
        chance = self._random.random()
        if self._first_fragments and chance < 0.08:
            return _later_fragment(self._random.choice(self._first_fragments))
        if questions and chance < 0.25:
            made = self.answer(self._random.choice(questions))
        elif self._corpus and chance < 0.5:
            made = self._random.choice(self._rarest())
        else:
            made = self._frame(self._hosts, self._pods)
        if self._random.random() < 0.2:
            return bytes(self._changed(bytearray(made)))
        return made

    def _rarest(self) -> list[bytes]:
        """Frames of a rare reason, or of any."""
        reasons = list(self._corpus)
        if self._random.random() < 0.7:
            reasons.sort(key=self.found.__getitem__)
            reasons = reasons[: max(1, len(reasons) // 3)]
        return self._corpus[self._random.choice(reasons)]

    def learn(self, frame: bytes, found: tuple[Verdict, Reason] | None) -> None:
        """What the program's counters showed for a frame."""
        self.found[found] += 1
        if found and found[0] is Verdict.PASS and _is_first_fragment(frame):
            self._first_fragments.append(frame)
        kept = self._corpus.setdefault(found, [])
        if len(kept) < _CORPUS:
            kept.append(frame)
        elif self._random.random() < 0.02:
            kept[self._random.randrange(_CORPUS)] = frame

    def _changed(self, frame: bytearray) -> bytearray:
        randrange = self._random.randrange
        for _ in range(randrange(4)):
            index = randrange(12, min(len(frame), 110))
            frame[index] = self._random.choice((0, 1, 6, 17, 44, 60, 0xFF, randrange(256)))
        if self._random.random() < 0.2:
            del frame[randrange(14, len(frame) + 1) :]
        elif self._random.random() < 0.05:
            frame += bytes(randrange(64))
        return frame

    def _frame(self, sources: Address, destinations: Address) -> bytes:
        chance, choose, randrange = self._random.random, self._random.choice, self._random.randrange
        kind = chance()
        mac = choose((POD_MAC, POD_MAC, POD_MAC, BROADCAST_MAC, b"\x01\x00\x5e\x00\x00\xfb"))
        if kind < 0.04:
            body = struct.pack("!HHBBH", 1, 0x0800, 6, 4, choose((1, 2, 3, 8))) + bytes(20)
            return mac + bytes(6) + b"\x08\x06" + body
        if kind < 0.06:
            ethertype = choose((0x8100, 0x88A8, 0x8847, 0, 0x0801))
            return mac + bytes(6) + ethertype.to_bytes(2) + self._random.randbytes(60)
        family = choose((4, 6))
        source, destination = sources(family), destinations(family)
        protocol = choose(PROTOCOLS[family]) if chance() < 0.97 else randrange(256)
        payload = self._payload(family, protocol)
        packet = self._ipv4 if family == 4 else self._ipv6
        return mac + bytes(6) + packet(source, destination, protocol, payload)

    def _hosts(self, family: int) -> bytes:
        return self._random.choice(
            (
                *(NODES[family],) * 6,
                *(SERVICES[family], REMOTE[family], CLIENTS[family], OTHERS[family]),
                *(PODS[family][0], self._random.choice(GROUPS[family])),
            )
        )

    def _pods(self, family: int) -> bytes:
        if self._random.random() < 0.75:
            return self._random.choice((*PODS[family][:1] * 4, *PODS[family]))
        return self._random.choice(
            (OTHERS[family], SHARED[family], CLIENTS[family], *GROUPS[family], REMOTE[family])
        )

    def _ipv4(self, source: bytes, destination: bytes, protocol: int, payload: bytes) -> bytes:
        chance, choose = self._random.random, self._random.choice
        options = bytes(4 * choose((0, 0, 0, 0, 0, 0, 1, 3, 10)))
        words, length = 5 + len(options) // 4, 20 + len(options) + len(payload)
        if chance() < 0.04:
            words = self._random.randrange(16)
        if chance() < 0.06:
            length = choose((0, 19, 20, 40, 65535, self._random.randrange(65536)))
        place = choose((0x2000, 0x2000, 1, 0x2001, 185, 0x8000)) if chance() < 0.2 else 0x4000
        version = 4 if chance() < 0.99 else self._random.randrange(16)
        identification = self._random.randrange(4)
        header = struct.pack(
            *("!BBHHHBBH", version << 4 | words, 0, length, identification, place, 64),
            *(protocol, 0),
        )
        return b"\x08\x00" + header + source[12:] + destination[12:] + options + payload

    def _ipv6(self, source: bytes, destination: bytes, protocol: int, payload: bytes) -> bytes:
        chance, choose = self._random.random, self._random.choice
        following = protocol
        if chance() < 0.02:
            count = self._random.randrange(7, 11)
            payload = bytes((protocol, 0, 1, 4)) + bytes(4) + payload
            payload = (bytes((60, 0, 1, 4)) + bytes(4)) * (count - 1) + payload
            following = 60
        for _ in range(choose((0, 0, 0, 0, 0, 1, 1, 2, 3, self._random.randrange(11)))):
            kind = choose(_EXTENSIONS)
            if kind == 44:
                offset = choose((0, 0, 1, 8, 9, 16, 0xFFF8))
                header = struct.pack("!BBHI", following, 0, offset, self._random.randrange(3))
            elif kind == 51:
                header = struct.pack("!BBH", following, choose((1, 4)), 0)
                header += bytes((header[1] + 2) * 4 - 4)
            else:
                size = choose((0, 0, 0, 1, 3))
                left = choose((0, 0, 1)) if kind == 43 else 4
                header = bytes((following, size, 1, left)) + bytes(size * 8 + 4)
            payload, following = header + payload, kind
        length = len(payload)
        if chance() < 0.06:
            length = choose((0, 1, 8, 20, 65535, self._random.randrange(65536)))
        version = 6 if chance() < 0.99 else self._random.randrange(16)
        header = struct.pack("!IHBB", version << 28, length, following, 64)
        return b"\x86\xdd" + header + source + destination + payload

    def _payload(self, family: int, protocol: int) -> bytes:
        chance, choose, randrange = self._random.random, self._random.choice, self._random.randrange
        ports = struct.pack("!HH", choose(PORTS), choose(PORTS))
        body = bytes(choose((0, 4, 8, 20)))
        if protocol == 6:
            flags = choose((2, 2, 2, 16, 16, 18, 4, 20, 24, 17, 0, 1, 41, randrange(256)))
            words = choose((5, 5, 5, 5, 5, 6, 8, 4, 0, 15))
            header = ports + _SEQUENCE + bytes(4) + bytes((words << 4, flags)) + bytes(6)
            made = header + bytes(max(0, words - 5) * 4)
            return made + (body if chance() < 0.5 else b"")
        if protocol in (1, 58):
            type_ = choose(TYPES[family]) if chance() < 0.97 else randrange(256)
            identifier = choose(PORTS[:3])
            return struct.pack("!BBHHH", type_, 0, 0, identifier, 1) + body
        return ports + bytes(4) + body

    # Ways

    def sent(self, frame: bytes) -> tuple[Way, Sent]:
        """The frame, and what the kernel is to know of it."""
        chance, choose = self._random.random, self._random.choice
        kind = chance()
        if self._sockets and kind < 0.15:
            sockets = self._sockets[_FAMILIES.get(frame[12:14], 0)]
            kind_of_socket = choose(sorted({each.kind.name for _, each in sockets}))
            number, socket = choose([s for s in sockets if s[1].kind.name == kind_of_socket])
            if socket.kind is Kind.TCP and chance() < 0.5:
                frame = self._syn(frame)
            if socket.kind is Kind.TCP:  # a new one each time
                socket = dataclasses.replace(socket, number=self._random.getrandbits(60))
            way, sent = Way(SOCKET, number), Sent(frame, stamp=self.stamp(), socket=socket)
            if socket.kind is not Kind.PACKET:
                return way, sent
            return way, self._offloaded(dataclasses.replace(sent, stamp=Stamp.NONE))
        if self._sockets and kind < 0.2:
            ingress = choose((INJECTABLE, INJECTABLE, LOOPBACK))
            return Way(PAIR), self._offloaded(Sent(frame, ingress, self.stamp()))
        sent = Sent(
            frame,
            ingress=choose((0, 0, 0, 0, LOOPBACK, INJECTABLE, INJECTABLE, FOREIGN, BEYOND)),
            stamp=self.stamp(),
            switch_stamp=self.stamp() if chance() < 0.1 else Stamp.NONE,
            is_tagged=chance() < 0.02,
        )
        if chance() < 0.6:
            return Way(LOST), sent
        socket = Socket(Kind.OTHER, self._cgroup, self._random.getrandbits(60), _source(frame))
        has_segments = chance() < 0.1 and len(frame) >= 60
        return Way(RUN), dataclasses.replace(sent, socket=socket, has_segments=has_segments)

    def _syn(self, frame: bytes) -> bytes:
        """To the pod, in the family of this frame."""
        ports = struct.pack("!HH", self._random.choice(PORTS), self._random.choice(PORTS))
        payload = ports + _SEQUENCE + bytes(4) + bytes((5 << 4, 2)) + bytes(6)
        family = _FAMILIES[frame[12:14]]
        packet = self._ipv4 if family == 4 else self._ipv6
        ends = NODES[family], PODS[family][0]
        return POD_MAC + bytes(6) + packet(*ends, 6, payload)

    def stamp(self) -> Stamp:
        return Stamp.NONE if self._random.random() < 0.6 else self._random.choice(list(Stamp))

    def _offloaded(self, sent: Sent) -> Sent:
        """With a checksum that is to be filled in later, within the frame; or as one TCP segment
        that is to be split."""
        frame, chance = sent.frame, self._random.random()
        if chance < 0.4 or len(frame) < 40:
            return sent
        if chance < 0.9:
            end = self._random.choice((16, 36, 42, 52, 62, 72, 80, len(frame)))
            return dataclasses.replace(sent, pending_end=end)
        packet = parse(frame)
        if packet is None or packet.protocol != 6 or len(packet.payload) < 24:
            return sent
        end = len(frame) - len(packet.payload) + 18
        return dataclasses.replace(sent, pending_end=end, has_segments=True)


_FAMILIES = {b"\x08\x00": 4, b"\x86\xdd": 6}


def _is_first_fragment(frame: bytes) -> bool:
    if frame[12:14] == b"\x08\x00":
        return frame[20] & 0x3F == 0x20 and frame[21] == 0
    return frame[12:14] == b"\x86\xdd" and frame[20] == 44 and frame[56] == frame[57] & 0xF8 == 0


def _later_fragment(first: bytes) -> bytes:
    """One of the same datagram."""
    made = bytearray(first)
    at = 20 if first[12:14] == b"\x08\x00" else 56
    made[at : at + 2] = b"\x00\x08"
    return bytes(made)


def _source(frame: bytes) -> bytes | None:
    """A test run's socket is connected from the frame's source."""
    if frame[12:14] == b"\x08\x00":
        return NOWHERE[:10] + b"\xff\xff" + frame[26:30] if any(frame[26:30]) else None
    return frame[22:38] if frame[12:14] == b"\x86\xdd" else None
