"""Confirms a verdict: runs the gate's own program on the same facts.

The program runs on maps of its own, as a packet of this process (bpf/gate_trial.py). So this
process takes the source's place: wherever a rule or the configuration names the source's cgroup, or
one above it, it gets this process's.
"""

import dataclasses
import socket
import struct

from agent.linux import packets
from agent.operate.explain import model
from agent.operate.explain.evaluation import ICMP, ICMPV6, TCP, UDP, Evaluation
from agent.operate.explain.facts import HOST, Facts, Flow, GateFacts, Source
from bpf import abi, errors, pins, sources
from bpf.gate_config import GateConfig
from bpf.gate_trial import GateTrial
from bpf.rule_evaluation import ROOT_CGROUP, Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Reason, Verdict

_NO_CGROUP = (1 << 64) - 1
_UNIT = 1
# Replies and packets of a grace period pass by their socket, which a test run lacks.
_BY_SOCKET = frozenset({Reason.REPLY, Reason.ESTABLISHED, Reason.GRACE})
_ETHERTYPES = {4: 0x0800, 6: 0x86DD}
_SOURCE_PORT = 20000
_TTL = 64


def confirm(
    installation: pins.Pins, facts: Facts, source: Source, flow: Flow, found: Evaluation
) -> tuple[Evaluation, str]:
    """The evaluation, and what the program's answer to it is, in a phrase; empty if it has none.

    If the program has another verdict, that one counts.
    """
    if not can_confirm(source, found):
        return found, ""
    if not (installation.programs / sources.fingerprint()).is_dir():
        return found, "not run: the programs in force are of another version"
    try:
        with GateTrial() as trial:
            verdict, reason = trial_verdict(trial, facts, source, flow, found)
    except (errors.KernelSideError, OSError) as error:
        return found, f"not run: {error}"
    if (verdict, reason) == (found.verdict, found.reason):
        return found, model.SAME
    answer = dataclasses.replace(found, verdict=verdict, reason=reason, decided_by=model.GATE)
    return answer, "the gate's program decides otherwise than the steps show; please report this"


def can_confirm(source: Source, found: Evaluation) -> bool:
    """Whether a test run can show this verdict: of a new flow of a host process, by a gate."""
    return (
        source.origin == HOST
        and found.gate is not None
        and found.reason is not None
        and found.decided_by in (model.GATE, model.CONNECT_HOOK)
        and found.reason not in _BY_SOCKET
        and found.reason is not Reason.TUNNEL
    )


def trial_verdict(
    trial: GateTrial, facts: Facts, source: Source, flow: Flow, found: Evaluation
) -> tuple[Verdict, Reason]:
    """The program's verdict and reason. Raises `BpfError`."""
    gate, cgroup = found.gate, source.cgroup
    assert gate is not None
    assert cgroup is not None
    own = trial.cgroup
    config, remade = _node(facts.node, cgroup, own)
    return trial.run(config, _gate(gate, cgroup, own), first_frame(flow), remade)


def first_frame(flow: Flow) -> bytes:
    """The first frame of a flow, from the loopback's address."""
    ports = _SOURCE_PORT, flow.port
    if flow.protocol == TCP:
        payload = packets.TCP_HEADER.pack(*ports, 0, 0, 5 << 4, packets.SYN, 1024, 0, 0)
    elif flow.protocol == UDP:
        payload = struct.pack("!HHHH", *ports, 8, 0)
    elif flow.protocol in (ICMP, ICMPV6):
        echo_request = 8 if flow.protocol == ICMP else 128
        payload = struct.pack("!BBHHH", echo_request, 0, 0, 1, 1)
    else:
        payload = struct.pack("!HHII", *ports, 0, 0)
    return bytes(12) + struct.pack("!H", _ETHERTYPES[flow.address.version]) + _ip(flow, payload)


def _ip(flow: Flow, payload: bytes) -> bytes:
    to = flow.address.packed
    if flow.address.version == 4:
        length = packets.IPV4_BYTES + len(payload)
        header = struct.pack("!BBHHHBBH", 0x45, 0, length, 0, 0, _TTL, flow.protocol, 0)
        return header + socket.inet_pton(socket.AF_INET, "127.0.0.1") + to + payload
    header = struct.pack("!IHBB", 6 << 28, len(payload), flow.protocol, _TTL)
    return header + socket.inet_pton(socket.AF_INET6, "::1") + to + payload


def _node(node: NodeFacts, source: Cgroup, own: int) -> tuple[abi.CConfig, abi.CKubeletRemade]:
    # The root is above every process.
    pods_cgroup = _NO_CGROUP if node.pods_cgroup else 0
    if node.is_in_pod(source):
        pods_cgroup = ROOT_CGROUP
    config = abi.CConfig(
        kubelet_cgroup=_cgroup(node.kubelet_cgroup, source, own),
        pods_cgroup=pods_cgroup,
        pods_cgroup_level=0,
        heartbeat_ns=node.heartbeat_ns,
        stale_after_ns=node.stale_after_ns,
        dead_man_ns=node.dead_man_ns,
        has_ovs=node.has_ovs,
        kubelet_unit=_UNIT if node.is_unit_followed else 0,
    )
    return config, abi.CKubeletRemade(_cgroup(node.remade_cgroup, source, own), _UNIT)


def _cgroup(number: int, source: Cgroup, own: int) -> int:
    return own if number == source.id else _NO_CGROUP if number else 0


def _gate(gate: GateFacts, source: Cgroup, own: int) -> GateConfig:
    return GateConfig(
        gate.mode,
        tuple(gate.addresses),
        tuple(_rule(rule, source, own) for rule in gate.rules),
        any_address=gate.has_any_address,
        identified_kubelet=gate.identified_kubelet,
        without_fallback=not gate.has_fallback,
    )


def _rule(rule: Rule, source: Cgroup, own: int) -> Rule:
    match rule.source:
        case SourceKind.CGROUP:
            cgroup = _cgroup(rule.cgroup, source, own)
        case SourceKind.ANCESTOR:
            # The root is above every process.
            is_above = source.ancestor(rule.level) == rule.cgroup
            cgroup = ROOT_CGROUP if is_above else _NO_CGROUP
        case _:
            return rule
    return dataclasses.replace(rule, cgroup=cgroup, level=0, id=0)
