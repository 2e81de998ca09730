"""What a check finds."""

import enum

import msgspec


class Severity(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """podgate works, with a feature less."""
    PROBLEM = "problem"
    """podgate does not work, or does not protect pods."""


class Finding(msgspec.Struct, frozen=True):
    """Result of one check. text: one sentence; remedy: what to do, one sentence, empty if all is
    well."""

    check: str
    severity: Severity
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Severity.OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, text, remedy)


def problem(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Severity.PROBLEM, text, remedy)
