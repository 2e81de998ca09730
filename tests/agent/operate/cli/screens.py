"""`python -m tests.agent.operate.cli.screens` writes the golden screens: what commands print on a
terminal of 80 or 140 columns, from fixed reports. Read the difference before it is committed.

Below a line with colours, a line of letters names the colour of each character: r is red, y yellow,
g green.
"""

import io
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import rich.console

from agent.operate.cli.output import Screen
from agent.operate.cli.views import (
    doctor,
    drops,
    explain,
    maps,
    pinned_status,
    pods,
    probes,
    programs,
    rules,
    services,
    status,
    suggestions,
)
from agent.policy.review import FlowFilter, Review
from agent.services.client.v1alpha1.endpoints_pb2 import NextFilter
from tests.agent.operate.cli import kernel_reports, reports

DIRECTORY = pathlib.Path(__file__).parent / "screens"
_FORMATS = ((80, False), (140, False), (140, True))
# By the escape sequence that begins it. Headers are bold, which the eye does not need here.
_COLOURS = {"\x1b[31m": "r", "\x1b[32m": "g", "\x1b[33m": "y", "\x1b[1m": " ", "\x1b[0m": " "}
_ESCAPE = re.compile(r"(\x1b\[[\d;]*m)")


def _follow(screen: Screen) -> None:
    for event in reports.EVENTS.events:
        drops.show_event(screen, event)
    drops.show_suppressed(screen, reports.SUPPRESSED)


VIEWS: dict[str, Callable[[Screen], None]] = {
    "doctor": lambda screen: doctor.show(screen, reports.DOCTOR),
    "drops": lambda screen: drops.show(screen, reports.DROPS),
    "drops-follow": _follow,
    "drops-nowhere-admitted": lambda screen: drops.show(screen, reports.NOT_ADMITTED),
    "drops-none": lambda screen: drops.show(screen, reports.NO_DROPS),
    "drops-top": lambda screen: drops.show(screen, reports.TOP_DROP, reports.DROPS.sources[1:]),
    "explain": lambda screen: explain.show_flow(screen, kernel_reports.DROPPED),
    "explain-admitted": lambda screen: explain.show_flow(screen, kernel_reports.ADMITTED),
    "explain-audit": lambda screen: explain.show_flow(screen, kernel_reports.WOULD_DROP),
    "explain-egress": lambda screen: explain.show_flow(screen, kernel_reports.EGRESS),
    "explain-pod": lambda screen: explain.show_pod(screen, kernel_reports.POD),
    "explain-pod-in-order": lambda screen: explain.show_pod(screen, kernel_reports.POD_IN_ORDER),
    "maps": lambda screen: maps.show(kernel_reports.MAPS, screen),
    "maps-entries": lambda screen: maps.show_entries(kernel_reports.CONTENT, screen),
    "pods": lambda screen: screen.table(pods.CONDITIONS, pods.rows(reports.PODS)),
    "probes": lambda screen: probes.show(screen, reports.STATUS, probes.rows(reports.STATUS.pods)),
    "probes-without-relay": lambda screen: probes.show(screen, reports.TROUBLE, []),
    "programs": lambda screen: programs.show(kernel_reports.PROGRAMS, screen),
    "rules": lambda screen: rules.show(screen, reports.RULES, rules.rows(reports.RULES.policies)),
    "rules-egress": lambda screen: rules.show(screen, reports.EGRESS_RULES, []),
    "services": lambda screen: services.show(
        screen,
        reports.SERVICES,
        services.columns(NextFilter()),
        services.rows(reports.SERVICES.services),
    ),
    "services-details": lambda screen: services.show(
        screen,
        reports.DETAILED_SERVICES,
        services.columns(reports.DETAILED_FILTER),
        services.rows(reports.DETAILED_SERVICES.services),
    ),
    "status": lambda screen: status.show(screen, reports.STATUS),
    "status-off": lambda screen: status.show(screen, reports.SWITCHED_OFF),
    "status-of-open-pins": lambda screen: pinned_status.show(screen, reports.PINNED_OPEN),
    "status-of-pins": lambda screen: pinned_status.show(screen, reports.PINNED),
    "status-trouble": lambda screen: status.show(screen, reports.TROUBLE),
    "suggest": lambda screen: suggestions.show_flows(
        screen, Review([reports.OBSERVATIONS], FlowFilter()).flows()
    ),
    "suggest-nothing": lambda screen: suggestions.show_flows(screen, []),
}


def screens() -> dict[str, list[str]]:
    """The lines of each file, with escape sequences."""
    return {
        f"{name}{'-wide' if is_wide else ''}.{width}.txt": _screen(view, width, is_wide=is_wide)
        for name, view in VIEWS.items()
        for width, is_wide in _FORMATS
    }


def marked(lines: list[str]) -> str:
    """The content of a file."""
    return "".join(f"{each.rstrip()}\n" for line in lines for each in _with_colours(line))


def plain(line: str) -> str:
    """A line without escape sequences."""
    return _ESCAPE.sub("", line).rstrip()


def _screen(view: Callable[[Screen], None], width: int, *, is_wide: bool) -> list[str]:
    stream = io.StringIO()
    console = rich.console.Console(
        file=stream, width=width, color_system="standard", no_color=False
    )
    view(Screen(is_wide=is_wide, console=console, now=reports.NOW))
    return stream.getvalue().splitlines()


def _with_colours(line: str) -> Iterator[str]:
    colours, colour = "", " "
    for part in _ESCAPE.split(line):
        if _ESCAPE.match(part):
            colour = _COLOURS[part]
        else:
            colours += colour * len(part)
    yield plain(line)
    if colours.strip():
        yield colours


def main() -> None:
    DIRECTORY.mkdir(exist_ok=True)
    for name, lines in screens().items():
        (DIRECTORY / name).write_text(marked(lines), encoding="utf-8")
        sys.stderr.write(f"wrote {name}\n")


if __name__ == "__main__":
    main()
