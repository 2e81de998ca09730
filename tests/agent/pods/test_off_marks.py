"""The marks of `podgate off --node`: one is enough, and neither needs the other's file system."""

import asyncio
import os
import pathlib

import pytest

from agent.pods import off_marks
from agent.pods.off_marks import OffMarks, OffMarksError
from agent.pods.pod_modes import PodModes
from bpf import pins
from bpf.verdicts import Mode
from tests.polling import until


@pytest.fixture
def installation(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pins.Pins:
    """On a directory that counts as a BPF file system."""
    monkeypatch.setattr(pins, "is_bpffs", lambda _: True)
    return pins.Pins(tmp_path / "bpf")


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "run"


def test_both_marks_are_set_and_removed(run: pathlib.Path, installation: pins.Pins) -> None:
    assert not off_marks.are_set(run, installation)
    for _ in range(2):
        off_marks.put(run, installation)
    assert off_marks.file(run).is_file()
    assert off_marks.directory(installation).is_dir()
    for _ in range(2):
        off_marks.remove(run, installation)
    assert not off_marks.are_set(run, installation)


def test_one_mark_is_enough(tmp_path: pathlib.Path, installation: pins.Pins) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    off_marks.put(blocked, installation)
    assert off_marks.are_set(blocked, installation)
    off_marks.remove(blocked, installation)


def test_directory_in_place_of_the_file_is_a_mark_and_can_be_removed(
    run: pathlib.Path, installation: pins.Pins
) -> None:
    off_marks.file(run).mkdir(parents=True)
    off_marks.put(run, installation)
    off_marks.remove(run, installation)
    assert not os.path.lexists(off_marks.file(run))


def test_plain_directory_is_no_place_for_a_mark(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    off_marks.put(run, pins.Pins(tmp_path))
    assert not (tmp_path / "podgate").exists()


def test_marks_that_cannot_be_set_or_removed_are_an_error(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OffMarksError, match=r"an agent attaches gates again: .*File exists"):
        off_marks.put(blocked, pins.Pins(tmp_path))
    full = tmp_path / "run"
    (off_marks.file(full) / "inside").mkdir(parents=True)
    with pytest.raises(OffMarksError, match=r"stays off on this node: .*not empty"):
        off_marks.remove(full, pins.Pins(tmp_path))


async def test_agent_follows_the_marks(run: pathlib.Path, installation: pins.Pins) -> None:
    modes = PodModes(Mode.ENFORCE)
    marks = OffMarks(run, installation, modes)
    await asyncio.to_thread(marks.read)
    assert not modes.node.is_off
    following = asyncio.create_task(marks.run())
    await asyncio.to_thread(off_marks.put, run, installation)
    await until("off", lambda: modes.node.is_off)
    await asyncio.to_thread(off_marks.file(run).unlink)
    await asyncio.to_thread(off_marks.remove, run, installation)
    await until("on", lambda: not modes.node.is_off)
    following.cancel()
