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
import os
import struct
from collections.abc import Callable
from unittest import mock

import pyroute2

from agent.linux import network_setup
from bpf import abi, loader, map_specs, pins, program_specs, rcu, syscalls
from bpf.gates import Gates
from bpf.rule_evaluation import Cgroup
from bpf.verdicts import Reason, Verdict
from probes.netns import netns_cookie
from tests.kernel import foreign, gate_sockets, gate_stage
from tests.kernel.gate_sockets import OpenSocket, Unsendable, packet_socket
from tests.kernel.gate_tables import OTHER_IFINDEX, StateTables
from tests.model import generator
from tests.model.facts import LOOPBACK, Kind, Sent, Socket, Stamp, State
from tests.model.generator import Way

_KEY = bytes(4)
_NUMBER = struct.Struct("=I")
_COUNTS = struct.Struct(f"={abi.COUNTER_SLOTS}Q")
_ARRAY = 2
_SCHED_CLS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """verdict: None if nothing was counted; stamp: None if that is unknown, or it was dropped."""

    verdict: tuple[Verdict, Reason] | None
    is_dropped: bool
    stamp: Stamp | None = None


class GateRuns:
    """One gated interface in the current namespace. A context manager."""

    def __init__(self, loaded: loader.Loaded, installation: pins.Pins, cgroup: Cgroup) -> None:
        self._loaded = loaded
        with contextlib.ExitStack() as undo:
            # Nothing else runs these programs while a configuration changes.
            undo.enter_context(mock.patch.object(rcu, "wait_for_programs"))
            self.ifindex = self._make_interfaces(undo)
            self._gates = Gates(loaded, installation)
            undo.callback(self._gates.close)
            self._counters = loaded.map(map_specs.COUNTERS)
            self._frequent = loaded.map(map_specs.FREQUENT_COUNTS)
            self._make_programs(undo)
            self._gates.start_reply_tables([self.ifindex])
            self._tables = StateTables(loaded, installation, self.ifindex, netns_cookie() or 0)
            undo.callback(self._tables.close)
            self._sockets = list(gate_sockets.open_sockets(loaded, cgroup, undo))
            self._again = {LOOPBACK: packet_socket("lo")}
            self._again[generator.INJECTABLE] = packet_socket("in0")
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
        return abi.FIRST_SLOT + self.ifindex, abi.FIRST_SLOT + OTHER_IFINDEX % abi.MAX_GATES

    # States

    def apply(self, state: State) -> None:
        """Put a state into the maps: without flows and fragments, which packets make."""
        self._tables.apply(state)
        self._slot = abi.FIRST_SLOT + self.ifindex if state.gate else abi.FALLBACK_SLOT
        self._last = self._counts()

    def age(self, by_ns: int) -> None:
        """Make all flows and fragments older."""
        self._tables.age(by_ns)

    def record(self, frame: bytes, stamp: Stamp = Stamp.NONE) -> Stamp:
        """A frame from the pod. Returns its stamp afterwards, which only the program of a node with
        Open vSwitch shows: in the priority. Raises `Unsendable`."""
        context = bytearray(gate_stage.CONTEXT_BYTES)
        _NUMBER.pack_into(context, gate_stage.IFINDEX, self.ifindex)
        _NUMBER.pack_into(context, gate_stage.CB, gate_stage.number_of(stamp, frame))
        if len(frame) < gate_stage.SHORTEST_RUN:
            raise Unsendable
        returned, _ = syscalls.run_program(self._pod_launcher, frame, context)
        assert returned == -1, returned
        (priority,) = _NUMBER.unpack_from(context, gate_stage.PRIORITY)
        return gate_stage.STAMP_OF.get(priority >> 16, Stamp.NONE)

    # Frames

    def run(self, way: Way, sent: Sent) -> Found:
        """Raises `Unsendable`."""
        match way.name:
            case generator.RUN:
                action = gate_stage.run_frame(self._launcher, sent, self.ifindex)
                return Found(self._moved(), action == foreign.TC_ACT_SHOT)
            case generator.LOST:
                gate_stage.run_frame(self._launcher, sent, self.ifindex, clone_to=self.ifindex)
            case generator.SOCKET:
                self._send(self._sockets[way.socket], sent)
            case generator.PAIR:
                if (
                    sent.frame[12:14] in gate_sockets.TAGS
                ):  # the kernel removes them, or drops the frame
                    raise Unsendable
                self._order(b"", gate_stage.number_of(sent.stamp, sent.frame))
                gate_sockets.send_frame(self._again[sent.ingress], sent)
        verdict = self._moved()
        before, self._result = self._result, self._read_result()
        is_dropped = self._result[1] == before[1]
        stamp = None if is_dropped else gate_stage.STAMP_OF.get(self._result[2], Stamp.NONE)
        return Found(verdict, is_dropped, stamp)

    def run_send(self, send: Callable[[], object]) -> Found:
        """What the gate does with what a call sends by a socket with `MARK`."""
        send()
        verdict = self._moved()
        before, self._result = self._result, self._read_result()
        return Found(verdict, self._result[1] == before[1])

    def _send(self, source: OpenSocket, sent: Sent) -> None:
        kind = source.described.kind
        if kind is Kind.PACKET:
            assert source.send is not None
            gate_sockets.send_frame(source.send, sent)
            return
        self._order(sent.frame, gate_stage.number_of(sent.stamp, sent.frame))
        changed = self._result[0]
        try:
            if kind is Kind.TCP:
                gate_sockets.send_segment(self._loaded, source)
            else:
                assert source.send is not None
                to = "198.18.1.1" if source.family == 4 else "fd00:18:0:1::1"
                port = 9 if kind in (Kind.UDP, Kind.UDPLITE) else 0
                with contextlib.suppress(OSError):  # ENOBUFS: the gate dropped it
                    source.send.sendto(gate_sockets.ORIGINAL, (to, port))
        finally:
            self._order(b"", 0)
        after = self._read_result()
        if after[0] != changed + 1 or after[3]:
            self._last, self._result = self._counts(), after
            raise Unsendable

    def _order(self, frame: bytes, stamp: int) -> None:
        if len(frame) > gate_stage.ORDER.size - gate_stage.FRAME_AT:
            raise Unsendable
        syscalls.map_update(self._order_map, _KEY, gate_stage.ORDER.pack(len(frame), stamp, frame))

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
        value = syscalls.map_lookup(self._result_map, _KEY, gate_stage.RESULT.size)
        assert value is not None
        changed, passed, stamp, problem = gate_stage.RESULT.unpack(value)
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
        calls, from_pod = (
            self._calls(undo, name)
            for name in (program_specs.GATE_EGRESS, program_specs.GATE_INGRESS)
        )
        self._order_map = syscalls.map_create(_ARRAY, 4, gate_stage.ORDER.size, 1)
        undo.callback(os.close, self._order_map)
        self._result_map = syscalls.map_create(_ARRAY, 4, gate_stage.RESULT.size, 1)
        undo.callback(os.close, self._result_map)
        self._launcher, self._pod_launcher = (
            syscalls.program_load(_SCHED_CLS, gate_stage.launcher(called))
            for called in (calls, from_pod)
        )
        undo.callback(os.close, self._launcher)
        undo.callback(os.close, self._pod_launcher)
        drop = foreign.load_program(foreign.TC_ACT_SHOT)
        undo.callback(os.close, drop)
        for name, code, where in (
            (
                "pod0",
                gate_stage.stage(calls, self._order_map, self._result_map),
                syscalls.BPF_TCX_EGRESS,
            ),
            ("pod0", gate_stage.witness(self._result_map), syscalls.BPF_TCX_EGRESS),
            ("in1", gate_stage.reentry(self._order_map, self.ifindex), syscalls.BPF_TCX_INGRESS),
            ("lo", gate_stage.reentry(self._order_map, self.ifindex), syscalls.BPF_TCX_INGRESS),
        ):
            program = syscalls.program_load(_SCHED_CLS, code)
            undo.callback(os.close, program)
            link = syscalls.link_create_tcx(program, self._indexes[name], where, 0)
            undo.callback(os.close, link)

    def _calls(self, undo: contextlib.ExitStack, program: str) -> int:
        """A map by which other programs call this one."""
        made = syscalls.map_create(gate_stage.PROG_ARRAY, 4, 4, 1)
        undo.callback(os.close, made)
        syscalls.map_update(made, _KEY, _NUMBER.pack(self._loaded.programs[program]))
        return made


def _delete_link(name: str) -> None:
    with pyroute2.IPRoute() as netlink:
        for index in netlink.link_lookup(ifname=name):
            netlink.link("del", index=index)
