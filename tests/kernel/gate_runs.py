"""Runs the gate's own programs on made frames, sockets and states, and shows what they did.

Four ways lead a frame to the gate:

* A test run (BPF_PROG_TEST_RUN) of a program that calls the gate. The kernel gives the frame a
  socket without type and protocol, connected from the frame's source, of this process's cgroup.
* A test run of a program that sends a clone of the frame out by the pod's interface. A clone has no
  socket.
* A real socket sends a datagram by that interface, and a program there puts the frame in its place.
  A packet socket sends the frame itself, also with a checksum that is to be filled in later, or
  to be split into segments.
* A packet socket sends it by a pair or the loopback, and where it comes in again a clone is sent
  out by the interface: without a socket, but with its checksum pending.

No way leads to request and TIME-WAIT sockets, to macvtaps, or to buffers that are not linear: live
tests have these (tests/kernel/test_traffic.py, test_bypass_tun.py, test_fuzz.py).
"""

import contextlib
import dataclasses
import errno
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from unittest import mock

import pyroute2

from agent.linux import network_setup
from bpf import abi, gate_table, injectable, loader, maps, pins, rcu, syscalls
from bpf.gate_config import GateConfig
from bpf.gates import Gates
from bpf.rule_evaluation import Cgroup
from bpf.verdicts import Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import assembly, foreign
from tests.model import generator
from tests.model.gate import LOOPBACK, NOWHERE, Gate, Kind, Sent, Socket, Stamp, State
from tests.model.generator import NODES, PODS, REMOTE, Way

_KEY = bytes(4)
_NUMBER = struct.Struct("=I")
_BEAT = struct.Struct("=Q")
_COUNTS = struct.Struct(f"={abi.COUNTER_SLOTS}Q")
_PROG_ARRAY, _ARRAY = 3, 2
_SCHED_CLS = 3
_OTHER_IFINDEX = 7777
_FOREVER_NS = 1 << 62
_UNIT = 1

MARK = 0x6D6F6465
"""By which the stage knows our frames. The kernel has reports of its own to send (MLD)."""

# struct __sk_buff
_CONTEXT_BYTES = 192
_MARK_AT = 8
_PRIORITY, _INGRESS, _IFINDEX, _TC_INDEX, _CB = 32, 36, 40, 44, 48
_GSO_SEGMENTS, _GSO_SIZE = 164, 176

# The map `order`: what the stage puts in the place of the next packet.
_ORDER = struct.Struct("=II2040s")
_FRAME_AT = 8
# The map `result`: packets that the stage changed, those that passed the gate, and the last stamp.
_RESULT = struct.Struct("=IIII")

_SHORTEST_RUN = 60
"""Bytes; test runs reject shorter frames, so the program cuts them."""
_VNET_HEADER = struct.Struct("=BBHHHH")
_ORIGINAL = bytes(200)

STAMPS = {
    Stamp.NONE: (0, 0, 0, 1, 0x0F, 0x7020, 0x7080, 0xF060, 0x3060),
    Stamp.PLAIN: (0x7060, 0x7060, 0x7062, 0x706A, 0x707F),
    Stamp.UNPROVEN: (0x7061,),
    Stamp.HAND_MADE: (0x7040, 0x7040, 0x7041, 0x7047, 0x7048, 0x705F),
    Stamp.RULE: (0x7067,),
    Stamp.PROBE: (0x7068,),
    Stamp.UNIDENTIFIED: (0x7069,),
}
_STAMP_OF = {value: stamp for stamp, values in STAMPS.items() for value in values}


