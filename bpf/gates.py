"""Gates: the programs on one interface, what they know, and what they counted.

All methods are synchronous. `install`, `remember` and `remove` wait for the kernel's RTNL lock:
call them from one worker thread.
"""

import array
import ctypes
import dataclasses
import errno
import os
import struct
import time
from collections.abc import Iterable, Mapping

from bpf import abi, errors, loader, pins, sources, syscalls
from bpf.addresses import Addresses
from bpf.attachments import Attachment, Attachments, Direction
from bpf.rcu_map import RcuMap
from bpf.replies import ReplyFlow, ReplyTable
from bpf.rules import Rule
from bpf.verdicts import Mode, Reason, Verdict

__all__ = ["Attachment", "Counts", "GateConfig", "Gates"]

Counts = Mapping[tuple[Verdict, Reason], int]

_KEY = struct.Struct("=I")


@dataclasses.dataclass(frozen=True, slots=True)
class GateConfig:
    """What one gate knows.

    addresses: the pod's own, by which hooks and bridges know its gate; claimed: others that its
    namespace shows, which count in this gate alone; at most 16 together. rules: at most 32.
    any_address: whatever lies behind the interface is its own, and no packet a stray (the relay's
    range).
    """

    mode: Mode
    addresses: tuple[abi.IPAddress, ...]
    rules: tuple[Rule, ...] = ()
    any_address: bool = False
    claimed: tuple[abi.IPAddress, ...] = ()

    def pack(self) -> abi.CGate:
        """The value of the gates map. Raises `ValueError` when there is too much for a gate."""
        addresses = (*self.addresses, *self.claimed)
        for things, room, what in (
            (addresses, abi.GATE_ADDRESSES, "addresses"),
            (self.rules, abi.GATE_RULES, "rules"),
        ):
            if len(things) > room:
                raise ValueError(
                    f"the pod has {len(things)} {what} and a gate holds {room}; use fewer"
                )
        gate = abi.CGate(
            mode=self.mode,
            address_count=len(addresses),
            claimed_count=len(self.claimed),
            rule_count=len(self.rules),
            flags=abi.GATE_ANY_ADDRESS if self.any_address else 0,
        )
        for slot, address in zip(gate.addresses, addresses, strict=False):
            ctypes.memmove(ctypes.addressof(slot), abi.pack_address(address), 16)
        for index, rule in enumerate(self.rules):
            gate.rules[index] = rule.pack()
        return gate

    @classmethod
    def unpack(cls, value: bytes) -> "GateConfig":
        gate = abi.CGate.from_buffer_copy(value)
        addresses = [
            abi.unpack_address(bytes(address))
            for address in list(gate.addresses)[: gate.address_count]
        ]
        own = gate.address_count - gate.claimed_count
        return cls(
            Mode(gate.mode),
            tuple(addresses[:own]),
            tuple(Rule.unpack(entry) for entry in list(gate.rules)[: gate.rule_count]),
            any_address=bool(gate.flags & abi.GATE_ANY_ADDRESS),
            claimed=tuple(addresses[own:]),
        )


