"""The links that keep the programs of `src/services.c` attached.

They are pinned below `<bpffs>/podgate/services/`, beside the gates' schemas, so translation
continues without the proxy, with its last state, as with kube-proxy's rules.
"""

import errno
import os
import pathlib
import shutil

from bpf import errors, hooks, pins, program_specs, syscalls

_SOCK_ADDR = 18

HOOKS = (
    program_specs.HookSpec("service_getpeername4", _SOCK_ADDR, 29),
    program_specs.HookSpec("service_getpeername6", _SOCK_ADDR, 30),
    program_specs.HookSpec("service_recvmsg4", _SOCK_ADDR, 19),
    program_specs.HookSpec("service_recvmsg6", _SOCK_ADDR, 20),
    program_specs.HookSpec("service_connect4", _SOCK_ADDR, 10),
    program_specs.HookSpec("service_connect6", _SOCK_ADDR, 11),
    program_specs.HookSpec("service_sendmsg4", _SOCK_ADDR, 14),
    program_specs.HookSpec("service_sendmsg6", _SOCK_ADDR, 15),
)
"""In this order: a translated process must not see the endpoint's address."""


def directory(installation: pins.Pins) -> pathlib.Path:
    """Where the proxy's objects are pinned, independent of the gates' schema."""
    return installation.root / "services"


class ServiceLinks:
    """The pinned links of one cgroup, also those of a previous process."""

    def __init__(self, installation: pins.Pins, programs: pathlib.Path) -> None:
        """programs: the directory of the pinned programs."""
        self._installation = installation
        self._directory = programs
        self._links = directory(installation) / "links"

    def attach(self, cgroup: str | os.PathLike[str]) -> None:
        """Translate for `cgroup` and all below it, before all other programs attached to it.

        Replaces programs of a previous version in place, so call it after the first `change`.
        Raises `BpfError`; if an exclusive program prevents it, the text names the remedy.
        """
        self._links.mkdir(mode=0o700, exist_ok=True)
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook in HOOKS:
                with pins.opened(self._directory / hook.name) as program_fd:
                    if not self._reuse(hook, program_fd, cgroup_fd):
                        self._link(hook, program_fd, cgroup_fd)
        finally:
            os.close(cgroup_fd)
        for other in directory(self._installation).iterdir():
            if other not in (self._links, self._directory):
                shutil.rmtree(other)

    def _reuse(self, hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int) -> bool:
        """Swap the program of the pinned link; False if there is none to this cgroup."""
        path = self._links / hook.name
        if not os.path.lexists(path):
            return False
        with pins.opened(path) as link_fd:
            if hooks.is_linked(link_fd, cgroup_fd, hook):
                if syscalls.link_program_id(link_fd) != syscalls.program_id(program_fd):
                    syscalls.link_update(link_fd, program_fd)
                return True
            syscalls.link_detach(link_fd)
        os.unlink(path)
        return False

    def _link(self, hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int) -> None:
        path = self._links / hook.name
        try:
            link_fd = _link_first(hook, program_fd, cgroup_fd)
            if link_fd is None:
                if self._move_first(hook, program_fd, cgroup_fd, path):
                    return
                link_fd = syscalls.link_create_cgroup(program_fd, cgroup_fd, hook.attach_type)
        except errors.BpfError as error:
            foreign = hooks.describe_exclusive(cgroup_fd, hook) if error.errno == errno.EPERM else 0
            if not foreign:
                raise
            raise errors.BpfError(error.errno, foreign) from error
        try:
            syscalls.pin(link_fd, str(path))
        finally:
            os.close(link_fd)

    def _move_first(
        self, hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int, path: pathlib.Path
    ) -> bool:
        """Use the agent's link for our program, and give the agent a new link at the end.

        The agent's hook runs at every moment. False if the agent has no link to this cgroup.
        """
        name = hook.name.replace("service_", "hook_")
        for agents in self._installation.find_links(name):
            with pins.opened(agents) as first_fd:
                if not hooks.is_linked(first_fd, cgroup_fd, hook):
                    continue
                hook_fd = syscalls.fd_by_id(
                    syscalls.Command.PROG_GET_FD_BY_ID, syscalls.link_program_id(first_fd)
                )
                try:
                    last_fd = syscalls.link_create_cgroup(hook_fd, cgroup_fd, hook.attach_type)
                finally:
                    os.close(hook_fd)
                try:
                    moving = agents.with_name(f"{name}{pins.MOVING}")
                    pins.unlink_quietly(moving)
                    syscalls.pin(last_fd, str(moving))
                    syscalls.link_update(first_fd, program_fd)
                    syscalls.pin(first_fd, str(path))
                    os.rename(moving, agents)
                finally:
                    os.close(last_fd)
                return True
        return False


def detach(installation: pins.Pins) -> None:
    """Stop translating; open connections stay.

    In the opposite order of attaching: a translated process must not see the endpoint's address.
    """
    links = directory(installation) / "links"
    for hook in reversed(HOOKS):
        if os.path.lexists(links / hook.name):
            with pins.opened(links / hook.name) as link_fd:
                syscalls.link_detach(link_fd)
            os.unlink(links / hook.name)


def _link_first(hook: program_specs.HookSpec, program_fd: int, cgroup_fd: int) -> int | None:
    """A link before all others. None where the kernel has no order (before Linux 6.16)."""
    try:
        return syscalls.link_create_cgroup(
            program_fd, cgroup_fd, hook.attach_type, syscalls.BPF_F_BEFORE
        )
    except errors.BpfError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