class Unsendable(Exception):
    """The kernel does not take this frame by this way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """verdict: None if nothing was counted; stamp: None if that is unknown, or it was dropped."""

    verdict: tuple[Verdict, Reason] | None
    is_dropped: bool
    stamp: Stamp | None = None


@dataclasses.dataclass(slots=True)
class _OpenSocket:
    """A socket as the specification describes it, of the frames of a family; 0: of both."""

    described: Socket
    family: int
    send: socket.socket | None = None


class GateRuns:
    """One gated interface in the current namespace. A context manager."""

    def __init__(self, loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup) -> None:
        self._loaded = loaded
        self._cgroup = cgroup
        self._netns = netns_cookie() or 0
        with contextlib.ExitStack() as undo:
            # Nothing else runs these programs while a configuration changes.
            undo.enter_context(mock.patch.object(rcu, "wait_for_programs"))
            self.ifindex = self._make_interfaces(undo)
            self._gates = Gates(loaded, installation)
            undo.callback(self._gates.close)
            self._table = gate_table.GateTable(loaded, installation.maps)
            undo.callback(self._table.close)
            self._injectable = injectable.InjectableMap(loaded)
            self._counters = loaded.map(abi.COUNTERS)
            self._frequent = loaded.map(abi.FREQUENT_COUNTS)
            self._make_programs(undo)
            self._gates.start_reply_tables([self.ifindex])
            table = loaded.map(abi.REPLIES).get(_NUMBER.pack(self.ifindex))
            assert table is not None
            (table_id,) = _NUMBER.unpack(table)
            self._replies = syscalls.fd_by_id(syscalls.Command.MAP_GET_FD_BY_ID, table_id)
            undo.callback(os.close, self._replies)
            self._sockets = list(self._open_sockets(undo))
            self._again = {LOOPBACK: _packet_socket("lo")}
            self._again[generator.INJECTABLE] = _packet_socket("in0")
            for again in self._again.values():
                undo.callback(again.close)
            self._slot = abi.FALLBACK_SLOT
            self._last = self._counts()
            self._result = self._read_result()
            self._undo = undo.pop_all()

    def __enter__(self) -> "GateRuns":
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def sockets(self) -> dict[int, list[tuple[int, Socket]]]:
        """The real sockets by family, with their numbers."""
        found: dict[int, list[tuple[int, Socket]]] = {0: [], 4: [], 6: []}
        for index, source in enumerate(self._sockets):
            for family in (source.family,) if source.family else (0, 4, 6):
                found[family].append((index, source.described))
        return found

    @property
    def slots(self) -> tuple[int, int]:
        """Of the pod's gate and of the other one, for counters."""
        return abi.FIRST_SLOT + self.ifindex, abi.FIRST_SLOT + _OTHER_IFINDEX % abi.MAX_GATES

    # States

    def apply(self, state: State) -> None:
        """Put a state into the maps: without flows and fragments, which packets make."""
        self._apply_node(state)
        numbers = {id(None): 0}
        other = next(
            (gate for gate in state.owners.values() if gate and gate is not state.gate), None
        )
        for gate, ifindex in ((state.gate, self.ifindex), (other, _OTHER_IFINDEX)):
            if gate is None:
                self._table.delete(ifindex)
                continue
            self._table.set(ifindex, _config(gate), gate.grace_until_ns)
            numbers[id(gate)] = ifindex
        self._slot = abi.FIRST_SLOT + self.ifindex if state.gate else abi.FALLBACK_SLOT
        addresses = self._loaded.map(abi.ADDRESSES)
        _replace(addresses, {key: _NUMBER.pack(numbers[id(g)]) for key, g in state.owners.items()})
        for ifindex in (generator.INJECTABLE,):
            self._injectable.mark(ifindex, is_node_sent=ifindex in state.injectable)
        _replace(self._loaded.map(abi.FRAGMENTS), {})
        sets = list(range(abi.REPLY_SETS))
        size = abi.REPLY_TABLE.value_size
        syscalls.map_update_batch(
            self._replies, [_NUMBER.pack(index) for index in sets], [bytes(size)] * len(sets)
        )
        self._last = self._counts()

    def _apply_node(self, state: State) -> None:
        node = state.node
        config = abi.CConfig(
            kubelet_cgroup=node.kubelet_cgroup,
            pods_cgroup=node.pods_cgroup,
            pods_cgroup_level=node.pods_level,
            heartbeat_ns=node.heartbeat_ns,
            stale_after_ns=node.stale_after_ns,
            dead_man_ns=node.dead_man_ns,
            has_ovs=node.has_ovs,
            kubelet_unit=_UNIT if node.is_unit_followed else 0,
            has_node_addresses=state.is_own_listed,
            node_netns=self._netns,
            tunnel_port_count=len(node.tunnel_ports),
        )
        for at, tunnel_port in enumerate(node.tunnel_ports):
            config.tunnel_ports[at] = tunnel_port
        self._loaded.map(abi.CONFIG).set(_KEY, bytes(config))
        remade = abi.CKubeletRemade(node.remade_cgroup, _UNIT)
        self._loaded.map(abi.KUBELET_REMADE).set(_KEY, bytes(remade))
        own = {
            _NUMBER.pack(8 * len(prefix)) + prefix.ljust(16, b"\0"): _NUMBER.pack(1)
            for prefix in state.own
        }
        _replace(self._loaded.map(abi.NODE_ADDRESSES), own)
        beat_ns = _FOREVER_NS if state.is_relay_alive else 0
        self._loaded.map(abi.RELAY_BEAT).set(_KEY, _BEAT.pack(beat_ns))
        targets, relayed = {}, {}
        for number, ((pod, port), admits) in enumerate(state.proxied.items()):
            relay = b"relay".ljust(12) + number.to_bytes(4)
            targets[pod + _NUMBER.pack(port)] = relay
            relayed[relay] = pod + struct.pack("=II", 1, admits)
        _replace(self._loaded.map(abi.RELAY_TARGETS), targets)
        _replace(self._loaded.map(abi.RELAY_PODS), relayed)
        denied = {
            address + struct.pack("=HH", port, 0): bytes(8)
            for address, port in state.denied_host_probes
        }
        _replace(self._loaded.map(abi.DENIED_HOST_PROBES), denied)

    def record(self, frame: bytes, stamp: Stamp = Stamp.NONE) -> Stamp:
        """A frame from the pod. Returns its stamp afterwards, which only the program of a node with
        Open vSwitch shows: in the priority. Raises `Unsendable`."""
        context = bytearray(_CONTEXT_BYTES)
        _NUMBER.pack_into(context, _IFINDEX, self.ifindex)
        _NUMBER.pack_into(context, _CB, self._number(stamp, frame))
        if len(frame) < _SHORTEST_RUN:
            raise Unsendable
        returned, _ = syscalls.run_program(self._pod_launcher, frame, context)
        assert returned == -1, returned
        (priority,) = _NUMBER.unpack_from(context, _PRIORITY)
        return _STAMP_OF.get(priority >> 16, Stamp.NONE)

    def age(self, by_ns: int) -> None:
        """Make all flows and fragments older."""
        size = abi.REPLY_TABLE.value_size
        values = syscalls.array_values(self._replies, abi.REPLY_SETS, size)
        slots = struct.Struct(f"={2 * abi.REPLY_WAYS}Q")
        for index, numbers in enumerate(slots.iter_unpack(values)):
            if any(numbers):
                aged = list(numbers)
                for at in range(1, len(aged), 2):
                    aged[at] -= by_ns if aged[at] else 0
                syscalls.map_update(self._replies, _NUMBER.pack(index), slots.pack(*aged))
        fragments = self._loaded.map(abi.FRAGMENTS)
        for key, value in list(fragments.items()):
            fragments.set(key, _BEAT.pack(_BEAT.unpack(value)[0] - by_ns))

    # Frames

    def run(self, way: Way, sent: Sent) -> Found:
        """Raises `Unsendable`."""
        match way.name:
            case generator.RUN:
                is_dropped = self._test_run(sent, is_clone=False) == foreign.TC_ACT_SHOT
                return Found(self._moved(), is_dropped)
            case generator.LOST:
                self._test_run(sent, is_clone=True)
            case generator.SOCKET:
                self._send(self._sockets[way.socket], sent)
            case generator.PAIR:
                if sent.frame[12:14] in _TAGS:  # the kernel removes them, or drops the frame
                    raise Unsendable
                self._order(b"", self._number(sent.stamp, sent.frame))
                _send_frame(self._again[sent.ingress], sent)
        verdict = self._moved()
        before, self._result = self._result, self._read_result()
        is_dropped = self._result[1] == before[1]
        stamp = None if is_dropped else _STAMP_OF.get(self._result[2], Stamp.NONE)
        return Found(verdict, is_dropped, stamp)

    def run_send(self, send: Callable[[], object]) -> Found:
        """What the gate does with what a call sends by a socket with `MARK`."""
        send()
        verdict = self._moved()
        before, self._result = self._result, self._read_result()
        return Found(verdict, self._result[1] == before[1])

    def _test_run(self, sent: Sent, *, is_clone: bool) -> int:
        context = bytearray(_CONTEXT_BYTES)
        switch = self._number(sent.switch_stamp, sent.frame) << 16
        struct.pack_into("=III", context, _PRIORITY, switch, sent.ingress, self.ifindex)
        _NUMBER.pack_into(context, _MARK_AT, MARK)
        length = len(sent.frame)
        struct.pack_into(
            "=4I",
            *(context, _CB, self._number(sent.stamp, sent.frame), sent.is_tagged),
            *(length if length < _SHORTEST_RUN else 0, self.ifindex if is_clone else 0),
        )
        if sent.has_segments:
            is_by_number = length % 2
            _NUMBER.pack_into(context, _GSO_SEGMENTS, 2 if is_by_number else 0)
            _NUMBER.pack_into(context, _GSO_SIZE, 0 if is_by_number else 100)
        frame = sent.frame.ljust(_SHORTEST_RUN, b"\0")
        return syscalls.run_program(self._launcher, frame, bytes(context))[0]

    def _number(self, stamp: Stamp, frame: bytes) -> int:
        """One of those that mean this stamp, the same for the same frame."""
        numbers = STAMPS[stamp]
        return numbers[zlib.crc32(frame) % len(numbers)]

    def _send(self, source: _OpenSocket, sent: Sent) -> None:
        kind = source.described.kind
        if kind is Kind.PACKET:
            assert source.send is not None
            _send_frame(source.send, sent)
            return
        self._order(sent.frame, self._number(sent.stamp, sent.frame))
        changed = self._result[0]
        try:
            if kind is Kind.TCP:
                self._send_segment(source)
            else:
                assert source.send is not None
                to = "198.18.1.1" if source.family == 4 else "fd00:18:0:1::1"
                port = 9 if kind in (Kind.UDP, Kind.UDPLITE) else 0
                with contextlib.suppress(OSError):  # ENOBUFS: the gate dropped it
                    source.send.sendto(_ORIGINAL, (to, port))
        finally:
            self._order(b"", 0)
        after = self._read_result()
        if after[0] != changed + 1 or after[3]:
            self._last, self._result = self._counts(), after
            raise Unsendable

    def _send_segment(self, source: _OpenSocket) -> None:
        """By a new connection, which is one without a peer (TCP_REPAIR)."""
        family = socket.AF_INET if source.family == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            made.connect(("198.18.1.1" if source.family == 4 else "fd00:18:0:1::1", 9))
            cookie = made.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
            bypasses = self._loaded.map(abi.RELAY_BYPASSES)
            if source.described.connected is not None:
                bypasses.set(cookie, source.described.connected)
            made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR_WINDOW, _WINDOW)
            made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, -1)
            made.send(bytes(100))
            made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)  # closes without a word

    def _order(self, frame: bytes, stamp: int) -> None:
        if len(frame) > _ORDER.size - _FRAME_AT:
            raise Unsendable
        syscalls.map_update(self._order_map, _KEY, _ORDER.pack(len(frame), stamp, frame))

    # What programs have counted

    def _counts(self) -> tuple[bytes, bytes, bytes]:
        key = _NUMBER.pack(self._slot)
        counters, frequent = self._counters.get(key), self._frequent.get(key)
        assert counters is not None
        assert frequent is not None
        return key, counters, frequent

    def _moved(self) -> tuple[Verdict, Reason] | None:
        before, self._last = self._last, self._counts()
        if before == self._last:
            return None
        moved = []
        if before[1] != self._last[1]:
            pairs = zip(_COUNTS.unpack(before[1]), _COUNTS.unpack(self._last[1]), strict=True)
            moved = [(cell, new - old) for cell, (old, new) in enumerate(pairs) if old != new]
        if before[2] != self._last[2]:
            size = len(before[2]) // 8
            old, new = (struct.unpack(f"={size}Q", value[2]) for value in (before, self._last))
            for at, reason in enumerate((Reason.ESTABLISHED, Reason.NODE)):
                if count := sum(new[at::2]) - sum(old[at::2]):
                    moved.append((int(reason), count))
        assert len(moved) == 1, moved
        ((cell, count),) = moved
        assert count == 1, moved
        if cell >= abi.REASON_SLOTS:
            return Verdict.WOULD_DROP, Reason(cell - abi.REASON_SLOTS)
        reason = Reason(cell)
        return (Verdict.DROP if reason.is_drop else Verdict.PASS), reason

    def _read_result(self) -> tuple[int, int, int, int]:
        value = syscalls.map_lookup(self._result_map, _KEY, _RESULT.size)
        assert value is not None
        changed, passed, stamp, problem = _RESULT.unpack(value)
        return changed, passed, stamp, problem

    # What is made once

    def _make_interfaces(self, undo: contextlib.ExitStack) -> int:
        for name in ("ipv4/conf/all/forwarding", "ipv6/conf/all/forwarding"):
            network_setup.write_sysctl(name, "1")
        network_setup.write_sysctl("ipv6/conf/default/router_solicitations", "0")
        network_setup.write_sysctl("ipv6/conf/default/addr_gen_mode", "1")
        network_setup.write_sysctl("ipv6/conf/default/accept_dad", "0")
        with pyroute2.IPRoute() as netlink:
            netlink.link("add", ifname="pod0", kind="veth", peer="pod1")
            netlink.link("add", ifname="in1", index=generator.INJECTABLE, kind="veth", peer="in0")
            undo.callback(_delete_link, "pod0")
            undo.callback(_delete_link, "in0")
            found: dict[str, int] = {
                name: netlink.link_lookup(ifname=name)[0]
                for name in ("lo", "pod0", "pod1", "in0", "in1")
            }
            for index in found.values():
                netlink.link("set", index=index, state="up")
            own = found["lo"]
            netlink.addr("add", index=own, address="198.18.0.1", prefixlen=32)
            netlink.addr("add", index=own, address="fd00:18::1", prefixlen=128)
            for pod, mask in (("198.18.1.1", 32), ("fd00:18:0:1::1", 128)):
                netlink.route("add", dst=f"{pod}/{mask}", oif=found["pod0"])
                netlink.neigh(
                    "add",
                    dst=pod,
                    lladdr="02:00:00:00:00:aa",
                    ifindex=found["pod0"],
                    state="permanent",
                )
            for network in ("198.19.0.0/16", "fd00:19::/32"):
                netlink.route("add", dst=network, oif=found["in0"])
        self._indexes = found
        return found["pod0"]

    def _make_programs(self, undo: contextlib.ExitStack) -> None:
        calls, from_pod = (self._calls(undo, name) for name in (abi.GATE_EGRESS, abi.GATE_INGRESS))
        self._order_map = syscalls.map_create(_ARRAY, 4, _ORDER.size, 1)
        undo.callback(os.close, self._order_map)
        self._result_map = syscalls.map_create(_ARRAY, 4, _RESULT.size, 1)
        undo.callback(os.close, self._result_map)
        self._launcher, self._pod_launcher = (
            syscalls.program_load(_SCHED_CLS, _launcher(called)) for called in (calls, from_pod)
        )
        undo.callback(os.close, self._launcher)
        undo.callback(os.close, self._pod_launcher)
        drop = foreign.load_program(foreign.TC_ACT_SHOT)
        undo.callback(os.close, drop)
        for name, code, where in (
            ("pod0", _stage(calls, self._order_map, self._result_map), syscalls.BPF_TCX_EGRESS),
            ("pod0", _witness(self._result_map), syscalls.BPF_TCX_EGRESS),
            ("in1", _reentry(self._order_map, self.ifindex), syscalls.BPF_TCX_INGRESS),
            ("lo", _reentry(self._order_map, self.ifindex), syscalls.BPF_TCX_INGRESS),
        ):
            program = syscalls.program_load(_SCHED_CLS, code)
            undo.callback(os.close, program)
            link = syscalls.link_create_tcx(program, self._indexes[name], where, 0)
            undo.callback(os.close, link)

    def _calls(self, undo: contextlib.ExitStack, program: str) -> int:
        """A map by which other programs call this one."""
        made = syscalls.map_create(_PROG_ARRAY, 4, 4, 1)
        undo.callback(os.close, made)
        syscalls.map_update(made, _KEY, _NUMBER.pack(self._loaded.programs[program]))
        return made

    def _open_sockets(self, undo: contextlib.ExitStack) -> Iterator[_OpenSocket]:
        def described(
            kind: Kind, family: int, made: socket.socket, **details: object
        ) -> _OpenSocket:
            cookie = struct.unpack("=Q", made.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))[0]
            made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            undo.callback(made.close)
            return _OpenSocket(Socket(kind, self._cgroup, cookie, **details), family, made)  # type: ignore[arg-type]

        yield described(Kind.PACKET, 0, _packet_socket("pod0"))
        for family in (4, 6):
            for bound in (None, NODES[family], REMOTE[family]):
                for foreign_sources, source in ((0, None), (1, REMOTE[family]), (2, NODES[family])):
                    made = _datagram_socket(family, bound)
                    if foreign_sources:
                        self._write_history(made, source or NOWHERE, foreign_sources)
                    yield described(
                        Kind.UDP,
                        family,
                        made,
                        bound=bound,
                        foreign_source=source,
                        foreign_sources=foreign_sources,
                    )
                for is_marked in (True, False):
                    raw = socket.socket(_FAMILIES[family], socket.SOCK_RAW, 47)
                    _bind(raw, family, bound)
                    if is_marked:
                        self._write_history(raw, NOWHERE, 0, is_raw=True)
                    kind = Kind.RAW if is_marked else Kind.KERNEL
                    yield described(kind, family, raw, bound=bound)
            old = socket.socket(_FAMILIES[family], socket.SOCK_RAW, 47)
            cookie = old.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
            self._loaded.map(abi.OLD_RAW_SOCKETS).set(cookie, _NUMBER.pack(1))
            yield described(Kind.RAW, family, old)
            with contextlib.suppress(OSError):  # not offered by every kernel
                light = socket.socket(_FAMILIES[family], socket.SOCK_DGRAM, 136)
                _bind(light, family, None)
                yield described(Kind.UDPLITE, family, light)
            for connected in (None, NOWHERE, PODS[family][0], REMOTE[family]):
                tcp = Socket(Kind.TCP, self._cgroup, -family, NODES[family], connected=connected)
                yield _OpenSocket(tcp, family)

    def _write_history(
        self, made: socket.socket, source: bytes, foreign_sources: int, *, is_raw: bool = False
    ) -> None:
        value = source + struct.pack("=II", foreign_sources, is_raw)
        histories = self._loaded.map(abi.SOCKET_HISTORIES)
        syscalls.map_update(histories.fd, _NUMBER.pack(made.fileno()), value)


