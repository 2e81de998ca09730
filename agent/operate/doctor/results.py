"""What the checks of `podgate doctor` find, and what is in order."""

from collections.abc import Iterable

import msgspec

from agent.admin import finding
from agent.admin.finding import Finding
from agent.admin.finding_kinds import Severity


class Passed(msgspec.Struct, frozen=True):
    """A check without a finding. text: what is in order, one sentence."""

    check: str
    text: str


Result = Passed | Finding


class DoctorReport(msgspec.Struct, frozen=True):
    """All checks. findings: the worst first; passed: in the order of the checks."""

    findings: list[Finding]
    passed: list[Passed]

    @property
    def has_problem(self) -> bool:
        """Whether a finding is open or broken."""
        worst = {Severity.of(one.severity) for one in self.findings}
        return not worst.isdisjoint((Severity.OPEN, Severity.BROKEN))


def report_of(results: Iterable[Result]) -> DoctorReport:
    """The report of these results."""
    results = list(results)
    return DoctorReport(
        findings=finding.ordered(one for one in results if isinstance(one, Finding)),
        passed=[one for one in results if isinstance(one, Passed)],
    )
