"""The kernel side of strict mode, as the relay's process uses it: redirects connects to the relay.

Only the maps' entries outlive that process, and they have no effect without the links. So when a
relay is killed, the next connect goes to the pod itself. Nothing is compiled here: the agent pins
the programs before it starts a relay.
"""

import contextlib
import os
import pathlib
import struct
import time
from collections.abc import Collection, Iterable

from bpf import abi, clsact, errors, map_specs, maps, pins, program_specs, syscalls, tcx

_BEAT_KEY = bytes(4)
_BEAT = struct.Struct("=Q")


class Redirect:
    """The programs and maps of one relay. All methods but `attach_hold` return at once."""

    def __init__(
        self,
        installation: pins.Pins,
        programs: dict[str, int],
        tables: tuple[maps.Map, maps.Map, maps.Map],
    ) -> None:
        """programs: descriptors by name; tables: targets, pods and beat. Use `open`."""
        self._installation = installation
        self._programs = programs
        self._targets, self._pods, self._beat = tables
        self._links: list[int] = []
        self._hold_links: list[int] = []

    @classmethod
    def open(cls, installation: pins.Pins, source_hash: str) -> "Redirect":
        """Open the pins of the agent whose programs have this hash (`bpf.sources.fingerprint`).

        Raises `PinError` if one is missing, also because the kernel rejected the program.
        """
        directory = installation.programs / source_hash
        with contextlib.ExitStack() as undo:
            programs = {}
            for name in (
                program_specs.HOLD_SYNS,
                *(hook.name for hook in program_specs.RELAY_HOOKS),
            ):
                programs[name] = _open_program(directory, name)
                undo.callback(os.close, programs[name])
            targets, pods, beat = (
                undo.enter_context(maps.Map.open(installation.map(spec), spec))
                for spec in (map_specs.RELAY_TARGETS, map_specs.RELAY_PODS, map_specs.RELAY_BEAT)
            )
            undo.pop_all()
        return cls(installation, programs, (targets, pods, beat))

    def __enter__(self) -> "Redirect":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disengage, stop holding SYNs, and close all descriptors."""
        self.disengage()
        for fd in (*self._hold_links, *self._programs.values()):
            os.close(fd)
        for table in (self._targets, self._pods, self._beat):
            table.close()

    def engage(self, cgroup: pathlib.Path) -> None:
        """Redirect connects of `cgroup` (the root's directory) and all below it.

        Takes effect with the first beat. Links are not pinned, so they end with this process.
        Raises `BpfError`; then this object redirects nothing.
        """
        if self._links:
            return
        cgroup_fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook in program_specs.RELAY_HOOKS:
                self._links.append(self._link(hook, cgroup_fd))
        except errors.BpfError:
            self.disengage()
            raise
        finally:
            os.close(cgroup_fd)

    def disengage(self) -> None:
        """Stop redirecting; open connections stay.

        getpeername then shows an address of the relay to them, unless another relay is engaged.
        """
        while self._links:
            link = self._links.pop()
            try:
                syscalls.link_detach(link)
            finally:
                os.close(link)

    @property
    def is_engaged(self) -> bool:
        """Whether all hooks are attached. `podgate off` and `podgate cleanup` detach them."""
        return bool(self._links) and all(map(syscalls.is_cgroup_link_attached, self._links))

    def attach_hold(self, ifindex: int) -> None:
        """Drop SYNs that come in by this interface of the calling thread's namespace.

        While this process lives, or while the namespace exists if a filter does it (before Linux
        6.6). Waits about 10 ms for RCU. Raises `BpfError` or `AttachError`.
        """
        program = self._programs[program_specs.HOLD_SYNS]
        if tcx.TcxLinks.is_supported():
            self._hold_links.append(
                syscalls.link_create_tcx(
                    program, ifindex, syscalls.BPF_TCX_INGRESS, syscalls.BPF_F_BEFORE
                )
            )
            return
        filters = clsact.ClsactFilters(
            self._installation, program_specs.HOLD_SYNS, program, clsact.INGRESS
        )
        with contextlib.closing(filters):
            filters.attach(ifindex)

    def beat(self) -> None:
        """Write the relay's heartbeat: after 300 ms without one nothing is redirected."""
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
        *,
        admits_translated: bool = False,
    ) -> None:
        """Redirect connects to these ports of the pod to this address of the relay.

        ports: 0 for all ports without an entry; pair_ifindex: the host's end of the relay's veth
        pair, whose gate decides which sources may connect; admits_translated: whether the pod's
        gate admits the kubelet beside the relay, if it connects to an address that is translated to
        the pod's. Overwrites another relay's entries.
        Raises `BpfError` (E2BIG: the map is full).
        """
        if relay_address.version != pod_address.version:
            raise ValueError(
                f"{relay_address} cannot represent {pod_address}: the families differ; "
                "use an address of the pod's family"
            )
        pod = abi.CRelayPod(_address(pod_address), pair_ifindex, admits_translated)
        value = abi.pack_address(relay_address)
        self._pods.set(value, bytes(pod))
        for port in ports:
            self._targets.set(_key(pod_address, port), value)

    def withdraw(
        self, relay_address: abi.IPAddress, pod_address: abi.IPAddress, ports: Iterable[int]
    ) -> None:
        """Stop redirecting to this address of the relay; open connections stay.

        Entries that another relay has published since stay, except one published at the same
        moment: two relays must not publish and withdraw for one pod at once.
        """
        value = abi.pack_address(relay_address)
        for port in ports:
            key = _key(pod_address, port)
            if self._targets.get(key) == value:
                self._targets.delete(key)

    def delete(self, relay_address: abi.IPAddress) -> None:
        """Delete the pod of this address of the relay; withdraw it first.

        Its connections should be closed: getpeername now shows the relay's address to them.
        """
        self._pods.delete(abi.pack_address(relay_address))

    def delete_within(self, subnets: Collection[abi.IPNetwork]) -> None:
        """Delete a killed relay's entries for addresses in these subnets, which are ours now."""
        for key, _ in list(self._pods.items()):
            address = abi.unpack_address(key)
            if any(address in subnet for subnet in subnets):
                self._pods.delete(key)

    def keep_only(self, published: Collection[tuple[abi.IPAddress, int]]) -> None:
        """Delete previous relays' targets for other pod addresses and ports.

        Their relay addresses stay: a previous relay may still proxy open connections.
        """
        kept = {_key(address, port) for address, port in published}
        for key, _ in list(self._targets.items()):
            if key not in kept:
                self._targets.delete(key)

    def _link(self, hook: program_specs.HookSpec, cgroup_fd: int) -> int:
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


