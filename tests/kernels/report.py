"""docs/kernels.md, one row per kernel, and the protocol of a run, which is no part of the page."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tests.kernels import results

_INTRODUCTION = """\
# Kernels

<!-- `make test-kernels` writes this page; manual changes are lost. -->

podgate needs Linux 5.10 or newer. It finds each feature by trying it, never by the kernel's
version; `podgate doctor` shows what a machine lacks. Features of later releases, and the effect
where they are missing:

* **netns cookies (5.14)**: no cgroup hooks: gates drop, but processes get a timeout instead of
  EPERM, tunnels of the node can bypass gates, raw sockets count as the kernel's, and strict falls
  back to enforce.
* **type information (BTF, `CONFIG_DEBUG_INFO_BTF`)**: the kernel does not follow the kubelet's
  restarts, so while the agent is missing for more than 15 s, declared ports open to host processes.
* **listener events (5.15)**: probes run on schedule only.
* **tcx (6.6)**: gates are clsact filters, which run after tcx programs and can be removed by any
  process with CAP_NET_ADMIN.
* **BPF trampolines (5.7; arm64 6.4) and type information**: `--raw-sockets=deny-pods` rejects raw
  sockets of containers, and only counts their packet sockets. Some machines forbid trampolines.
* **existing listeners (6.12)**: the close of a listener that is older than podgate triggers no
  probe.
* **process names in gates (6.16)**: `podgate drops` shows cgroups, and processes only for hooks.

The table lists runs of the kernel tests (`pytest -m kernel`) on Debian's kernels, each booted in
QEMU with software emulation over the host's files. `make test-kernels` runs all of them,
`make test-kernels KERNEL=6.1` one, with `FILES="tests/kernel/test_agent.py"` only some files, which
have a row of their own, as have runs with systemd as the init (`SYSTEMD=1`). All have cgroup v2 as
the only hierarchy. "lacks" lists features that tests found missing in that run. A run that
was stopped early has fewer results than tests. The details of a run are in
`.cache/kernels/protocols`.
"""
_HEADER = (
    "| run | release | package | attachment | lacks | tests | results | failed | commit |",
    "|---|---|---|---|---|---|---|---|---|",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A run: its row of the page, and its protocol."""

    row: str
    protocol: str


def title(series: str, files: Sequence[str], *, has_systemd: bool = False) -> str:
    """The name of a run: the kernel, and the files unless all. files: paths."""
    names = sorted(re.sub(r"^test_|\.py$", "", file.rpartition("/")[2]) for file in files)
    names = ["systemd"] * has_systemd + names
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
    """The entry of a guest. `remark`: why it did not finish, or empty."""
    count = len(found.passed) + len(found.failed) + len(found.not_offered)
    row = (
        title,
        release,
        package,
        found.attachment,
        "; ".join(dict.fromkeys(found.not_offered.values())) or "-",
        found.collected,
        count,
        len(found.failed),
        commit,
    )
    parts = [f"# {title}", f"{release}, {package}, commit {commit}, {seconds:.0f} s."]
    if remark:
        parts.append(remark)
    if not found.is_complete:
        parts.append(f"Not complete: {count} of {found.collected} tests have a result.")
    if found.unfinished:
        parts.append(f"The last test that started is `{found.unfinished}`.")
    failed = {name: _shortened(reason) for name, reason in found.failed.items()}
    parts.append(_grouped("Failed", failed) or "Nothing failed.")
    parts.append(_grouped("Not offered", found.not_offered))
    if found.complaints:
        lines = "\n".join(f"* `{line}`" for line in found.complaints)
        parts.append(f"Kernel warnings:\n\n{lines}")
    return Entry(_row(row), "\n\n".join(part for part in parts if part) + "\n")


def entry_not_to_be_had(title: str, reason: str) -> Entry:
    """A kernel that no suite offered on the machine of the run."""
    row = (title, "not available", "", "", "", "", "", "", "")
    return Entry(_row(row), f"# {title}\n\nNot available: {reason}.\n")


def read(page: str) -> dict[str, str]:
    """Title and row of each run on a page of `render`; nothing for another page."""
    return {match[1]: match[0] for match in re.finditer(r"^\| (\d[^|]*) \|.*$", page, re.MULTILINE)}


def render(rows: Mapping[str, str]) -> str:
    """The page, with kernels from old to new, and all files before some."""
    table = "\n".join((*_HEADER, *(rows[title] for title in sorted(rows, key=_order))))
    return f"{_INTRODUCTION}\n{table}\n"


def _order(title: str) -> tuple[list[int], str]:
    series, _, files = title.partition(" ")
    return [int(part) for part in series.split(".")], files


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _grouped(title: str, tests: Mapping[str, str]) -> str:
    """By reason: many tests share one."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in tests.items():
        by_reason.setdefault(reason, []).append(f"* `{name}`")
    return "\n\n".join(
        f"{title}, {reason}:\n\n" + "\n".join(names) for reason, names in by_reason.items()
    )


def _shortened(reason: str) -> str:
    """The first line, without parts that differ between tests or would end the markup."""
    first = reason.strip().splitlines()[0] if reason.strip() else "no message"
    first = re.sub(r"\b0x[0-9a-f]{8,}|(?<=interface )\d+", "…", first).replace("`", "'")
    return f"`{first[:160]}`"
