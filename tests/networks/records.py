"""What ran beside which network, recorded by the run itself, and the page that is made of it.

`python -m tests.networks.records` writes the page again. A run replaces the rows of its own tests;
all others stay, with their dates.
"""

import datetime
import pathlib
import platform
import re
import subprocess

import msgspec
import pytest

from agent import VERSION

RECORDED = pathlib.Path(__file__).parent / "recorded"
ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "networks.md"
FIGURES = "figures"
"""The property of a test (`record_property`) that becomes a part of its row."""
_NAME = re.compile(r"::test_(?P<words>\w+)(?:\[(?P<case>[^\]]+)\])?$")


class Row(msgspec.Struct, frozen=True):
    """One test. mode: of podgate, or of its case, empty without; date: of the run, UTC;
    revision: podgate's commit, "+" behind it if the tree differed."""

    subject: str
    mode: str
    result: str
    figures: str
    date: str
    podgate: str
    revision: str
    version: str
    kubernetes: str
    kernel: str


class Record(msgspec.Struct, frozen=True):
    """All that is known of one network."""

    network: str
    rows: list[Row]


class Run:
    """The tests of one run."""

    def __init__(self) -> None:
        self._network = ""
        self._version = ""
        self._kubernetes = ""
        self._rows: dict[tuple[str, str], Row] = {}

    def began(self, network: str, version: str, kubernetes: str) -> None:
        """network: the argument NET; version: of the network plugin."""
        self._network, self._version, self._kubernetes = network, version, kubernetes

    def add(self, report: pytest.TestReport) -> None:
        """A test's end; of a failed fixture, too."""
        match = _NAME.search(report.nodeid)
        if match is None or (report.when != "call" and not report.failed):
            return
        key = (match["words"].replace("_", " "), match["case"] or "")
        if report.when == "teardown" and key in self._rows and self._rows[key].result == "failed":
            return
        self._rows[key] = Row(
            *key,
            result="failed" if report.failed else report.outcome,
            figures=", ".join(
                str(text) for name, text in report.user_properties if name == FIGURES
            ),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            podgate=VERSION,
            revision=_revision(),
            version=self._version,
            kubernetes=self._kubernetes,
            kernel=platform.release(),
        )

    def write(self) -> None:
        """Nothing if no network was started."""
        if not self._network or not self._rows:
            return
        write(merged(read(self._network), self._rows))
        PAGE.write_text(page(), encoding="utf-8")


def merged(before: Record, rows: dict[tuple[str, str], Row]) -> Record:
    """The recorded rows, with these in the place of those of the same tests."""
    found = {(row.subject, row.mode): row for row in before.rows} | rows
    return Record(before.network, [found[key] for key in sorted(found)])


def read(network: str) -> Record:
    """Empty, if nothing was recorded."""
    path = RECORDED / f"{network}.json"
    if not path.exists():
        return Record(network, [])
    return msgspec.json.decode(path.read_bytes(), type=Record)


def write(record: Record) -> None:
    RECORDED.mkdir(exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    (RECORDED / f"{record.network}.json").write_bytes(content + b"\n")


def page() -> str:
    """docs/internals/networks.md."""
    parts = [
        "# Runs beside real networks",
        "",
        "<!-- `make test-networks` writes this page; manual changes are lost. -->",
        "",
        "A cluster of one node with a real kubelet and a real network plugin, in namespaces of its",
        "own; podgate is installed from its image by the manifests. Each row is the last run of a",
        "test of tests/networks. [Beside networks](../guides/networks.md) explains them.",
        "",
    ]
    recorded = sorted(RECORDED.glob("*.json"))
    parts += [] if recorded else ["No run is recorded yet.", ""]
    for path in recorded:
        record = read(path.stem)
        parts += [f"## {record.network}", ""]
        cells = [
            (row.subject, row.mode, row.result, row.figures, row.date, row.version, row.revision)
            for row in record.rows
        ]
        heading = ("test", "mode", "result", "figures", "date", "version", "podgate's commit")
        parts += ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
        parts += ["| " + " | ".join(row) + " |" for row in cells]
        kernels = sorted({(row.kubernetes, row.kernel) for row in record.rows})
        parts += ["", *(f"Kubernetes {one}, Linux {other}." for one, other in kernels), ""]
    return "\n".join(parts)


def _revision() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "agent", "bpf", "probes")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
