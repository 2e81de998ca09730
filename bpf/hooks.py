"""The hooks at the root cgroup, each attached by a pinned link, next to other programs."""

import dataclasses
import errno
import os
import struct
from collections.abc import Sequence

from bpf import errors, loader, pins, program_specs, syscalls

# Attach flags (include/uapi/linux/bpf.h): only this one allows other programs.
_ALLOW_MULTI = 1 << 1
_LINK_INFO = struct.Struct("=IIIIQI")  # type, id, prog_id, (padding), cgroup id, attach_type
_BPF_LINK_TYPE_CGROUP = 3


@dataclasses.dataclass(frozen=True, slots=True)
class HookState:
    """Whether one hook is attached. problem: one sentence if it is not."""

    name: str
    problem: str | None = None


class Hooks:
    """The links of all hooks to one cgroup: the root of the hierarchy, so that none escapes."""

    def __init__(
        self,
        loaded: loader.Loaded,
        installation: pins.Pins,
        cgroup: str | os.PathLike[str],
        specs: Sequence[program_specs.HookSpec] = program_specs.HOOKS,
    ) -> None:
        """specs: of the hooks, in the order of attaching."""
        self._loaded = loaded
        self._specs = specs
        self._pins = installation
        self._cgroup = cgroup

    def attach(self) -> list[HookState]:
        """Attach each hook that the kernel accepts, or replace its program; returns their states.

        If one cannot be attached the others are: the gates enforce without hooks.
        """
        cgroup_fd = os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return [self._attach(hook, cgroup_fd) for hook in self._specs]
        finally:
            os.close(cgroup_fd)

    def attached(self) -> dict[str, bool]:
        """By hook that the kernel accepts: whether its link is pinned, and attaches a program to
        the cgroup now."""
        cgroup_fd = os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return {
                hook.name: self._is_attached(hook, cgroup_fd)
                for hook in self._specs
                if hook.name in self._loaded.programs
            }
        finally:
            os.close(cgroup_fd)

    def _is_attached(self, hook: program_specs.HookSpec, cgroup_fd: int) -> bool:
        path = self._pins.links / hook.name
        if not os.path.lexists(path):
            return False
        with pins.opened(path) as link_fd:
            return is_linked(link_fd, cgroup_fd, hook)

    def detach(self) -> None:
        """Detach all, and unpin them."""
        for hook in self._specs:
            for path in self._pins.find_links(hook.name):
                with pins.opened(path) as link_fd:
                    syscalls.link_detach(link_fd)
                pins.unlink_quietly(path)

    def _attach(self, hook: program_specs.HookSpec, cgroup_fd: int) -> HookState:
        program_fd = self._loaded.programs.get(hook.name)
        if program_fd is None:
            return HookState(hook.name, "this kernel does not accept the program")
        try:
            if not self._reuse(hook, program_fd, cgroup_fd):
                self._link(hook, program_fd, cgroup_fd)
        except errors.BpfError as error:
            foreign = describe_exclusive(cgroup_fd, hook) if error.errno == errno.EPERM else None
            return HookState(hook.name, foreign or str(error))
        return HookState(hook.name)

    def _link(self, hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int) -> None:
        link_fd = syscalls.link_create_cgroup(program_fd, cgroup_fd, hook.attach_type)
        try:
            syscalls.pin(link_fd, str(self._pins.links / hook.name))
        finally:
            os.close(link_fd)

    def _reuse(self, hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int) -> bool:
        """Replace the program of any schema's pinned link; False if none is to this cgroup.

        The program first and then the pin, as for gates.
        """
        for path in self._pins.find_links(hook.name):
            with pins.opened(path) as link_fd:
                if is_linked(link_fd, cgroup_fd, hook):
                    if syscalls.link_program_id(link_fd) != syscalls.program_id(program_fd):
                        syscalls.link_update(link_fd, program_fd)
                    self._pins.adopt(path, hook.name)
                    return True
            pins.unlink_quietly(path)
        return False


def is_linked(link_fd: int, cgroup_fd: int, hook: program_specs.HookSpec) -> bool:
    """Whether a link attaches a program as this hook to this cgroup."""
    kind, _, _, _, cgroup, attach_type = _LINK_INFO.unpack(
        syscalls.object_info(link_fd, _LINK_INFO.size)
    )
    expected = (_BPF_LINK_TYPE_CGROUP, os.fstat(cgroup_fd).st_ino, hook.attach_type)
    return (kind, cgroup, attach_type) == expected


def describe_exclusive(cgroup_fd: int, hook: program_specs.HookSpec) -> str | None:
    """One sentence if a program is attached to this cgroup exclusively; otherwise None."""
    try:
        programs, flags = syscalls.query_cgroup_programs(cgroup_fd, hook.attach_type)
    except errors.BpfError:
        return None
    if not programs or flags & _ALLOW_MULTI:
        return None
    numbers = ", ".join(str(program) for program in programs)
    return (
        f"program {numbers} is attached to the root cgroup without BPF_F_ALLOW_MULTI and leaves "
        f"no room for others; find its owner with 'bpftool prog show id {programs[0]}' and have "
        "it attach with that flag"
    )
