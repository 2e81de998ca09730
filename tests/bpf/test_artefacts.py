"""Files of compiled programs: the one for this kernel is used as a whole, or not at all."""

import base64
import dataclasses
import json
import pathlib
import struct
from typing import Any

import pytest

from bpf import artefacts, map_specs, sources
from bpf.artefacts import Artefact, ArtefactError, Function
from bpf.features import Feature, Helper
from bpf.program_sets import ProgramSet, ProgramSpec

FIRST = Feature("FIRST", (Helper.KTIME_GET_COARSE_NS,))
SECOND = Feature("SECOND", (Helper.GET_CURRENT_COMM,))
PROGRAMS = ProgramSet(
    source="test.c",
    programs=(ProgramSpec("pinned_name", "function", 3),),
    maps=tuple(
        map_specs.MapSpec(name, 2, map_specs.U32, map_specs.U64, 1) for name in ("counts", "names")
    ),
    needs="Linux",
    features=(FIRST, SECOND),
)

MOVE = struct.pack("=BBhi", 0xB7, 0, 0, 7)
EXIT = struct.pack("=BBhi", 0x95, 0, 0, 0)
# Twice a number of 64 bits, of which the second looks like the load of a map.
NUMBER = struct.pack("=BBhiBBhi", 0x18, 1, 0, 9, 0x18, 0x11, 0, 9)


def load_map(fd: int) -> bytes:
    return struct.pack("=BBhiBBhi", 0x18, 0x11, 0, fd, 0, 0, 0, 0)


CODE = MOVE + load_map(7) + NUMBER + load_map(9) + load_map(7) + EXIT
FUNCTION = Function.extract(CODE, {7: "counts", 9: "names"})


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def artefact(*used: Feature, fingerprint: str = "") -> Artefact:
    macros = tuple(feature.macro for feature in used)
    return Artefact("test.c", fingerprint or sources.fingerprint(), macros, {"function": FUNCTION})


def write(directory: pathlib.Path, *used: Feature) -> pathlib.Path:
    path = artefacts.path(directory, PROGRAMS, used)
    path.write_bytes(artefact(*used).encode())
    return path


def test_descriptors_are_left_out_and_put_in() -> None:
    assert FUNCTION.maps == {1: "counts", 5: "names", 7: "counts"}
    assert FUNCTION.instructions == MOVE + load_map(0) + NUMBER + load_map(0) + load_map(0) + EXIT
    assert FUNCTION.link({"counts": 7, "names": 9}) == CODE
    assert FUNCTION.link({"counts": 3, "names": 4}) == (
        MOVE + load_map(3) + NUMBER + load_map(4) + load_map(3) + EXIT
    )


def test_descriptors_of_all_four_bytes_are_left_out_and_put_in() -> None:
    function = Function.extract(load_map(0x01020304), {0x01020304: "counts"})
    assert function == Function(load_map(0), {0: "counts"})
    assert function.link({"counts": 0x05060708}) == load_map(0x05060708)


def test_unknown_map_is_an_error() -> None:
    with pytest.raises(KeyError):
        Function.extract(CODE, {7: "counts"})


def test_file_comes_back_as_it_was_written() -> None:
    made = artefact(FIRST)
    assert artefacts.decode(made.encode(), PROGRAMS) == made


def test_file_is_text_with_a_field_in_each_line() -> None:
    made = artefact(FIRST, fingerprint="f" * 16).encode()
    assert (
        made.decode()
        == f"""{{
 "format": 1,
 "source": "test.c",
 "fingerprint": "ffffffffffffffff",
 "features": [
  "FIRST"
 ],
 "functions": {{
  "function": {{
   "instructions": "{base64.b64encode(FUNCTION.instructions).decode()}",
   "maps": {{
    "1": "counts",
    "5": "names",
    "7": "counts"
   }}
  }}
 }}
}}
"""
    )


def test_name_of_a_file_has_the_source_and_the_features() -> None:
    directory = pathlib.Path("/programs")
    assert artefacts.path(directory, PROGRAMS, ()) == directory / "test.json"
    assert artefacts.path(directory, PROGRAMS, (FIRST, SECOND)) == (
        directory / "test-first-second.json"
    )