class Gates:
    """All gates of the node namespace that the calling thread is in."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment | None = None
    ) -> None:
        """attachment: None chooses tcx where the kernel has it, else clsact."""
        self.attachment = attachment or Attachment.best()
        self._installation = installation
        self._gates = loaded.map(abi.GATES)
        self._published = RcuMap(self._gates)
        self._counters = loaded.map(abi.COUNTERS)
        self._replies = loaded.map(abi.REPLIES)
        self._addresses = Addresses(loaded)
        for key, value in self._gates.items():
            self._addresses.set(_KEY.unpack(key)[0], GateConfig.unpack(value).addresses)
        self._addresses.retain()
        self._egress, self._ingress = (
            Attachments(
                installation,
                program,
                loaded.copies(program),
                direction,
                self.attachment,
            )
            for program, direction in (
                (abi.GATE_EGRESS, Direction.EGRESS),
                (abi.GATE_INGRESS, Direction.INGRESS),
            )
        )

    def close(self) -> None:
        """Close the netlink sockets; gates stay. To be called in the thread that installs."""
        self._egress.close()
        self._ingress.close()

    def install(self, ifindex: int, config: GateConfig, *, grace_seconds: float = 0) -> None:
        """Configure and attach; an attached gate is brought up to date without a gap.

        grace_seconds: for a pod that has been talking before there was a gate: what is not TCP
        passes for so long, counted, since it may be an answer. A gate that stands keeps what is
        left of its grace; one that is taken over from another schema gets it as a new one does,
        since the table of what the pod asked is that schema's, and ours begins empty.

        Raises `ValueError` (more than a gate holds) or `AttachError`.
        """
        key = _KEY.pack(ifindex)
        previous = self._previous(key)
        value = config.pack()
        if previous and self._egress.mark_attached(ifindex):
            value.grace_until_ns = previous.grace_until_ns
        elif grace_seconds:
            value.grace_until_ns = time.monotonic_ns() + int(grace_seconds * 1e9)
        try:
            self._published.set(key, bytes(value))
            if self._counters.get(key) is None:
                self._counters.set(key, bytes(self._counters.value_size))
            self._egress.attach(ifindex)
        except (errors.BpfError, errors.AttachError) as error:
            if previous is None:
                self._forget(key)
            raise _attach_error("gating", ifindex, error) from error
        self._addresses.set(ifindex, config.addresses)

    def configure(self, ifindex: int, config: GateConfig) -> None:
        """Change what an installed gate knows; the next packet is judged by it."""
        key = _KEY.pack(ifindex)
        value = config.pack()
        if previous := self._previous(key):
            value.grace_until_ns = previous.grace_until_ns
        self._published.set(key, bytes(value))
        self._addresses.set(ifindex, config.addresses)

    def start_reply_table(self, ifindex: int) -> bool:
        """Have an installed gate remember what the pod asks, so that the node may answer.

        Apart from `install`, because closing all pods comes first. Whether it has only begun to
        remember: then what was asked before is for `recall`. Raises `AttachError`.
        """
        key = _KEY.pack(ifindex)
        begins = ifindex not in self._ingress.attached
        is_new = False
        try:
            is_new = self._replies.get(key) is None
            if is_new:
                self._make_table(key)
            self._ingress.attach(ifindex)
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._replies.delete(key)
            raise _attach_error("remembering what the pod asks at", ifindex, error) from error
        return begins or is_new

    def fill_reply_table(self, ifindex: int, questions: Iterable[ReplyFlow]) -> bool:
        """Have a gate that remembers know what the pod asked before.

        Whether all found a place. Raises `BpfError`.
        """
        table = self._replies.get(_KEY.pack(ifindex))
        if table is None:
            return False
        with ReplyTable(_KEY.unpack(table)[0]) as opened:
            return opened.fill(questions, time.monotonic_ns())

    def end_grace(self, ifindex: int, at_ns: int) -> None:
        """Have a gate's grace end then, by CLOCK_MONOTONIC, if it would not sooner.

        Apart from `recall`, because it may take 20 ms, and nobody needs it at once. Raises
        `BpfError`.
        """
        key = _KEY.pack(ifindex)
        value = self._previous(key)
        if value is not None and value.grace_until_ns > at_ns:
            value.grace_until_ns = at_ns
            self._published.set(key, bytes(value))

    def remove(self, ifindex: int) -> None:
        """Detach and forget, whichever version's it is.

        Nothing happens where there is no gate, or no such interface.
        """
        # Egress first: as long as it judges, what the pod asks must be remembered.
        self._egress.detach(ifindex)
        self._ingress.detach(ifindex)
        self._forget(_KEY.pack(ifindex))

    def is_attached(self, ifindex: int) -> bool:
        """Whether an interface has a gate, also one that podgate-cni made just now."""
        return self._egress.mark_attached(ifindex)

    def installed(self) -> dict[int, GateConfig | None]:
        """Gates that are attached now, with what they know.

        None for those of another schema: its maps are not ours to read. They judge until they are
        installed here, or removed.

        On the way, entries of interfaces that are gone are removed, and so are attachments
        without an entry, which judge nothing.
        """
        self._egress.refresh()
        self._ingress.refresh()
        found: dict[int, GateConfig | None] = dict.fromkeys(self._egress.other_interfaces)
        for key, value in list(self._gates.items()):
            (ifindex,) = _KEY.unpack(key)
            if ifindex in self._egress.attached:
                found[ifindex] = GateConfig.unpack(value)
            # One that is attached elsewhere may run our program already: `TcxLinks.attach` swaps
            # first and moves the pin afterwards, and may have been killed in between.
            elif ifindex not in found:
                self._forget(key)
        remembering = self._ingress.attached | self._ingress.other_interfaces
        for ifindex in (self._egress.attached | remembering) - found.keys():
            self.remove(ifindex)
        return found

    def remove_stale(self) -> bool:
        """Unpin programs of other sources, and other schemas once no gate of theirs judges.

        Whether that was so. To be called when all gates are as wanted. Raises `OSError`.
        """
        self._installation.discard_other_programs(sources.fingerprint())
        if self._egress.other_interfaces | self._ingress.other_interfaces:
            return False
        for schema in self._installation.other_schemas():
            self._installation.discard_schema(schema)
        return True

    def displaced(self) -> set[int]:
        """Interfaces on which somebody else's program runs before ours at either side, or ours is
        no longer there.

        It may end the chain (TC_ACT_OK), and then the gate never sees the packet.
        """
        return {
            ifindex
            for side in (self._egress, self._ingress)
            for ifindex in side.attached
            if not _is_first(side, ifindex)
        }

    def is_first(self, ifindex: int) -> bool:
        """Whether ours run before everybody's, at both sides."""
        return all(
            _is_first(side, ifindex)
            for side in (self._egress, self._ingress)
            if ifindex in side.attached
        )

    def move_first(self, ifindex: int) -> None:
        """Put an installed gate before others' programs, without a gap. Raises `AttachError`."""
        try:
            for side in (self._egress, self._ingress):
                if ifindex in side.attached and not _is_first(side, ifindex):
                    side.move_first(ifindex)
        except errors.BpfError as error:
            raise _attach_error("moving the gate of", ifindex, error) from error

    def counts(self) -> dict[int, Counts]:
        """Node-sent packets by interface, verdict and reason, summed over CPUs; zeros left out."""
        return {
            _KEY.unpack(key)[0]: _sum_up(value)
            for key, value in self._counters.items()
            if key != abi.HOST_KEY
        }

    def host_counts(self) -> Counts:
        """The same of what was refused before an interface was chosen, by hooks and tunnels."""
        return _sum_up(self._counters.get(abi.HOST_KEY) or b"")

    def _make_table(self, key: bytes) -> None:
        spec = abi.REPLY_TABLE
        table = syscalls.map_create(spec.type, spec.key_size, spec.value_size, spec.max_entries)
        try:
            self._replies.set(key, _KEY.pack(table))
        finally:
            os.close(table)

    def _previous(self, key: bytes) -> abi.CGate | None:
        value = self._gates.get(key)
        return abi.CGate.from_buffer_copy(value) if value else None

    def _forget(self, key: bytes) -> None:
        self._addresses.forget(_KEY.unpack(key)[0])
        for table in (self._gates, self._counters, self._replies):
            table.delete(key)


def _is_first(side: Attachments, ifindex: int) -> bool:
    try:
        return side.is_first(ifindex)
    except errors.BpfError as error:
        if error.errno == errno.ENODEV:  # gone, and everything on it
            return True
        raise


def _sum_up(value: bytes) -> Counts:
    slots = abi.VERDICT_COUNT * abi.REASON_SLOTS
    per_cpu = array.array("Q", value)
    return {
        (verdict, reason): total
        for verdict in Verdict
        for reason in Reason
        if (total := sum(per_cpu[verdict * abi.REASON_SLOTS + reason :: slots]))
    }


def _attach_error(what: str, ifindex: int, error: Exception) -> errors.AttachError:
    if isinstance(error, errors.BpfError):
        return errors.AttachError(f"{what} interface {ifindex}: {error.strerror}")
    return errors.AttachError(str(error))
