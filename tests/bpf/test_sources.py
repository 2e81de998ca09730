"""One text from many files, and the hash by which a loaded copy is known."""

import pathlib
import re
import shutil

import pytest

from bpf import map_specs, program_specs, sources


@pytest.fixture
def copy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Sources of the test's own; below it src/ and include/."""
    shutil.copytree(sources.SOURCE_DIRECTORY, tmp_path / "src")
    shutil.copytree(sources.KERNEL_SOURCE, tmp_path / "include")
    monkeypatch.setattr(sources, "_HERE", tmp_path)
    monkeypatch.setattr(sources, "SOURCE_DIRECTORY", tmp_path / "src")
    monkeypatch.setattr(sources, "KERNEL_SOURCE", tmp_path / "include")
    return tmp_path


def test_every_quoted_include_is_replaced_once() -> None:
    text = sources.expand("programs.c")
    assert '#include "' not in text
    for header in ("abi.h", "maps.h", "packet.h", "gate.c"):
        assert text.count(f'#line 1 "{header}"') == 1


def test_programs_and_maps_of_the_description_are_there() -> None:
    text = sources.expand("programs.c")
    for name in program_specs.PROGRAMS.values():
        assert f"int {name}(struct __sk_buff *skb)" in text
    for hook in program_specs.OPTIONAL_PROGRAMS:
        of_cgroups = "sock|sock_addr|sock_ops|sockopt"
        context = rf"struct (bpf_({of_cgroups}|raw_tracepoint_args)|\w+_creation) \*context"
        assert re.search(rf"int {hook.name}\({context}\)", text)
    for spec in map_specs.MAPS:
        assert f" {spec.name}" in text


def test_lines_are_those_of_the_files() -> None:
    """A line in a compiler message must be the line of the source."""
    name, number = "", 0
    files = set()
    for line in sources.expand("programs.c").splitlines():
        if marker := re.fullmatch(r'#line (\d+) "(.+)"', line):
            number, name = int(marker[1]), marker[2]
            files.add(name)
            continue
        written = (sources.SOURCE_DIRECTORY / name).read_text(encoding="ascii").splitlines()
        assert written[number - 1] == line
        number += 1
    assert {"programs.c", "abi.h", "gate.c"} <= files


def test_include_within_an_include_is_followed(copy: pathlib.Path) -> None:
    (copy / "src" / "outer.h").write_text('#include "inner.h"\nouter\n', encoding="ascii")
    (copy / "src" / "inner.h").write_text("inner\n", encoding="ascii")
    (copy / "src" / "a.c").write_text(
        '#include "outer.h"\n#include "inner.h"\nend\n', encoding="ascii"
    )
    lines = [line for line in sources.expand("a.c").splitlines() if not line.startswith("#line")]
    assert lines == ["inner", "outer", "end"]


def fingerprint() -> str:
    """As another process has it."""
    sources.fingerprint.cache_clear()
    try:
        return sources.fingerprint()
    finally:
        sources.fingerprint.cache_clear()


def test_fingerprint_is_a_file_name() -> None:
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint())


def test_fingerprint_stays_the_same(copy: pathlib.Path) -> None:
    before = fingerprint()
    (copy / "src" / "notes.txt").write_text("no source", encoding="ascii")
    assert fingerprint() == before


@pytest.mark.parametrize("name", ["src/gate.c", "src/abi.h", "include/include/linux/types.h"])
def test_fingerprint_follows_every_source(copy: pathlib.Path, name: str) -> None:
    before = fingerprint()
    with (copy / name).open("a", encoding="ascii") as file:
        file.write("\n")
    assert fingerprint() != before


def test_fingerprint_knows_a_new_file_and_a_new_name(copy: pathlib.Path) -> None:
    seen = {fingerprint()}
    (copy / "src" / "new.h").write_text("", encoding="ascii")
    seen.add(fingerprint())
    (copy / "src" / "new.h").rename(copy / "src" / "newer.h")
    seen.add(fingerprint())
    assert len(seen) == 3
