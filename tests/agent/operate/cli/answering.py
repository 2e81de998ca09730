"""`python -m tests.agent.operate.cli.answering` writes docs/reference/answers.md: what commands
answer if the agent is alive, hangs, is dead, or has another version. Each cell is a run of the
command."""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import msgspec
from click.testing import CliRunner, Result

from agent.errors import PodgateError
from agent.operate.cli.main import main
from agent.settings import admin_socket, localnet_socket
from tests.agent.operate.cli import reports
from tests.agent.operate.cli.stub_agent import ANSWERS, GrpcStub, HungAgent, StubAgent

PAGE = pathlib.Path(__file__).parents[4] / "docs" / "reference" / "answers.md"

COMMANDS = ("status", "drops", "rules", "probes", "pods", "services", "suggest", "relay restart")

_READS = {
    "agent.operate.pinned.status.read": reports.PINNED,
    "agent.operate.pinned.drops.read": reports.DROPS,
    "agent.operate.pinned.rules.read": reports.RULES,
}
# How long an agent is awaited before it hangs: nothing else is awaited here.
_LIMITS = (
    "agent.admin.client.ALIVE_SECONDS",
    "agent.operate.cli.commands.services._ANSWER_SECONDS",
    "agent.client.base._READY_SECONDS",
)
_PINS, _VERSION = "pinned BPF objects.", "the agent has version"

_HEAD = """\
# What commands answer without the agent

Made by running each command (`python -m tests.agent.operate.cli.answering`). A number is the exit
status: 0 yes or done, 1 no or failed, 2 wrong usage, 3 no agent responds and there is no other
answer. With a 3 the command prints one sentence on stderr and nothing else.

* *from the pins*: read from the pinned BPF objects, after one sentence on stderr. Gates, modes and
  counters are the kernel's; names of pods are those that the agent saved last; probes, conditions
  and names of policies are missing.
* *what both know*: unknown fields are ignored, missing ones are empty, and one sentence on stderr
  has both versions.
* An agent hangs if its event loop does not answer within 5 s. One that is busy with its gates
  answers.

"""
_FOOT = """
These need no agent: `podgate maps`, `podgate programs`, `podgate explain`, `podgate doctor`,
`podgate bugtool`, `podgate off --node`, `podgate cleanup`, `podgate probe --netns`. These need one,
and exit with 3 without: `podgate drops --follow`, `podgate probe --pod`.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Situation:
    """A state of the agent. enter: establishes it for the directory's commands."""

    name: str
    enter: Callable[[pathlib.Path], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _alive(directory: pathlib.Path) -> Iterator[None]:
    with StubAgent(directory), GrpcStub(directory):
        yield


@contextlib.contextmanager
def _of_another_version(directory: pathlib.Path) -> Iterator[None]:
    """Half of the fields are missing, and there are others."""
    answers = {path: _changed(content) for path, content in ANSWERS.items() if path != "/version"}
    with StubAgent(directory, {"/version": b"9.9.9\n", **answers}), GrpcStub(directory):
        yield


def _changed(content: bytes) -> bytes:
    document = msgspec.json.decode(content)
    half = dict(list(document.items())[::2])
    return msgspec.json.encode(half | {"news": {"of": ["another", "version"]}})


@contextlib.contextmanager
def _hung(directory: pathlib.Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        podinfo = directory / "podinfo" / "podinfo.sock"
        for path in (admin_socket(directory), localnet_socket(directory), podinfo):
            stack.enter_context(HungAgent(path))
        for limit in _LIMITS:
            stack.enter_context(mock.patch(limit, 0.2))
        stack.enter_context(_pinned())
        yield


@contextlib.contextmanager
def _dead(_: pathlib.Path) -> Iterator[None]:
    with _pinned():
        yield


@contextlib.contextmanager
def _never_run(_: pathlib.Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in _READS:
            error = PodgateError("nothing is pinned.")
            stack.enter_context(mock.patch(name, side_effect=error))
        yield


@contextlib.contextmanager
def _pinned() -> Iterator[None]:
    """Objects of an agent are pinned: tests/kernel read real ones."""
    with contextlib.ExitStack() as stack:
        for name, found in _READS.items():
            stack.enter_context(mock.patch(name, return_value=found))
        yield


SITUATIONS = (
    Situation("alive", _alive),
    Situation("hangs", _hung),
    Situation("dead", _dead),
    Situation("dead, nothing pinned", _never_run),
    Situation("of another version", _of_another_version),
)


def run(command: str, situation: Situation) -> Result:
    """Run one command in one situation."""
    with tempfile.TemporaryDirectory(prefix="podgate-") as folder:
        directory = pathlib.Path(folder) / "run"
        with situation.enter(directory):
            words = [*command.split(), "--run-directory", str(directory)]
            return CliRunner().invoke(main, words)


def cell(result: Result) -> str:
    """The exit status, and where the answer comes from."""
    if result.exit_code == 0 and _PINS in result.stderr:
        return "0, from the pins"
    if result.exit_code == 0 and _VERSION in result.stderr:
        return "0, what both know"
    return str(result.exit_code)


def answers() -> dict[tuple[str, str], Result]:
    """Of each command in each situation, by their names."""
    return {
        (command, situation.name): run(command, situation)
        for command in COMMANDS
        for situation in SITUATIONS
    }


def page(answers: Mapping[tuple[str, str], Result]) -> str:
    """The page of these answers."""
    names = [situation.name for situation in SITUATIONS]
    lines = [f"| command | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for command in COMMANDS:
        cells = [cell(answers[command, name]) for name in names]
        lines.append(f"| `{command}` | {' | '.join(cells)} |")
    return _HEAD + "\n".join(lines) + "\n" + _FOOT


if __name__ == "__main__":
    PAGE.write_text(page(answers()), encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE.name}\n")
