"""The demo for people (six acts with a picture of the node) and for machines (one JSON object)."""

import dataclasses
import sys
from typing import Self

import msgspec
import rich.console
import rich.live
import rich.padding
import rich.spinner
import rich.table
import rich.text

from agent.operate.demo import events, picture
from agent.operate.demo.events import Subject

# Without a terminal. Screens of podgate and of the demo are readable in it.
PIPED_WIDTH = 100

_MARGIN = "  "

# With the picture and the act's lines above it fits 24 lines, the usual height of a terminal.
_EVIDENCE_LINES = 12

_NEXT_COMMANDS = (
    (".venv/bin/podgate doctor", "what this machine's kernel offers, and what is missing"),
    (".venv/bin/podgate run --manifests DIR", "gate pods of this machine: README.md"),
    ("helm install podgate deploy/chart/podgate", "in a cluster, in audit: README.md"),
)


@dataclasses.dataclass(slots=True)
class _ActLog:
    """One act and what it has shown so far."""

    act: events.Act
    checks: list[events.Check] = dataclasses.field(default_factory=list)
    evidence: list[events.Evidence] = dataclasses.field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        return all(check.ok for check in self.checks)

    def line(self) -> rich.text.Text:
        """The facts of passed checks, each once, and the names of failed ones."""
        facts = {
            check.fact.text: picture.STYLES[check.fact.danger]
            for check in self.checks
            if check.ok and check.fact
        }
        facts |= {f"✗ {check.name}": "bold red" for check in self.checks if not check.ok}
        line = rich.text.Text()
        for text, style in facts.items():
            if line:
                line.append(" · ", "dim")
            line.append(text, style)
        return line


