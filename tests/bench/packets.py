"""Cost of the gate for one packet, and of a change for many gates: part of bench `gate`.

Packets are timed by BPF_PROG_TEST_RUN, in turn with an empty program. A ratio is that of the
fastest of three runs each, since other processes only make runs longer. The time is the thread's:
the kernel's own figure has whole nanoseconds, of which an empty program takes nine.
"""

import statistics
import sys
import time

from bpf import loader, map_specs, pins, program_specs, syscalls
from bpf.gate_table import GateTable
from bpf.gates import GateConfig, Gates
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode
from tests.bench import figures
from tests.bench.crowd import Crowd
from tests.kernel import foreign, frames, skb

_ROUNDS = 15
_RUNS = 3
_REPEAT = 40_000
_CHANGES = 5
_PODS = 250
_GATED_IFINDEX, _FOREIGN_IFINDEX = 1, 4242


def measure(loaded: loader.Loaded, installation: pins.Pins) -> None:
    ends = frames.Ends(frames.address("198.18.0.1"), frames.address("198.18.1.1"))
    from_pod = frames.Ends(ends.pod, ends.source)
    egress, ingress = (
        loaded.programs[program_specs.GATE_EGRESS],
        loaded.programs[program_specs.GATE_INGRESS],
    )
    syn = frames.segment(ends, frames.SYN)
    packets = {
        "forwarded": (egress, syn, _FOREIGN_IFINDEX),
        "forwarded_ack": (egress, frames.segment(ends, frames.ACK), _FOREIGN_IFINDEX),
        "ack": (egress, frames.segment(ends, frames.ACK), 0),
        "syn": (egress, syn, 0),
        "udp": (egress, frames.packet(ends, frames.UDP, frames.udp(ends)), 0),
        "from_pod": (ingress, frames.segment(from_pod, frames.ACK), 0),
    }
    table = GateTable(loaded, installation.maps)
    table.set(_GATED_IFINDEX, GateConfig(Mode.ENFORCE, (ends.pod,)), 0)
    empty = foreign.load_program(skb.TCX_NEXT)
    ratios: dict[str, list[float]] = {name: [] for name in packets}
    baselines = []
    for _ in range(_ROUNDS):
        taken: dict[str, list[float]] = {name: [] for name in ("empty", *packets)}
        for _ in range(_RUNS):
            taken["empty"].append(_run_ns(empty, syn, 0))
            for name, packet in packets.items():
                taken[name].append(_run_ns(*packet))
        baseline = min(taken["empty"])
        baselines.append(baseline)
        for name, samples in ratios.items():
            samples.append(min(taken[name]) / baseline)
    for name, samples in ratios.items():
        figures.emit("gate", f"{name}_over_empty_ratio", samples, "ratio to an empty program")
    sys.stderr.write(f"bench: an empty program takes {statistics.median(baselines):.1f} ns\n")
    table.delete(_GATED_IFINDEX)
    table.close()


def _run_ns(program_fd: int, frame: bytes, ingress_ifindex: int) -> float:
    context = skb.context(_GATED_IFINDEX, ingress_ifindex)
    started = time.thread_time_ns()
    syscalls.run_program(program_fd, frame, context, _REPEAT)
    return (time.thread_time_ns() - started) / _REPEAT


def measure_policies(loaded: loader.Loaded, installation: pins.Pins) -> None:
    """A policy that touches all of these pods: each gate gets another rule."""
    gates = Gates(loaded, installation)
    taken = []
    with Crowd(_PODS) as crowd:
        for change in range(1 + _CHANGES):
            started = time.perf_counter()
            for ifindex in crowd.ifindexes:
                gates.install(ifindex, _config(ifindex, change))
            taken.append((time.perf_counter() - started) * 1000)
        for ifindex in crowd.ifindexes:
            gates.remove(ifindex)
    gates.close()
    figures.emit("gate", f"policy_{_PODS}_pods_ms", taken[1:], "ms")


def _config(ifindex: int, port: int) -> GateConfig:
    address = frames.address(f"198.19.{ifindex >> 8 & 255}.{ifindex & 255}")
    rules = [Rule(SourceKind.ANY, 6, port + number, port + number) for number in range(1, 7)]
    return GateConfig(Mode.ENFORCE, (address,), tuple(rules))


def emit_memory() -> None:
    """Of the counters of 250 gates on 128 CPUs; all slots exist, used or not."""
    size = sum(
        spec.value_size * spec.max_entries * (128 if spec.is_per_cpu else 1)
        for spec in (map_specs.COUNTERS, map_specs.FREQUENT_COUNTS)
    )
    figures.emit("gate", "counters_mib_128_cpus", [size / 2**20], "MiB")
