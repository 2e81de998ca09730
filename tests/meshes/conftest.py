"""Tests with the programs of meshes, which `make test-meshes MESHES=DIR` names; other runs leave
them out.

What they find is recorded at the end of the run, in tests/meshes/recorded.json and
docs/internals/mesh-runs.md.
"""

import os
import pathlib
import platform
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from agent.lab.agent_process import Launch
from agent.lab.lab import Lab
from bpf import pins
from tests.kernel.conftest import installed, installed_pins
from tests.meshes import programs, record
from tests.meshes.meshes import MESHES, Mesh
from tests.meshes.scene import Scene, scene

__all__ = ["installed", "installed_pins"]

_FOUND = "mesh run"

RecordRun = Callable[..., None]


class _Recorder:
    """In the process that writes the run's end, which has all reports."""

    def __init__(self) -> None:
        self._found: record.Record = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == _FOUND:
                found = msgspec.json.decode(str(value), type=record.Record)
                self._found = record.merged(self._found, found)

    def pytest_sessionfinish(self) -> None:
        if self._found:
            record.write(record.merged(record.read(), self._found))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Tests of the record itself need no programs."""
    needs_programs = collection_path.name in ("test_probes.py", "test_gaps.py")
    return True if needs_programs and not os.environ.get(programs.VARIABLE) else None


@pytest.fixture(params=MESHES, ids=lambda mesh: mesh.name)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    """Each one; that of a test with another parameter."""
    made: Mesh = request.param
    try:
        for name in made.programs:
            programs.path(name)
    except programs.MissingProgramError as error:
        pytest.fail(str(error), pytrace=False)
    return made


@pytest.fixture
def pods(
    mesh: Mesh, lab: Lab, tmp_path: pathlib.Path, launch: Launch, installed_pins: pins.Pins
) -> Iterator[Scene]:
    with scene(mesh, lab, tmp_path, launch, installed_pins) as made:
        yield made


@pytest.fixture
def record_run(mesh: Mesh, record_property: Callable[[str, object], None]) -> RecordRun:
    """Adds results and gaps to the record."""

    def add(tried: str, **found: Any) -> None:
        run = record.Run(
            date=record.today(),
            podgate=record.commit(),
            kernel=platform.release(),
            programs=programs.versions(list(mesh.programs)),
            **found,
        )
        record_property(_FOUND, msgspec.json.encode({mesh.name: {tried: run}}).decode())

    return add
