"""Sources of dropped traffic, which the kernel counts without the agent."""

import pathlib

from agent.admin.report import Drops, RawSocketSourceStatus, SourceProcessStatus
from agent.drops.admitted_sources import AdmittedSources
from agent.drops.raw_sockets import FAMILIES
from agent.drops.source_processes import wall_clock
from agent.drops.source_report import source_status, with_scans
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.names import Names
from bpf import loader, map_specs, pins, raw_socket_policy
from bpf.drop_sources import DropSource, DropSources
from bpf.gate_reader import GateReader


def read(installation: pins.Pins, run_directory: pathlib.Path) -> Drops:
    """The agent's report, as far as the kernel knows it. A pod that no agent has saved is named
    after its interface.

    Blocks for milliseconds. Raises `PinsUnreadableError`.
    """
    names = Names(run_directory)
    with pinned_installation.opened(installation) as loaded:
        found = DropSources(loaded).read()
        sockets = list(map(raw_socket_policy.unpack_source, *_raw_sockets(loaded)))
        names.learn({seen.cgroup for seen in found} | {seen.cgroup for seen in sockets})
        gated = set(GateReader(loaded).interfaces())
        admitted = AdmittedSources(loaded)
        return Drops(
            sources=with_scans(
                _source(seen, names, admitted) for seen in found if seen.ifindex in gated
            ),
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
    entries = list(loaded.map(map_specs.RAW_SOCKET_SOURCES).items())
    return [key for key, _ in entries], [value for _, value in entries]


def _source(seen: DropSource, names: Names, admitted: AdmittedSources) -> SourceProcessStatus:
    pod, cgroup = names.pod(seen.ifindex), names.source(seen.cgroup)
    return source_status(
        *(seen, cgroup),
        namespace=pod.namespace,
        pod=pod.name or names.interface(seen.ifindex) or f"interface {seen.ifindex}",
        labels=pod.labels,
        is_admitted=admitted.has(seen, cgroup.path),
    )
