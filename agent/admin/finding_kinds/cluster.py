"""Kinds of findings of a cluster, by `kubectl podgate`."""

from agent.admin.finding_kinds.kind import BROKEN, define

NO_ANSWER = define(
    "no-answer",
    BROKEN,
    "No agent of the node answers `kubectl podgate`.",
    "Solve the reason in the sentence; on the node, 'podgate status' works without an agent.",
)
