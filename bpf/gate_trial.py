"""The gate's program on maps of its own: its verdict on a frame, without an effect on the node.

The kernel runs the program on a made frame (BPF_PROG_TEST_RUN). It gives the frame a socket without
type and protocol, whose cgroup is that of the calling process. So new flows can be tried, and
replies, raw sockets and packets without a socket cannot.
"""

import contextlib
import ipaddress
import os
import pathlib
import struct

from bpf import abi, artefacts, features, loader, map_specs, maps, pinning, program_specs, syscalls
from bpf.artefacts import Artefact
from bpf.counters import Counters
from bpf.drop_sources import DropSources
from bpf.gate_config import GateConfig
from bpf.gate_table import GateTable
from bpf.verdicts import Mode, Reason, Verdict

_SCHED_CLS = 3  # `enum bpf_prog_type`
_LOOPBACK = 1
"""The kernel wants the number of an interface, which every network namespace has."""
_SKB_BYTES = 192  # sizeof(struct __sk_buff)
_IFINDEX_OFFSET = 40
_KEY = bytes(4)
_LOCK = pathlib.Path("/proc/self")
"""No other process writes these maps."""
_NUMBER = struct.Struct("=I")

_ADDRESS = ipaddress.ip_address("198.18.0.1")
# Ethernet, IPv4 (28 bytes of UDP) and UDP to port 9.
_DATAGRAM = (
    bytes(12)
    + struct.pack("!HBBHHHBBH4s", 0x0800, 0x45, 0, 28, 0, 0, 64, 17, 0, bytes(4))
    + _ADDRESS.packed
    + struct.pack("!HHHH", 9, 9, 8, 0)
)


class GateTrial:
    """The program with new maps. A context manager; loading takes 0.1 s for the verifier."""

    def __init__(self, artefact: Artefact | None = None) -> None:
        """artefact: the compiled programs; None: those of the image.

        Raises `ArtefactError` (there are none for this kernel) or `BpfError`.
        """
        program_set = loader.PROGRAM_SET
        artefact = artefact or artefacts.find(program_set, features.offered(program_set.features))
        function = artefact.functions[program_specs.GATE_EGRESS]
        with contextlib.ExitStack() as undo:
            opened: dict[str, maps.Map] = {}
            for spec in map_specs.MAPS:
                template = opened[spec.template].fd if spec.template else 0
                opened[spec.name] = maps.Map(maps.create(spec, template), spec)
                undo.callback(opened[spec.name].close)
            descriptors = {name: made.fd for name, made in opened.items()}
            program_fd = syscalls.program_load(
                _SCHED_CLS, function.link(descriptors), name=program_specs.GATE_EGRESS
            )
            undo.callback(os.close, program_fd)
            outcome = pinning.Outcome(pinning.Origin.PREBUILT)
            self._loaded = loader.Loaded({program_specs.GATE_EGRESS: program_fd}, opened, outcome)
            self._table = GateTable(self._loaded, _LOCK)
            undo.callback(self._table.close)
            self.cgroup = self._find_cgroup()
            """Id of this process's, in any cgroup namespace."""
            self._close = undo.pop_all()

    def __enter__(self) -> "GateTrial":
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def run(
        self,
        node: abi.CConfig,
        gate: GateConfig,
        frame: bytes,
        remade: abi.CKubeletRemade | None = None,
    ) -> tuple[Verdict, Reason]:
        """The verdict on a frame that the host made, to a pod with this gate. remade: what the
        kernel recorded of the kubelet, None for nothing."""
        self._loaded.map(map_specs.CONFIG).set(_KEY, bytes(node))
        self._loaded.map(map_specs.KUBELET_REMADE).set(_KEY, bytes(remade or abi.CKubeletRemade()))
        self._table.set(_LOOPBACK, gate, 0)
        before = Counters(self._loaded).of_gate(_LOOPBACK)
        context = bytearray(_SKB_BYTES)
        _NUMBER.pack_into(context, _IFINDEX_OFFSET, _LOOPBACK)
        syscalls.run_program(
            self._loaded.programs[program_specs.GATE_EGRESS], frame, bytes(context)
        )
        after = Counters(self._loaded).of_gate(_LOOPBACK)
        (found,) = [key for key, count in after.items() if count != before.get(key, 0)]
        return found

    def _find_cgroup(self) -> int:
        """By a drop, whose source the program records."""
        self.run(abi.CConfig(), GateConfig(Mode.ENFORCE, (_ADDRESS,)), _DATAGRAM)
        (seen,) = {source.cgroup for source in DropSources(self._loaded).read()}
        return seen
