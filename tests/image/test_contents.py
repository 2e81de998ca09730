"""What is in the image, and what is not."""

import json
import pathlib
import re
import subprocess
import tarfile
import urllib.parse
from typing import Any

import pytest

from agent import VERSION
from bpf import artefacts
from bpf.compiler import PROGRAM_SETS
from tests.image import building, foreign
from tests.kernels import architectures
from tests.kernels.architectures import Architecture
from tests.polling import PATIENCE

# The first of them builds the image: half a minute on an idle machine.
pytestmark = pytest.mark.timeout(900 * PATIENCE)

_LABELS = ("version", "source", "revision", "licenses")
_METADATA = re.compile(r"dist-packages/([^/]+?)-[^-/]+\.dist-info/METADATA$")
_MAX_BYTES = 160_000_000


@pytest.fixture(scope="module")
def configuration(image: pathlib.Path) -> dict[str, Any]:
    """The image's, as its registry has it."""
    with tarfile.open(image) as archive:

        def read(name: str) -> Any:
            content = archive.extractfile(name)
            assert content is not None
            return json.load(content)

        def blob(descriptor: dict[str, str]) -> Any:
            return read(f"blobs/{descriptor['digest'].replace(':', '/')}")

        (manifest,) = read("index.json")["manifests"]
        found: dict[str, Any] = blob(blob(manifest)["config"])
        return found


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


def test_labels_name_version_source_and_revision(configuration: dict[str, Any]) -> None:
    labels = configuration["config"]["Labels"]
    found = {key: labels[f"org.opencontainers.image.{key}"] for key in _LABELS}
    assert found == {
        "version": VERSION,
        "source": building.SOURCE,
        "revision": building.REVISION,
        "licenses": "Apache-2.0",
    }


def test_architecture_is_that_of_its_packages(
    configuration: dict[str, Any], architecture: Architecture | None
) -> None:
    assert configuration["architecture"] == (architecture or architectures.of_machine()).name


def test_commands_run_with_nothing_but_the_image(
    image: pathlib.Path, architecture: Architecture | None, tmp_path: pathlib.Path
) -> None:
    with tarfile.open(image) as archive:
        layer = archive.extractfile(max(archive.getmembers(), key=lambda member: member.size))
        assert layer is not None
        subprocess.run(["tar", "-x", "-C", str(tmp_path)], check=True, input=layer.read())

    def run(*command: str, sent: bytes = b"", **variables: str) -> str:
        return foreign.run(tmp_path, architecture, command, sent=sent, **variables).decode()

    assert run("podgate", "--version") == f"podgate, version {VERSION}\n"
    assert run("python3", "-c", "import agent.app.agent, agent.relay.main") == ""
    answer = run("podgate-cni", sent=b'{"cniVersion": "1.0.0"}', CNI_COMMAND="VERSION")
    assert "1.0.0" in json.loads(answer)["supportedVersions"]
    # nft cannot be run: QEMU emulates no netlink of netfilter.
    assert re.search(r"bpftool v\d", run("bpftool", "--version"))
    assert run("test", "-e", "/etc/passwd") == ""


def test_sbom_lists_every_package_of_debian_and_python_that_is_in_the_image(
    files: dict[str, bytes],
) -> None:
    (content,) = (files[path] for path in files if path.endswith(".spdx.json"))
    listed = json.loads(content)["packages"]
    urls = {one["externalRefs"][0]["referenceLocator"] for one in listed}
    names = {re.split("[@?]", url)[0] for url in urls}
    debian = {path.rpartition("/")[2] for path in files if "dpkg/status.d/" in path}
    python = {_normal(match[1]) for path in files if (match := _METADATA.search(path))}
    assert len(debian) > 20
    assert len(python) > 30
    assert names == {
        "pkg:oci/podgate",
        *(f"pkg:deb/debian/{urllib.parse.quote(name, safe='')}" for name in debian),
        *(f"pkg:pypi/{name}" for name in python),
    }
    assert f"pkg:oci/podgate@{VERSION}" in urls


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
