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
    """One call. `levels` and `events` have more than one member if they depend on a value."""

    place: str
    levels: tuple[str, ...]
    events: tuple[Event, ...]
    """Empty if the first argument is a parameter, or no `Event`."""
    is_parameter: bool
    """Whether the event is a parameter of the function; its calls pass it."""
    fields: tuple[str, ...]
    is_failure: bool = False
    """Whether it is passed as `failure`, as to `agent.state_files`."""


def log_calls(source: pathlib.Path = _SOURCE) -> list[LogCall]:
    """All log calls below a directory, and places that pass an event to a function that logs it.

    That function is in the same package, or for `failure=` in a module of `source` itself.
    """
    calls = []
    modules = sorted(source.glob("*.py"))
    shared = [call for path in modules for call in _calls_in(path) if call.is_parameter]
    packages = sorted(path for path in source.iterdir() if path.is_dir())
    for files in ([path] for path in modules), (sorted(p.rglob("*.py")) for p in packages):
        for found in ([call for path in group for call in _calls_in(path)] for group in files):
            own = [call for call in found if call.is_parameter]
            for call in found:
                if call.levels:
                    calls.append(call)
                elif passed := shared if call.is_failure else own:
                    levels = dict.fromkeys(level for other in passed for level in other.levels)
                    fields = dict.fromkeys(field for other in passed for field in other.fields)
                    calls.append(
                        dataclasses.replace(call, levels=tuple(levels), fields=tuple(fields))
                    )
    return calls


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
    tree = ast.parse(path.read_text("utf-8"))
    chosen = {
        node.targets[0].id: levels
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and (levels := _levels(node.value))
    }
    direct: set[Event] = set()
    failures: set[ast.expr] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        place = f"{path.relative_to(_SOURCE.parent)}:{node.lineno}"
        failures |= {keyword.value for keyword in node.keywords if keyword.arg == "failure"}
        fields = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        levels = _levels(node.func)
        if isinstance(node.func, ast.Name):
            levels = chosen.get(node.func.id, ())
        if levels:
            first = node.args[0] if node.args else None
            is_parameter = isinstance(first, ast.Name)
            events = _events(first)
            direct |= set(events)
            yield LogCall(place, levels, events, is_parameter, fields)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and (events := _events(node))
            and events[0] not in direct
        ):
            place = f"{path.relative_to(_SOURCE.parent)}:{node.lineno}"
            yield LogCall(place, (), events, False, (), is_failure=node in failures)


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