_SO_COOKIE, _SO_NO_CHECK = 57, 11
_TCP_REPAIR, _TCP_REPAIR_WINDOW, _UDP_NO_CHECK6_TX = 19, 29, 101
_WINDOW = struct.pack("=5I", 0, 65535, 65535, 65535, 0)
"""struct tcp_repair_window: room for one segment to be sent."""
_IP_FREEBIND, _IPV6_FREEBIND = 15, 78
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_TAGS = (b"\x81\x00", b"\x88\xa8")
_GSO_TCP_IPV4, _GSO_TCP_IPV6 = 1, 4  # linux/virtio_net.h
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def _datagram_socket(family: int, bound: bytes | None) -> socket.socket:
    made = socket.socket(_FAMILIES[family], socket.SOCK_DGRAM)
    if family == 4:
        made.setsockopt(socket.SOL_SOCKET, _SO_NO_CHECK, 1)
    else:
        made.setsockopt(socket.IPPROTO_UDP, _UDP_NO_CHECK6_TX, 1)
    _bind(made, family, bound)
    return made


def _bind(made: socket.socket, family: int, bound: bytes | None) -> None:
    if bound is None:
        made.bind(("", 0))
    elif family == 4:
        made.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        made.bind((socket.inet_ntop(socket.AF_INET, bound[12:]), 0))
    else:
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        made.bind((socket.inet_ntop(socket.AF_INET6, bound), 0))


