import pathlib

import pytest

from agent.operate.kubectl import off
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.standin import KubectlStandin


@pytest.fixture
def kubectl(tmp_path: pathlib.Path) -> KubectlStandin:
    return KubectlStandin(tmp_path)


@pytest.fixture
def cluster(kubectl: KubectlStandin) -> Cluster:
    return Cluster([kubectl.command])


class _Clock:
    """In place of the module `time`: sleeping takes no time."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def off_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`off` and `on` query nodes that are not done until the time is over, at once."""
    monkeypatch.setattr(off, "time", _Clock())
