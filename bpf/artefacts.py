"""Artefacts: compiled programs in files, one for each set of features that kernels differ in.

The image carries them (`python -m bpf.compiler --all DIRECTORY` when it is built), so a node needs
no compiler. An instruction that loads a map's descriptor has 0 in its place and is listed with the
map's name. A file counts only for the sources that it was compiled from.
"""

import base64
import dataclasses
import json
import os
import pathlib
import struct
from collections.abc import Collection, Mapping
from typing import Any

from bpf import errors, sources
from bpf.features import Feature
from bpf.program_sets import ProgramSet

DIRECTORY_VARIABLE = "PODGATE_PROGRAMS"
"""Environment variable that names another directory of artefacts."""

_DIRECTORY = pathlib.Path(__file__).parent / "compiled"
_FORMAT = 1

# `struct bpf_insn`: opcode, registers (the source in the upper half), offset, immediate value.
_INSTRUCTION = struct.Struct("=BBhi")
_LOAD_64_BITS = 0x18  # BPF_LD | BPF_DW | BPF_IMM; two instructions long
_PSEUDO_MAP_FD = 1


class ArtefactError(errors.KernelSideError):
    """There is no usable artefact; one sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """Instructions without descriptors; maps: name by the number of the instruction."""

    instructions: bytes
    maps: Mapping[int, str]

    @classmethod
    def extract(cls, instructions: bytes, names: Mapping[int, str]) -> "Function":
        """From instructions with descriptors in them. names: of the maps, by descriptor."""
        code = bytearray(instructions)
        found = {}
        for number, fd in _map_loads(instructions).items():
            found[number] = names[fd]
            struct.pack_into("=i", code, number * _INSTRUCTION.size + 4, 0)
        return cls(bytes(code), found)

    def link(self, descriptors: Mapping[str, int]) -> bytes:
        """The instructions with these maps' descriptors."""
        code = bytearray(self.instructions)
        for number, name in self.maps.items():
            struct.pack_into("=i", code, number * _INSTRUCTION.size + 4, descriptors[name])
        return bytes(code)


@dataclasses.dataclass(frozen=True, slots=True)
class Artefact:
    """The functions of a program set, compiled from sources with this fingerprint."""

    source: str
    fingerprint: str
    macros: tuple[str, ...]
    functions: Mapping[str, Function]

    def encode(self) -> bytes:
        functions = {
            name: {
                "instructions": base64.b64encode(function.instructions).decode(),
                "maps": {str(number): map_name for number, map_name in function.maps.items()},
            }
            for name, function in sorted(self.functions.items())
        }
        content = {
            "format": _FORMAT,
            "source": self.source,
            "fingerprint": self.fingerprint,
            "features": self.macros,
            "functions": functions,
        }
        return json.dumps(content, indent=1).encode() + b"\n"


def decode(content: bytes, programs: ProgramSet) -> Artefact:
    """Raises `ArtefactError` unless these are all programs of the set, from the current sources."""
    try:
        fields = json.loads(content)
        if fields["format"] != _FORMAT:
            raise ArtefactError("it has another format")
        artefact = Artefact(
            source=fields["source"],
            fingerprint=fields["fingerprint"],
            macros=tuple(fields["features"]),
            functions={name: _function(value) for name, value in fields["functions"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError("it is damaged") from error
    if (artefact.source, artefact.fingerprint) != (programs.source, sources.fingerprint()):
        raise ArtefactError("it was compiled from other sources")
    maps = {spec.name for spec in programs.maps}
    for program in programs.programs:
        function = artefact.functions.get(program.function)
        if function is None or not maps.issuperset(function.maps.values()):
            raise ArtefactError(f"its program {program.function} is not the one of this version")
    return artefact


def path(directory: pathlib.Path, programs: ProgramSet, used: Collection[Feature]) -> pathlib.Path:
    """The file for the programs compiled with these features."""
    name = "-".join((programs.source.removesuffix(".c"), *(feature.macro for feature in used)))
    return directory / f"{name.lower()}.json"


def find(programs: ProgramSet, offered: Collection[Feature]) -> Artefact:
    """The artefact with the most features of those that the kernel offers.

    Raises `ArtefactError`: there is none, or it cannot be used.
    """
    usable = [used for used in programs.feature_sets() if set(used) <= set(offered)]
    directory = pathlib.Path(os.environ.get(DIRECTORY_VARIABLE) or _DIRECTORY)
    file = path(directory, programs, usable[-1])
    try:
        return decode(file.read_bytes(), programs)
    except FileNotFoundError:
        raise ArtefactError(f"there are no compiled programs in {file}") from None
    except OSError as error:
        raise ArtefactError(f"{file} cannot be read ({error.strerror})") from error
    except ArtefactError as error:
        raise ArtefactError(f"{file} cannot be used: {error}") from error


def _function(fields: Any) -> Function:
    """Raises `ValueError`, `KeyError` or `TypeError` unless every map has its instruction."""
    instructions = base64.b64decode(fields["instructions"], validate=True)
    function = Function(
        instructions, {int(number): str(name) for number, name in fields["maps"].items()}
    )
    if not instructions or _map_loads(instructions).keys() != function.maps.keys():
        raise ValueError("map loads")
    return function


def _map_loads(instructions: bytes) -> dict[int, int]:
    """The descriptors in the instructions that load a map's, by their number."""
    if len(instructions) % _INSTRUCTION.size:
        raise ValueError("incomplete instruction")
    codes = instructions[:: _INSTRUCTION.size]
    found = {}
    number = codes.find(_LOAD_64_BITS)
    while number >= 0:
        _, registers, _, value = _INSTRUCTION.unpack_from(instructions, number * _INSTRUCTION.size)
        if registers >> 4 == _PSEUDO_MAP_FD:
            found[number] = value
        number = codes.find(_LOAD_64_BITS, number + 2)  # the second one has the upper half
    return found
