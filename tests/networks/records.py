"""What ran beside which network, recorded by the run itself, and the page that is made of it.

`python -m tests.networks.records` writes the page again. A run replaces the rows of its own tests;
all others stay, with their dates.
"""

import datetime
import pathlib
import platform
import re
import shutil
import subprocess

import msgspec
import pytest

from agent import VERSION

RECORDED = pathlib.Path(__file__).parent / "recorded"
ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "internals" / "networks.md"
FIGURES = "figures"
"""The property of a test (`record_property`) that becomes a part of its row."""
MODES = "modes"
"""The property of a test that runs in several modes one after the other, with a comma between them:
each has a row."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_NAME = re.compile(r"::test_(?P<words>\w+)(?:\[(?P<case>[^\]]+)\])?$")


class Row(msgspec.Struct, frozen=True):
    """One test. mode: of podgate, or of its case, empty without; date: of the run, UTC;
    revision: podgate's commit, "+" behind it if the tree differed; runtime, host, architecture:
    with versions, as `containerd 1.6.20`, `Debian 12`, `amd64`."""

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
    runtime: str = ""
    host: str = ""
    architecture: str = ""


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
        self._runtime = ""
        self._rows: dict[tuple[str, str], Row] = {}

    def began(self, network: str, version: str, kubernetes: str, runtime: str = "") -> None:
        """network: the argument NET; version: of the network plugin; runtime: with its version,
        containerd's if empty."""
        self._network, self._version, self._kubernetes = network, version, kubernetes
        self._runtime = runtime or _containerd()

    def add(self, report: pytest.TestReport) -> None:
        """A test's end; of a failed fixture, too."""
        match = _NAME.search(report.nodeid)
        if not self._network or match is None or (report.when != "call" and not report.failed):
            return
        modes = [str(text) for name, text in report.user_properties if name == MODES]
        for mode in modes[-1].split(",") if modes else [match["case"] or ""]:
            self._add((match["words"].replace("_", " "), mode), report)

    def _add(self, key: tuple[str, str], report: pytest.TestReport) -> None:
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
            runtime=self._runtime,
            host=_host(),
            architecture=_ARCHITECTURES.get(platform.machine(), platform.machine()),
        )

    def write(self) -> bool:
        """Whether there was something: nothing if no network was started."""
        if not self._network or not self._rows:
            return False
        write(merged(read(self._network), self._rows))
        PAGE.write_text(page(), encoding="utf-8")
        return True


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
        "<!-- `make test-networks`, `make test-fleet` and `make test-cluster` write this page;",
        "manual changes are lost. -->",
        "",
        "Clusters with real kubelets and real network plugins, in namespaces of their own: of one",
        "node with Calico, AWS' VPC CNI plugin and network policy agent (a stand-in for ipamd",
        "gives addresses, which needs EC2) or the CNI plugin ptp, of several nodes with flannel",
        "and kube-proxy.",
        "podgate is installed from its image by the manifests. Each row is the last run of a test.",
        "[Beside networks](../guides/networks.md) explains them.",
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


def _containerd() -> str:
    """`containerd github.com/containerd/containerd VERSION REVISION` is its output."""
    if not (program := shutil.which("containerd")):
        return ""
    command = [program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return f"containerd {done.stdout.split()[2].lstrip('v').partition('~')[0]}"


def _host() -> str:
    release = platform.freedesktop_os_release()
    return f"{release['NAME'].partition(' ')[0]} {release.get('VERSION_ID', '')}".strip()


def _revision() -> str:
    """Empty without git."""
    if shutil.which("git") is None:
        return ""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "agent", "bpf", "probes")
    return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
