"""Which senders of the node a pod's gate lets in: today the kubelet, to what the pod declares."""

import socket

from bpf import abi
from bpf.rules import Rule, Sender
from probes.specs import PodSpec

_ANY_TCP_PORT = Rule(Sender.KUBELET, socket.IPPROTO_TCP)


def kubelet_rules(spec: PodSpec) -> tuple[Rule, ...]:
    """What the kubelet may open: any port of a pod with an http(s) probe or hook, whose redirects
    to other ports it follows (pkg/probe/http), else the declared ports.

    Any port, too, of a pod whose probes could not all be read, or that declares more ports than a
    gate has room for: a healthy pod must not restart for that.
    """
    declared = spec.declared
    if declared.any_port or spec.errors or len(declared.ports) > abi.GATE_RULES:
        return (_ANY_TCP_PORT,)
    return tuple(
        Rule(Sender.KUBELET, socket.IPPROTO_TCP, port, port) for port in sorted(declared.ports)
    )
