"""`python -m tests.fuzz SECONDS`: the property tests of tests/probes, repeatedly, with new
examples.

They are the ones that `make test` runs for a moment: parsers of a pod's bytes and of users' specs.
Ends with status 1 at the first finding, after Hypothesis has shown the smallest example.
"""

import importlib
import inspect
import itertools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import hypothesis

_EXAMPLES = 2000
"""A round of one test: a second or so, so that the time is shared by all."""


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    hypothesis.settings.register_profile(
        "fuzz",
        max_examples=_EXAMPLES,
        deadline=None,
        # Hypothesis' default in CI has the same examples each time.
        derandomize=False,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("fuzz")
    found = dict(_targets())
    ends = time.monotonic() + seconds
    rounds = 0
    for rounds, (name, run) in enumerate(itertools.cycle(found.items()), start=1):  # noqa: B007
        try:
            run()
        except Exception as error:
            sys.stderr.write(f"fuzz: {name}: {error!r}\n")
            raise
        if time.monotonic() > ends:
            break
    sys.stdout.write(
        f"fuzz: {len(found)} targets, {rounds} rounds of {_EXAMPLES} examples, no finding\n"
    )
    return 0


def _targets() -> Iterator[tuple[str, Callable[[], None]]]:
    tests = pathlib.Path(__file__).parent
    for path in sorted((tests / "probes").rglob("test_*.py")):
        place = path.relative_to(tests.parent).with_suffix("")
        module = importlib.import_module(".".join(place.parts))
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if not getattr(function, "is_hypothesis_test", False):
                continue
            marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
            if marks:
                argument, values = marks[0].args
                for value in values:
                    bound: Callable[[], None] = partial(function, **{argument: value})
                    yield f"{path.stem}.{name}[{value}]", bound
            else:
                yield f"{path.stem}.{name}", function


if __name__ == "__main__":
    sys.exit(main())
