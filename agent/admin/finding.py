"""A finding: one thing that is wrong on a node, as every command, page and metric names it."""

import datetime
from collections.abc import Callable, Iterable, Sequence

import msgspec

from agent.admin.finding_kinds import Kind, Severity
from agent.listing import listed

NODE = "node"

# Names of programs, as they are typed.
_LOWER_CASE = ("podgate", "kubectl", "bpftool", "nft ", "bpf(2)")


class Finding(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """severity: `open`, `broken`, `degraded` or `note`; kind: of docs/reference/findings.md;
    subject: `node`, "pod NAMESPACE/NAME", "namespace NAME"; sentence: what is wrong; remedy: what
    to do, one sentence; next_command: to run next, or empty; since: None if that is not
    known; pods: those that it concerns, "namespace/name", unless one is the subject.
    """

    severity: str
    kind: str
    subject: str
    sentence: str
    remedy: str = ""
    next_command: str = ""
    since: datetime.datetime | None = None
    pods: list[str] = []

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return Severity.of(self.severity).rank

    @property
    def pod_names(self) -> list[str]:
        """All pods that it concerns, "namespace/name"."""
        what, _, name = self.subject.partition(" ")
        return [name] if what == "pod" else self.pods

    def advice(self, by: str = "") -> str:
        """What to do and what to run, in one line. by: a command to leave out."""
        command = f"Next: {self.next_command}" if self.next_command not in ("", by) else ""
        return " ".join(filter(None, (self.remedy, command)))


def found(
    kind: Kind,
    sentence: str,
    subject: str = NODE,
    *,
    remedy: str = "",
    since: datetime.datetime | None = None,
    pods: Sequence[str] = (),
) -> Finding:
    """A finding of this kind. sentence: gets its capital and full stop; remedy: instead of the
    kind's."""
    name = subject.partition(" ")[2]
    namespace, _, pod = name.rpartition("/")
    return Finding(
        severity=kind.severity.value,
        kind=kind.name,
        subject=subject,
        sentence=as_sentence(sentence),
        remedy=remedy or kind.remedy,
        next_command=kind.command.format(name=name, namespace=namespace, pod=pod),
        since=since,
        pods=list(pods),
    )


def line(finding: Finding, pods: Sequence[str]) -> str:
    """A finding in one line. pods: all that it concerns."""
    if pods == [finding.subject.removeprefix("pod ")]:
        return f"{pods[0]}: {finding.sentence}"
    return f"{finding.sentence} Pods: {listed(pods)}." if pods else finding.sentence


def as_sentence(text: str) -> str:
    """With a capital, unless a name starts it, and a full stop; empty for none."""
    start = text[:1] if text.startswith(_LOWER_CASE) else text[:1].upper()
    return f"{start}{text[1:].rstrip('.')}." if text else ""


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, and otherwise as they are."""
    return sorted(findings, key=lambda finding: finding.rank)


def of_pod(findings: Iterable[Finding], name: str) -> list[Finding]:
    """Those that concern one pod, "namespace/name"."""
    return [finding for finding in findings if name in finding.pod_names]


def chosen(findings: Iterable[Finding], is_chosen: Callable[[str], bool]) -> list[Finding]:
    """Those of the node, and of pods that are chosen by their name, "namespace/name"."""
    kept = []
    for finding in findings:
        names = [name for name in finding.pod_names if is_chosen(name)]
        if names or not finding.pod_names:
            pods = names if finding.pods else []
            kept.append(msgspec.structs.replace(finding, pods=pods))
    return kept


def merged(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Equal findings once, each with all of its pods; the worst first."""
    pods: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.sentence)
        first.setdefault(key, finding)
        pods.setdefault(key, []).extend(finding.pod_names)
    kept = sorted(first.items(), key=lambda item: item[1].rank)
    return [(finding, pods[key]) for key, finding in kept]
