"""`python -m tests.bench [--record | --compare] [NAME...]`: run benchmarks, each in a process of
its own.

Figures are JSON lines on stdout (`tests.bench.figures.Figure`). The rest goes to stderr. --record
keeps them as what later runs are compared with; --compare exits with status 1 if a ratio is worse
than all that were recorded, or was not measured.
"""

import os
import subprocess
import sys

import msgspec

from tests.bench import comparison, recording
from tests.bench.figures import Figure

BENCHES = (
    "start",
    "rest",
    "gate",
    "back",
    "default_deny",
    "probe",
    "relay",
    "localapi",
    "kube",
    "policy",
    "off",
    "burst",
    "births",
)
# These need the programs of a cluster, so they run only if they are named.
APART = ("cluster", "fleet", "nri")
_RECORD, _COMPARE = "--record", "--compare"


def main() -> int:
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    wanted = [word for word in sys.argv[1:] if word not in options] or list(BENCHES)
    if unknown := set(options) - {_RECORD, _COMPARE}:
        sys.stderr.write(f"bench: there is no option {unknown.pop()}.\n")
        return 2
    for name in wanted:
        if name not in BENCHES + APART:
            known = ", ".join(BENCHES + APART)
            sys.stderr.write(f"bench: there is no {name!r}; known: {known}.\n")
            return 2
    has_regressed = False
    for name in wanted:
        sys.stderr.write(f"bench: {name}\n")
        load, _, _ = os.getloadavg()
        status, figures = _run(name)
        if status:
            return status
        if _COMPARE in options:
            has_regressed |= _compare(name, figures)
        if _RECORD in options:
            recording.save(recording.new(name, load, figures))
    return int(has_regressed)


def _run(name: str) -> tuple[int, list[Figure]]:
    """Its exit status and figures, which are printed as they come."""
    figures = []
    command = [sys.executable, "-m", f"tests.bench.{name}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            figures.append(msgspec.json.decode(line, type=Figure))
    return process.returncode, figures


def _compare(name: str, figures: list[Figure]) -> bool:
    """Whether it has regressed."""
    record = recording.load(name)
    if record is None:
        sys.stderr.write(f"bench: {name} was never recorded, so it is not compared.\n")
        return False
    sentences = list(comparison.regressions(record.figures, figures))
    for sentence in sentences:
        sys.stderr.write(f"bench: {name}: {sentence}\n")
    return bool(sentences)


if __name__ == "__main__":
    sys.exit(main())
