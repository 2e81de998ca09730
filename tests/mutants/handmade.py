"""Mutants made by hand, each of which once passed all unit tests near it, or is as likely.

`make mutants HANDMADE=1` shows that tests detect all of them.
"""

from dataclasses import dataclass

from tests.mutants.mutations import MutationError


@dataclass(frozen=True, slots=True)
class Edit:
    """A part of a module, and what replaces it."""

    meaning: str
    path: str
    old: str
    """In the module once; what is in it elsewhere, too, has more around it."""
    new: str

    def apply(self, source: str) -> str:
        """Raises `MutationError`."""
        if source.count(self.old) != 1:
            raise MutationError(f"adapt the mutant '{self.meaning}' to {self.path}")
        return source.replace(self.old, self.new)


EDITS = (
    Edit(
        "failing probes of strict without fallback are only degraded",
        "agent/admin/findings.py",
        "    if has_fallback:\n",
        "    if problem:\n",
    ),
    Edit(
        "a problem of raw sockets is no finding",
        "agent/admin/findings.py",
        "if sockets.problem:",
        "if not sockets:",
    ),
    Edit(
        "a ceiling below a namespace's label is no finding",
        "agent/operate/kubectl/ceilings.py",
        "if not is_off and not above:",
        "if not is_off:",
    ),
    Edit(
        "answers of the relay are not counted",
        "agent/strict/process.py",
        "self._stats.answers.add(message.answers)",
        "pass",
    ),
    Edit(
        "pods that are not enforced report a kubelet that is not identified",
        "agent/pods/isolation.py",
        "if kubelet_problem and state.status.reason == ENFORCED:",
        "if kubelet_problem:",
    ),
    Edit("nine pods are a crowd", "agent/gates/crowds.py", "_PODS = 8", "_PODS = 9"),
    Edit(
        "a condition's message is written twice as often",
        "agent/kube/condition_writer.py",
        "_TEXT_SECONDS = 60.0",
        "_TEXT_SECONDS = 30.0",
    ),
    Edit(
        "a rule of a subtree whose cgroup has no level is matched",
        "agent/policy/matching.py",
        "elif found.level is not None:",
        "elif found.level is None:",
    ),
    Edit(
        "a restart of a relay that cannot start is never answered",
        "agent/strict/supervisor.py",
        'self._back_off(f"the relay cannot be started: {error}")\n'
        "            self._resolve_restarts(error)",
        'self._back_off(f"the relay cannot be started: {error}")',
    ),
    Edit(
        "a changed mode of the node does not wake the relay's supervisor",
        "agent/strict/supervisor.py",
        "modes.changes.subscribe(self._changes)",
        "pass",
    ),
    Edit(
        "a list after 410 asks for the version that the API server has forgotten",
        "agent/kube/watcher.py",
        'self._watch_query("" if self._needs_newest else self._version)',
        "self._watch_query(self._version)",
    ),
    Edit(
        "a bypassed gate is only degraded",
        "agent/admin/finding_kinds/pods.py",
        '"gate-bypassed",\n    OPEN,',
        '"gate-bypassed",\n    DEGRADED,',
    ),
    Edit(
        "doctor trusts the report of an agent of another version",
        "agent/operate/doctor/agent.py",
        "if report.version != VERSION:",
        "if False:",
    ),
)
