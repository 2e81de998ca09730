"""The kernel side of strict mode, as the relay's process uses it: who is redirected, and where to.

Nothing here outlives that process but what the maps say, and that counts for nothing without the
links. So a relay that is killed is one whose next connect goes to the pod itself. Nothing is
compiled here: the agent has pinned the programs before it starts a relay.
"""

import contextlib
import os
import pathlib
import struct
import time
from collections.abc import Collection, Iterable

from bpf import abi, errors, maps, pins, sources, syscalls, tcx

_BEAT_KEY = bytes(4)
_BEAT = struct.Struct("=Q")


class Redirect:
    """The programs and maps of one relay. All methods return at once but `hold`."""

    def __init__(
        self,
        installation: pins.Pins,
        programs: dict[str, int],
        tables: tuple[maps.Map, maps.Map, maps.Map],
    ) -> None:
        """programs: descriptors by name; tables: targets, origins and beat. Use `open`."""
        self._installation = installation
        self._programs = programs
        self._targets, self._origins, self._beat = tables
        self._links: list[int] = []
        self._held: list[int] = []

    @classmethod
    def open(cls, installation: pins.Pins) -> "Redirect":
        """Open what the agent of this version has pinned.

        Raises `PinError` where it is not there, and where this kernel has refused a program.
        """
        directory = installation.programs / sources.fingerprint()
        with contextlib.ExitStack() as undo:
            programs = {}
            for name in (abi.HOLD_SYNS, *(hook.name for hook in abi.RELAY_HOOKS)):
                programs[name] = _open_program(directory, name)
                undo.callback(os.close, programs[name])
            targets, origins, beat = (
                undo.enter_context(maps.Map.open(installation.map(spec), spec))
                for spec in (abi.RELAY_TARGETS, abi.RELAY_PODS, abi.RELAY_BEAT)
            )
            undo.pop_all()
        return cls(installation, programs, (targets, origins, beat))

    def __enter__(self) -> "Redirect":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disengage, hold nothing any more, and close all descriptors."""
        self.disengage()
        for fd in (*self._held, *self._programs.values()):
            os.close(fd)
        for table in (self._targets, self._origins, self._beat):
            table.close()

    def engage(self, cgroup: pathlib.Path) -> None:
        """Redirect what `cgroup` (the root's directory) and all below it connect.

        It takes effect with the first beat. Links are not pinned, so they end with this process.
        Raises `BpfError`; then nothing is redirected by this one.
        """
        if self._links:
            return
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook in abi.RELAY_HOOKS:
                self._links.append(self._link(hook, cgroup_fd))
        except errors.BpfError:
            self.disengage()
            raise
        finally:
            os.close(cgroup_fd)

    def disengage(self) -> None:
        """The next connect is not redirected; connections that are open stay.

        Their peer is then shown as what it is, an address of the relay, unless another is engaged.
        """
        while self._links:
            link = self._links.pop()
            try:
                syscalls.link_detach(link)
            finally:
                os.close(link)

    def hold(self, ifindex: int) -> None:
        """Have this interface of the calling thread's namespace let in nothing that opens.

        For as long as this process lives, or the namespace where it is done by a filter (before
        Linux 6.6). Waits about 10 ms for RCU. Raises `BpfError` or `AttachError`.
        """
        program = self._programs[abi.HOLD_SYNS]
        if tcx.TcxLinks.is_supported():
            self._held.append(
                syscalls.link_create_tcx(
                    program, ifindex, syscalls.BPF_TCX_INGRESS, syscalls.BPF_F_BEFORE
                )
            )
            return
        from bpf import clsact  # with pyroute2 in it, 20 MB

        filters = clsact.ClsactFilters(self._installation, abi.HOLD_SYNS, program, clsact.INGRESS)
        with contextlib.closing(filters):
            filters.attach(ifindex)

    def beat(self) -> None:
        """Say that the relay is there: without it for 300 ms nothing is redirected."""
        self._beat.set(_BEAT_KEY, _BEAT.pack(time.monotonic_ns()))

    def pause(self) -> None:
        """Redirect nothing until the next beat."""
        self._beat.set(_BEAT_KEY, _BEAT.pack(0))

    def publish(
        self,
        relay_address: abi.IPAddress,
        pod_address: abi.IPAddress,
        ports: Iterable[int],
        pair_ifindex: int,
    ) -> None:
        """From now on this address of the relay stands for the pod, at these ports.

        ports: 0 for any that has no entry of its own; pair_ifindex: of the node's side of the
        relay's pair, whose gate says who may connect. What another relay published for a port is
        overwritten. Raises `BpfError` (E2BIG: no room).
        """
        if relay_address.version != pod_address.version:
            raise ValueError(
                f"{relay_address} cannot stand for {pod_address}: the families are not the same; "
                "give one of the pod's own family"
            )
        origin = abi.CRelayPod(_address(pod_address), pair_ifindex)
        value = abi.pack_address(relay_address)
        self._origins.set(value, bytes(origin))
        for port in ports:
            self._targets.set(_key(pod_address, port), value)

    def withdraw(
        self, relay_address: abi.IPAddress, pod_address: abi.IPAddress, ports: Iterable[int]
    ) -> None:
        """Redirect to this address of the relay no more; connections that are open go on.

        What another relay has published for a port since then stays; but not what it publishes at
        this very moment, so two relays may not do these two for one pod at once.
        """
        value = abi.pack_address(relay_address)
        for port in ports:
            key = _key(pod_address, port)
            if self._targets.get(key) == value:
                self._targets.delete(key)

    def forget(self, relay_address: abi.IPAddress) -> None:
        """This address of the relay stands for nothing any more; to be withdrawn first.

        Connections that are open should have ended: their peer is shown as what it is from now on.
        """
        self._origins.delete(abi.pack_address(relay_address))

    def forget_within(self, subnets: Collection[abi.IPNetwork]) -> None:
        """Forget all that a relay which was killed left of these addresses, which are ours now."""
        for key, _ in list(self._origins.items()):
            address = abi.unpack_address(key)
            if any(address in subnet for subnet in subnets):
                self._origins.delete(key)

    def keep_only(self, published: Collection[tuple[abi.IPAddress, int]]) -> None:
        """Delete what relays before this one left for other pods' addresses and ports.

        Not what their addresses stand for: such a relay may still carry what it began.
        """
        wanted = {_key(address, port) for address, port in published}
        for key, _ in list(self._targets.items()):
            if key not in wanted:
                self._targets.delete(key)

    def _link(self, hook: abi.HookSpec, cgroup_fd: int) -> int:
        try:
            return syscalls.link_create_cgroup(
                self._programs[hook.name], cgroup_fd, hook.attach_type
            )
        except errors.BpfError as error:
            from bpf import hooks  # with what loads programs

            foreign = hooks.describe_exclusive(cgroup_fd, hook)
            if foreign is None:
                raise
            raise errors.BpfError(error.errno, foreign) from error


def _open_program(directory: pathlib.Path, name: str) -> int:
    path = directory / name
    try:
        return syscalls.open_pin(str(path))
    except errors.BpfError as error:
        if os.path.lexists(directory / abi.HOLD_SYNS) and not os.path.lexists(path):
            raise errors.PinError(
                f"this kernel does not take the program {name}, without which nothing can be "
                "carried by the relay; use a newer kernel, or mode enforce"
            ) from error
        raise errors.PinError(
            f"cannot open {path} ({os.strerror(error.errno or 0)}); the agent pins it before it "
            "starts a relay, so start the relay by 'podgate run'"
        ) from error


def _key(pod_address: abi.IPAddress, port: int) -> bytes:
    return bytes(abi.CRelayTargetKey(_address(pod_address), port))


def _address(address: abi.IPAddress) -> abi.CAddress:
    return abi.CAddress.from_buffer_copy(abi.pack_address(address))