@pytest.mark.parametrize("name", ["", None])
def test_files_are_beside_the_code_if_no_directory_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    if name is None:
        monkeypatch.delenv(artefacts.DIRECTORY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(artefacts.DIRECTORY_VARIABLE, name)
    expected = pathlib.Path(artefacts.__file__).parent / "compiled" / "test.json"
    with pytest.raises(ArtefactError) as caught:
        artefacts.find(PROGRAMS, [])
    assert str(caught.value) == f"there are no compiled programs in {expected}"


@pytest.mark.parametrize(
    ("offered", "expected"),
    [([], ()), ([FIRST], ("FIRST",)), ([FIRST, SECOND], ("FIRST", "SECOND")), ([SECOND], ())],
)
def test_the_most_features_that_the_kernel_offers_are_used(
    directory: pathlib.Path, offered: list[Feature], expected: tuple[str, ...]
) -> None:
    for used in PROGRAMS.feature_sets():
        write(directory, *used)
    assert artefacts.find(PROGRAMS, offered).macros == expected


READS = Feature("READS", (Helper.PROBE_READ_KERNEL,), is_in_lockdown=False)
WITH_READS = dataclasses.replace(PROGRAMS, features=(READS, FIRST, SECOND))


@pytest.mark.parametrize("offered", [[], [FIRST], [FIRST, SECOND]])
def test_kernel_in_lockdown_loses_only_what_that_forbids(
    directory: pathlib.Path, offered: list[Feature]
) -> None:
    for used in WITH_READS.feature_sets():
        write(directory, *used)
    for found in (offered, [READS, *offered]):
        assert artefacts.find(WITH_READS, found).macros == tuple(each.macro for each in found)


def test_missing_file_is_named(directory: pathlib.Path) -> None:
    write(directory)
    with pytest.raises(ArtefactError) as caught:
        artefacts.find(PROGRAMS, [FIRST])
    assert str(caught.value) == f"there are no compiled programs in {directory}/test-first.json"


@pytest.mark.parametrize("size", [0, 1, 100, -2])
def test_incomplete_file_is_damaged(directory: pathlib.Path, size: int) -> None:
    path = write(directory)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ArtefactError) as caught:
        artefacts.find(PROGRAMS, [])
    assert str(caught.value) == f"{path} cannot be used: it is damaged"


def test_unreadable_file_is_named(directory: pathlib.Path) -> None:
    artefacts.path(directory, PROGRAMS, ()).mkdir()
    with pytest.raises(ArtefactError, match=r"test\.json cannot be read \(Is a directory\)"):
        artefacts.find(PROGRAMS, [])


def change(name: str, value: object) -> bytes:
    """A file in which one field of it, or of its function, has another value; None: is absent."""
    fields: dict[str, Any] = json.loads(artefact().encode())
    owner = fields if name in fields else fields["functions"]["function"]
    owner[name] = value
    if value is None:
        del owner[name]
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("source", None),
        ("fingerprint", None),
        ("functions", None),
        ("functions", []),
        ("functions", {"function": None}),
        ("maps", {"1": "counts"}),
        ("maps", {"x": "counts"}),
        ("maps", None),
        ("instructions", "?"),
        ("instructions", ""),
        ("instructions", "AAAA"),
        ("instructions", None),
    ],
)
def test_file_with_another_field_is_damaged(name: str, value: object) -> None:
    with pytest.raises(ArtefactError, match=r"^it is damaged$"):
        artefacts.decode(change(name, value), PROGRAMS)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("format", 2, "it has another format"),
        ("source", "other.c", "it was compiled from other sources"),
        ("fingerprint", "0" * 16, "it was compiled from other sources"),
        ("functions", {}, "its program function is not the one of this version"),
        (
            "maps",
            {"1": "counts", "5": "foreign", "7": "counts"},
            "its program function is not the one of this version",
        ),
    ],
)
def test_file_of_another_version_is_not_used(name: str, value: object, problem: str) -> None:
    with pytest.raises(ArtefactError) as caught:
        artefacts.decode(change(name, value), PROGRAMS)
    assert str(caught.value) == problem


def test_instructions_with_other_characters_are_no_artefact() -> None:
    document = json.loads(artefact().encode())
    function = document["functions"]["function"]
    function["instructions"] = "!" + function["instructions"]
    with pytest.raises(ArtefactError):
        artefacts.decode(json.dumps(document).encode(), PROGRAMS)
