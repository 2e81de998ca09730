"""Gates: the programs on pod interfaces, their configuration and their counters.

All methods are synchronous. `install`, `start_reply_table` and `remove` wait for the kernel's RTNL
lock: call them from one worker thread.
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
from bpf.replies import ReplyFlow, ReplyKey, ReplyTable
from bpf.rules import Rule
from bpf.verdicts import Mode, Reason, Verdict

__all__ = ["Attachment", "Counts", "GateConfig", "Gates"]

Counts = Mapping[tuple[Verdict, Reason], int]

_KEY = struct.Struct("=I")


@dataclasses.dataclass(frozen=True, slots=True)
class GateConfig:
    """The configuration of one gate.

    addresses: the pod's confirmed addresses, by which hooks and bridges find its gate; claimed:
    other addresses in its namespace, which count in this gate alone; at most 16 together. rules: at
    most 32. any_address: all addresses behind the interface are the pod's (the relay's range).
    without_fallback: in strict the kubelet is never admitted, with a relay or without.
    """

    mode: Mode
    addresses: tuple[abi.IPAddress, ...]
    rules: tuple[Rule, ...] = ()
    any_address: bool = False
    claimed: tuple[abi.IPAddress, ...] = ()
    without_fallback: bool = False

    def pack(self) -> abi.CGate:
        """The value of the gates map. Raises `ValueError` for too many addresses or rules."""
        addresses = (*self.addresses, *self.claimed)
        for entries, maximum, what in (
            (addresses, abi.GATE_ADDRESSES, "addresses"),
            (self.rules, abi.GATE_RULES, "rules"),
        ):
            if len(entries) > maximum:
                raise ValueError(
                    f"the pod has {len(entries)} {what} and a gate holds {maximum}; use fewer"
                )
        gate = abi.CGate(
            mode=self.mode,
            address_count=len(addresses),
            claimed_count=len(self.claimed),
            rule_count=len(self.rules),
            flags=(abi.GATE_ANY_ADDRESS if self.any_address else 0)
            | (abi.GATE_NO_FALLBACK if self.without_fallback else 0),
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
            without_fallback=bool(gate.flags & abi.GATE_NO_FALLBACK),
        )


class Gates:
    """All gates of the host network namespace, which the calling thread must be in."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment | None = None
    ) -> None:
        """attachment: None chooses tcx where the kernel has it, otherwise clsact."""
        self.attachment = attachment or Attachment.best()
        self._installation = installation
        self._gates = loaded.map(abi.GATES)
        self._gate_values = RcuMap(self._gates)
        self._counters = loaded.map(abi.COUNTERS)
        self._replies = loaded.map(abi.REPLIES)
        self._reply_key = ReplyKey.ensure(loaded)
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
        """Close the netlink sockets; gates stay. Call it in the thread that installs."""
        self._egress.close()
        self._ingress.close()

    def install(self, ifindex: int, config: GateConfig, *, grace_seconds: float = 0) -> None:
        """Configure and attach; an attached gate is updated without a gap.

        grace_seconds: the grace period, for a pod that had flows before its gate: packets other
        than TCP pass, counted, since they may be replies. An attached gate keeps the rest of its
        grace period. A gate taken over from another schema gets a new one, since the reply table is
        that schema's, and ours is empty.

        Raises `ValueError` (too many addresses or rules) or `AttachError`.
        """
        key = _KEY.pack(ifindex)
        previous = self._previous(key)
        value = config.pack()
        if previous and self._egress.mark_attached(ifindex):
            value.grace_until_ns = previous.grace_until_ns
        elif grace_seconds:
            value.grace_until_ns = time.monotonic_ns() + int(grace_seconds * 1e9)
        try:
            self._gate_values.set(key, bytes(value))
            if self._counters.get(key) is None:
                self._counters.set(key, bytes(self._counters.value_size))
            self._egress.attach(ifindex)
        except (errors.BpfError, errors.AttachError) as error:
            if previous is None:
                self._forget(key)
            raise _attach_error("cannot attach the gate to", ifindex, error) from error
        self._addresses.set(ifindex, config.addresses)

    def configure(self, ifindex: int, config: GateConfig) -> None:
        """Change an installed gate's configuration, from the next packet on."""
        key = _KEY.pack(ifindex)
        value = config.pack()
        if previous := self._previous(key):
            value.grace_until_ns = previous.grace_until_ns
        self._gate_values.set(key, bytes(value))
        self._addresses.set(ifindex, config.addresses)

    def start_reply_table(self, ifindex: int) -> bool:
        """Record the pod's flows from now on, so that replies from the host pass.

        Separate from `install`, because enforcing for all pods comes first. Returns whether the
        recording is new: then `fill_reply_table` adds earlier flows. Raises `AttachError`.
        """
        key = _KEY.pack(ifindex)
        was_attached = ifindex in self._ingress.attached
        is_new = False
        try:
            is_new = self._replies.get(key) is None
            if is_new:
                self._make_table(key)
            self._ingress.attach(ifindex)
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._replies.delete(key)
            raise _attach_error("cannot record the pod's flows on", ifindex, error) from error
        return not was_attached or is_new

    def fill_reply_table(self, ifindex: int, flows: Iterable[ReplyFlow]) -> bool:
        """Add flows from before `start_reply_table` to a gate's reply table.

        Whether all of them had a free slot. Raises `BpfError`.
        """
        table = self._replies.get(_KEY.pack(ifindex))
        if table is None:
            return False
        with ReplyTable(_KEY.unpack(table)[0]) as opened:
            return opened.fill(flows, self._reply_key, time.monotonic_ns())

    def end_grace(self, ifindex: int, at_ns: int) -> None:
        """End a gate's grace period at `at_ns` (CLOCK_MONOTONIC), unless it ends sooner.

        Separate from `fill_reply_table`, because it may take 20 ms and is not urgent. Raises
        `BpfError`.
        """
        key = _KEY.pack(ifindex)
        value = self._previous(key)
        if value is not None and value.grace_until_ns > at_ns:
            value.grace_until_ns = at_ns
            self._gate_values.set(key, bytes(value))

    def remove(self, ifindex: int) -> None:
        """Detach any version's gate and delete its entries.

        Does nothing if the gate or the interface does not exist.
        """
        # Egress first: while it enforces, ingress must record the pod's flows.
        self._egress.detach(ifindex)
        self._ingress.detach(ifindex)
        self._forget(_KEY.pack(ifindex))

    def is_attached(self, ifindex: int) -> bool:
        """Whether an interface has a gate, also one that podgate-cni has just attached."""
        return self._egress.mark_attached(ifindex)

    def installed(self) -> dict[int, GateConfig | None]:
        """The attached gates, with their configurations.

        None for gates of another schema, whose maps cannot be read. They enforce until they are
        installed here, or removed.

        Also removes entries of deleted interfaces, and attachments without an entry, which do
        nothing.
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
        recording = self._ingress.attached | self._ingress.other_interfaces
        for ifindex in (self._egress.attached | recording) - found.keys():
            self.remove(ifindex)
        return found

    def remove_stale(self) -> bool:
        """Unpin programs of other sources, and other schemas once none of their gates is attached.

        Returns whether none was. Call it when all gates are as desired. Raises `OSError`.
        """
        self._installation.discard_other_programs(sources.fingerprint())
        if self._egress.other_interfaces | self._ingress.other_interfaces:
            return False
        for schema in self._installation.other_schemas():
            self._installation.discard_schema(schema)
        return True

    def displaced(self) -> set[int]:
        """Interfaces on which another program runs before ours in either direction, or ours is no
        longer attached.

        The other program may end the chain (TC_ACT_OK); then the gate never sees the packet.
        """
        return {
            ifindex
            for side in (self._egress, self._ingress)
            for ifindex in side.attached
            if not _is_first(side, ifindex)
        }

    def is_first(self, ifindex: int) -> bool:
        """Whether our programs run before all others, in both directions."""
        return all(
            _is_first(side, ifindex)
            for side in (self._egress, self._ingress)
            if ifindex in side.attached
        )

    def move_first(self, ifindex: int) -> None:
        """Move an installed gate before other programs, without a gap. Raises `AttachError`."""
        try:
            for side in (self._egress, self._ingress):
                if ifindex in side.attached and not _is_first(side, ifindex):
                    side.move_first(ifindex)
        except errors.BpfError as error:
            raise _attach_error("cannot move the gate of", ifindex, error) from error

    def counts(self) -> dict[int, Counts]:
        """Host-sent packets by interface, verdict and reason, summed over CPUs, without zeros."""
        return {
            _KEY.unpack(key)[0]: _sum_up(value)
            for key, value in self._counters.items()
            if key != abi.HOST_KEY
        }

    def host_counts(self) -> Counts:
        """The same for drops before an interface was chosen, by hooks and the tunnel gate."""
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
        if error.errno == errno.ENODEV:  # deleted, with everything attached to it
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