class _Collected:
    """The acts and timings, for both views."""

    def __init__(self) -> None:
        self.acts: list[_ActLog] = []
        self.timings: dict[str, float] = {}

    @property
    def checks(self) -> list[events.Check]:
        return [check for log in self.acts for check in log.checks]

    @property
    def has_passed(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def evidence_environment(self) -> dict[str, str]:
        """Environment in which podgate's commands print what the view can show."""
        return {}

    def __enter__(self) -> Self:
        return self

    def add(self, message: events.StageMessage) -> None:
        match message:
            case events.Act():
                self.acts.append(_ActLog(message))
            case events.Check():
                if not self.acts:
                    self.acts.append(_ActLog(events.Act("start", "")))
                self.acts[-1].checks.append(message)
            case events.Evidence():
                self.acts[-1].evidence.append(message)
            case events.Timings():
                self.timings = message.milliseconds


class JsonView(_Collected):
    """Progress on stderr; at the end {"ok", "checks", "timingsMs"} on stdout."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        checks = [
            {
                "act": log.act.name,
                "name": check.name,
                "expected": check.expected,
                "observed": check.observed,
                "ok": check.ok,
            }
            for log in self.acts
            for check in log.checks
        ]
        document = {"ok": self.has_passed, "checks": checks, "timingsMs": self.timings}
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(document)) + b"\n")

    def add(self, message: events.StageMessage) -> None:
        super().add(message)
        if isinstance(message, events.Step):
            act = f"{self.acts[-1].act.name}: " if self.acts else ""
            sys.stderr.write(f"podgate demo: {act}{message.text}\n")
            sys.stderr.flush()


class TextView(_Collected):
    """In a terminal each act is one line and a picture while it runs; at its end it is printed
    with its evidence."""

    def __init__(
        self, console: rich.console.Console, *, is_verbose: bool = False, is_live: bool = True
    ) -> None:
        """is_verbose: whether every check is shown, not only failed ones; is_live: whether a
        terminal shows the act that runs."""
        super().__init__()
        self._is_verbose = is_verbose
        self._is_live = is_live and console.is_terminal
        self._console = console
        if not console.is_terminal:
            console.width = PIPED_WIDTH
        self._scene: events.Scene | None = None
        self._newest: dict[Subject, events.Fact] = {}
        self._step = "building a node and four pods"
        self._spinner = rich.spinner.Spinner("dots")
        self._live = rich.live.Live(
            get_renderable=self.running, console=self._console, transient=True
        )

    @property
    def evidence_environment(self) -> dict[str, str]:
        """As wide as what is below an act, in colour if the console is."""
        environment = {
            "FORCE_COLOR": "1",
            "COLUMNS": str(self._console.width - 2 * len(_MARGIN)),
        }
        if not self._console.is_terminal or self._console.no_color:
            environment["NO_COLOR"] = "1"
        return environment

    def __enter__(self) -> Self:
        self._console.print(
            "[bold]podgate demo[/]: a node, four pods and a kubelet, in namespaces of their own"
        )
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        if kind is not None:
            return
        self._end_act()
        if self._is_verbose:
            timings = ", ".join(
                f"{name.replace('_', ' ')} {value:g} ms" for name, value in self.timings.items()
            )
            self._console.print(f"\n{timings}", style="dim")
        failed = sum(not check.ok for check in self.checks)
        if not self.has_passed:
            text = f"{failed} of {len(self.checks)} checks failed."
            self._console.print(f"\n[bold red]{text}[/]")
            return
        more = "" if self._is_verbose else " --verbose shows each of them."
        self._console.print(f"\n[bold green]All {len(self.checks)} checks passed.[/]{more} Next:")
        for command, purpose in _NEXT_COMMANDS:
            self._console.print(f"{_MARGIN}[bold]{command}[/]\n{_MARGIN * 3}{purpose}")

    def add(self, message: events.StageMessage) -> None:
        if isinstance(message, events.Act):
            self._end_act()
        super().add(message)
        match message:
            case events.Act():
                self._newest.clear()
            case events.Step():
                self._step = message.text
                if not self._console.is_terminal:
                    self._console.print(f"... {message.text}", style="dim")
            case events.Scene():
                self._scene = message
            case events.Check(ok=True, fact=events.Fact() as fact):
                self._newest[fact.subject] = fact

    def running(self) -> rich.console.RenderableType:
        """The act that runs, for a terminal."""
        self._spinner.update(text=f"{self._step} ...")
        if not self.acts:
            return self._spinner
        return rich.console.Group(
            "", self._act_line(self.acts[-1], " "), *self._picture(), self._spinner
        )

    def _end_act(self) -> None:
        """Print the act that ends, if there is one."""
        if not self.acts:
            return
        log = self.acts[-1]
        mark = "✓" if log.has_passed else "✗"
        sentence = _indented(rich.text.Text(log.act.sentence, "dim"))
        parts: list[rich.console.RenderableType] = ["", self._act_line(log, mark), sentence]
        parts += [_check_line(check) for check in log.checks if self._is_verbose or not check.ok]
        parts += self._picture()
        for evidence in log.evidence:
            parts.append(rich.text.Text(f"{_MARGIN}$ {evidence.command}", "bold"))
            parts += self._evidence_lines(evidence)
        self._console.print(rich.console.Group(*parts))

    def _evidence_lines(self, evidence: events.Evidence) -> list[rich.padding.Padding]:
        lines = list(rich.text.Text.from_ansi(evidence.output).split("\n"))
        more = len(lines) - _EVIDENCE_LINES
        if more > 0 and not self._is_verbose:
            lines[_EVIDENCE_LINES:] = [rich.text.Text(f"... and {more} more lines", "dim")]
        return [_indented(line or rich.text.Text(" ")) for line in lines]

    def _act_line(self, log: _ActLog, mark: str) -> rich.table.Table:
        line = rich.table.Table.grid(padding=(0, 1))
        line.add_column(width=1)
        line.add_column(width=10)
        line.add_column()
        style = "green" if log.has_passed else "bold red"
        number = self.acts.index(log) + 1
        name = rich.text.Text(f"{number} {log.act.name}", "bold")
        line.add_row(rich.text.Text(mark, style), name, log.line())
        return line

    def _picture(self) -> list[rich.text.Text]:
        if self._scene is None or self._console.width < picture.WIDTH:
            return []
        host, kubelet = (self._newest.get(who) for who in (Subject.HOST, Subject.KUBELET))
        return [picture.draw(self._scene, host=host, kubelet=kubelet)]


def _check_line(check: events.Check) -> rich.table.Table:
    """One check; what was expected only where another result was observed."""
    line = rich.table.Table.grid(padding=(0, 1))
    line.add_column(width=len(_MARGIN) + 1, justify="right")
    line.add_column(width=44)
    line.add_column(overflow="fold")
    mark = rich.text.Text("✓", "green") if check.ok else rich.text.Text("✗", "bold red")
    observed = check.observed if check.ok else f"{check.observed} (expected: {check.expected})"
    style = "" if check.ok else "red"
    line.add_row(mark, rich.text.Text(check.name, style), rich.text.Text(observed, style))
    return line


def _indented(text: rich.text.Text) -> rich.padding.Padding:
    """With further lines of a long text below its first one."""
    return rich.padding.Padding(text, (0, 0, 0, len(_MARGIN)), expand=False)


View = JsonView | TextView
