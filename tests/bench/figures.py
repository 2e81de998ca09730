"""One figure, one JSON line."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence


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
    """Print the samples' median. `baseline`: samples of what it is compared with, same run;
    parts: further fields, of which the samples are a summary; digits: behind the point.

    spread is [smallest, largest] of the samples; ratio is median over median.
    """
    value = statistics.median(samples)
    line: dict[str, object] = {
        "bench": bench,
        "figure": figure,
        "value": round(value, digits),
        "unit": unit,
        "spread": [round(min(samples), digits), round(max(samples), digits)],
    }
    if baseline is not None:
        line["baseline"] = round(statistics.median(baseline), 3)
        line["ratio"] = round(value / statistics.median(baseline), 3)
    for name, part in (parts or {}).items():
        line[name] = round(part, digits)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def p99(samples: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(samples)[int(len(samples) * 0.99)]
