"""Results of all meshes, in a file of the repository and on a page that is made of it."""

import datetime
import pathlib
import subprocess
from collections.abc import Iterable, Mapping

import msgspec

ROOT = pathlib.Path(__file__).parents[2]
FILE = pathlib.Path(__file__).with_name("recorded.json")
PAGE = ROOT / "docs" / "internals" / "mesh-runs.md"

RIGHT, UNCHANGED = "right", "unchanged"
MODES = ("none", "audit", "enforce", "strict")

_INTRODUCTION = """\
# podgate beside service meshes

<!-- `make test-meshes` writes this page; manual changes are lost. -->

`make test-meshes MESHES=DIR` runs these meshes' own rules and proxies beside an agent, in network
namespaces. DIR contains the programs, which it does not build: `tests/meshes/programs.py` names
them. The policy of each mesh is strict: connections without mTLS are rejected. There is no control
plane: the tests configure the proxies. The kubelet is a stand-in in a cgroup of its own.

* **right**: the result of the probe is the application's state, over IPv4 and IPv6. Probes are as
  the pod's author wrote them, but for `rewritten`, which is what Istio's injector makes of them.
* **wrong**: it is not, with what the kubelet got. `none`, `audit` and `enforce` are equal: podgate
  changes no probe there.
* **podgate's own**: the results of podgate's probes of the same kinds.
* **host process**: of another cgroup than the kubelet's, to the ports of application and proxy.
* **pod to pod**: from another pod of the mesh, and from one without, as without podgate.

`tests/meshes/recorded.json` stores the results by mesh, mode and kind of probe.
"""


class Gap(msgspec.Struct, frozen=True):
    """Probes that the mesh would reject, while something restarts. seconds: from the first that
    failed to the last."""

    probes: int
    failed: int
    seconds: float


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last run of one test with one mesh. date: ISO 8601; podgate: the commit; kernel: its
    release; programs: name to version; results: by mode, then by kind of probe; gaps: by event."""

    date: str
    podgate: str
    kernel: str
    programs: dict[str, str]
    results: dict[str, dict[str, str]] = {}
    gaps: dict[str, Gap] = {}


PROBES, GAPS = "probes", "gaps"

Record = dict[str, dict[str, Run]]
"""By mesh, then by what was tried."""


def read(file: pathlib.Path = FILE) -> Record:
    """Raises `msgspec.ValidationError`: the file is no record."""
    return msgspec.json.decode(file.read_bytes(), type=Record) if file.exists() else {}


def write(record: Record, file: pathlib.Path = FILE, page: pathlib.Path = PAGE) -> None:
    encoded = msgspec.json.encode(dict(sorted(record.items())))
    file.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    page.write_text(text(record), encoding="utf-8")


def merged(record: Record, found: Record) -> Record:
    """With newer runs in place of the former ones."""
    meshes = sorted(record.keys() | found.keys())
    return {mesh: record.get(mesh, {}) | found.get(mesh, {}) for mesh in meshes}


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit() -> str:
    """Of the checkout, and whether it has other changes than the record's."""
    git = ["git", "-C", str(ROOT)]
    own = [f":!{path.relative_to(ROOT)}" for path in (FILE, PAGE)]
    outputs = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        for command in (
            [*git, "rev-parse", "--short=8", "HEAD"],
            [*git, "status", "--porcelain", "--", ".", *own],
        )
    ]
    return f"{outputs[0]} and changes" if outputs[1] else outputs[0]


def text(record: Record) -> str:
    """The page."""
    sections = [_INTRODUCTION]
    sections += [_section(mesh, runs) for mesh, runs in sorted(record.items())]
    return "\n".join(sections)


def _section(mesh: str, runs: Mapping[str, Run]) -> str:
    lines = [f"## {mesh}", ""]
    for run in runs.values():
        versions = ", ".join(f"{name} {version}" for name, version in sorted(run.programs.items()))
        lines += [f"{run.date}, podgate {run.podgate}, Linux {run.kernel}; {versions}.", ""]
        if run.results:
            modes = [mode for mode in MODES if mode in run.results]
            kinds = dict.fromkeys(kind for mode in modes for kind in run.results[mode])
            rows = [[kind, *(run.results[mode].get(kind, "") for mode in modes)] for kind in kinds]
            lines += _table(["probe", *modes], rows)
        if run.gaps:
            rows = [
                [event, str(gap.probes), str(gap.failed), _duration(gap)]
                for event, gap in run.gaps.items()
            ]
            lines += _table(["strict, probes of the application", "probes", "failed", "over"], rows)
    return "\n".join(lines)


def _duration(gap: Gap) -> str:
    return f"{gap.seconds:.2f} s" if gap.failed else ""


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    heads = list(heads)
    return [
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
