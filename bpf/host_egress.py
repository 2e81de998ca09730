"""HostEgressPolicies in the kernel: cgroups of the host that may not reach destinations.

The programs (`src/host_egress.c`) are loaded and attached with the first policy, and removed with
the last one. Pinned, they stay in force without the agent, until the dead man's time.
"""

import array
import contextlib
import ctypes
import os
import pathlib
import shutil
import struct
from collections.abc import Collection

from bpf import (
    abi,
    errors,
    features,
    loader,
    map_specs,
    maps,
    pinning,
    pins,
    program_specs,
    rcu,
    syscalls,
)
from bpf import host_egress_tables as tables
from bpf.hooks import Hooks, HookState
from bpf.host_egress_tables import EgressRule, EgressSource, EgressSubject, EgressTable
from bpf.pinning import Origin, Outcome
from bpf.program_sets import ProgramSet, ProgramSpec
from bpf.verdicts import Verdict

_DIRECTORY = "host-egress"
_VERSIONS = 255  # 0: no table was written
_KEY = bytes(4)
_NUMBER = struct.Struct("=I")
_STATE = struct.Struct("=Q")
_PAIR = struct.Struct("=QQ")
VERDICTS = (Verdict.DROP, Verdict.WOULD_DROP)

PROGRAM_SET = ProgramSet(
    source="host_egress.c",
    programs=tuple(ProgramSpec.hook(hook) for hook in program_specs.EGRESS_HOOKS),
    maps=(
        *(map_specs.CONFIG, map_specs.KUBELET_REMADE, map_specs.COUNTERS, map_specs.NODE_ADDRESSES),
        *(map_specs.DROP_EVENTS, map_specs.EVENT_BUDGET),
        *tables.MAPS,
    ),
    needs="Linux 5.11 with cgroup v2",
    features=(features.PACKET_NETNS,),
)


class TooMuchError(errors.KernelSideError):
    """A table has no room for all of the policies; the text names the limit."""


