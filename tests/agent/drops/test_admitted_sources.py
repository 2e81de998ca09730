"""Which sources of drops a rule admits by now."""

import pathlib

import pytest

from agent.drops.admitted_sources import current_cgroup, is_admitted
from bpf.drop_sources import DropSource
from bpf.gate_config import GateConfig
from bpf.rule_evaluation import Cgroup, NodeFacts
from bpf.rules import Rule, SourceKind
from bpf.verdicts import Mode

TCP, UDP = 6, 17
SERVICE = Cgroup(5, "/system.slice/backup.service", (1, 2, 5))
KUBELET = Rule(SourceKind.KUBELET, protocol=TCP, first_port=8080, last_port=8080)


def dropped(port: int = 8080, *, cgroup: int = 5, protocol: int = TCP) -> DropSource:
    return DropSource(cgroup, 7, protocol, port, 1, 2, 3, "curl", Mode.AUDIT)


def admits(
    rule: Rule,
    seen: DropSource,
    cgroup: Cgroup | None = SERVICE,
    *,
    mode: Mode = Mode.ENFORCE,
    node: NodeFacts | None = None,
) -> bool:
    return is_admitted(seen, cgroup, GateConfig(mode, (), (rule,)), node or NodeFacts())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(SourceKind.CGROUP, cgroup=5), True),
        (Rule(SourceKind.ANCESTOR, cgroup=2, level=1), True),
        (Rule(SourceKind.CGROUP, cgroup=6), False),
        (Rule(SourceKind.CGROUP, cgroup=5, protocol=UDP), False),
        (Rule(SourceKind.CGROUP, cgroup=5, first_port=80, last_port=81), False),
        (Rule(SourceKind.KERNEL), False),
    ],
)
def test_rule_admits_its_own_source_to_its_own_ports(rule: Rule, expected: bool) -> None:
    assert admits(rule, dropped()) is expected


def test_source_of_many_ports_needs_a_rule_for_all() -> None:
    assert admits(Rule(SourceKind.ANY), dropped(port=0))
    assert not admits(Rule(SourceKind.ANY, protocol=TCP, first_port=1, last_port=1), dropped(0))


def test_packets_without_a_socket_are_the_kernel_s() -> None:
    assert admits(Rule(SourceKind.KERNEL), dropped(cgroup=0), None)
    assert not admits(Rule(SourceKind.CGROUP, cgroup=5), dropped(cgroup=0), None)


def test_kubelet_is_admitted_to_declared_ports_but_not_past_the_relay() -> None:
    node = NodeFacts(kubelet_cgroup=5)
    assert admits(KUBELET, dropped(), node=node)
    assert not admits(KUBELET, dropped(), node=node, mode=Mode.STRICT)


def test_ports_that_are_open_without_a_kubelet_admit_no_source() -> None:
    assert not admits(KUBELET, dropped())


def test_unit_that_was_started_again_has_its_present_cgroup(tmp_path: pathlib.Path) -> None:
    service = tmp_path / "system.slice" / "backup.service"
    service.mkdir(parents=True)
    found = current_cgroup(5, "/system.slice/backup.service", tmp_path)
    ids = [path.stat().st_ino for path in (tmp_path, service.parent, service)]
    assert (found.id, list(found.ancestors)) == (ids[-1], ids)


def test_cgroup_that_is_gone_has_those_above_it(tmp_path: pathlib.Path) -> None:
    """A container that was started again has another cgroup, below the same pod's."""
    (tmp_path / "pod").mkdir()
    found = current_cgroup(5, "/pod/container", tmp_path)
    assert found.id == 5
    assert list(found.ancestors) == [path.stat().st_ino for path in (tmp_path, tmp_path / "pod")]


def test_source_without_a_path_has_its_own_number_alone(tmp_path: pathlib.Path) -> None:
    assert current_cgroup(5, "(gone)", tmp_path) == Cgroup(5, "(gone)", ())
    assert current_cgroup(5, "/system.slice", None).ancestors == ()
