"""Rules in force, from the gates' configurations. The kernel has no names of policies."""

import pathlib
from collections.abc import Mapping

from agent.admin.report import PolicyStatus, RulesReport, RuleStatus
from agent.drops.source_processes import protocol_word
from agent.operate.pinned import egress as pinned_egress
from agent.operate.pinned import installation as pinned_installation
from agent.operate.pinned.names import Names
from agent.relay.interfaces import is_relay_interface
from bpf import pins
from bpf.gate_reader import GateReader
from bpf.rule_hits import RuleHits
from bpf.rules import Rule, SourceKind

_SOURCES = {
    SourceKind.ANY: "any process",
    SourceKind.KUBELET: "the kubelet",
    SourceKind.KERNEL: "the kernel",
}
DECLARED_PORTS = "(declared ports)"
"""In place of a policy's name, for rules that follow from probes and hooks."""


def read(installation: pins.Pins, run_directory: pathlib.Path) -> RulesReport:
    """The agent's report, as far as the kernel knows it: one policy for each rule, named after its
    number.

    Blocks for milliseconds. Raises `PinsUnreadableError`.
    """
    names = Names(run_directory)
    with pinned_installation.opened(installation) as loaded:
        reader = GateReader(loaded)
        hits = RuleHits(loaded).read()
        pods: dict[Rule, list[str]] = {}
        for ifindex in sorted(reader.interfaces()):
            interface = names.interface(ifindex)
            gate = reader.get(ifindex)
            if not gate or not interface or is_relay_interface(interface):
                continue
            pod = names.pod(ifindex)
            name = f"{pod.namespace}/{pod.name}" if pod.name else interface
            for rule in gate.rules:
                pods.setdefault(rule, []).append(name)
    names.learn({rule.cgroup for rule in pods if rule.cgroup})
    return RulesReport(
        sources=[f"the maps below {installation.maps}"],
        policies=[_policy(rule, sorted(set(owners)), hits, names) for rule, owners in pods.items()],
        problems=[],
        egress=pinned_egress.read(installation, names),
    )


def _policy(rule: Rule, pods: list[str], hits: Mapping[int, int], names: Names) -> PolicyStatus:
    name = f"(rule {rule.id:08x})" if rule.id else DECLARED_PORTS
    source = _SOURCES.get(rule.source) or f"cgroup {names.cgroup(rule.cgroup)}"
    if rule.source is SourceKind.ANCESTOR:
        source += " and below"
    status = RuleStatus(
        source=source,
        protocol=protocol_word(rule.protocol) if rule.protocol else "any",
        ports=rule.ports_text,
        hits=hits.get(rule.id, 0) if rule.id else 0,
        problem="",
    )
    return PolicyStatus(name=name, source="pins", pods=pods, rules=[status])
