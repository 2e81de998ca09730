"""Runs of pytest below a test: of the files in tests/nodes/seeded."""

import pathlib
import subprocess
import sys
from types import ModuleType


def run(module: ModuleType, *options: str, status: int = 1) -> str:
    """What a run of this file prints, which must end so; with the output of each test."""
    assert module.__file__ is not None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options]
    done = subprocess.run(
        [*command, module.__file__],
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout
