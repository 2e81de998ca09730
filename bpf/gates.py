"""Gates: the programs on one interface, what they know, and what they counted.

All methods are synchronous. `install`, `remember` and `remove` wait for the kernel's RTNL lock:
call them from one worker thread.
"""

import array
import ctypes
import dataclasses
import os
import struct
import time
from collections.abc import Iterable, Mapping

from bpf import abi, errors, loader, pins, syscalls
from bpf.attachments import Attachment, Attachments, Direction
from bpf.replies import Question, ReplyTable
from bpf.rules import Rule
from bpf.verdicts import Mode, Reason, Verdict

__all__ = ["Attachment", "Counts", "GateConfig", "Gates"]

Counts = Mapping[tuple[Verdict, Reason], int]

_KEY = struct.Struct("=I")


@dataclasses.dataclass(frozen=True, slots=True)
class GateConfig:
    """What one gate knows.

    addresses: all of the pod's netns but loopback, at most 16; rules: at most 32.
    """

    mode: Mode
    addresses: tuple[abi.IPAddress, ...]
    rules: tuple[Rule, ...] = ()

    def pack(self) -> abi.Gate:
        """The value of the gates map. Raises `ValueError` when there is too much for a gate."""
        for things, room, what in (
            (self.addresses, abi.GATE_ADDRESSES, "addresses"),
            (self.rules, abi.GATE_RULES, "rules"),
        ):
            if len(things) > room:
                raise ValueError(
                    f"the pod has {len(things)} {what} and a gate holds {room}; use fewer"
                )
        gate = abi.Gate(
            mode=self.mode, address_count=len(self.addresses), rule_count=len(self.rules)
        )
        for slot, address in zip(gate.addresses, self.addresses, strict=False):
            ctypes.memmove(ctypes.addressof(slot), abi.pack_address(address), 16)
        for index, rule in enumerate(self.rules):
            gate.rules[index] = rule.pack()
        return gate

    @classmethod
    def unpack(cls, value: bytes) -> "GateConfig":
        gate = abi.Gate.from_buffer_copy(value)
        addresses = list(gate.addresses)[: gate.address_count]
        return cls(
            Mode(gate.mode),
            tuple(abi.unpack_address(bytes(address)) for address in addresses),
            tuple(Rule.unpack(entry) for entry in list(gate.rules)[: gate.rule_count]),
        )


