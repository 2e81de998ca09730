"""docs/kernels.md: one row and one section per kernel; a run replaces only those of its kernels."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tests.kernels import results

_INTRODUCTION = """\
# Kernels

<!-- Written by `make test-kernels`; what is changed here by hand is lost. -->

The kernel tests (`pytest -m kernel`) on Debian's kernels, each booted in QEMU with software
emulation over the host's files. `make test-kernels` runs all of them, `make test-kernels
KERNEL=6.1` one; with `FILES="tests/kernel/test_agent.py"` some files only, which stand in a row of
their own. "Not offered" are tests of something that the kernel lacks, found out by trying; a skip
for any other reason counts as a failure. Seconds are those of an emulated machine, from switching
it on to its end; the commit is that of the sources.
"""
_HEADER = (
    "| run | release | package | passed | failed | not offered | attached by | seconds | commit |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A run's part of the page: its row in the table and the lines of its section."""

    row: str
    section: str


def title(series: str, files: Sequence[str]) -> str:
    """What tells a run from others: the kernel, and which files, unless all. files: paths."""
    names = sorted(re.sub(r"^test_|\.py$", "", file.rpartition("/")[2]) for file in files)
    return f"{series} ({', '.join(names)})" if names else series


def entry_of_run(
    *,
    title: str,
    release: str,
    package: str,
    commit: str,
    seconds: float,
    found: results.Results,
    remark: str,
) -> Entry:
    """What a guest came to. `remark` says why it did not come to its end, or is empty."""
    row = (
        title,
        release,
        package,
        len(found.passed),
        len(found.failed),
        len(found.not_offered),
        found.attachment,
        round(seconds),
        commit,
    )
    parts = []
    if remark:
        parts.append(remark)
    if not found.is_complete:
        parts.append(
            f"Not complete: {found.collected} tests were collected, and "
            f"{len(found.passed) + len(found.failed) + len(found.not_offered)} came to a result. "
            "Tests that run whole agents come last."
        )
    if found.unfinished:
        parts.append(f"The last test that began was `{found.unfinished}`.")
    failed = {name: _shortened(reason) for name, reason in found.failed.items()}
    parts.append(_grouped("Failed", failed) or "Nothing failed.")
    parts.append(_grouped("Not offered", found.not_offered))
    if found.complaints:
        lines = "\n".join(f"* `{line}`" for line in found.complaints)
        parts.append(f"The kernel complained:\n\n{lines}")
    return Entry(_row(row), "\n\n".join(part for part in parts if part))


def entry_not_to_be_had(title: str, reason: str) -> Entry:
    """A kernel that no suite offered on the machine of the run."""
    row = (title, "not to be had", "", "", "", "", "", "", "")
    return Entry(_row(row), f"This kernel could not be had: {reason}.")


def read(page: str) -> dict[str, Entry]:
    """The entries of a page as `render` made it; title to entry. Nothing for another page."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| (\d[^|]*) \|.*$", page, re.MULTILINE)}
    sections = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)(?=\n\n## |\n*\Z)", page, re.M | re.S))
    return {title: Entry(row, sections[title]) for title, row in rows.items() if title in sections}


def render(entries: Mapping[str, Entry]) -> str:
    """The page, with kernels from old to new, and all files before some."""
    order = sorted(entries, key=_order)
    table = "\n".join((*_HEADER, *(entries[title].row for title in order)))
    sections = "\n\n".join(f"## {title}\n\n{entries[title].section}" for title in order)
    return f"{_INTRODUCTION}\n{table}\n\n{sections}\n"


def _order(title: str) -> tuple[list[int], str]:
    series, _, files = title.partition(" ")
    return [int(part) for part in series.split(".")], files


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _grouped(title: str, tests: Mapping[str, str]) -> str:
    """By reason: one holds for many tests."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in tests.items():
        by_reason.setdefault(reason, []).append(f"* `{name}`")
    return "\n\n".join(
        f"{title}, {reason}:\n\n" + "\n".join(names) for reason, names in by_reason.items()
    )


def _shortened(reason: str) -> str:
    """The first line, without what differs from test to test or would end the markup."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no message"
    first = re.sub(r"\b0x[0-9a-f]{8,}|(?<=interface )\d+", "…", first).replace("`", "'")
    return f"`{first[:160]}`"
