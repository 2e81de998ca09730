"""The configuration of one gate."""

import dataclasses

from bpf import abi
from bpf.rules import Rule
from bpf.verdicts import Mode


@dataclasses.dataclass(frozen=True, slots=True)
class GateConfig:
    """The configuration of one gate.

    addresses: the pod's confirmed addresses, by which hooks and bridges find its gate; claimed:
    other addresses in its namespace, which count in this gate alone. rules: at most 32.
    any_address: all addresses behind the interface are the pod's (the relay's range).
    without_fallback: in strict the kubelet is never admitted, with a relay or without.
    identified_kubelet: rules for the kubelet admit no process that only may be the kubelet. pod:
    whose interface it is; a pod's interfaces share its addresses. Not stored in the kernel.
    """

    mode: Mode
    addresses: tuple[abi.IPAddress, ...]
    rules: tuple[Rule, ...] = ()
    any_address: bool = False
    claimed: tuple[abi.IPAddress, ...] = ()
    without_fallback: bool = False
    identified_kubelet: bool = False
    pod: str = dataclasses.field(default="", compare=False)
