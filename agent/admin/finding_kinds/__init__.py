"""The kinds of findings, by name. No I/O.

docs/reference/findings.md is made from this list. It needs only the standard library, since the
kubectl plugin has it, too.
"""

from agent.admin.finding_kinds.cluster import *  # noqa: F403  # the kinds' constants
from agent.admin.finding_kinds.kind import KINDS, Kind, Severity
from agent.admin.finding_kinds.machine import *  # noqa: F403
from agent.admin.finding_kinds.node import *  # noqa: F403
from agent.admin.finding_kinds.pods import *  # noqa: F403

__all__ = ["KINDS", "Kind", "Severity"]
