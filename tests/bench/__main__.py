"""`python -m tests.bench [NAME]`: run benchmarks, each in a process of its own.

Figures are JSON lines on stdout: bench, figure, value, unit, baseline, ratio, spread. The rest goes
to stderr.
"""

import subprocess
import sys

BENCHES = (
    "start",
    "gate",
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


def main() -> int:
    wanted = sys.argv[1:] or list(BENCHES)
    for name in wanted:
        if name not in BENCHES + APART:
            known = ", ".join(BENCHES + APART)
            sys.stderr.write(f"bench: there is no {name!r}; known: {known}.\n")
            return 2
    for name in wanted:
        sys.stderr.write(f"bench: {name}\n")
        status = subprocess.run(
            [sys.executable, "-m", f"tests.bench.{name}"], check=False
        ).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
