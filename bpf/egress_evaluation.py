"""What HostEgressPolicies deny: the twin of src/host_egress.c, by the same names. Pure functions.

tests/kernel/test_explain_egress.py compares it with what the programs do.
"""

import dataclasses
import ipaddress

from bpf import abi
from bpf.abi import IPAddress
from bpf.host_egress_tables import EgressRule, EgressTable
from bpf.rule_evaluation import Cgroup

_LOOPBACK4, _LOOPBACK6 = ipaddress.IPv4Address("127.0.0.1"), ipaddress.IPv6Address("::1")


@dataclasses.dataclass(frozen=True, slots=True)
class EgressAttempt:
    """`struct egress_attempt`. protocol: IP protocol number; port: 0 for protocols without;
    is_nodes: whether the destination is an address of the node, or its loopback."""

    destination: IPAddress
    protocol: int
    port: int
    is_nodes: bool


def policies_of(table: EgressTable, cgroup: Cgroup) -> int:
    """The policies that deny something to this cgroup: a mask. The nearest cgroup decides."""
    policies = 0
    for ancestor in cgroup.ancestors:
        if subject := table.subjects.get(ancestor):
            policies = (policies | subject.denied) & ~subject.excepted
    return policies


def replace_unspecified(to: IPAddress) -> IPAddress:
    """A socket that connects to no address connects to the loopback."""
    if not to.is_unspecified:
        return to
    return _LOOPBACK4 if to.version == 4 else _LOOPBACK6


def find_policy(table: EgressTable, policies: int, attempt: EgressAttempt) -> EgressRule | None:
    """The first rule of a policy in force that matches, or else the first of one in audit."""
    found = [
        rule
        for rule in table.rules
        if policies >> rule.policy & 1
        and is_destination(rule, attempt)
        and is_protocol(rule, attempt)
        and is_port(rule, attempt)
    ]
    enforced = (rule for rule in found if is_enforced(table, rule.policy))
    return next(enforced, found[0] if found else None)


def is_enforced(table: EgressTable, policy: int) -> bool:
    """Whether the policy with this number is in force; otherwise it only counts."""
    return bool(table.enforced >> policy & 1)


def is_destination(rule: EgressRule, attempt: EgressAttempt) -> bool:
    """By the address alone."""
    packed = rule.pack()
    address, mask, to = (
        int.from_bytes(part, "big")
        for part in (packed.address, packed.mask, abi.pack_address(attempt.destination))
    )
    return (to ^ address) & mask == 0 and (attempt.is_nodes or not rule.is_nodes)


def is_protocol(rule: EgressRule, attempt: EgressAttempt) -> bool:
    return rule.protocol in (0, attempt.protocol)


def is_port(rule: EgressRule, attempt: EgressAttempt) -> bool:
    return rule.first_port <= attempt.port <= rule.last_port
