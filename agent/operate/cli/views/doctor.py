"""Output of `podgate doctor`."""

from agent.operate.cli.output import Screen, Signal
from agent.operate.cli.views import findings
from agent.operate.doctor.results import DoctorReport


def show(screen: Screen, report: DoctorReport) -> None:
    """Print the findings with what to do, then a line for each check that passed."""
    findings.show(screen, report.findings, by="podgate doctor", with_advice=True)
    for one in report.passed:
        screen.line(f"\u2713 {one.check}: {one.text}", Signal.SAFE)
