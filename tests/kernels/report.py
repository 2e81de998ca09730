"""docs/internals/kernel-runs.md, one section per kernel, and the protocol of its failures, which is
no part of the page.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.kernels import record, results

_INTRODUCTION = """\
# Runs of the kernel tests

<!-- `make test-kernels` writes this page; manual changes are lost. -->

[kernels.md](../kernels.md) lists what each kernel lacks, and what to do about it. This page lists
runs of the kernel tests (`pytest -m kernel`) on Debian's kernels, each booted in QEMU with software
emulation over the host's files, with cgroup v2 as the only hierarchy:

| command | runs |
|---|---|
| `make test-kernels` | all kernels |
| `make test-kernels KERNEL=6.1` | one kernel |
| with `FILES="tests/kernel/test_agent.py"` | only these files |
| with `RESUME=1` | only files that never ran to their end |
| with `SYSTEMD=1` | systemd as the init; a separate section |
| with `ARCH=arm64` | another architecture, with its packages; a separate section |

`tests/kernels/recorded` stores the results, so another machine can continue a run that was stopped.
The row of a file is its last run to the end. Tests under "lacks" found a feature of the kernel
missing, and ended there. `.cache/kernels/protocols` has the details of failures.

Runs of older commits, before results were kept by file; each ended after two hours at most:

| run | tests | results | failed | commit |
|---|---|---|---|---|
| 5.10, all files | 1153 | 732 | 152 | e3c2bb8 |
| 6.1, all files | 1577 | 1225 | 14 | 935db73 |
| 6.1, relay and strict | 254 | 249 | 20 | 6ac63ed |
| 6.1, relay hooks and attacks on strict | 73 | 73 | 0 | a00202e |
| 6.1 with systemd, kubelet and kubelet's unit | 40 | 40 | 0 | 6e0ce5c |
| 6.12, all files | 1152 | 806 | 0 | 14de746 |
| 6.12, relay and strict | 256 | 251 | 0 | 7d81473 |
"""


def title(series: str, architecture: str = "amd64", *, has_systemd: bool = False) -> str:
    """The name of a kernel's runs; those of other architectures, and those with systemd as the
    init, are separate."""
    name = series if architecture == "amd64" else f"{series} {architecture}"
    return f"{name} with systemd" if has_systemd else name


def section(title: str, kept: record.Record, offered: Sequence[str]) -> str:
    """A kernel's section of the page. offered: all files with kernel tests."""
    files = {name: kept.files[name] for name in offered if name in kept.files}
    tests = sum(file.tests for file in files.values())
    counts = [(file.passed, file.lacking, len(file.failed)) for file in files.values()]
    passed, lacking, failed = (sum(count[of] for count in counts) for of in range(3))
    lacks: Counter[str] = Counter()
    for file in files.values():
        lacks.update(file.lacks)
    lines = [
        f"## {title}",
        "",
        f"Linux {kept.release}, package {kept.package}, attachment {kept.attachment}: "
        f"{len(files)} of {len(offered)} files ran to their end, {tests} tests, of which "
        f"{passed} passed, {lacking} lack a feature, {failed} failed.",
        "",
        *_table(("lacks", "tests"), sorted(lacks.items())),
        *_table(
            ("file", "passed", "lacks", "failed", "commit"),
            [(name, *count, files[name].commit) for name, count in zip(files, counts, strict=True)],
        ),
    ]
    missing = [name for name in offered if name not in files]
    if missing:
        lines += [f"Not run to the end: {', '.join(missing)}.", ""]
    return "\n".join(lines)


def protocol(title: str, found: results.Results) -> str:
    """Why tests failed, and what the kernel logged."""
    parts = [f"# {title}", f"{found.release}, {found.package}."]
    failed = {
        test: f"`{results.shortened(reason)}`"
        for file in found.files.values()
        for test, reason in file.failed.items()
    }
    parts.append(_grouped("Failed", failed) or "Nothing failed.")
    parts += [
        f"Started without an end, `{name}`: {', '.join(sorted(file.running)) or 'the file'}."
        for name, file in found.files.items()
        if not file.is_complete
    ]
    if found.complaints:
        lines = "\n".join(f"* `{line}`" for line in found.complaints)
        parts.append(f"Kernel warnings of the last boot:\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def read(page: str) -> dict[str, str]:
    """Title and section of each kernel on a page of `render`; nothing for another page."""
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts}


def render(sections: Mapping[str, str]) -> str:
    """The page, with kernels from old to new."""
    order = sorted(sections, key=_order)
    return "\n".join((_INTRODUCTION, *(sections[title].rstrip() + "\n" for title in order)))


def _order(title: str) -> tuple[list[int], str]:
    series, _, rest = title.partition(" ")
    return [int(part) for part in series.split(".")], rest


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table and an empty one; nothing without rows."""
    if not rows:
        return []
    cells = [header, ["---"] * len(header), *rows]
    return [*("| " + " | ".join(map(str, row)) + " |" for row in cells), ""]


def _grouped(title: str, tests: Mapping[str, str]) -> str:
    """By reason: many tests share one."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in tests.items():
        by_reason.setdefault(reason, []).append(f"* `{name}`")
    return "\n\n".join(
        f"{title}, {reason}:\n\n" + "\n".join(names) for reason, names in by_reason.items()
    )
