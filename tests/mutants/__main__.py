"""`make mutants`: the changes of podgate's code that no test detects."""

import argparse
import contextlib
import difflib
import json
import os
import pathlib
import queue
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from tests.mutants import equivalent, handmade, modules, mutations
from tests.mutants.entries import Entries
from tests.mutants.record import Record
from tests.mutants.trials import Copy, TrialError

_ROOT = pathlib.Path(__file__).parents[2]

# Of kernel tests, for each processor, as in `make test-kernel`.
_WORKERS = 2
# Of their files, recorded and kept together: a run that is ended continues there.
_PART = 45
UNIT, KERNEL = "unit tests", "kernel tests"


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one mutant."""

    path: str
    line: int
    function: str
    """The outermost one, such as "Ports.add"; empty outside of functions, and of handmade ones."""
    difference: str
    tests: tuple[str, ...]
    """Those that ran, without parameters; or files."""
    killed_by: str
    """`UNIT` or `KERNEL`; empty if it survived."""

    @property
    def is_equivalent(self) -> bool:
        return equivalent.is_equivalent(self.path, self.function, self.difference)

    def as_json(self) -> str:
        """Of a survivor, in one line."""
        content = asdict(self)
        del content["killed_by"]
        return json.dumps(content)

    def __str__(self) -> str:
        files = dict.fromkeys(test.partition("::")[0] for test in self.tests)
        return f"{self.path}:{self.line}\n{self.difference}\n  tests: {', '.join(files)}\n"


class Trials:
    """Runs mutants in copies of the tree, several at a time."""

    def __init__(self, copies: list[Copy]) -> None:
        self.tree = copies[0].tree
        """As the checkout was at the start of the run."""
        self._copies = copies
        self._sources: dict[str, str] = {}
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)

    def record(self, tests: list[str]) -> Record:
        """What these test files run, each copy its part of them."""
        count = len(self._copies)
        parts = [tests[number::count] for number in range(count)]
        with ThreadPoolExecutor(count) as pool:
            return Record.merged(pool.map(self._record, [part for part in parts if part]))

    def run(
        self,
        mutants: list[mutations.Mutant | handmade.Edit],
        record: Record,
        entries: Entries,
    ) -> Iterator[Trial]:
        """In the order of the mutants. entries: what survives the unit tests is tried with these
        kernel tests."""
        self._sources = {one.path: (self.tree / one.path).read_text() for one in mutants}
        try:
            with ThreadPoolExecutor(len(self._copies)) as pool:
                yield from pool.map(lambda mutant: self._try(mutant, record, entries), mutants)
        finally:
            for copy in self._copies:
                copy.close()

    def slow(self) -> Counter[str]:
        """Why mutants were tried by new processes, and how many."""
        return sum((copy.slow for copy in self._copies), Counter())

    @contextlib.contextmanager
    def _copy(self) -> Iterator[Copy]:
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def _record(self, tests: list[str]) -> Record:
        with self._copy() as copy:
            return copy.record(tests)

    def _try(
        self, mutant: mutations.Mutant | handmade.Edit, record: Record, entries: Entries
    ) -> Trial:
        source = self._sources[mutant.path]
        changed = mutant.apply(source)
        lines, difference = _difference(source, changed)
        steps = _steps(mutant, lines, record)
        ran = [test for tests in steps for test in tests]
        name = getattr(mutant, "name", "")
        with self._copy() as copy:
            is_killed = copy.unit_tests_detect(steps, record, mutant.path, changed, source)
            killed_by = UNIT if is_killed else ""
            in_kernel = entries.tests_of(mutant.path, name)
            if not is_killed and in_kernel:
                ran += in_kernel
                seconds = entries.duration(in_kernel)
                if copy.kernel_tests_detect(in_kernel, seconds, mutant.path, changed, source):
                    killed_by = KERNEL
        return Trial(mutant.path, lines[0], name, difference, tuple(ran), killed_by)


def _difference(source: str, changed: str) -> tuple[list[int], str]:
    """The lines of the source that change, and the lines of a diff."""
    before, after = source.splitlines(), changed.splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    lines: list[int] = []
    shown: list[str] = []
    for kind, first, last, first_after, last_after in blocks:
        if kind != "equal":
            lines += range(first + 1, last + 1) or [first]
            shown += [f"-{line}" for line in before[first:last]]
            shown += [f"+{line}" for line in after[first_after:last_after]]
    return lines, "\n".join(shown)


def _steps(
    mutant: mutations.Mutant | handmade.Edit, lines: list[int], record: Record
) -> list[list[str]]:
    """The tests of the module's package that run what changes, then all others that do; last those
    that run another part of its function: coverage misses lines of coroutines that follow a
    handled timeout (before Python 3.12). The quickest of each are first."""
    running = record.tests_of(mutant.path, {*lines, *getattr(mutant, "lines", ())})
    others = record.tests_of(mutant.path, getattr(mutant, "function", ())) - running
    near = {test for test in running if modules.is_near(test, mutant.path)}
    return [
        sorted(tests, key=lambda test: record.duration([test]))
        for tests in (near, running - near, others)
        if tests
    ]


def _mutants(
    tree: pathlib.Path, paths: list[str], record: Record, size: int | None, seed: int
) -> list[mutations.Mutant]:
    """Those of each group, or a sample of them; prints how many there are."""
    chosen = []
    for group in modules.GOALS:
        found: list[mutations.Mutant] = []
        left_out: Counter[str] = Counter()
        for path in paths:
            if modules.group(path) == group:
                for mutant in mutations.of_module(tree, path):
                    if record.tests_of(path, mutant.function):
                        found.append(mutant)
                    else:
                        left_out[path] += 1
        chosen += mutations.sample(tree, found, size, seed)
        _print(
            f"{group}: {len(found)} mutants; left to kernel tests, since no unit test runs their "
            f"function: {left_out.total()} in {len(left_out)} modules"
        )
    return chosen


def _entries(directory: str, jobs: int) -> Entries:
    """The record of kernel tests, with those that it lacked."""
    entries = Entries.read(_ROOT)
    if missing := entries.keep_only(_ROOT, modules.kernel_tests(_ROOT)):
        _print(f"recording what {len(missing)} files of kernel tests enter")
        copy = Copy(_ROOT, pathlib.Path(directory, "kernel"))
        for first in range(0, len(missing), _PART):
            copy.record_entries(missing[first : first + _PART], _WORKERS * jobs, entries)
            entries.write(_ROOT)
    for name in entries.failed:
        _print(f"left out, since it fails without a mutant: {name}")
    return entries


def report(trials: Iterator[Trial], file: str | None, *, is_complete: bool) -> bool:
    """Print each survivor, and the scores of those that are other programs; whether these reach
    their goals.

    file: gets a line of JSON for each survivor; is_complete: the goal is that tests kill all."""
    tried: Counter[str] = Counter()
    same: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    killed_by: Counter[tuple[str, str]] = Counter()
    is_good = True
    for trial in trials:
        group = modules.group(trial.path)
        if trial.is_equivalent:
            same[group] += 1
            if trial.killed_by:
                _print(
                    f"\nnot the same program, though tests/mutants/equivalent.py has it: {trial}"
                )
                is_good = False
            continue
        tried[group] += 1
        killed[group] += bool(trial.killed_by)
        killed_by[group, trial.killed_by] += 1
        if not trial.killed_by:
            _print(f"\nsurvived: {trial}")
            if file is not None:
                with open(file, "a") as output:
                    output.write(trial.as_json() + "\n")
    for group, count in tried.items():
        share = 100 * killed[group] / count
        goal = 100 if is_complete else modules.GOALS[group]
        is_good &= share >= goal
        _print(
            f"{group}: {killed[group]} of {count} killed, {share:.1f} % (goal: {goal} %), "
            + ", ".join(f"{killed_by[group, kind]} by {kind}" for kind in (UNIT, KERNEL))
            + f"; {same[group]} more are the same program (tests/mutants/equivalent.py)"
        )
    return is_good


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("paths", nargs="*", help="modules and packages")
    parser.add_argument("--sample", type=int, help="mutants of each group; default: all")
    parser.add_argument("--seed", type=int, help="of the sample; default: a random one")
    parser.add_argument("--handmade", action="store_true", help="only tests/mutants/handmade.py")
    parser.add_argument(
        "--kernel",
        action=argparse.BooleanOptionalAction,
        help="try what survives the unit tests with kernel tests; default: for a sample",
    )
    parser.add_argument("--list", metavar="FILE", help="gets a line of JSON for each survivor")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


def _paths(options: argparse.Namespace) -> list[str]:
    """Those that are named; else all for a sample, and what differs from main without one."""
    if options.handmade:
        return sorted({edit.path for edit in handmade.EDITS})
    if options.paths:
        return modules.named(_ROOT, options.paths)
    return modules.changed(_ROOT) if options.sample is None else modules.every(_ROOT)


def main() -> int:
    options = _options()
    # What is in temporary directories, and in namespaces, ends with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if os.geteuid() != 0:
        _print("make mutants needs root: mutants run in namespaces of their own")
        return 1
    seed = options.seed if options.seed is not None else random.randrange(10_000)
    paths = _paths(options)
    if not paths:
        _print("no module of agent, bpf or probes differs from the main branch")
        return 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="podgate-mutants-") as directory:
        # Some tests have processes of other users, which read the tree.
        pathlib.Path(directory).chmod(0o711)
        trials = Trials(
            [Copy(_ROOT, pathlib.Path(directory, str(number))) for number in range(options.jobs)]
        )
        tests = modules.UnitTests(_ROOT).reaching(paths)
        _print(f"seed {seed}; {len(paths)} modules, {len(tests)} test files")
        record = trials.record(tests)
        for name in record.failed:
            _print(f"left out, since it fails without a mutant: {name}")
        mutants: list[mutations.Mutant | handmade.Edit] = []
        if options.handmade:
            mutants += handmade.EDITS
        else:
            mutants += _mutants(trials.tree, paths, record, options.sample, seed)
        has_kernel = options.sample is not None if options.kernel is None else options.kernel
        entries = _entries(directory, options.jobs) if has_kernel else Entries()
        if options.list is not None:
            pathlib.Path(options.list).write_bytes(b"")
        ran = trials.run(mutants, record, entries)
        is_good = report(ran, options.list, is_complete=options.handmade)
        for reason, count in trials.slow().items():
            _print(f"tried by new processes, since {reason}: {count}")
    minutes = (time.monotonic() - started) / 60
    _print(f"{len(mutants)} mutants in {minutes:.1f} minutes, seed {seed}")
    return 0 if is_good else 1


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TrialError, mutations.MutationError) as error:
        sys.exit(f"make mutants: {error}")
