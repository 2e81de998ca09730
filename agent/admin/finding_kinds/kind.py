"""What a kind of finding is: how bad, what it means and what to do."""

import dataclasses
import enum


class Severity(enum.StrEnum):
    """How bad a finding is; the worst first."""

    OPEN = "open"
    """Host processes reach a pod, or a port of it, that should be closed."""
    BROKEN = "broken"
    """Probes, conditions or traffic of a user fail."""
    DEGRADED = "degraded"
    """podgate works with less than is configured, or an operator must act."""
    NOTE = "note"
    """Nothing has to be done now."""

    @property
    def rank(self) -> int:
        """0 for the worst."""
        return _RANKS[self]

    @classmethod
    def of(cls, text: str) -> "Severity":
        """The severity of that name; of a name from a later version, DEGRADED."""
        return cls(text) if text in _RANKS else cls.DEGRADED


_RANKS = {severity: rank for rank, severity in enumerate(Severity)}


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One kind. meaning: when it is found, a sentence; remedy: what to do, a sentence; command: to
    run next, or empty; {name} is the subject's name, of a pod also {namespace} and {pod}."""

    name: str
    severity: Severity
    meaning: str
    remedy: str
    command: str = ""

    @property
    def reason(self) -> str:
        """The reason of Events, in CamelCase."""
        return "".join(word.capitalize() for word in self.name.split("-"))


KINDS: dict[str, Kind] = {}
"""All kinds, by name."""


def define(name: str, severity: Severity, meaning: str, remedy: str, command: str = "") -> Kind:
    """Add a kind to the list."""
    KINDS[name] = Kind(name, severity, meaning, remedy, command)
    return KINDS[name]


OPEN, BROKEN, DEGRADED, NOTE = Severity
