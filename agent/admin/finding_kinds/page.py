"""The page of all kinds of findings."""

from agent.admin import finding_kinds


def text() -> str:
    """docs/reference/findings.md, Markdown."""
    lines = [
        "# Findings",
        "",
        "What podgate finds wrong on a node. `podgate status`, the status page, `podgate doctor`, "
        "`podgate explain pod`, `kubectl podgate`, `/readyz`, Events and the metric "
        "`podgate_findings` name each by its kind and severity.",
        "",
        "| severity | meaning |",
        "|---|---|",
        "| `open` | host processes reach a pod, or a port of it, that should be closed |",
        "| `broken` | probes, conditions or traffic of a user fail |",
        "| `degraded` | podgate works with less than is configured, or an operator must act |",
        "| `note` | nothing has to be done now |",
        "",
        "| kind | severity | found if | what to do |",
        "|---|---|---|---|",
    ]
    kinds = sorted(finding_kinds.KINDS.values(), key=lambda kind: (kind.severity.rank, kind.name))
    lines += [
        f"| `{kind.name}` | {kind.severity} | {kind.meaning} | {kind.remedy} |" for kind in kinds
    ]
    return "\n".join(lines) + "\n"