class EgressTables:
    """The pinned maps of HostEgressPolicies, also for readers without an agent. One writer: the
    agent. All methods block."""

    def __init__(self, installation: pins.Pins) -> None:
        """Raises `PinError`."""
        with contextlib.ExitStack() as undo:
            self.open_maps = {
                spec.name: undo.enter_context(maps.Map.open(installation.map(spec), spec))
                for spec in tables.MAPS
            }
            undo.pop_all()

    def close(self) -> None:
        for opened in self.open_maps.values():
            opened.close()

    def __enter__(self) -> "EgressTables":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def numbers(self, names: Collection[str]) -> dict[str, int]:
        """The number of each policy, as it had before, or a free one with counts of zero. Others
        lose theirs: call it for all policies in force, before `write`.

        Raises `TooMuchError`.
        """
        if len(names) > tables.POLICIES:
            raise TooMuchError(
                f"a node holds {tables.POLICIES} HostEgressPolicies, and there are {len(names)}"
            )
        before = self.names()
        free = [number for number in range(tables.POLICIES) if before.get(number, "") not in names]
        assigned = {name: number for number, name in before.items() if name in names}
        for name in sorted(set(names) - assigned.keys()):
            number = assigned[name] = free.pop(0)
            self._forget_counts(number)
            value = bytes(tables.CEgressPolicy(name=name.encode()))
            self.open_maps[tables.NAMES.name].set(_NUMBER.pack(number), value)
        for number in free:
            if number in before:
                self._forget_counts(number)
                self.open_maps[tables.NAMES.name].set(
                    _NUMBER.pack(number), bytes(tables.CEgressPolicy())
                )
        return assigned

    def write(self, table: EgressTable) -> None:
        """Put these policies in force, all in one step. Raises `TooMuchError` or `BpfError`; then
        the previous ones stay in force."""
        levels = table.levels
        for what, count, room in (
            ("destinations", len(table.rules), tables.RULES),
            ("subjects", len(table.subjects), tables.MAX_SUBJECTS // 2),
            ("depths of subjects' cgroups", len(levels), tables.LEVELS),
        ):
            if count > room:
                raise TooMuchError(f"there are {count} {what}, and room for {room}")
        before = self.state & 0xFF
        version = before % _VERSIONS + 1
        subjects = self.open_maps[tables.SUBJECTS.name]
        self._keep_subjects(before)
        for cgroup, subject in table.subjects.items():
            key, value = _PAIR.pack(cgroup, version), _PAIR.pack(subject.denied, subject.excepted)
            subjects.set(key, value)
        self.open_maps[tables.RULE_SETS.name].set(_NUMBER.pack(version & 1), table.pack_rules())
        self.open_maps[tables.STATE.name].set(_KEY, _STATE.pack(tables.pack_state(version, levels)))
        # The next table is written over the one before this.
        rcu.wait_for_programs()
        self._keep_subjects(version)

    @property
    def state(self) -> int:
        """As programs read it; 0: no table was written."""
        value = self.open_maps[tables.STATE.name].get(_KEY)
        assert value is not None  # an array has all of its keys
        return int(_STATE.unpack(value)[0])

    def table(self) -> EgressTable:
        """The policies in force."""
        state = self.state
        version, *levels = state.to_bytes(8, "little")
        value = self.open_maps[tables.RULE_SETS.name].get(_NUMBER.pack(version & 1))
        assert value is not None  # an array has all of its keys
        rules = tables.CEgressRules.from_buffer_copy(value)
        subjects = {}
        for key, entry in self.open_maps[tables.SUBJECTS.name].items():
            cgroup, of_version = _PAIR.unpack(key)
            if of_version == version:
                subjects[cgroup] = EgressSubject(max(levels), *_PAIR.unpack(entry))
        return EgressTable(
            subjects,
            tuple(EgressRule.unpack(rule) for rule in rules.rules[: rules.count]),
            rules.enforced,
        )

    def names(self) -> dict[int, str]:
        """Policies by number."""
        values = self.open_maps[tables.NAMES.name].array_values()
        size = ctypes.sizeof(tables.CEgressPolicy)
        found = {}
        for number in range(tables.POLICIES):
            entry = tables.CEgressPolicy.from_buffer_copy(values, number * size)
            if entry.name:
                found[number] = entry.name.decode()
        return found

    def counts(self) -> dict[tuple[str, Verdict], int]:
        """By policy and verdict, since the policy is in force on this node."""
        counted = array.array("Q", self.open_maps[tables.COUNTS.name].array_values())
        return {
            (name, verdict): counted[number * abi.VERDICT_COUNT + verdict]
            for number, name in self.names().items()
            for verdict in VERDICTS
        }

    def sources(self) -> list[EgressSource]:
        """Of all policies, in no order. The kernel forgets the oldest of more than 4,096."""
        by_number = self.names()
        found = []
        for key, value in self.open_maps[tables.SOURCES.name].items():
            packed = tables.CEgressSourceKey.from_buffer_copy(key)
            entry = abi.CDropSource.from_buffer_copy(value)
            if packed.policy in by_number:
                found.append(
                    EgressSource(
                        cgroup=packed.cgroup,
                        policy=by_number[packed.policy],
                        protocol=packed.protocol,
                        verdict=Verdict(packed.verdict),
                        first_ns=entry.first_ns,
                        last_ns=entry.last_ns,
                        count=entry.count,
                        process_name=entry.process_name.decode(errors="replace"),
                    )
                )
        return found

    def _keep_subjects(self, version: int) -> None:
        subjects = self.open_maps[tables.SUBJECTS.name]
        for key, _ in list(subjects.items()):
            if _PAIR.unpack(key)[1] != version:
                subjects.delete(key)

    def _forget_counts(self, number: int) -> None:
        for verdict in Verdict:
            key = _NUMBER.pack(number * abi.VERDICT_COUNT + verdict)
            self.open_maps[tables.COUNTS.name].set(key, bytes(8))
        found = self.open_maps[tables.SOURCES.name]
        for key, _ in list(found.items()):
            if tables.CEgressSourceKey.from_buffer_copy(key).policy == number:
                found.delete(key)


class HostEgress:
    """The pinned programs, and the tables that they use. All methods block."""

    def __init__(self, directory: pathlib.Path, installation: pins.Pins) -> None:
        """directory: that `load` returned. Raises `PinError` or `BpfError`."""
        self._installation = installation
        with contextlib.ExitStack() as undo:
            self.tables = undo.enter_context(EgressTables(installation))
            programs = {}
            for hook in program_specs.EGRESS_HOOKS:
                programs[hook.name] = syscalls.open_pin(str(directory / hook.name))
                undo.callback(os.close, programs[hook.name])
            undo.pop_all()
        self._loaded = loader.Loaded(programs, self.tables.open_maps, Outcome(Origin.PINNED))

    def close(self) -> None:
        """Close the descriptors; what is attached stays in force."""
        self._loaded.close()

    def attach(self, cgroup: str | os.PathLike[str]) -> list[HookState]:
        """Attach all programs to this cgroup, the root's, or replace another version's."""
        return self._hooks(cgroup).attach()

    def attached(self, cgroup: str | os.PathLike[str]) -> dict[str, bool]:
        """By hook: whether it is attached now."""
        return self._hooks(cgroup).attached()

    def _hooks(self, cgroup: str | os.PathLike[str]) -> Hooks:
        return Hooks(self._loaded, self._installation, cgroup, program_specs.EGRESS_HOOKS)


async def load(installation: pins.Pins) -> pathlib.Path:
    """Ensure that the current programs and their maps are pinned. Returns their directory.

    Raises `PinError` or `CompileError`; then what was attached stays in force.
    """
    return await pinning.ensure_only(
        PROGRAM_SET, installation.schema, _DIRECTORY, installation.maps
    )


def is_installed(installation: pins.Pins) -> bool:
    """Whether programs or links of any version are pinned. A few system calls."""
    return any(installation.find_links(hook.name) for hook in program_specs.EGRESS_HOOKS) or any(
        installation.schema.glob(f"{_DIRECTORY}-*")
    )


def is_of_another_schema(installation: pins.Pins) -> bool:
    """Whether a program of another schema is in force, which ends with that schema's directory."""
    links = (
        path for hook in program_specs.EGRESS_HOOKS for path in installation.find_links(hook.name)
    )
    return any(path.parent != installation.links for path in links)


def detach(installation: pins.Pins) -> None:
    """Detach any version's programs; they stay pinned. Raises `BpfError`."""
    for hook in program_specs.EGRESS_HOOKS:
        for path in installation.find_links(hook.name):
            with pins.opened(path) as link_fd:
                syscalls.link_detach(link_fd)
            pins.unlink_quietly(path)


def remove(installation: pins.Pins) -> None:
    """As `detach`, and unpin the programs and maps. Raises `BpfError` or `OSError`."""
    detach(installation)
    for directory in installation.schema.glob(f"{_DIRECTORY}-*"):
        shutil.rmtree(directory)
    for spec in tables.MAPS:
        pins.unlink_quietly(installation.map(spec))
