"""`python -m tests.cnp` runs the cases of ClusterNetworkPolicy in the cluster of a kubeconfig.

It needs kubectl, the rights of an administrator, and an image with a shell, httpd and nc, such as
busybox. It makes one namespace, pods in it (one privileged: its processes leave their pod's
cgroup) and policies that select these pods alone, and removes all of it, also after Ctrl-C or a
SIGTERM. Exit status: 0 if all is as expected, 1 if not, 2 if it cannot run.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence

import msgspec
import yaml

from tests.cnp import cases
from tests.cnp.cases import ORIGINS
from tests.cnp.kubectl import Kubectl, KubectlError
from tests.cnp.running import POLICIES, NotRunnableError, Report, Run, remove_all


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # What the run made is removed. A parent may have ignored either.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    kubectl = Kubectl(options.kubectl, options.kubeconfig)
    try:
        if options.clean:
            remove_all(kubectl)
            return 0
        run = Run(
            kubectl,
            [one for one in cases.read() if not options.case or one.name in options.case],
            name=f"podgate-conformance-{uuid.uuid4().hex[:6]}",
            node=options.node,
            image=options.image,
            least_seconds=options.least,
            most_seconds=options.most,
            log=_report,
        )
        with _definition(kubectl, options.crd):
            report = run.run()
    except (NotRunnableError, KubectlError) as error:
        _report(str(error))
        return 2
    except KeyboardInterrupt:
        _report("interrupted")
        return 2
    text = _json(report) if options.output == "json" else table(report)
    sys.stdout.write(f"{text}\n")
    return 1 if report.differing else 0


def table(report: Report) -> str:
    """For people. What is not as expected has an exclamation mark."""
    rows = [("CASE", *(origin.upper() for origin in ORIGINS))]
    for one in report.results:
        cells = (
            one.found[origin] + ("" if one.found[origin] == one.expected[origin] else " !")
            for origin in ORIGINS
        )
        rows.append((one.name, *cells))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    passed = len(report.results) - len(report.differing)
    between = "drops" if report.pods_are_dropped else "does not drop"
    return "\n".join(
        [
            *lines,
            "",
            f"{passed} of {len(report.results)} as expected on {report.node} ({report.kubelet}).",
            f"Between pods, a Deny of everything {between} packets here.",
        ]
    )


def _report(text: str) -> None:
    sys.stderr.write(f"cnp: {text}\n")
    sys.stderr.flush()


def _json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


@contextlib.contextmanager
def _definition(kubectl: Kubectl, path: pathlib.Path | None) -> Iterator[None]:
    """The cluster has the definition meanwhile, and afterwards if it had it before."""
    if path is None or kubectl.has("customresourcedefinitions", POLICIES):
        yield
        return
    found = [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]
    try:
        kubectl.create(found)
        kubectl.wait_for_definition(POLICIES)
        yield
    finally:
        kubectl.delete("customresourcedefinitions", POLICIES)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cnp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kubeconfig", default=os.environ.get("KUBECONFIG", ""), metavar="FILE")
    parser.add_argument("--kubectl", default="kubectl", metavar="PROGRAM")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--image", default="docker.io/library/busybox:1.37")
    parser.add_argument("--node", default="", help="of the pods; one that is Ready, by default")
    parser.add_argument("--crd", type=pathlib.Path, metavar="FILE", help="where there is none yet")
    parser.add_argument("--case", action="append", metavar="NAME", help="this one alone, repeated")
    after = "from the policies to what counts, {}"
    for name, seconds, words in (
        ("--least", 10.0, "if all is as expected by then"),
        ("--most", 60.0, "whatever it is"),
    ):
        parser.add_argument(
            name, type=float, default=seconds, metavar="SECONDS", help=after.format(words)
        )
    parser.add_argument("--clean", action="store_true", help="remove what killed runs left, alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