def _packet_socket(interface: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    made.bind((interface, 0))
    return made


def _send_frame(by: socket.socket, sent: Sent) -> None:
    end = sent.pending_end
    if end is None:
        header = bytes(_VNET_HEADER.size)
    elif sent.has_segments:  # of TCP: of one byte, and its checksum ends at its byte 18
        kind = _GSO_TCP_IPV4 if sent.frame[12:14] == b"\x08\x00" else _GSO_TCP_IPV6
        header = _VNET_HEADER.pack(1, kind, end + 2, 1, end - 18, 16)
    else:
        header = _VNET_HEADER.pack(1, 0, 0, 0, end - 2, 0)
    try:
        by.send(header + sent.frame)
    except OSError as error:
        # EINVAL and ENOMEM: a checksum or segments that do not match the frame.
        if error.errno in (errno.EINVAL, errno.ENOMEM):
            raise Unsendable from error
        if error.errno != errno.ENOBUFS:  # the gate dropped it
            raise


def _delete_link(name: str) -> None:
    with pyroute2.IPRoute() as netlink:
        for index in netlink.link_lookup(ifname=name):
            netlink.link("del", index=index)


def _config(gate: Gate) -> GateConfig:
    addresses = tuple(abi.unpack_address(address) for address in sorted(gate.addresses))
    return GateConfig(
        gate.mode,
        addresses[:-1],
        gate.rules,
        any_address=gate.has_any_address,
        claimed=addresses[-1:],
        without_fallback=not gate.has_fallback,
    )


def _replace(into: maps.Map, wanted: dict[bytes, bytes]) -> None:
    """All entries of a map."""
    for key, value in list(into.items()):
        if key not in wanted:
            into.delete(key)
        elif wanted[key] == value:
            del wanted[key]
    for key, value in wanted.items():
        into.set(key, value)


def _launcher(calls: int) -> bytes:
    """Sets the stamp, a VLAN tag and the length of a test frame by the context's `cb`, and sends a
    clone out by an interface, or calls the gate."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, _CB),
            a.store(6, _TC_INDEX, 2),
            a.load(3, 6, _CB + 4),
            a.unless_zero(3, a.copy(1, 6), a.move(2, 0x0081), a.call(a.VLAN_PUSH)),
            a.load(2, 6, _CB + 8),
            a.unless_zero(2, a.copy(1, 6), a.move(3, 0), a.call(a.CHANGE_TAIL)),
            a.load(2, 6, _CB + 12),
            a.unless_zero(
                2, a.copy(1, 6), a.move(3, 0), a.call(a.CLONE_REDIRECT), a.move(0, 0), a.leave()
            ),
            a.copy(1, 6),
            a.load_map(2, calls),
            a.move(3, 0),
            a.call(a.TAIL_CALL),
            a.move(0, -100),
            a.leave(),
        )
    )


def _value_of(map_fd: int) -> bytes:
    """r0: the map's only value."""
    a = assembly
    return b"".join(
        (
            a.move(2, 0),
            a.store(10, -4, 2),
            a.load_map(1, map_fd),
            a.copy(2, 10),
            a.add(2, -4),
            a.call(a.MAP_LOOKUP),
        )
    )


def _drop_without(register: int) -> bytes:
    a = assembly
    return b"".join((a.skip_unless_zero(register, 2), a.move(0, foreign.TC_ACT_SHOT), a.leave()))


def _stage(calls: int, order: int, result: int) -> bytes:
    """Puts the ordered frame in a packet's place, and calls the gate."""
    a = assembly
    change = (
        a.load(2, 9, 0),  # changed packets
        a.add(2, 1),
        a.store(9, 0, 2),
        a.copy(1, 6),
        a.copy(2, 8),
        a.move(3, 0),
        a.call(a.CHANGE_TAIL),
        a.store(9, 12, 0),
        a.unless_zero(0, a.move(0, foreign.TC_ACT_SHOT), a.leave()),
        a.copy(1, 6),
        a.move(2, 0),
        a.copy(3, 7),
        a.add(3, _FRAME_AT),
        a.copy(4, 8),
        a.move(5, 0),
        a.call(a.STORE_BYTES),
        a.load(2, 7, 4),
        a.store(6, _TC_INDEX, 2),
    )
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, _MARK_AT),
            a.unless_equal(2, MARK, a.move(0, foreign.TC_ACT_SHOT), a.leave()),
            _value_of(order),
            _drop_without(0),
            a.copy(7, 0),
            _value_of(result),
            _drop_without(0),
            a.copy(9, 0),
            a.load(8, 7, 0),
            a.unless_zero(8, a.unless_above(8, _ORDER.size - _FRAME_AT, *change)),
            a.copy(1, 6),
            a.load_map(2, calls),
            a.move(3, 0),
            a.call(a.TAIL_CALL),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )


def _witness(result: int) -> bytes:
    """Behind the gate: counts what passed, keeps its stamp, and drops it."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            _value_of(result),
            _drop_without(0),
            a.load(2, 0, 4),
            a.add(2, 1),
            a.store(0, 4, 2),
            a.load(2, 6, _TC_INDEX),
            a.store(0, 8, 2),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )


def _reentry(order: int, ifindex: int) -> bytes:
    """Stamps our frames that come in, and sends a clone, which has no socket, out by the pod's
    interface. The kernel takes the socket away in IP only."""
    a = assembly
    return b"".join(
        (
            a.copy(6, 1),
            a.load(2, 6, _MARK_AT),
            a.unless_equal(2, MARK, a.move(0, foreign.TC_ACT_UNSPEC), a.leave()),
            _value_of(order),
            _drop_without(0),
            a.load(2, 0, 4),
            a.store(6, _TC_INDEX, 2),
            a.copy(1, 6),
            a.move(2, ifindex),
            a.move(3, 0),
            a.call(a.CLONE_REDIRECT),
            a.move(0, foreign.TC_ACT_SHOT),
            a.leave(),
        )
    )
