"""docs/kernels.md, one section per kernel, and the protocol of its failures, which is no part of
the page.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.kernels import record, results

_INTRODUCTION = """\
# Kernels

<!-- `make test-kernels` writes this page; manual changes are lost. -->

podgate needs Linux 5.10 or newer. It finds each feature by trying it, never by the kernel's
version; `podgate doctor` shows what a machine lacks. Features of later releases, and the effect
where they are missing:

* **netns cookies (5.14)**: no cgroup hooks: gates drop, but processes get a timeout instead of
  EPERM, tunnels of the node can bypass gates, raw sockets count as the kernel's,
  `--raw-sockets=deny-pods` rejects nothing, and strict falls back to enforce.
* **type information (BTF, `CONFIG_DEBUG_INFO_BTF`)**: the kernel does not follow the kubelet's
  restarts, so while the agent is missing for more than 15 s, declared ports open to host processes.
  Gates do not read where a packet's checksum is pending, so on some kernels they drop what a VPN's
  process sends with checksum offload ([failures](failures.md)).
* **sockets by cgroup in nftables (5.13)**: no default-deny table, so host processes reach a new pod
  until its gate is attached.
* **listener events (5.15)**: probes run on schedule only.
* **tcx (6.6)**: gates are clsact filters, which run after tcx programs and can be removed by any
  process with CAP_NET_ADMIN.
* **BPF trampolines (5.7; arm64 6.4) with ancestors of cgroups (5.15), and type information**:
  `--raw-sockets=deny-pods` rejects raw sockets of containers, and only counts their packet sockets.
  Some machines forbid trampolines.
* **existing listeners (6.12; before it by a tracepoint, which needs type information)**: the close
  of a listener that is older than podgate triggers no probe.
* **process names in gates (6.16)**: `podgate drops` shows cgroups, and processes only for hooks.

The tables list runs of the kernel tests (`pytest -m kernel`) on Debian's kernels, each booted in
QEMU with software emulation over the host's files. `make test-kernels` runs all of them,
`make test-kernels KERNEL=6.1` one, with `FILES="tests/kernel/test_agent.py"` only some files, and
with `RESUME=1` only those that never ran to their end: `tests/kernels/recorded` has the results, so
a run may be stopped, and continued on another machine. Runs with systemd as the init (`SYSTEMD=1`)
are separate. All have cgroup v2 as the only hierarchy. A file's row is its last run to the end.
"lacks" are tests that found a feature of the kernel missing, and ended there. The details of
failures are in `.cache/kernels/protocols`.

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


def title(series: str, *, has_systemd: bool) -> str:
    """The name of a kernel's runs; those with systemd as the init are separate."""
    return f"{series} with systemd" if has_systemd else series


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
