"""Which processes may be relays without their agents."""

import os
import pathlib

from agent.linux.procfs import Procfs
from agent.strict import orphans


def add_process(root: pathlib.Path, pid: int, user: int, *arguments: str) -> pathlib.Path:
    directory = root / str(pid)
    directory.mkdir()
    status = f"Name:\tpython3\nUid:\t{user}\t{user}\t{user}\t{user}\n"
    (directory / "status").write_text(status, encoding="ascii")
    if arguments:
        (directory / "cmdline").write_text("".join(f"{one}\0" for one in arguments))
    return directory


def test_roots_processes_with_the_relays_module_are_candidates(tmp_path: pathlib.Path) -> None:
    add_process(tmp_path, 7, 0, "python3", "-m", "agent.relay", "x")
    add_process(tmp_path, 8, 0, "python3", "-m", "agent")
    assert orphans.candidates(Procfs(tmp_path)) == [7]


def test_command_line_of_another_users_process_is_not_read(tmp_path: pathlib.Path) -> None:
    """Its user may make a read of it wait: the kernel takes the lock of its memory."""
    os.mkfifo(add_process(tmp_path, 7, 65534) / "cmdline")
    assert orphans.candidates(Procfs(tmp_path)) == []