class Gates:
    """All gates of the node namespace that the calling thread is in."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment | None = None
    ) -> None:
        """attachment: None chooses tcx where the kernel has it, else clsact."""
        self.attachment = attachment or Attachment.best()
        self._gates = loaded.map(abi.GATES)
        self._counters = loaded.map(abi.COUNTERS)
        self._replies = loaded.map(abi.REPLIES)
        self._egress, self._ingress = (
            Attachments(installation, program, loaded.programs[program], direction, self.attachment)
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
        left of its grace.

        Raises `ValueError` (more than a gate holds) or `AttachError`.
        """
        key = _KEY.pack(ifindex)
        is_new = self._previous(key) is None
        value = self._value(key, config)
        if is_new and grace_seconds:
            value.grace_until_ns = time.monotonic_ns() + int(grace_seconds * 1e9)
        try:
            self._gates.set(key, bytes(value))
            if self._counters.get(key) is None:
                self._counters.set(key, bytes(self._counters.value_size))
            if self._egress.attach(ifindex, made_qdisc=bool(value.made_qdisc)):
                value.made_qdisc = 1
                self._gates.set(key, bytes(value))
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._forget(key)
            raise _attach_error("gating", ifindex, error) from error

    def configure(self, ifindex: int, config: GateConfig) -> None:
        """Change what an installed gate knows; the next packet is judged by it."""
        key = _KEY.pack(ifindex)
        self._gates.set(key, bytes(self._value(key, config)))

    def remember(self, ifindex: int) -> bool:
        """Have an installed gate remember what the pod asks, so that the node may answer.

        Apart from `install`, because closing all pods comes first. Whether it has only begun to
        remember: then what was asked before is for `recall`. Raises `AttachError`.
        """
        key = _KEY.pack(ifindex)
        spec = abi.REPLY_TABLE
        is_new = False
        try:
            is_new = self._replies.get(key) is None
            if is_new:
                table = syscalls.map_create(
                    spec.type, spec.key_size, spec.value_size, spec.max_entries
                )
                try:
                    self._replies.set(key, _KEY.pack(table))
                finally:
                    os.close(table)
            previous = self._previous(key)
            self._ingress.attach(ifindex, made_qdisc=bool(previous and previous.made_qdisc))
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._replies.delete(key)
            raise _attach_error("remembering what the pod asks at", ifindex, error) from error
        return is_new

    def recall(
        self, ifindex: int, questions: Iterable[Question], *, is_complete: bool = False
    ) -> bool:
        """Have a gate that remembers know what the pod asked before.

        is_complete: the pod waits for no other answer, so its grace ends if all found a place.
        Whether it ended. Raises `BpfError`.
        """
        key = _KEY.pack(ifindex)
        table = self._replies.get(key)
        value = self._previous(key)
        if table is None or value is None:
            return False
        with ReplyTable(_KEY.unpack(table)[0]) as opened:
            have_all_room = opened.fill(questions, time.monotonic_ns())
        if not (is_complete and have_all_room):
            return False
        value.grace_until_ns = 0
        self._gates.set(key, bytes(value))
        return True

    def remove(self, ifindex: int) -> None:
        """Detach and forget. Nothing happens where there is no gate, or no such interface."""
        key = _KEY.pack(ifindex)
        previous = self._previous(key)
        self._ingress.detach(ifindex, remove_qdisc=False)
        self._egress.detach(ifindex, remove_qdisc=bool(previous and previous.made_qdisc))
        self._forget(key)

    def installed(self) -> dict[int, GateConfig]:
        """Gates that are attached now, with what they know.

        On the way, entries of interfaces that are gone are removed, and so are attachments
        without an entry, which judge nothing.
        """
        attached = self._egress.look()
        remembering = self._ingress.look()
        found = {}
        for key, value in list(self._gates.items()):
            (ifindex,) = _KEY.unpack(key)
            if ifindex in attached:
                found[ifindex] = GateConfig.unpack(value)
            else:
                self._forget(key)
        for ifindex in (attached | remembering) - found.keys():
            self.remove(ifindex)
        return found

    def counts(self) -> dict[int, Counts]:
        """Node-sent packets by interface, verdict and reason, summed over CPUs; zeros left out."""
        slots = abi.VERDICT_COUNT * abi.REASON_SLOTS
        result: dict[int, Counts] = {}
        for key, value in self._counters.items():
            per_cpu = array.array("Q", value)
            chunks = (per_cpu[start : start + slots] for start in range(0, len(per_cpu), slots))
            totals = [sum(column) for column in zip(*chunks, strict=True)]
            result[_KEY.unpack(key)[0]] = {
                (verdict, reason): total
                for verdict in Verdict
                for reason in Reason
                if (total := totals[verdict * abi.REASON_SLOTS + reason])
            }
        return result

    def _value(self, key: bytes, config: GateConfig) -> abi.Gate:
        """The packed config, with what is kept of the value that it replaces."""
        value = config.pack()
        if previous := self._previous(key):
            value.made_qdisc, value.grace_until_ns = previous.made_qdisc, previous.grace_until_ns
        return value

    def _previous(self, key: bytes) -> abi.Gate | None:
        value = self._gates.get(key)
        return abi.Gate.from_buffer_copy(value) if value else None

    def _forget(self, key: bytes) -> None:
        for table in (self._gates, self._counters, self._replies):
            table.delete(key)


def _attach_error(what: str, ifindex: int, error: Exception) -> errors.AttachError:
    if isinstance(error, errors.BpfError):
        return errors.AttachError(f"{what} interface {ifindex}: {error.strerror}")
    return errors.AttachError(str(error))
