"""Kubernetes' own test cases: their names, and which podgate has.

The names are recorded from a checkout of Kubernetes, as `go test` has them but for its underscores:

    python -m tests.agent.api.upstream.inventory ~/kubernetes 1.36.2

A test module here declares its cases with `UpstreamFile`; `test_inventory.py` compares
them with the recorded names. A case that has no counterpart here is declared with the reason.
"""

import collections
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

RECORDED = pathlib.Path(__file__).parent / "recorded" / "cases.json"

FILES = (
    "pkg/proxy/topology_test.go",
    "pkg/proxy/servicechangetracker_test.go",
    "pkg/proxy/endpointschangetracker_test.go",
    "pkg/proxy/endpointslicecache_test.go",
    "pkg/proxy/nftables/proxier_test.go",
    "pkg/kubelet/apis/pods/server_unit_test.go",
    "test/e2e_node/pods_api_test.go",
)

Names = dict[str, list[str]]
"""Of each test function its cases; none if it is one case."""


class UpstreamFile:
    """The cases of one test file of Kubernetes that a module has."""

    def __init__(self, path: str) -> None:
        """path: in the checkout."""
        self.path = path
        self.cases: Names = {}
        self.without: dict[str, str] = {}
        """Why a test, or "test/case", has no counterpart."""

    def table(self, test: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
        """Parametrize `case` by the cases of an upstream test, which become the ids."""
        self.cases.setdefault(test, []).extend(cases)
        return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))

    def single(self, test: str, *cases: str) -> Callable[[Any], Any]:
        """Declare a test function, which is one upstream test, or these cases of one."""
        self.cases.setdefault(test, []).extend(cases)
        return lambda function: function

    def none(self, reason: str, *tests: str) -> None:
        """Declare tests, or "test/case"s, without a counterpart."""
        self.without.update(dict.fromkeys(tests, reason))


def recorded() -> dict[str, Names]:
    """By file."""
    found: dict[str, Names] = json.loads(RECORDED.read_text(encoding="utf-8"))["files"]
    return found


_TEST = re.compile(r'^(?:func (Test\w+)\(t |var _ = SIGDescribe\("([^"]+)")')
_CASE = re.compile(
    r"^(\t+)(?:(?:\}, \{)?(?:name|desc):\s+(\"(?:[^\"\\]|\\.)+\"),$"
    r"|(\"(?:[^\"\\]|\\.)+\"): \{$"
    r"|(?:t\.Run|ginkgo\.It)\((\"(?:[^\"\\]|\\.)+\"), func"
    r"|// (Case\[\d+\]: .+)$)"
)


def cases_of(source: str) -> Names:
    """The tests of a Go file, each with the names of its cases.

    Read are elements of tables (`name: "..."`, `desc: "..."`, keys of maps), literal names of
    subtests, and comments with a number, "Case[0]: ...", where nothing else has a name. A case
    within another one, by indentation, is "outer/inner"; a name that occurs again gets Go's suffix.
    """
    tests: Names = {}
    seen: collections.Counter[str] = collections.Counter()
    outer: list[tuple[int, str]] = []
    current: list[str] | None = None
    for line in source.splitlines():
        if found := _TEST.match(line):
            current = tests.setdefault(found[1] or found[2], [])
            seen.clear()
            outer.clear()
        elif current is not None and (found := _CASE.match(line)):
            depth = len(found[1])
            while outer and outer[-1][0] >= depth:
                outer.pop()
            quoted = found[2] or found[3] or found[4]
            outer.append((depth, json.loads(quoted) if quoted else found[5]))
            name = "/".join(text for _, text in outer)
            current.append(f"{name}#{seen[name]:02}" if seen[name] else name)
            seen[name] += 1
    for names in tests.values():
        names[:] = [name for name in names if not name.startswith("Case[")] or names
    return tests


def main(arguments: Iterable[str]) -> None:
    checkout, version = arguments
    files = {
        path: cases_of((pathlib.Path(checkout) / path).read_text(encoding="utf-8"))
        for path in FILES
    }
    text = json.dumps({"version": version, "files": files}, indent=1, ensure_ascii=False)
    RECORDED.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
