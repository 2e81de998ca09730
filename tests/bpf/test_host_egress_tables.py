"""What HostEgressPolicies deny: the bytes of the rules, and which of them matches."""

import ipaddress
import struct

import pytest

from bpf import egress_evaluation
from bpf.egress_evaluation import EgressAttempt
from bpf.host_egress_tables import (
    CEgressRule,
    EgressRule,
    EgressSubject,
    EgressTable,
    pack_state,
)
from bpf.rule_evaluation import Cgroup

TCP, UDP = 6, 17
RULE = struct.Struct("=16s16sIHHBBxx")
"""struct egress_rule"""
MAPPED = bytes(10) + b"\xff\xff"
NETWORK = ipaddress.ip_network("198.18.0.0/15")
V4, V6 = ipaddress.ip_address("198.19.255.1"), ipaddress.ip_address("fd00:18::1")


@pytest.mark.parametrize(
    ("rule", "content"),
    [
        (EgressRule(3), RULE.pack(bytes(16), bytes(16), 3, 0, 65535, 0, 0)),
        (
            EgressRule(3, NETWORK, protocol=TCP, first_port=80, last_port=81),
            RULE.pack(MAPPED + b"\xc6\x12\0\0", b"\xff" * 12 + b"\xff\xfe\0\0", 3, 80, 81, TCP, 0),
        ),
        (
            EgressRule(63, ipaddress.ip_network("fd00:18::/33"), is_nodes=True),
            RULE.pack(
                b"\xfd\0\0\x18" + bytes(12), b"\xff" * 4 + b"\x80" + bytes(11), 63, 0, 65535, 0, 1
            ),
        ),
        (
            EgressRule(0, ipaddress.ip_network("0.0.0.0/0")),
            RULE.pack(MAPPED + bytes(4), b"\xff" * 12 + bytes(4), 0, 0, 65535, 0, 0),
        ),
    ],
)
def test_rule_is_packed_with_its_mask_and_read_back(rule: EgressRule, content: bytes) -> None:
    assert bytes(rule.pack()) == content
    assert EgressRule.unpack(CEgressRule.from_buffer_copy(content)) == rule


def test_table_has_its_rules_in_order() -> None:
    rules = EgressRule(1), EgressRule(2, NETWORK)
    subjects = {5: EgressSubject(2), 6: EgressSubject(1), 7: EgressSubject(2)}
    table = EgressTable(subjects, rules, enforced=1 << 63 | 2)
    content = struct.pack("=QII", 1 << 63 | 2, 2, 0) + b"".join(bytes(one.pack()) for one in rules)
    assert table.pack_rules() == content.ljust(16 + 128 * RULE.size, b"\0")
    assert table.levels == [1, 2]


def test_state_is_the_version_and_then_the_levels() -> None:
    assert pack_state(1, [2, 7]) == 0x070201
    assert pack_state(0, []) == 0


def test_nearest_cgroup_decides_which_policies_deny() -> None:
    subjects = {
        5: EgressSubject(1, denied=0b0110),
        7: EgressSubject(3, denied=0b1000, excepted=0b0010),
    }
    table = EgressTable(subjects, (), 0)
    for ancestors, policies in (
        ((1, 2), 0),
        ((1, 5, 6), 0b0110),
        ((1, 5, 6, 7), 0b1100),
        ((1, 2, 6, 7), 0b1000),
    ):
        assert egress_evaluation.policies_of(table, Cgroup(9, "", ancestors)) == policies


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (EgressRule(0), [True, True, True]),
        (EgressRule(0, NETWORK), [True, False, False]),
        (EgressRule(0, ipaddress.ip_network("fd00:18::/32")), [False, True, False]),
        (EgressRule(0, is_nodes=True), [False, True, False]),
        (EgressRule(0, protocol=TCP), [True, True, False]),
        (EgressRule(0, first_port=80), [True, True, False]),
        (EgressRule(0, first_port=81), [False, True, False]),
        (EgressRule(0, last_port=80), [True, False, True]),
    ],
)
def test_rule_matches_by_address_protocol_and_port(rule: EgressRule, expected: list[bool]) -> None:
    attempts = [
        EgressAttempt(V4, TCP, 80, is_nodes=False),
        EgressAttempt(V6, TCP, 81, is_nodes=True),
        EgressAttempt(ipaddress.ip_address("198.20.0.0"), UDP, 79, is_nodes=False),
    ]
    table = EgressTable({}, (rule,), 1)
    found = [egress_evaluation.find_policy(table, 1, attempt) for attempt in attempts]
    assert [one is rule for one in found] == expected


def test_rule_in_force_goes_before_those_in_audit() -> None:
    in_audit, second, in_force = EgressRule(0), EgressRule(2), EgressRule(1)
    table = EgressTable({}, (in_audit, second, in_force), enforced=0b1010)
    attempt = EgressAttempt(V4, TCP, 80, is_nodes=False)
    for policies, expected in (
        (0b111, in_force),
        (0b101, in_audit),
        (0b100, second),
        (0b1000, None),
    ):
        assert egress_evaluation.find_policy(table, policies, attempt) is expected
    assert [egress_evaluation.is_enforced(table, number) for number in range(4)] == [
        *(False, True, False, True)
    ]


def test_no_address_is_the_loopback() -> None:
    for to, expected in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("198.18.0.1", "198.18.0.1")):
        found = egress_evaluation.replace_unspecified(ipaddress.ip_address(to))
        assert str(found) == expected
