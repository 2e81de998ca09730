"""One figure, one JSON line."""

import statistics
import sys
from collections.abc import Mapping, Sequence

import msgspec


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line. value: the samples' median; spread: [smallest, largest] of the samples; baseline: the
    median of what it is compared with in the same run; ratio: value over baseline, ratio_spread:
    smallest and largest sample over it."""

    bench: str
    figure: str
    value: float
    unit: str
    spread: tuple[float, float]
    baseline: float | None = None
    ratio: float | None = None
    ratio_spread: tuple[float, float] | None = None
    parts: Mapping[str, float] = {}

    @property
    def compared(self) -> tuple[float, tuple[float, float]] | None:
        """What can be compared between machines, and its spread: None for other figures."""
        if self.ratio is not None and self.ratio_spread is not None:
            return self.ratio, self.ratio_spread
        return (self.value, self.spread) if self.unit == RATIO else None


RATIO = "ratio"
"""The unit of samples that are ratios of one run."""


def emit(
    bench: str,
    figure: str,
    samples: Sequence[float],
    unit: str,
    *,
    baseline: Sequence[float] | None = None,
    parts: Mapping[str, float] | None = None,
    digits: int = 3,
) -> None:
    """Print a `Figure`. `baseline`: samples of what it is compared with, same run; parts: of which
    the samples are a summary; digits: behind the point."""
    ends = min(samples), max(samples)
    base = statistics.median(baseline) if baseline else None

    def over(value: float) -> float:
        return round(value / base, 3) if base else 0.0

    value = statistics.median(samples)
    line = Figure(
        *(bench, figure, round(value, digits), unit),
        (round(ends[0], digits), round(ends[1], digits)),
        baseline=None if base is None else round(base, 3),
        ratio=over(value) if base else None,
        ratio_spread=(over(ends[0]), over(ends[1])) if base else None,
        parts={name: round(part, digits) for name, part in (parts or {}).items()},
    )
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def p99(samples: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(samples)[int(len(samples) * 0.99)]
