"""The node's gates, and what of podgate is attached, from the pins."""

import contextlib
import datetime
import os
import pathlib
import struct
import time
from collections.abc import Iterable, Iterator

import msgspec

from agent.admin.report import HookStatus
from agent.linux.cgroups import cgroup2_mount
from agent.operate.pinned import agent_process, findings
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.exposures import exposures
from agent.operate.pinned.gate_attachments import GateAttachments
from agent.operate.pinned.names import Names
from agent.operate.pinned.report import PinnedGateStatus, PinnedRelayStatus, PinnedStatus
from agent.pods import off_marks
from agent.relay.interfaces import is_relay_interface
from bpf import abi, errors, hooks, loader, map_specs, pins, program_specs
from bpf.counters import Counters, Counts, labelled
from bpf.gate_config import GateConfig
from bpf.gate_reader import GateReader
from bpf.node_config import NodeConfig
from bpf.rules import SourceKind
from bpf.verdicts import Mode

_KEY = bytes(4)
_TIME = struct.Struct("=Q")


def read(
    installation: pins.Pins, run_directory: pathlib.Path, *, agent: str = "", now_ns: int = 0
) -> PinnedStatus:
    """agent: why it did not answer; now_ns: CLOCK_MONOTONIC, 0 for the current time.

    Blocks for milliseconds. Raises `PinsUnreadableError`.
    """
    is_off = off_marks.are_set(run_directory, installation)
    with pinned_installation.opened(installation) as loaded:
        names = Names(run_directory)
        return _Reader(installation, loaded, names, now_ns, is_off=is_off).read(agent)


class _Reader:
    def __init__(
        self,
        installation: pins.Pins,
        loaded: loader.Loaded,
        names: Names,
        now_ns: int,
        *,
        is_off: bool,
    ) -> None:
        self._is_off = is_off
        self._installation = installation
        self._loaded = loaded
        self._names = names
        self._now_ns = now_ns or time.monotonic_ns()
        self._counters = Counters(loaded)
        self._node = NodeConfig(loaded).facts()

    def read(self, agent: str) -> PinnedStatus:
        node = self._node
        kubelet = node.remade_cgroup or node.kubelet_cgroup
        reader = GateReader(self._loaded)
        gates = {
            ifindex: gate
            for ifindex in sorted(reader.interfaces())
            if (gate := reader.get(ifindex)) and self._is_pods(ifindex)
        }
        relay = self._relay(gates.values())
        process = agent_process.find(self._installation.root)
        found = PinnedStatus(
            agent=agent,
            agent_pid=process.pid if process else 0,
            agent_age_seconds=process.age_seconds if process else 0.0,
            is_off=self._is_off,
            schema=abi.SCHEMA,
            heartbeat_age_seconds=self._age(node.heartbeat_ns),
            stale_after_seconds=node.stale_after_ns / 1e9,
            dead_man_seconds=node.dead_man_ns / 1e9,
            exposures=exposures(
                node,
                list(gates.values()),
                is_relay_up=relay.is_up,
                now_ns=self._now_ns,
                now=datetime.datetime.now(datetime.UTC),
            ),
            kubelet=self._names.cgroup(kubelet) if kubelet else None,
            is_kubelet_followed=node.is_unit_followed,
            hooks=list(self._hooks()),
            relay=relay,
            node_drops=_reasons(self._counters.of_host()),
            gates=list(self._gates(gates, reader)),
        )
        return msgspec.structs.replace(found, findings=findings.find(found))

    def _is_pods(self, ifindex: int) -> bool:
        """Not the relay's, nor of an interface that was deleted while no agent ran."""
        name = self._names.interface(ifindex)
        return bool(name) and not is_relay_interface(name)

    def _gates(
        self, gates: dict[int, GateConfig], reader: GateReader
    ) -> Iterator[PinnedGateStatus]:
        with contextlib.closing(GateAttachments(self._installation)) as attached:
            for ifindex, gate in gates.items():
                pod = self._names.pod(ifindex)
                own = [rule for rule in gate.rules if rule.source is not SourceKind.KUBELET]
                yield PinnedGateStatus(
                    interface=self._names.interface(ifindex),
                    ifindex=ifindex,
                    namespace=pod.namespace,
                    pod=pod.name,
                    mode=gate.mode.label,
                    addresses=[str(address) for address in gate.addresses],
                    attachment=attached.of(ifindex),
                    declared_ports=len(own) < len(gate.rules),
                    rules=len(own),
                    is_in_grace_period=(reader.grace_until_ns(ifindex) or 0) > self._now_ns,
                    packets=labelled(self._counters.of_gate(ifindex)),
                )

    def _hooks(self) -> Iterator[HookStatus]:
        root = cgroup2_mount()
        if root is None:
            return
        cgroup_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for hook in program_specs.HOOKS:
                yield HookStatus(name=hook.name, problem=self._hook_problem(hook, cgroup_fd))
        finally:
            os.close(cgroup_fd)

    def _hook_problem(self, hook: program_specs.HookSpec, cgroup_fd: int) -> str | None:
        try:
            with pins.opened(self._installation.links / hook.name) as link_fd:
                if hooks.is_linked(link_fd, cgroup_fd, hook):
                    return None
                return "its link is not to the root cgroup"
        except errors.BpfError:
            return "it has no link"

    def _relay(self, gates: Iterable[GateConfig]) -> PinnedRelayStatus:
        (beat,) = _TIME.unpack(self._loaded.map(map_specs.RELAY_BEAT).get(_KEY) or bytes(8))
        age = self._age(beat)
        return PinnedRelayStatus(
            is_up=age is not None and age * 1e9 < abi.RELAY_BEAT_LIMIT_NS,
            beat_age_seconds=age,
            ports=sum(1 for _ in self._loaded.map(map_specs.RELAY_TARGETS).items()),
            has_fallback=not any(
                gate.mode is Mode.STRICT and gate.without_fallback for gate in gates
            ),
        )

    def _age(self, at_ns: int) -> float | None:
        return max(0.0, (self._now_ns - at_ns) / 1e9) if at_ns else None


def _reasons(counts: Counts) -> dict[str, int]:
    return {reason.label: count for (_, reason), count in counts.items()}
