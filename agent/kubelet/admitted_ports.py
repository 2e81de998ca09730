"""Ports to which a pod's gate admits the kubelet: those that the pod declares."""

import socket

from bpf import abi
from bpf.rules import Rule, SourceKind
from probes.spec.specs import PodSpec

_ANY_TCP_PORT = Rule(SourceKind.KUBELET, socket.IPPROTO_TCP)


def kubelet_rules(spec: PodSpec) -> tuple[Rule, ...]:
    """Rules that admit the kubelet to the declared ports, or to any port of a pod with an http(s)
    probe or hook, whose redirects to other ports it follows (pkg/probe/http).

    Also to any port of a pod whose probes are not all valid, or that declares more ports than a
    gate has room for: a healthy pod must not be restarted for that.
    """
    declared = spec.declared
    if declared.any_port or spec.errors or len(declared.ports) > abi.GATE_RULES:
        return (_ANY_TCP_PORT,)
    return tuple(
        Rule(SourceKind.KUBELET, socket.IPPROTO_TCP, port, port) for port in sorted(declared.ports)
    )
