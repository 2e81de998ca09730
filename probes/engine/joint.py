"""Several runs of one probe, one for each family, all of which must pass."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from probes.results import ProbeOutcome, ProbeResult


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class JointRun:
    """Waits for all runs, so that a failure reports every family that fails."""

    __slots__ = ("_done", "_outcomes", "_runs", "over")

    def __init__(self, count: int, done: Callable[[ProbeOutcome], None]) -> None:
        self.over = False
        self._done = done
        self._outcomes: list[ProbeOutcome | None] = [None] * count
        self._runs: list[Cancellable] = []

    def add(self, run: Cancellable) -> None:
        self._runs.append(run)

    def ender(self, number: int) -> Callable[[ProbeOutcome], None]:
        """The callback of the run with this number."""
        return partial(self._ended, number)

    def cancel(self) -> None:
        """Stop at once; `done` is not called."""
        self.over = True
        for run in self._runs:
            run.cancel()

    def _ended(self, number: int, outcome: ProbeOutcome) -> None:
        self._outcomes[number] = outcome
        ended = [outcome for outcome in self._outcomes if outcome is not None]
        if len(ended) == len(self._outcomes) and not self.over:
            self.over = True
            self._done(together(ended))


def together(outcomes: list[ProbeOutcome]) -> ProbeOutcome:
    """The joint outcome of all families; the first family's message comes first."""
    duration = max(outcome.duration_seconds for outcome in outcomes)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed:
        # A failure of the pod takes precedence over a prober error with another family.
        real = [outcome for outcome in failed if not outcome.error] or failed
        text = "; ".join(dict.fromkeys(outcome.message for outcome in real))
        other = real[1].address if len(real) > 1 else None
        return msgspec.structs.replace(
            real[0], message=text, duration_seconds=duration, other_address=other
        )
    warned = [outcome for outcome in outcomes if outcome.result is ProbeResult.WARNING]
    return msgspec.structs.replace(
        (warned or outcomes)[0],
        duration_seconds=duration,
        address=outcomes[0].address,
        other_address=outcomes[1].address,
    )
