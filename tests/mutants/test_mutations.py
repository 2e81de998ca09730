"""Mutants change behaviour, and what has none gets no mutant."""

import functools
import pathlib

from tests.mutants import handmade, modules, mutations

SOURCE = '''\
"""A module."""
LIMIT = 8
Kind = int | str


@decorated(flag=True)
class Pod:
    size: int = 1

    async def settle(self, *, count: "int | None" = 0) -> "int | None":
        assert count >= 0
        log.info(Event.SETTLED, count=count + 1)
        self.close()
        self.first = 0
        if now > self.until_ns:
            return self.first
        if count is None or count < 3:
            return wait(2, timeout=5)
        if not self.pods or len(self.pods) > _MAX_PODS:
            return 1
        self.share = round(count / 1e9, 3)
        await asyncio.sleep(2)
        return [*zip(self.pods, self.gates, strict=True)] in self.found

    def __repr__(self) -> str:
        return "a" + "b"
'''


def changes(tmp_path: pathlib.Path) -> list[str]:
    """The line of each mutant, stripped and with single spaces."""
    (tmp_path / "pod.py").write_text(SOURCE)
    found = []
    for mutant in mutations.of_module(tmp_path, "pod.py"):
        changed = mutant.apply(SOURCE).splitlines()
        (line,) = [
            after
            for before, after in zip(SOURCE.splitlines(), changed, strict=True)
            if before != after
        ]
        found.append(" ".join(line.split()))
    return found


def test_mutants_are_made_of_statements_with_behaviour(tmp_path: pathlib.Path) -> None:
    assert sorted(changes(tmp_path)) == sorted(
        [
            "pass",
            "pass",
            "if now <= self.until_ns:",
            "if not now > self.until_ns:",
            "if not count is None or count < 3:",
            "if count is not None or count < 3:",
            "if count is None and count < 3:",
            "if count is None or count <= 3:",
            "if count is None or count >= 3:",
            "if count is None or count < 4:",
            "if count is None or count < 2:",
            "return wait( 3, timeout=5)",
            "return wait( 1, timeout=5)",
            "if self.pods or len(self.pods) > _MAX_PODS:",
            "if not self.pods and len(self.pods) > _MAX_PODS:",
            "if not self.pods or len(self.pods) <= _MAX_PODS:",
            "if not not self.pods or len(self.pods) > _MAX_PODS:",
            "self.share = round(count * 1e9, 3)",
            "return 2",
            "return 0",
            "return [*zip(self.pods, self.gates, strict=True)] not in self.found",
        ]
    )


def test_mutant_concerns_its_statement_and_function(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pod.py").write_text(SOURCE)
    by_line = {one.lines.start: one for one in mutations.of_module(tmp_path, "pod.py")}
    assert by_line[20].lines == range(20, 21)
    assert by_line[20].function == range(11, 24)
    assert by_line[20].name == "Pod.settle"


def test_larger_sample_begins_with_the_smaller_one(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pod.py").write_text(SOURCE)
    sample = functools.partial(
        mutations.sample, tmp_path, list(mutations.of_module(tmp_path, "pod.py"))
    )
    assert sample(9, 1)[:4] == sample(4, 1)
    assert sample(9, 1) != sample(9, 2)


def test_mutant_that_does_not_compile_is_left_out(tmp_path: pathlib.Path) -> None:
    source = "def f():\n    if a := g():\n        return 1\n"
    (tmp_path / "pod.py").write_text(source)
    mutants = list(mutations.of_module(tmp_path, "pod.py"))
    found = mutations.sample(tmp_path, mutants, None, 1)
    assert sorted(one.apply(source).splitlines()[2].strip() for one in found) == [
        "return 0",
        "return 2",
    ]


def test_handmade_mutants_fit_their_modules() -> None:
    root = pathlib.Path(modules.__file__).parents[2]
    for edit in handmade.EDITS:
        source = (root / edit.path).read_text()
        assert source.count(edit.old) == 1, edit.meaning
        assert edit.apply(source) != source


def test_tests_of_a_package_are_near_its_modules() -> None:
    assert modules.is_near("tests/bpf/test_rules.py::test_a", "bpf/gates.py")
    assert modules.is_near(
        "tests/agent/operate/cli/views/test_status.py", "agent/operate/cli/output.py"
    )
    assert not modules.is_near(
        "tests/agent/operate/cli/test_output.py", "agent/operate/cli/views/status.py"
    )
