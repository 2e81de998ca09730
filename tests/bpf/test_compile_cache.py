"""What was compiled before is not compiled again, and nothing else is used in its place."""

import pathlib
from collections.abc import Collection

import pytest

from bpf import abi, compile_cache, errors, listeners, loader, sources
from bpf.features import Feature
from bpf.program_sets import ProgramSet

COMPILED = b"compiled"


@pytest.fixture(autouse=True)
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    found = tmp_path / "cache"
    monkeypatch.setenv(compile_cache.DIRECTORY_VARIABLE, str(found))
    return found


def never(programs: ProgramSet, used: Collection[Feature]) -> bytes:
    raise AssertionError(f"{programs.source} is compiled again")


def compile_listeners() -> bytes:
    return compile_cache.artefact(listeners.PROGRAM_SET, (), lambda *_: COMPILED)


def is_compiled_again() -> bool:
    answer = compile_cache.artefact(listeners.PROGRAM_SET, (), lambda *_: b"again")
    assert answer in (COMPILED, b"again")
    return answer == b"again"


def test_same_sources_are_compiled_once() -> None:
    assert compile_listeners() == COMPILED
    assert compile_cache.artefact(listeners.PROGRAM_SET, (), never) == COMPILED


def test_other_features_and_other_sets_are_compiled() -> None:
    def name(programs: ProgramSet, used: Collection[Feature]) -> bytes:
        return f"{programs.source} {used}".encode()

    compile_listeners()
    sets = [(loader.PROGRAM_SET, used) for used in loader.PROGRAM_SET.feature_sets()]
    made = [compile_cache.artefact(*each, name) for each in sets]
    assert made == [name(*each) for each in sets]


def test_changed_sources_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_listeners()
    monkeypatch.setattr(sources, "fingerprint", lambda: "0" * 16)
    assert is_compiled_again()


def test_changed_description_of_the_maps_is_compiled_against(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_listeners()
    assert abi.__file__ is not None
    (tmp_path / "abi.py").write_bytes(pathlib.Path(abi.__file__).read_bytes() + b"# changed\n")
    monkeypatch.setattr(compile_cache, "_PACKAGE", tmp_path)
    assert is_compiled_again()


def test_failed_compile_is_tried_again(directory: pathlib.Path) -> None:
    def fail(programs: ProgramSet, used: Collection[Feature]) -> bytes:
        raise errors.CompileError("it is no C")

    with pytest.raises(errors.CompileError):
        compile_cache.artefact(listeners.PROGRAM_SET, (), fail)
    assert list(directory.rglob("*.json")) == []
    assert compile_listeners() == COMPILED


@pytest.mark.parametrize("name", ["", None])
def test_without_a_directory_all_is_compiled(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    compile_listeners()
    if name is None:
        monkeypatch.delenv(compile_cache.DIRECTORY_VARIABLE)
    else:
        monkeypatch.setenv(compile_cache.DIRECTORY_VARIABLE, name)
    assert is_compiled_again()
