"""Puts states of the specification into the maps of the gate's program (gate_runs.py)."""

import ctypes
import os
import struct

from bpf import abi, gate_table, injectable, loader, map_specs, maps, pins, syscalls
from bpf.gate_config import GateConfig
from tests.model import generator
from tests.model.facts import Gate, State

_KEY = bytes(4)
_NUMBER = struct.Struct("=I")
_BEAT = struct.Struct("=Q")
OTHER_IFINDEX = 7777
"""Of the gate of another pod."""
_FOREVER_NS = 1 << 62
_UNIT = 1
_NETNS = "/proc/self/ns/net"


class StateTables:
    """The maps, and the reply table of the interface."""

    def __init__(
        self, loaded: loader.Loaded, installation: pins.Pins, ifindex: int, netns: int
    ) -> None:
        """The interface has a reply table. netns: cookie of this network namespace."""
        self._loaded = loaded
        self._ifindex = ifindex
        self._netns = netns
        self._table = gate_table.GateTable(loaded, installation.maps)
        self._injectable = injectable.InjectableMap(loaded)
        table = loaded.map(map_specs.REPLIES).get(_NUMBER.pack(ifindex))
        assert table is not None
        (table_id,) = _NUMBER.unpack(table)
        self._replies = syscalls.fd_by_id(syscalls.Command.MAP_GET_FD_BY_ID, table_id)

    def close(self) -> None:
        os.close(self._replies)
        self._table.close()

    def apply(self, state: State) -> None:
        """Put a state into them, without flows and fragments, which packets make."""
        self._apply_node(state)
        numbers = {id(None): 0}
        other = next(
            (gate for gate in state.owners.values() if gate and gate is not state.gate), None
        )
        for gate, ifindex in ((state.gate, self._ifindex), (other, OTHER_IFINDEX)):
            if gate is None:
                self._table.delete(ifindex)
                continue
            self._table.set(ifindex, _config(gate), gate.grace_until_ns)
            numbers[id(gate)] = ifindex
        addresses = self._loaded.map(map_specs.ADDRESSES)
        _replace(addresses, {key: _NUMBER.pack(numbers[id(g)]) for key, g in state.owners.items()})
        for ifindex in (generator.INJECTABLE,):
            self._injectable.mark(ifindex, is_node_sent=ifindex in state.injectable)
        _replace(self._loaded.map(map_specs.FRAGMENTS), {})
        sets = list(range(abi.REPLY_SETS))
        size = map_specs.REPLY_TABLE.value_size
        syscalls.map_update_batch(
            self._replies, [_NUMBER.pack(index) for index in sets], [bytes(size)] * len(sets)
        )

    def _apply_node(self, state: State) -> None:
        node = state.node
        config = abi.CConfig(
            kubelet_cgroup=node.kubelet_cgroup,
            pods_cgroup=node.pods_cgroup,
            pods_cgroup_level=node.pods_level,
            heartbeat_ns=node.heartbeat_ns,
            stale_after_ns=node.stale_after_ns,
            dead_man_ns=node.dead_man_ns,
            has_ovs=node.has_ovs,
            kubelet_unit=_UNIT if node.is_unit_followed else 0,
            has_node_addresses=state.is_own_listed,
            node_netns=self._netns if state.is_netns_known else self._netns + 1,
            tunnel_port_count=len(node.tunnel_ports),
        )
        for at, tunnel_port in enumerate(node.tunnel_ports):
            config.tunnel_ports[at] = tunnel_port
        self._loaded.map(map_specs.CONFIG).set(_KEY, bytes(config))
        remade = abi.CKubeletRemade(node.remade_cgroup, _UNIT)
        self._loaded.map(map_specs.KUBELET_REMADE).set(_KEY, bytes(remade))
        own = {
            _NUMBER.pack(8 * len(prefix)) + prefix.ljust(16, b"\0"): _NUMBER.pack(1)
            for prefix in state.own
        }
        _replace(self._loaded.map(map_specs.NODE_ADDRESSES), own)
        beat_ns = _FOREVER_NS if state.is_relay_alive else 0
        self._loaded.map(map_specs.RELAY_BEAT).set(_KEY, _BEAT.pack(beat_ns))
        targets, relayed = {}, {}
        for number, ((pod, port), admits) in enumerate(state.proxied.items()):
            relay = generator.relay_address(pod, number)
            targets[pod + _NUMBER.pack(port)] = relay
            relayed[relay] = pod + struct.pack("=II", 1, admits)
        _replace(self._loaded.map(map_specs.RELAY_TARGETS), targets)
        _replace(self._loaded.map(map_specs.RELAY_PODS), relayed)
        denied = {
            address + struct.pack("=HH", port, 0): bytes(8)
            for address, port in state.denied_host_probes
        }
        _replace(self._loaded.map(map_specs.DENIED_HOST_PROBES), denied)
        connects = {
            key: bytes(abi.CHostConnect(made.sent_ns, made.cgroup.id if made.cgroup else 0))
            for key, made in state.connects.items()
        }
        _replace(self._loaded.map(map_specs.HOST_CONNECTS), connects)
        cgroups = {
            struct.pack("=Q", made.cgroup.id): bytes(
                abi.CCgroupAncestors((ctypes.c_uint64 * abi.CONNECT_LEVELS)(*made.cgroup.ancestors))
            )
            for made in state.connects.values()
            if made.cgroup
        }
        _replace(self._loaded.map(map_specs.CONNECT_CGROUPS), cgroups)
        creators = {
            struct.pack("=Q", cgroup): _NUMBER.pack(
                abi.CREATORS_SUBTREE if is_subtree else abi.CREATORS_EXACT
            )
            for cgroup, is_subtree in state.raw_socket_creators.items()
        }
        _replace(self._loaded.map(map_specs.RAW_SOCKET_CREATORS), creators)
        policies = self._loaded.map(map_specs.RAW_SOCKET_POLICY)
        policy = abi.CRawSocketPolicy.from_buffer_copy(policies.get(_KEY) or b"")
        policy.denies_pods = state.denies_raw_sockets
        policy.node_netns = os.stat(_NETNS).st_ino if state.is_netns_known else 0
        policies.set(_KEY, bytes(policy))

    def age(self, by_ns: int) -> None:
        """Make all flows and fragments older."""
        size = map_specs.REPLY_TABLE.value_size
        values = syscalls.array_values(self._replies, abi.REPLY_SETS, size)
        slots = struct.Struct(f"={2 * abi.REPLY_WAYS}Q")
        for index, numbers in enumerate(slots.iter_unpack(values)):
            if any(numbers):
                aged = list(numbers)
                for at in range(1, len(aged), 2):
                    # Before the start of a machine that has just started: as programs subtract.
                    aged[at] = (aged[at] - by_ns) % 2**64 if aged[at] else 0
                syscalls.map_update(self._replies, _NUMBER.pack(index), slots.pack(*aged))
        fragments = self._loaded.map(map_specs.FRAGMENTS)
        for key, value in list(fragments.items()):
            fragments.set(key, _BEAT.pack((_BEAT.unpack(value)[0] - by_ns) % 2**64))


def _config(gate: Gate) -> GateConfig:
    addresses = tuple(abi.unpack_address(address) for address in sorted(gate.addresses))
    return GateConfig(
        gate.mode,
        addresses[:-1],
        gate.rules,
        any_address=gate.has_any_address,
        claimed=addresses[-1:],
        without_fallback=not gate.has_fallback,
    )


def _replace(into: maps.Map, wanted: dict[bytes, bytes]) -> None:
    """All entries of a map."""
    for key, value in list(into.items()):
        if key not in wanted:
            into.delete(key)
        elif wanted[key] == value:
            del wanted[key]
    for key, value in wanted.items():
        into.set(key, value)
