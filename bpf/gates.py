"""Gates: one program on one interface, what it knows, and what it counted.

All methods are synchronous. `install` and `remove` wait for the kernel's RTNL lock: call them from
one worker thread.
"""

import array
import dataclasses
import enum
import struct
from collections.abc import Mapping

from bpf import abi, clsact, errors, loader, pins, tcx
from bpf.verdicts import Mode, Reason, Verdict

Counts = Mapping[tuple[Verdict, Reason], int]

_KEY = struct.Struct("=I")


class Attachment(enum.StrEnum):
    """How a gate hangs on its interface."""

    TCX = "tcx"
    CLSACT = "clsact"


@dataclasses.dataclass(frozen=True, slots=True)
class GateConfig:
    """What one gate knows. `addresses`: all of the pod's netns but loopback, at most 16."""

    mode: Mode
    addresses: tuple[abi.IPAddress, ...]


class Gates:
    """All gates of the node namespace that the calling thread is in."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment | None = None
    ) -> None:
        """attachment: None chooses tcx where the kernel has it, else clsact."""
        program_fd = loaded.programs[abi.GATE_EGRESS]
        self._gates = loaded.gates
        self._counters = loaded.counters
        self._links = tcx.TcxLinks(installation, abi.GATE_EGRESS, program_fd)
        self._filters = clsact.ClsactFilters(abi.GATE_EGRESS, program_fd)
        if attachment is None:
            is_tcx = tcx.TcxLinks.is_supported()
            attachment = Attachment.TCX if is_tcx else Attachment.CLSACT
        self.attachment = attachment
        # Looked up once: a gate found hanging the other way is moved when it is next installed.
        self._linked = self._links.attached()
        self._filtered = self._filters.attached()

    def close(self) -> None:
        """Close the netlink socket; gates stay. To be called in the thread that installs."""
        self._filters.close()

    def install(self, ifindex: int, config: GateConfig) -> None:
        """Configure and attach; an attached gate is brought up to date without a gap.

        Raises `ValueError` (more addresses than a gate holds) or `AttachError`.
        """
        key = _key(ifindex)
        is_new = self._gates.get(key) is None
        made_qdisc = self._made_qdisc(key)
        try:
            self._write(key, config, made_qdisc=made_qdisc)
            if self._counters.get(key) is None:
                self._counters.set(key, bytes(self._counters.value_size))
            if self.attachment is Attachment.TCX:
                self._links.attach(ifindex)
                self._linked.add(ifindex)
                self._detach_filter(ifindex, made_qdisc=made_qdisc)
            else:
                made_qdisc |= self._filters.attach(ifindex)
                self._filtered.add(ifindex)
                self._write(key, config, made_qdisc=made_qdisc)
                self._detach_link(ifindex)
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._forget(key)
            if isinstance(error, errors.AttachError):
                raise
            raise errors.AttachError(f"gating interface {ifindex}: {error.strerror}") from error

    def configure(self, ifindex: int, config: GateConfig) -> None:
        """Change what an installed gate knows; the next packet is judged by it."""
        key = _key(ifindex)
        self._write(key, config, made_qdisc=self._made_qdisc(key))

    def remove(self, ifindex: int) -> None:
        """Detach and forget. Nothing happens where there is no gate, or no such interface."""
        key = _key(ifindex)
        self._detach_link(ifindex)
        self._detach_filter(ifindex, made_qdisc=self._made_qdisc(key))
        self._forget(key)

    def installed(self) -> dict[int, GateConfig]:
        """Gates that are attached now, with what they know.

        On the way, entries of interfaces that are gone are removed, and so are attachments
        without an entry, which judge nothing.
        """
        self._linked = self._links.attached()
        self._filtered = self._filters.attached()
        attached = self._linked | self._filtered
        found = {}
        for key, value in list(self._gates.items()):
            (ifindex,) = _KEY.unpack(key)
            if ifindex in attached:
                mode, addresses = abi.unpack_gate(value)
                found[ifindex] = GateConfig(Mode(mode), addresses)
            else:
                self._forget(key)
        for ifindex in attached - found.keys():
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

    def _detach_link(self, ifindex: int) -> None:
        if ifindex in self._linked:
            self._links.detach(ifindex)
            self._linked.discard(ifindex)

    def _detach_filter(self, ifindex: int, *, made_qdisc: bool) -> None:
        if ifindex in self._filtered:
            self._filters.detach(ifindex, remove_qdisc=made_qdisc)
            self._filtered.discard(ifindex)

    def _write(self, key: bytes, config: GateConfig, *, made_qdisc: bool) -> None:
        self._gates.set(key, abi.pack_gate(config.mode, config.addresses, made_qdisc=made_qdisc))

    def _made_qdisc(self, key: bytes) -> bool:
        value = self._gates.get(key)
        return bool(value and abi.Gate.from_buffer_copy(value).made_qdisc)

    def _forget(self, key: bytes) -> None:
        self._gates.delete(key)
        self._counters.delete(key)


def _key(ifindex: int) -> bytes:
    return _KEY.pack(ifindex)
