"""What benches measured last, and on which machine: one file for each bench.

Figures of two machines cannot be compared, but ratios of one run can.
"""

import datetime
import os
import pathlib
import platform
import shutil
import subprocess

import msgspec

from tests.bench.figures import Figure

RECORDED = pathlib.Path(__file__).parent / "recorded"
_ROOT = pathlib.Path(__file__).parents[2]


class Machine(msgspec.Struct, frozen=True):
    """processor: the model's name; memory_gib: of the machine, rounded."""

    processors: int
    processor: str
    memory_gib: int
    kernel: str
    python: str


class Record(msgspec.Struct, frozen=True):
    """One run of one bench. date: UTC; revision: podgate's commit, "+" behind it if the tree
    differed; load: the machine's when the bench started, of one minute."""

    bench: str
    date: str
    revision: str
    load: float
    machine: Machine
    figures: list[Figure]


def this_machine() -> Machine:
    models = [
        line.partition(":")[2].strip()
        for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        processors=os.cpu_count() or 1,
        processor=models[0] if models else platform.machine(),
        memory_gib=round(memory_bytes / 2**30),
        kernel=platform.release(),
        python=platform.python_version(),
    )


def new(bench: str, load: float, figures: list[Figure]) -> Record:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Record(bench, today, _revision(), round(load, 1), this_machine(), figures)


def save(record: Record) -> None:
    RECORDED.mkdir(exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    (RECORDED / f"{record.bench}.json").write_bytes(content + b"\n")


def load(bench: str) -> Record | None:
    """None if it was never recorded."""
    path = RECORDED / f"{bench}.json"
    return msgspec.json.decode(path.read_bytes(), type=Record) if path.exists() else None


def all_records() -> list[Record]:
    """By the name of the bench."""
    return [
        msgspec.json.decode(path.read_bytes(), type=Record)
        for path in sorted(RECORDED.glob("*.json"))
    ]


def _revision() -> str:
    """Empty without git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
