"""Sources of dropped traffic, which the kernel counts without the agent."""

import pathlib

from agent.admin.report import Drops, RawSocketSourceStatus, SourceProcessStatus
from agent.drops.raw_sockets import FAMILIES
from agent.drops.source_processes import protocol_word, wall_clock
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.names import Names
from bpf import abi, loader, pins, raw_socket_policy
from bpf.drop_sources import DropSource, DropSources
from bpf.gate_reader import GateReader


def read(installation: pins.Pins, run_directory: pathlib.Path) -> Drops:
    """The agent's report, as far as the kernel knows it. A pod that no agent has saved is named
    after its interface.

    Blocks for milliseconds. Raises `PinsUnreadableError`.
    """
    names = Names(run_directory)
    with pinned_installation.opened(installation) as loaded:
        found = sorted(DropSources(loaded).read(), key=lambda seen: -seen.count)
        sockets = list(map(raw_socket_policy.unpack_source, *_raw_sockets(loaded)))
        names.learn({seen.cgroup for seen in found} | {seen.cgroup for seen in sockets})
        gates = GateReader(loaded)
        modes = {
            ifindex: gate.mode.label
            for ifindex in {seen.ifindex for seen in found}
            if (gate := gates.get(ifindex))
        }
        return Drops(
            sources=[
                _source(seen, modes[seen.ifindex], names) for seen in found if seen.ifindex in modes
            ],
            lost_packets=DropSources(loaded).lost(),
            raw_sockets=[
                RawSocketSourceStatus(
                    cgroup=names.cgroup(seen.cgroup),
                    process=seen.process_name,
                    family=FAMILIES.get(seen.family, str(seen.family)),
                    verdict=seen.verdict.label,
                    sockets=seen.count,
                    first=wall_clock(seen.first_ns),
                    last=wall_clock(seen.last_ns),
                )
                for seen in sorted(sockets, key=lambda seen: -seen.count)
            ],
        )


def _raw_sockets(loaded: loader.Loaded) -> tuple[list[bytes], list[bytes]]:
    entries = list(loaded.map(abi.RAW_SOCKET_SOURCES).items())
    return [key for key, _ in entries], [value for _, value in entries]


def _source(seen: DropSource, mode: str, names: Names) -> SourceProcessStatus:
    pod = names.pod(seen.ifindex)
    return SourceProcessStatus(
        namespace=pod.namespace,
        pod=pod.name or names.interface(seen.ifindex) or f"interface {seen.ifindex}",
        mode=mode,
        protocol=protocol_word(seen.protocol),
        port=seen.port,
        has_many_ports=seen.has_many_ports,
        cgroup=names.cgroup(seen.cgroup),
        process=seen.process_name,
        packets=seen.count,
        first=wall_clock(seen.first_ns),
        last=wall_clock(seen.last_ns),
        labels=pod.labels,
    )
