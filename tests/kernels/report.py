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
KERNEL=6.1` one. "Not offered" are tests of something that the kernel lacks, found out by trying; on
a machine of one's own the same tests fail. Seconds are those of an emulated machine.
"""
_HEADER = (
    "| kernel | release | package | passed | failed | not offered | attached by "
    "| seconds | commit |",
    "|---|---|---|---|---|---|---|---|---|",
)
_MAX_LISTED = 60


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A kernel's part of the page: its row in the table and the lines of its section."""

    row: str
    section: str


def entry_of_run(
    *,
    series: str,
    release: str,
    package: str,
    commit: str,
    seconds: float,
    found: results.Results,
    remark: str,
) -> Entry:
    """What a guest came to. `remark` says why it did not come to its end, or is empty."""
    row = (
        series,
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
            f"{len(found.passed) + len(found.failed) + len(found.not_offered)} came to a result."
        )
    parts.append(_listed("Failed", found.failed) or "Nothing failed.")
    parts.append(_grouped(found.not_offered))
    if found.complaints:
        lines = "\n".join(f"* `{line}`" for line in found.complaints)
        parts.append(f"The kernel complained:\n\n{lines}")
    return Entry(_row(row), "\n\n".join(part for part in parts if part))


def entry_not_to_be_had(series: str, reason: str) -> Entry:
    """A kernel that no suite offered on the machine of the run."""
    row = (series, "not to be had", "", "", "", "", "", "", "")
    return Entry(_row(row), f"This kernel could not be had: {reason}.")


def read(page: str) -> dict[str, Entry]:
    """The entries of a page as `render` made it; series to entry. Nothing for another page."""
    rows = {match[1]: match[0] for match in re.finditer(r"^\| (\d\S*) \|.*$", page, re.MULTILINE)}
    sections = dict(re.findall(r"^## (\S+)\n\n(.*?)(?=\n\n## |\n*\Z)", page, re.M | re.S))
    return {
        series: Entry(row, sections[series]) for series, row in rows.items() if series in sections
    }


def render(entries: Mapping[str, Entry]) -> str:
    """The page, with kernels from old to new."""
    order = sorted(entries, key=lambda series: [int(part) for part in series.split(".")])
    table = "\n".join((*_HEADER, *(entries[series].row for series in order)))
    sections = "\n\n".join(f"## {series}\n\n{entries[series].section}" for series in order)
    return f"{_INTRODUCTION}\n{table}\n\n{sections}\n"


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _listed(title: str, tests: Mapping[str, str]) -> str:
    if not tests:
        return ""
    lines = [f"* `{name}`: {_shortened(reason)}" for name, reason in tests.items()]
    if len(lines) > _MAX_LISTED:
        lines[_MAX_LISTED:] = [f"* and {len(lines) - _MAX_LISTED} more"]
    return f"{title}:\n\n" + "\n".join(lines)


def _grouped(tests: Mapping[str, str]) -> str:
    """By what the kernel lacks: the same reason holds for many tests."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in tests.items():
        by_reason.setdefault(reason, []).append(name)
    return "\n\n".join(
        f"Not offered, {reason}:\n\n" + "\n".join(f"* `{name}`" for name in names)
        for reason, names in by_reason.items()
    )


def _shortened(reason: str) -> str:
    """The first line, without what differs from run to run or would end the list's markup."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no message"
    first = re.sub(r"0x[0-9a-f]{8,}", "0x…", first).replace("`", "'")
    return f"`{first[:160]}`"
