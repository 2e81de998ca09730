"""Output of `podgate doctor`."""

from agent.operate.cli.output import Screen, Signal
from agent.operate.doctor.finding import Finding, Severity

_MARKS = {
    Severity.OK: ("✓", Signal.SAFE),
    Severity.WARNING: ("!", Signal.CAUTION),
    Severity.PROBLEM: ("✗", Signal.DANGER),
}


def show(screen: Screen, findings: list[Finding]) -> None:
    """Print one line for each finding."""
    for finding in findings:
        mark, signal = _MARKS[finding.severity]
        text = " ".join(filter(None, (finding.text, finding.remedy)))
        screen.line(f"{mark} {finding.check}: {text}", signal)
