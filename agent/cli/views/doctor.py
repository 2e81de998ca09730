"""Output of `podgate doctor`."""

from agent.cli.doctor import Finding, Severity
from agent.cli.output import Screen, Signal

_MARKS = {
    Severity.OK: ("✓", Signal.SAFE),
    Severity.WARNING: ("!", Signal.CAUTION),
    Severity.PROBLEM: ("✗", Signal.DANGER),
}


def show(screen: Screen, findings: list[Finding]) -> None:
    """Print one line for each finding."""
    for finding in findings:
        mark, signal = _MARKS[finding.severity]
        screen.line(f"{mark} {finding.check}: {finding.text}", signal)
