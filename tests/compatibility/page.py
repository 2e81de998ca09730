"""docs/compatibility.md, made of recorded runs. `python -m tests.compatibility` writes it."""

import pathlib

from tests.compatibility.tables import Table, all_tables

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "compatibility.md"

_INTRODUCTION = """\
# What was tried, and when

<!-- `make docs` writes this page from recorded runs; manual changes are lost. -->

podgate finds features by trying them, never by a version. So this page lists where tests ran, not
where podgate is allowed to run. A cell is one of three:

* **tried** DATE VERSION: the tests of this cell passed, last on this date (UTC) with this version.
* **refused, because**: not supported, or a test of the last run failed.
* **not tried**: no run is recorded, so nothing is known, neither good nor bad.

`make test-cluster`, `make test-networks`, `make test-fleet`, `make test-meshes` and
`make test-kernels` record their runs; CONTRIBUTING.md describes them.
"""
_END = """\
## Nodes that are containers

Nodes that are containers (kind, k3d, minikube's container driver) have a cgroup namespace of their
own, whose root podgate takes for the node's (`tests/kernel/test_cgroup_namespace.py`). Before Linux
6.11, 6.6.52 and 6.1.111 nftables counts cgroups from the host's root, so the default-deny table
does not know the kubelet there.

[Beside Cilium, Calico, Antrea and kube-proxy](guides/networks.md) describes what follows from the
sources of programs that were not tried. Report what you tried: kernel, network, runtime,
`podgate doctor`, and the path tests of `podgate status -o wide`.
"""


def text() -> str:
    return "\n".join([_INTRODUCTION, *map(_section, all_tables()), _END])


def write() -> None:
    PAGE.write_text(text(), encoding="utf-8")


def _section(table: Table) -> str:
    lines = [f"## {table.title}", ""]
    lines += ["| | " + " | ".join(table.columns) + " |", "|" + "---|" * (len(table.columns) + 1)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in table.rows]
    lines += ["", table.note, ""] if table.note else [""]
    return "\n".join(lines)