def seconds_since_beat(installation: pins.Pins) -> float:
    """Since the heartbeat of the engaged relay: without one, and while it is full, very long.

    Raises `BpfError`.
    """
    with contextlib.closing(
        maps.Map.open(installation.map(map_specs.RELAY_BEAT), map_specs.RELAY_BEAT)
    ) as table:
        (beat_ns,) = _BEAT.unpack(table.get(_BEAT_KEY) or bytes(_BEAT.size))
    return (time.monotonic_ns() - int(beat_ns)) / 1e9


def redirected_addresses(installation: pins.Pins) -> set[abi.IPAddress]:
    """Addresses of pods to which connects are redirected, to whichever relay. Raises `BpfError`."""
    with contextlib.closing(
        maps.Map.open(installation.map(map_specs.RELAY_TARGETS), map_specs.RELAY_TARGETS)
    ) as table:
        keys = (abi.CRelayTargetKey.from_buffer_copy(key) for key, _ in table.items())
        return {abi.unpack_address(bytes(key.pod)) for key in keys}


def _open_program(directory: pathlib.Path, name: str) -> int:
    path = directory / name
    try:
        return syscalls.open_pin(str(path))
    except errors.BpfError as error:
        if os.path.lexists(directory / program_specs.HOLD_SYNS) and not os.path.lexists(path):
            raise errors.PinError(
                f"this kernel does not accept the program {name}, without which the relay cannot "
                "work; use a newer kernel, or mode enforce"
            ) from error
        raise errors.PinError(
            f"cannot open {path} ({os.strerror(error.errno or 0)}); the agent pins it before it "
            "starts a relay, so start the relay by 'podgate run'"
        ) from error


def _key(pod_address: abi.IPAddress, port: int) -> bytes:
    return bytes(abi.CRelayTargetKey(_address(pod_address), port))


def _address(address: abi.IPAddress) -> abi.CAddress:
    return abi.CAddress.from_buffer_copy(abi.pack_address(address))
