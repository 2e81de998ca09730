"""bpftool as a process: stand-ins that fail as it does."""

import pathlib
import shutil

import pytest

from agent.operate.pinned import bpftool
from agent.operate.pinned.bpftool import Bpftool, BpftoolError


@pytest.fixture
def program(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The program that is found first. Pauses between attempts are left out."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(bpftool, "_PAUSE_SECONDS", 0)
    return tmp_path / "bpftool"


def write(program: pathlib.Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="ascii")
    program.chmod(0o755)


def test_json_is_decoded_and_the_command_is_recorded(program: pathlib.Path) -> None:
    write(program, """echo '[{"id": 7}]'""")
    tool = Bpftool()
    assert tool.objects("prog", "show") == [{"id": 7}]
    assert tool.commands == ["bpftool -j prog show"]


def test_list_that_changes_meanwhile_is_read_again(
    program: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    failed = tmp_path / "failed"
    busy = (
        "echo 'Error: can not get link by id (7): Resource temporarily unavailable' >&2; exit 255"
    )
    write(program, f"[ -e {failed} ] && echo '[]' && exit; touch {failed}; {busy}")
    tool = Bpftool()
    assert tool.objects("link", "show") == []
    assert tool.commands == ["bpftool -j link show"]


def test_failure_has_the_last_line_of_its_error(program: pathlib.Path) -> None:
    write(program, "echo 'Error: no such thing' >&2; exit 255")
    with pytest.raises(BpftoolError, match="'bpftool prog show' failed: Error: no such thing"):
        Bpftool().text("prog", "show")


def test_only_the_last_line_of_an_error_is_shown(program: pathlib.Path) -> None:
    write(program, "printf 'Error: one\\nError: two\\n' >&2; exit 255")
    tool = Bpftool()
    with pytest.raises(BpftoolError, match=r"^'bpftool prog show' failed: Error: two$"):
        tool.text("prog", "show")
    assert tool.commands == []


def test_failure_that_lasts_is_tried_a_few_times(
    program: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    tried = tmp_path / "tried"
    write(program, f"echo >> {tried}; exit 255")
    with pytest.raises(BpftoolError):
        Bpftool().text("link", "show")
    assert 2 <= len(tried.read_text()) <= 10


def test_text_is_that_of_the_command(program: pathlib.Path) -> None:
    write(program, 'echo "$@"')
    tool = Bpftool()
    assert tool.text("prog", "show", "a b") == "prog show a b\n"
    assert tool.commands == ["bpftool prog show 'a b'"]


def test_no_output_is_no_object(program: pathlib.Path) -> None:
    write(program, "exit 0")
    assert Bpftool().objects("map", "show") == []


def test_missing_program_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(BpftoolError, match=r"^bpftool is not installed; install the distribution"):
        Bpftool()


@pytest.mark.parametrize("script", ["echo '[]'; exit 255", "exit 255"])
def test_failure_without_an_error_has_the_status(program: pathlib.Path, script: str) -> None:
    """As `cgroup show` of bpftool 7.1 on Linux 5.10."""
    write(program, script)
    with pytest.raises(BpftoolError, match="status 255; use the bpftool of this kernel's release"):
        Bpftool().objects("cgroup", "show", "/sys/fs/cgroup")


def test_other_output_is_one_sentence(program: pathlib.Path) -> None:
    write(program, "echo '{\"id\": 7}'")
    tool = Bpftool()
    tool.text("version")
    with pytest.raises(BpftoolError, match="the output of 'bpftool -j prog show' is not as expec"):
        tool.objects("prog", "show")


def test_program_of_another_machine_is_one_sentence(program: pathlib.Path) -> None:
    program.write_bytes(b"\x7fELF nothing")
    program.chmod(0o755)
    with pytest.raises(BpftoolError, match=r"cannot be started \(Exec format error\)"):
        Bpftool().text("version")
