"""The kernel programs by name, and those of cgroups and functions with what they attach to."""

import dataclasses

GATE_EGRESS = "gate_egress"
GATE_INGRESS = "gate_ingress"
BRIDGE_GATE = "bridge_gate"
DEVICE_GATE = "device_gate"
UPLINK_GATE = "uplink_gate"
BARE_DEVICE_GATE = "bare_device_gate"
HAND_MADE_GATE = "hand_made_gate"
STAMP_SPOOFED = "stamp_spoofed"
TUNNEL_GATE = "tunnel_gate"
HOLD_SYNS = "hold_syns"
DROP_FORWARDED = "drop_forwarded"


def moving_copy(program: str) -> str:
    """The name of a program's second copy, attached for a moment while the program moves.

    A program can be in an interface's chain only once, but to change its position without a gap it
    must be there twice for a moment. Most nodes never need one.
    """
    return f"{program}_moving"


_TC_PROGRAMS = (
    *(GATE_EGRESS, GATE_INGRESS),
    *(BRIDGE_GATE, DEVICE_GATE, UPLINK_GATE, BARE_DEVICE_GATE),
    *(HAND_MADE_GATE, STAMP_SPOOFED, TUNNEL_GATE),
    *(HOLD_SYNS, DROP_FORWARDED),
)

# The function of each pinned program.
PROGRAMS = {name: name for name in _TC_PROGRAMS}

# Many nodes lack some of these devices, and the verifier takes 0.1 s for each.
DEFERRABLE = (UPLINK_GATE, DEVICE_GATE, BRIDGE_GATE, BARE_DEVICE_GATE)
"""Programs that are loaded when a device needs one, or once the first gates are attached; the most
frequent devices first."""

# Only gates have moving copies: other projects' programs are unusual on bridges, the loopback and
# the relay's pair.
MOVING_COPIES = {moving_copy(name): name for name in (GATE_EGRESS, GATE_INGRESS)}


@dataclasses.dataclass(frozen=True, slots=True)
class HookSpec:
    """A program for the root cgroup.

    type: `enum bpf_prog_type`; attach_type: `enum bpf_attach_type`; kernel_function: what a tracing
    program is attached to.
    """

    name: str
    type: int
    attach_type: int
    kernel_function: str = ""


_CGROUP_SKB, _SOCK, _SOCK_OPS, _SOCK_ADDR, _SOCKOPT = 8, 9, 13, 18, 25

RECORD_CONNECTS = HookSpec("hook_sockops", _SOCK_OPS, 3)
"""Without it hairpins pass (`src/hairpins.h`)."""

HOOKS = (
    HookSpec("hook_release", _SOCK, 34),
    HookSpec("hook_create", _SOCK, 2),
    HookSpec("hook_connect4", _SOCK_ADDR, 10),
    HookSpec("hook_connect6", _SOCK_ADDR, 11),
    HookSpec("hook_sendmsg4", _SOCK_ADDR, 14),
    HookSpec("hook_sendmsg6", _SOCK_ADDR, 15),
    HookSpec("hook_setsockopt", _SOCKOPT, 22),
    RECORD_CONNECTS,
)
"""Optional: gates enforce without them, and a kernel that rejects one loads the others."""

RAW_SOCKET_HOOKS = ("hook_release", "hook_create")
"""Those of `HOOKS` that mark raw sockets."""

RELAY_HOOKS = (
    HookSpec("relay_getpeername4", _SOCK_ADDR, 29),
    HookSpec("relay_getpeername6", _SOCK_ADDR, 30),
    HookSpec("relay_connect4", _SOCK_ADDR, 10),
    HookSpec("relay_connect6", _SOCK_ADDR, 11),
)
"""Attached by the relay's process (`bpf/redirect.py`), all or none, in this order: a redirected
process must not see the relay's address by getpeername.
"""

FOLLOW_KUBELET = HookSpec("follow_kubelet", 17, 0)
"""A raw tracepoint's program (`bpf/kubelet_unit.py`), optional as well."""

CREATE_PACKET_SOCKET = HookSpec("create_packet_socket", 26, 26, "security_socket_create")
"""A tracing program that may replace the function's result (`bpf/raw_socket_policy.py`)."""

TRACING_PROGRAMS = (FOLLOW_KUBELET, CREATE_PACKET_SOCKET)

EGRESS_HOOKS = (
    HookSpec("egress_connect4", _SOCK_ADDR, 10),
    HookSpec("egress_connect6", _SOCK_ADDR, 11),
    HookSpec("egress_sendmsg4", _SOCK_ADDR, 14),
    HookSpec("egress_sendmsg6", _SOCK_ADDR, 15),
    HookSpec("egress_packet", _CGROUP_SKB, 1),
)
"""Of HostEgressPolicies, loaded with the first one (`bpf/host_egress.py`)."""

OPTIONAL_PROGRAMS = (*HOOKS, *RELAY_HOOKS, *TRACING_PROGRAMS)
"""Pinned where the kernel accepts them: TRACING_PROGRAMS not if it is locked down, which lets no
program read the kernel's memory (lockdown=confidentiality)."""
