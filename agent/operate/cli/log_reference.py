"""Log calls in the agent's source, for docs/reference/logs.md and the test of log events."""

import ast
import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterator

from agent.logs import Event
from agent.state_files import StateSaver

_SOURCE = pathlib.Path(__file__).parents[2]
# What a module with a log call or an event has; most have none.
_NAMED = re.compile(r"\b(log|Event)\.")
_LEVELS = ("debug", "info", "warning", "error", "exception")


@dataclasses.dataclass(frozen=True, slots=True)
class LogCall:
    """One call. `levels` and `events` have more than one member if they depend on a value."""

    place: str
    levels: tuple[str, ...]
    events: tuple[Event, ...]
    """Empty if the first argument is a parameter, or no `Event`."""
    is_parameter: bool
    """Whether the event is a parameter of the function; its calls pass it."""
    fields: tuple[str, ...]
    function: str = ""
    """Where the call is; of an event that is passed on, the function that it is passed to."""


@functools.cache
def log_calls() -> tuple[LogCall, ...]:
    """All log calls of the agent, and places that pass an event to a function that logs it.

    That function has this name anywhere, or is in the same package. It takes seconds once: the
    whole source is parsed.
    """
    calls = []
    by_package = [
        [call for path in files for call in _calls_in(path)]
        for files in (
            *([path] for path in sorted(_SOURCE.glob("*.py"))),
            *(sorted(path.rglob("*.py")) for path in sorted(_SOURCE.iterdir()) if path.is_dir()),
        )
    ]
    by_function: dict[str, list[LogCall]] = {}
    for call in itertools.chain(*by_package):
        if call.is_parameter:
            by_function.setdefault(call.function, []).append(call)
    for found in by_package:
        own = [call for call in found if call.is_parameter]
        for call in found:
            if call.levels:
                calls.append(call)
            elif passed := by_function.get(call.function, own):
                levels = dict.fromkeys(level for other in passed for level in other.levels)
                fields = dict.fromkeys(field for other in passed for field in other.fields)
                calls.append(dataclasses.replace(call, levels=tuple(levels), fields=tuple(fields)))
    return tuple(calls)


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
        of_event = [call for call in calls if event in call.events]
        levels = dict.fromkeys(level for call in of_event for level in call.levels)
        fields = dict.fromkeys(field for call in of_event for field in call.fields)
        names = ", ".join(f"`{field}`" for field in fields) or "none"
        lines.append(f"| `{event.key}` | {', '.join(levels)} | {event.message} | {names} |")
    return "\n".join(lines) + "\n"


def _calls_in(path: pathlib.Path) -> Iterator[LogCall]:
    """Log calls, and, without levels, other places that name an event."""
    text = path.read_text("utf-8")
    if not _NAMED.search(text):
        return
    tree = ast.parse(text)
    chosen = {
        node.targets[0].id: levels
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and (levels := _levels(node.value))
    }
    direct: set[Event] = set()
    callees: dict[ast.expr, str] = {}
    functions = {
        node: function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        place = f"{path.relative_to(_SOURCE.parent)}:{node.lineno}"
        arguments = (*node.args, *(keyword.value for keyword in node.keywords))
        callees |= dict.fromkeys(arguments, _name(node.func))
        fields = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        levels = _levels(node.func)
        if isinstance(node.func, ast.Name):
            levels = chosen.get(node.func.id, ())
        if levels:
            first = node.args[0] if node.args else None
            is_parameter = isinstance(first, ast.Name)
            events = _events(first)
            direct |= set(events)
            yield LogCall(place, levels, events, is_parameter, fields, functions.get(node, ""))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and (events := _events(node))
            and events[0] not in direct
        ):
            place = f"{path.relative_to(_SOURCE.parent)}:{node.lineno}"
            yield LogCall(place, (), events, False, (), callees.get(node, ""))


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            # It passes the event on to this one.
            return "write" if name == StateSaver.__name__ else name
    return ""


def _levels(function: ast.expr) -> tuple[str, ...]:
    """Of `log.info` or `(log.warning if late else log.info)`; nothing for other functions."""
    match function:
        case ast.Attribute(value=ast.Name(id="log"), attr=level) if level in _LEVELS:
            return (level,)
        case ast.IfExp(body=body, orelse=otherwise):
            return (*_levels(body), *_levels(otherwise))
        case _:
            return ()


def _events(argument: ast.expr | None) -> tuple[Event, ...]:
    match argument:
        case ast.Attribute(value=ast.Name(id="Event"), attr=name) if name in Event.__members__:
            return (Event[name],)
        case ast.IfExp(body=body, orelse=otherwise):
            return (*_events(body), *_events(otherwise))
        case _:
            return ()
