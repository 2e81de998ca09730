"""The verifier's work on each program, far below its limit: kernels differ in what they need."""

import contextlib
import ctypes
import os
import pathlib
import re
import struct

import pytest

from bpf import artefacts, btf, features, loader, maps, syscalls
from bpf.errors import BpfError
from bpf.program_sets import ProgramSpec
from probes.netns import netns_cookie
from tests.kernel import offers

pytestmark = pytest.mark.kernel

# Half of BPF_COMPLEXITY_LIMIT_INSNS. More also takes longer than the rest of an agent's start.
_MOST_INSTRUCTIONS = 500_000
_LOG_STATISTICS = 4
_LOG_BYTES = 1 << 16


def processed(program: ProgramSpec, instructions: bytes) -> int:
    """Number of instructions that the verifier has followed."""
    log = ctypes.create_string_buffer(_LOG_BYTES)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack(
        "=IIQQIIQII16sIIIIQIIQII",
        *(program.type, len(instructions) // 8),
        *(ctypes.addressof(code), ctypes.addressof(licence)),
        *(_LOG_STATISTICS, _LOG_BYTES, ctypes.addressof(log), 0, 0, b"", 0, program.attach_type),
        *(0, 0, 0, 0, 0, 0, 0),
        btf.function_id(program.kernel_function) if program.kernel_function else 0,
    )
    what = f"loading {program.name}"
    os.close(syscalls.call(syscalls.Command.PROG_LOAD, attributes, what=what)[0])
    found = re.search(rb"processed (\d+) insns", log.value)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize(
    "program",
    [program for program in loader.PROGRAM_SET.programs if program.name == program.function],
    ids=lambda program: program.name,
)
def test_verifier_has_room(prebuilt_programs: pathlib.Path, program: ProgramSpec) -> None:
    programs = loader.PROGRAM_SET
    artefact = artefacts.find(programs, features.offered(programs.features))
    with contextlib.ExitStack() as close:
        descriptors: dict[str, int] = {}
        for spec in programs.maps:
            descriptors[spec.name] = maps.create(spec, descriptors.get(spec.template, 0))
            close.callback(os.close, descriptors[spec.name])
        instructions = artefact.functions[program.function].link(descriptors)
        is_rejected = (program.kernel_function and not offers.rejects_packet_sockets()) or (
            program.name == "hook_setsockopt" and netns_cookie() is None
        )
        if is_rejected:
            with pytest.raises(BpfError):
                processed(program, instructions)
            return
        assert processed(program, instructions) < _MOST_INSTRUCTIONS
