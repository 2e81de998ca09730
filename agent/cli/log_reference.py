"""Log calls in the agent's source, for docs/reference/logs.md and the test of log events."""

import ast
import dataclasses
import pathlib
from collections.abc import Iterator

from agent.logs import Event

_SOURCE = pathlib.Path(__file__).parents[1]
_LEVELS = ("debug", "info", "warning", "error", "exception")


@dataclasses.dataclass(frozen=True, slots=True)
class LogCall:
    """One call: its place, levels (more than one if it depends on a value), event and fields."""

    place: str
    levels: tuple[str, ...]
    event: Event | None
    fields: tuple[str, ...]


def log_calls(source: pathlib.Path = _SOURCE) -> list[LogCall]:
    """All log calls below a directory. `event` is None if the first argument is no `Event`."""
    return [
        call
        for path in sorted(source.rglob("*.py"))
        for call in _calls_in(str(path.relative_to(source.parent)), path.read_text("utf-8"))
    ]


def page() -> str:
    """docs/reference/logs.md."""
    lines = [
        "# Log events",
        "",
        "Each line has `time`, `level`, `event` (the stable key), `message` (the sentence) and the "
        "fields of the event. Lines of libraries have the event `library`.",
        "",
        "| event | level | message | fields |",
        "|---|---|---|---|",
    ]
    calls = log_calls()
    for event in sorted(Event, key=lambda event: event.key):
        of_event = [call for call in calls if call.event is event]
        levels = dict.fromkeys(level for call in of_event for level in call.levels)
        fields = dict.fromkeys(field for call in of_event for field in call.fields)
        names = ", ".join(f"`{field}`" for field in fields) or "none"
        lines.append(f"| `{event.key}` | {', '.join(levels)} | {event.message} | {names} |")
    return "\n".join(lines) + "\n"


def _calls_in(path: str, source: str) -> Iterator[LogCall]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (levels := _levels(node.func)):
            fields = tuple(keyword.arg or "**" for keyword in node.keywords)
            first = node.args[0] if node.args else None
            yield LogCall(f"{path}:{node.lineno}", levels, _event(first), fields)


def _levels(function: ast.expr) -> tuple[str, ...]:
    """Of `log.info` or `(log.warning if late else log.info)`; nothing for other functions."""
    match function:
        case ast.Attribute(value=ast.Name(id="log" | "_log"), attr=level) if level in _LEVELS:
            return (level,)
        case ast.IfExp(body=body, orelse=otherwise):
            return (*_levels(body), *_levels(otherwise))
        case _:
            return ()


def _event(argument: ast.expr | None) -> Event | None:
    match argument:
        case ast.Attribute(value=ast.Name(id="Event"), attr=name):
            return Event.__members__.get(name)
        case _:
            return None
