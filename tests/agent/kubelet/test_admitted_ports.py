"""The ports to which gates admit the kubelet."""

import socket

import pytest

from agent.kubelet.admitted_ports import kubelet_rules
from bpf import abi
from bpf.rules import Rule, SourceKind
from probes.spec.specs import DeclaredPorts, FieldProblem, PodSpec

ANY = (Rule(SourceKind.KUBELET, socket.IPPROTO_TCP),)


def spec(*ports: int, any_port: bool = False, errors: tuple[FieldProblem, ...] = ()) -> PodSpec:
    return PodSpec(declared=DeclaredPorts(any_port, frozenset(ports)), errors=errors)


def test_declared_ports_and_no_others() -> None:
    rules = kubelet_rules(spec(80, 443))
    assert [(rule.source, rule.first_port, rule.last_port) for rule in rules] == [
        (SourceKind.KUBELET, 80, 80),
        (SourceKind.KUBELET, 443, 443),
    ]
    assert {rule.protocol for rule in rules} == {socket.IPPROTO_TCP}


def test_pod_without_declared_ports_admits_nothing() -> None:
    assert kubelet_rules(spec()) == ()


@pytest.mark.parametrize(
    "declared",
    [
        pytest.param(spec(80, any_port=True), id="http, whose redirects go to other ports"),
        pytest.param(
            spec(80, errors=(FieldProblem("spec", "InvalidProbe", "wrong."),)), id="not all known"
        ),
        pytest.param(spec(*range(1, abi.GATE_RULES + 2)), id="more than a gate has room for"),
    ],
)
def test_any_port_where_a_healthy_pod_might_restart_else(declared: PodSpec) -> None:
    assert kubelet_rules(declared) == ANY
