"""Findings, as `podgate status` and `podgate doctor` print them."""

import collections
from collections.abc import Iterable

from agent.admin import finding
from agent.admin.finding import Finding
from agent.operate.cli.output import Screen, signal_of_severity

# Of pods that all fail in their own way, these are enough; wide output has all.
_MAX_OF_A_KIND = 5


def show(screen: Screen, findings: Iterable[Finding], *, by: str, with_advice: bool) -> None:
    """Print one line for each, the worst first. by: the command that prints them, which is no
    advice; with_advice: whether to print what to do."""
    counts: collections.Counter[str] = collections.Counter()
    for one, pods in finding.merged(findings):
        counts[one.kind] += 1
        if counts[one.kind] > _MAX_OF_A_KIND and not screen.is_wide:
            continue
        text = f"{one.severity}: {finding.line(one, pods)}"
        if with_advice:
            text = " ".join(filter(None, (text, one.advice(by))))
        screen.line(text, signal_of_severity(one.severity))
    for kind, count in counts.items():
        if count > _MAX_OF_A_KIND and not screen.is_wide:
            screen.line(f"{count - _MAX_OF_A_KIND} more of kind {kind}: '{by} -o wide' has all.")
