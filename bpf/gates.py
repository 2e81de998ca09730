"""Gates: the programs on pod interfaces, their configuration and their counters.

All methods are synchronous. `install`, `start_reply_table` and `remove` wait for the kernel's RTNL
lock: call them from one worker thread.
"""

import contextlib
import dataclasses
import errno
import functools
import os
import socket
import struct
import time
from collections.abc import Callable, Container, Iterable

from bpf import errors, loader, map_specs, maps, pins, program_specs, sources
from bpf.addresses import Addresses
from bpf.attachment import Attachment
from bpf.attachments import Attachments, Direction, GateCheck
from bpf.counters import Counters, Counts
from bpf.gate_config import GateConfig
from bpf.gate_table import GateTable
from bpf.replies import ReplyFlow, ReplyKey, ReplyTable
from bpf.verdicts import Mode

__all__ = ["Attachment", "Counts", "GateCheck", "GateConfig", "Gates"]

_KEY = struct.Struct("=I")


class Gates:
    """All gates of the host network namespace, which the calling thread must be in."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, attachment: Attachment | None = None
    ) -> None:
        """attachment: None chooses tcx where the kernel has it, otherwise clsact."""
        self.attachment = attachment or Attachment.best()
        self.breathe: Callable[[], None] = lambda: None
        """Called between the steps of long calls, in each of which the kernel may be waited for:
        for repairs that cannot wait as long as all of them."""
        self._installation = installation
        self._table = GateTable(loaded, installation.maps)
        self._counters = Counters(loaded)
        self._replies = loaded.map(map_specs.REPLIES)
        self._reply_template = loaded.map(map_specs.REPLY_TABLE)
        self._reply_key = ReplyKey.ensure(loaded)
        self._addresses = Addresses(loaded)
        for ifindex in self._table.interfaces():
            if config := self._table.get(ifindex):
                self._addresses.set(ifindex, config.addresses, config.pod)
        self._addresses.retain()
        self._egress, self._ingress = (
            Attachments(
                installation,
                program,
                functools.partial(loaded.copies, program),
                direction,
                self.attachment,
            )
            for program, direction in (
                (program_specs.GATE_EGRESS, Direction.EGRESS),
                (program_specs.GATE_INGRESS, Direction.INGRESS),
            )
        )

    def close(self) -> None:
        """Close the netlink sockets; gates stay. Call it in the thread that installs."""
        self._egress.close()
        self._ingress.close()
        self._table.close()

    def install(
        self, ifindex: int, config: GateConfig, *, grace_seconds: float = 0, quickly: bool = False
    ) -> str:
        """Configure and attach; an attached gate is updated without a gap.

        grace_seconds: the grace period, for a pod that had flows before its gate: packets other
        than TCP pass, counted, since they may be replies. An attached gate keeps the rest of its
        grace period. A gate taken over from another schema gets a new one, since the reply table is
        that schema's, and ours is empty.

        quickly: as `Attachments.attach`; `settle` it later.

        Returns a sentence on what the gate has no room for, and so drops, or "". Raises
        `AttachError`.
        """
        grace_until_ns = self._table.grace_until_ns(ifindex)
        is_new = grace_until_ns is None
        is_kept = grace_until_ns is not None and self._egress.mark_attached(ifindex)
        if not is_kept and grace_seconds:
            grace_until_ns = time.monotonic_ns() + int(grace_seconds * 1e9)
        elif not is_kept:
            grace_until_ns = 0
        try:
            problem = self._configure(ifindex, config, grace_until_ns or 0)
            self._egress.attach(ifindex, quickly=quickly)
        except (errors.BpfError, errors.AttachError) as error:
            if is_new:
                self._forget(ifindex)
            raise _attach_error("cannot attach the gate to", ifindex, error) from error
        self._addresses.set(ifindex, config.addresses, config.pod)
        return problem

    def configure(self, ifindex: int, config: GateConfig) -> str:
        """Change an installed gate's configuration, from the next packet on.

        Returns what `install` does.
        """
        problem = self._configure(ifindex, config, self._table.grace_until_ns(ifindex) or 0)
        self._addresses.set(ifindex, config.addresses, config.pod)
        return problem

    def start_reply_tables(
        self, ifindexes: Iterable[int], *, quickly: bool = False
    ) -> dict[int, bool | errors.AttachError]:
        """Record these pods' flows from now on, so that replies from the host pass.

        Separate from `install`, because enforcing for all pods comes first, and for many at once,
        since the kernel waits for RCU when a map of maps changes: one wait for all of them.
        quickly: as `install`.

        Returns for each gate whether the recording is new: then `fill_reply_table` adds earlier
        flows. Or why it could not be started, which concerns no other gate.
        """
        results: dict[int, bool | errors.AttachError] = {}
        ifindexes = list(ifindexes)
        missing = {i for i in ifindexes if self._replies.get(_KEY.pack(i)) is None}
        problems = self._make_tables(missing)
        for ifindex in ifindexes:
            self.breathe()
            was_attached = ifindex in self._ingress.attached
            try:
                if ifindex in problems:
                    raise problems[ifindex]
                self._ingress.attach(ifindex, quickly=quickly)
            except (errors.BpfError, errors.AttachError) as error:
                if ifindex in missing:
                    self._replies.delete(_KEY.pack(ifindex))
                results[ifindex] = problem = _attach_error(
                    "cannot record the pod's flows on", ifindex, error
                )
                problem.__cause__ = error
            else:
                results[ifindex] = not was_attached or ifindex in missing
        return results

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
        self._table.end_grace(ifindex, at_ns)

    @property
    def unsettled(self) -> set[int]:
        """Interfaces whose gates were attached quickly and are to be settled."""
        return self._egress.unlinked | self._ingress.unlinked

    def settle(self, ifindex: int) -> bool:
        """Attach one side of a gate that was attached quickly as others are, without a gap; whether
        the other side is still to be settled.

        Takes 15 ms under RTNL. Raises `AttachError`.
        """
        try:
            if ifindex in self._egress.unlinked:
                self._egress.attach(ifindex)
            elif ifindex in self._ingress.unlinked:
                self._ingress.attach(ifindex)
            return ifindex in self.unsettled
        except errors.BpfError as error:
            raise _attach_error("cannot settle the gate of", ifindex, error) from error

    def remove(self, ifindex: int) -> None:
        """Detach any version's gate and delete its entries.

        Does nothing if the gate or the interface does not exist.
        """
        # Egress first: while it enforces, ingress must record the pod's flows.
        self._egress.detach(ifindex)
        self._ingress.detach(ifindex)
        self._forget(ifindex)

    def open(self, ifindexes: Iterable[int]) -> None:
        """Let these gates pass everything, from the next packet on; they stay attached.

        To detach a gate takes 20 to 50 ms (RCU, under RTNL), to open all of them one such wait.
        `install` closes a gate again. Raises `BpfError`.
        """
        for ifindex in ifindexes:
            if config := self._table.get(ifindex):
                grace_until_ns = self._table.grace_until_ns(ifindex) or 0
                opened = dataclasses.replace(config, mode=Mode.OFF)
                self._table.set(ifindex, opened, grace_until_ns)

    def is_in_chain(self, ifindex: int) -> bool:
        """Whether an interface has this schema's gate, as the kernel has it now."""
        return self._egress.is_in_chain(ifindex)

    def is_attached(self, ifindex: int) -> bool:
        """Whether an interface has a gate, also one that podgate-cni has just attached."""
        return self._egress.mark_attached(ifindex)

    def mode_of(self, ifindex: int) -> Mode:
        """The mode of the gate on an interface; OFF without one."""
        config = self._table.get(ifindex) if self.is_attached(ifindex) else None
        return config.mode if config else Mode.OFF

    def installed(self) -> dict[int, GateConfig | None]:
        """The attached gates, with their configurations.

        None for gates of another schema, whose maps cannot be read, and for those that found no
        place in the maps. They enforce until they are installed here, or removed.

        Also removes entries of deleted interfaces.
        """
        for side in (self._egress, self._ingress):
            side.refresh()
            side.expected = {ifindex for ifindex in side.expected if _exists(ifindex)}
        found: dict[int, GateConfig | None] = dict.fromkeys(
            self._egress.other_interfaces | self._egress.attached
        )
        for ifindex in self._table.interfaces():
            if ifindex in self._egress.attached:
                found[ifindex] = self._table.get(ifindex)
            # One that is attached elsewhere may run our program already: `TcxLinks.attach` swaps
            # first and moves the pin afterwards, and may have been killed in between.
            elif ifindex not in found and ifindex not in self._egress.expected:
                self._forget(ifindex)
        recording = self._ingress.attached | self._ingress.other_interfaces
        for ifindex in recording - found.keys() - self._egress.expected:
            self.remove(ifindex)
        return found

    def remove_stale(self) -> bool:
        """Unpin programs of other sources, and other schemas once none of their gates is attached.

        Returns whether none was. Call it when all gates are as desired. Raises `OSError`.
        """
        self._installation.discard_other_programs(sources.fingerprint())
        if self._installation.other_schemas():  # by which podgate-cni may have attached gates since
            self._egress.refresh()
            self._ingress.refresh()
        if self._egress.other_interfaces | self._ingress.other_interfaces:
            return False
        for schema in self._installation.other_schemas():
            self._installation.discard_schema(schema)
        return True

    def displaced(self) -> set[int]:
        """Interfaces on which another program runs before ours in either direction, or ours is no
        longer attached, or neither can be read.

        The other program may end the chain (TC_ACT_OK); then the gate never sees the packet. Gates
        that are to be settled are left out: that places them first, and to list filters takes long.
        """
        found = set()
        for side in (self._egress, self._ingress):
            for ifindex in side.attached - side.unlinked:
                try:
                    if not _is_first(side, ifindex):
                        found.add(ifindex)
                except errors.BpfError:
                    found.add(ifindex)
        return found

    def check(self, changed: Container[int] | None) -> GateCheck:
        """As `Attachments.check`, for both programs of each gate. Raises `BpfError`."""
        return self._egress.check(changed) | self._ingress.check(changed)

    @property
    def filtered(self) -> set[int]:
        """Interfaces whose gates should be attached, and are not by links alone."""
        return self._egress.filtered | self._ingress.filtered

    def lost(self, ifindexes: Iterable[int]) -> set[int]:
        """Those of these interfaces whose gates should be attached, and are not, as the kernel has
        it now. Raises `BpfError`."""
        sides = (self._egress, self._ingress)
        return {i for i in ifindexes if any(side.is_lost(i) for side in sides)}

    def put_back(self, ifindexes: Iterable[int]) -> dict[int, bool | errors.AttachError]:
        """Attach gates again that another program removed; their configurations are in the maps.

        All gates enforce before one records its pod's flows: a link takes 15 ms. False for a gate
        that podgate-cni removed meanwhile, with its entries; an error concerns no other gate.
        """
        results: dict[int, bool | errors.AttachError] = dict.fromkeys(ifindexes, True)
        for side in (self._egress, self._ingress):
            for ifindex, result in results.items():
                self.breathe()
                if result is True:
                    results[ifindex] = self._put_back(ifindex, side, _put_back_if_lost)
        return results

    def put_back_after_qdisc(
        self, ifindex: int, *, is_enforcing: bool
    ) -> bool | errors.AttachError:
        """As `put_back` for the side of one gate that enforces, or then the one that records: its
        qdisc was deleted, and the filters with it."""
        if is_enforcing:
            return self._put_back(ifindex, self._egress, Attachments.put_back_after_qdisc)
        result = self._put_back(ifindex, self._ingress, Attachments.put_back_after_qdisc)
        for side in (self._egress, self._ingress):
            if result is True:
                result = self._put_back(ifindex, side, Attachments.drop_spare_filter)
        return result

    def _put_back(
        self, ifindex: int, side: Attachments, call: Callable[[Attachments, int], None]
    ) -> bool | errors.AttachError:
        """Call this, unless podgate-cni has removed the gate; what it removes meanwhile is not left
        behind."""
        try:
            if self._table.grace_until_ns(ifindex) is None:
                return False
            call(side, ifindex)
            if self._table.grace_until_ns(ifindex) is None:
                self.remove(ifindex)
                return False
        except (errors.BpfError, errors.AttachError) as error:
            problem = _attach_error("cannot put back the gate of", ifindex, error)
            problem.__cause__ = error
            return problem
        return True

    def is_first(self, ifindex: int) -> bool:
        """Whether our programs run before all others, in both directions."""
        return all(
            _is_first(side, ifindex)
            for side in (self._egress, self._ingress)
            if ifindex in side.attached
        )

    def move_first(self, ifindex: int) -> None:
        """Move an installed gate before other programs, without a gap.

        tcx needs the moving copies: call `loader.load_moving_copies` first. Raises `AttachError`.
        """
        try:
            for side in (self._egress, self._ingress):
                if ifindex in side.attached and not _is_first(side, ifindex):
                    side.move_first(ifindex)
        except errors.BpfError as error:
            raise _attach_error("cannot move the gate of", ifindex, error) from error

    def counts(self) -> dict[int, Counts]:
        """Host-sent packets by interface, verdict and reason, without zeros."""
        return self._counters.all_gates()

    def host_counts(self) -> Counts:
        """As `Counters.of_host`."""
        return self._counters.of_host()

    def _configure(self, ifindex: int, config: GateConfig, grace_until_ns: int) -> str:
        """Where all slots are taken, an enforcing gate uses the fallback configuration."""
        try:
            return self._table.set(ifindex, config, grace_until_ns)
        except errors.BpfError as error:
            if error.errno != errno.E2BIG or config.mode < Mode.ENFORCE:
                raise
            return (
                f"The gate admits only the kubelet, to any TCP port: {error.strerror}; "
                "remove pods from the node."
            )

    def _make_tables(self, ifindexes: Iterable[int]) -> dict[int, errors.BpfError]:
        """Make a reply table for each. Returns why some have none."""
        problems: dict[int, errors.BpfError] = {}
        with contextlib.ExitStack() as close:
            made: dict[bytes, bytes] = {}
            for ifindex in ifindexes:
                try:
                    table = maps.create_like(map_specs.REPLY_TABLE, self._reply_template.fd)
                except errors.BpfError as error:
                    problems[ifindex] = error
                    continue
                close.callback(os.close, table)
                made[_KEY.pack(ifindex)] = _KEY.pack(table)
            try:
                self._replies.set_all(made)
            except errors.BpfError:
                # A kernel without batches for maps of maps (before 5.19), or no room for all.
                for key, table_fd in made.items():
                    try:
                        self._replies.set(key, table_fd)
                    except errors.BpfError as error:
                        problems[_KEY.unpack(key)[0]] = error
        return problems

    def _forget(self, ifindex: int) -> None:
        self._addresses.forget(ifindex)
        self._table.delete(ifindex)
        self._replies.delete(_KEY.pack(ifindex))


def _put_back_if_lost(side: Attachments, ifindex: int) -> None:
    if side.is_lost(ifindex):
        side.put_back(ifindex)


def _exists(ifindex: int) -> bool:
    try:
        socket.if_indextoname(ifindex)
    except OSError:
        return False
    return True


def _is_first(side: Attachments, ifindex: int) -> bool:
    try:
        return side.is_first(ifindex)
    except errors.BpfError as error:
        if error.errno == errno.ENODEV:  # deleted, with everything attached to it
            return True
        raise


def _attach_error(what: str, ifindex: int, error: Exception) -> errors.AttachError:
    if isinstance(error, errors.BpfError):
        return errors.AttachError(f"{what} interface {ifindex}: {error.strerror}")
    return errors.AttachError(str(error))
