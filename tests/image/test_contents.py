"""What is in the image, and what is not."""

import pathlib
import re
import tarfile

import pytest

from bpf import artefacts
from bpf.compiler import PROGRAM_SETS

# The first of them builds the image: half a minute on an idle machine.
pytestmark = pytest.mark.timeout(900)

_MAX_BYTES = 160_000_000


@pytest.fixture(scope="module")
def files(image: pathlib.Path) -> dict[str, bytes]:
    """All files, by path; the content of artefacts only."""
    found = {}
    with tarfile.open(image) as archive:
        layer = max(archive.getmembers(), key=lambda member: member.size)
        content = archive.extractfile(layer)
        assert content is not None
        with tarfile.open(fileobj=content) as members:
            for member in members:
                file = members.extractfile(member) if member.name.endswith(".json") else None
                found[member.name] = file.read() if file else b""
    return found


def test_no_compiler_is_in_the_image(files: dict[str, bytes]) -> None:
    unwanted = re.compile(r"libLLVM|libclang|libbcc|libbpf|libz3|/bcc/|/(gcc|cc|clang)$")
    assert [path for path in files if unwanted.search(path)] == []


def test_image_is_small(image: pathlib.Path) -> None:
    assert image.stat().st_size < _MAX_BYTES


def test_every_step_of_kernels_has_its_programs(files: dict[str, bytes]) -> None:
    for programs in PROGRAM_SETS:
        for used in programs.feature_sets():
            name = artefacts.path(pathlib.Path("bpf/compiled"), programs, used)
            (content,) = (files[path] for path in files if path.endswith(str(name)))
            artefact = artefacts.decode(content, programs)
            assert artefact.macros == tuple(feature.macro for feature in used)
