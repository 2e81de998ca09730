"""Answers of `podgate explain`, with what the agent reports while it is alive."""

import pathlib

from agent.admin.observations import Observations
from agent.admin.report import AgentReport
from agent.errors import AgentRequestError, AgentUnreachableError
from agent.operate.cli import answers
from agent.operate.explain import flows, pod_checks
from agent.operate.explain.model import Explanation, PodExplanation
from agent.operate.pinned.installation import PinsUnreadableError
from bpf import pins


def flow(question: flows.Question, run_directory: pathlib.Path, bpffs: pathlib.Path) -> Explanation:
    """Raises `AgentUnreachableError` if neither agent nor pins can be read; otherwise as
    `flows.explain`."""
    agent = _answers(run_directory)
    try:
        return flows.explain(question, pins.Pins(bpffs), run_directory, agent)
    except PinsUnreadableError as error:
        if agent.report is None:
            raise AgentUnreachableError(f"no agent responds, and {error}") from error
        raise


def pod(name: str, run_directory: pathlib.Path, bpffs: pathlib.Path) -> PodExplanation:
    """As `flow`."""
    try:
        report: AgentReport | None = answers.read(run_directory, "/status", AgentReport)
    except AgentRequestError:
        report = None
    try:
        return pod_checks.explain(name, pins.Pins(bpffs), run_directory, report)
    except PinsUnreadableError as error:
        if report is None:
            raise AgentUnreachableError(f"no agent responds, and {error}") from error
        raise


def _answers(run_directory: pathlib.Path) -> flows.AgentAnswers:
    """An agent that does not respond is explained, too."""
    try:
        return flows.AgentAnswers(
            answers.read(run_directory, "/status", AgentReport),
            answers.read(run_directory, "/observations", Observations),
        )
    except AgentRequestError:
        return flows.AgentAnswers()
