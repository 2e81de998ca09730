"""Plugin of pytest: the slowest tests start first, so that all workers end at about the same time.

`durations.json` has the seconds of each unit that takes long: of a file, or of a test that has a
node for itself. `make durations` writes them again; an old one only makes a run less balanced. What
it lacks comes last, file by file.
"""

import collections
import contextlib
import json
import pathlib
from collections.abc import Mapping

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

DURATIONS = pathlib.Path(__file__).with_name("durations.json")
UNIT = "unit"
"""The property of a report that has the key of the test's unit."""

# What takes less is scheduled with the rest of its file.
_MIN_SECONDS = 0.3


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out units in the order in which the workers have collected them: the longest first."""

    def __init__(
        self, config: pytest.Config, log: Producer | None, durations: Mapping[str, float]
    ) -> None:
        super().__init__(config, log)
        self._durations = durations
        # Otherwise by the number of their tests.
        config.option.loadscopereorder = False

    def remove_node(self, node: WorkerController) -> str | None:
        """As in the base, which hands out again whatever the worker was given: also the units that
        it has finished, after which the next one gets no other, and the test that ended it."""
        left = {
            scope: {test: False for test, is_done in unit.items() if not is_done}
            for scope, unit in self.assigned_work.pop(node).items()
        }
        crashed: str | None = next((test for unit in left.values() for test in unit), None)
        if crashed is not None:
            del left[self._split_scope(crashed)][crashed]
            self.workqueue.update({scope: unit for scope, unit in left.items() if unit})
            for other in self.assigned_work:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """A worker begins a test when it has the next one, too, or knows that none follows."""
        if node not in self.registered_collections:
            return
        # A worker that has just ended: what it was given is handed out again once that is known.
        with contextlib.suppress(OSError):
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid in self._durations else _file(nodeid)


class Recorder:
    """Adds up how long each unit takes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        unit = dict(report.user_properties).get(UNIT, _file(report.nodeid))
        self._seconds[str(unit)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Units of other files keep their durations: unit tests and kernel tests run apart."""
        files = set(map(_file, self._seconds))
        found = {
            unit: round(seconds, 1)
            for unit, seconds in self._seconds.items()
            if seconds >= _MIN_SECONDS
        }
        kept = {unit: seconds for unit, seconds in read().items() if _file(unit) not in files}
        content = json.dumps(dict(sorted((kept | found).items())), indent=0)
        DURATIONS.write_text(content + "\n", encoding="utf-8")


def read() -> dict[str, float]:
    """Seconds by unit."""
    if not DURATIONS.exists():
        return {}
    found: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return found


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-durations", action="store_true", help="write tests/nodes/durations.json again"
    )


def sort(items: list[pytest.Item]) -> None:
    """Put the items of the longest units first; those of a unit stay together."""
    durations = read()

    def seconds(item: pytest.Item) -> float:
        return durations.get(item.nodeid) or durations.get(_file(item.nodeid), 0)

    items.sort(key=seconds, reverse=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongestFirst:
    return LongestFirst(config, log, read())


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
