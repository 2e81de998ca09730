"""The drawing of the demo's node: host process, kubelet and agent, and pods behind their gates."""

import rich.text

from agent.operate.demo.events import Danger, Fact, PodScene, Scene

WIDTH = 73
"""Columns."""

STYLES = {
    Danger.OPEN: "red",
    Danger.COUNTED: "yellow",
    Danger.CLOSED: "green",
    Danger.NEUTRAL: "",
}

_HOST_WORDS = {
    Danger.OPEN: "connects",
    Danger.COUNTED: "connects, counted",
    Danger.CLOSED: "dropped",
    Danger.NEUTRAL: "",
}
_GATE_MARKS = {Danger.OPEN: "○", Danger.COUNTED: "◐", Danger.CLOSED: "●", Danger.NEUTRAL: "○"}

_Part = tuple[int, str, str]
"""Column, text and style."""

_MARGIN = 2
_POD_WIDTH = 15
_POD_STEP = 18
_STEM = 4
"""From a pod's left edge to the interface above it."""


def draw(scene: Scene, *, host: Fact | None, kubelet: Fact | None) -> rich.text.Text:
    """Eight lines, at most WIDTH wide. host, kubelet: the newest fact of each, if there is one."""
    columns = [_MARGIN + number * _POD_STEP for number in range(len(scene.pods))]
    pods = list(zip(columns, scene.pods, strict=True))
    inner = WIDTH - _MARGIN - 2
    edge = ["─"] * inner
    for column in columns:
        edge[column + _STEM - _MARGIN - 1] = "┬"
    return rich.text.Text("\n").join(
        [
            _line([(_MARGIN, "╭─ node " + "─" * (inner - 7) + "╮", "")]),
            _line(_processes(scene.agent, host, kubelet)),
            _line([(_MARGIN, "╰" + "".join(edge) + "╯", "")]),
            _line([part for column, pod in pods for part in _gate(column, pod)]),
            _line([(column, _box("╭", "─", "╮", stem="┴"), "") for column, _ in pods]),
            _line([part for column, pod in pods for part in _cell(column, pod.name, "bold")]),
            _line(
                [
                    part
                    for column, pod in pods
                    for part in _cell(column, pod.state.text, STYLES[pod.state.danger])
                ]
            ),
            _line([(column, _box("╰", "─", "╯"), "") for column, _ in pods]),
        ]
    )


def _processes(agent: Fact, host: Fact | None, kubelet: Fact | None) -> list[_Part]:
    parts: list[_Part] = [(_MARGIN, "│", ""), (WIDTH - 1, "│", "")]
    column = _MARGIN + 2
    for name, words, fact in (
        ("host process", _HOST_WORDS[host.danger] if host else "", host),
        ("kubelet", kubelet.text.removeprefix("kubelet ") if kubelet else "", kubelet),
        ("podgate", agent.text, agent),
    ):
        if fact:
            label = f"{name}: "
            parts += [(column, label, ""), (column + len(label), words, STYLES[fact.danger])]
            column += len(label) + len(words) + 3
    return parts


def _gate(column: int, pod: PodScene) -> list[_Part]:
    style = STYLES[pod.gate.danger]
    return [
        (column + _STEM, _GATE_MARKS[pod.gate.danger], style),
        (column + _STEM + 2, pod.gate.text, style),
    ]


def _cell(column: int, text: str, style: str) -> list[_Part]:
    return [(column, "│", ""), (column + 2, text, style), (column + _POD_WIDTH - 1, "│", "")]


def _box(left: str, middle: str, right: str, *, stem: str = "") -> str:
    edge = middle * (_POD_WIDTH - 2)
    if stem:
        edge = edge[: _STEM - 1] + stem + edge[_STEM:]
    return left + edge + right


def _line(parts: list[_Part]) -> rich.text.Text:
    """Texts at their columns, filled with spaces between."""
    line = rich.text.Text()
    for column, text, style in sorted(parts):
        line.append(" " * (column - len(line)))
        line.append(text, style)
    return line
