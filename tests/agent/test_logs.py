import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Protocol

import pytest
import structlog

from agent import logs
from agent.logs import Event, LogFormat, LogLevel
from agent.operate.cli import log_reference
from tests import voice


class Output(io.StringIO):
    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


class Configure(Protocol):
    def __call__(self, log_format: LogFormat, level: LogLevel = ...) -> io.StringIO: ...


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Configure logging with a stderr that can be read; everything is reset afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def configured(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
        output = Output()
        monkeypatch.setattr(sys, "stderr", output)
        logs.configure(log_format, level)
        return output

    yield configured
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_line_has_key_sentence_and_fields(configure: Configure) -> None:
    output = configure(LogFormat.JSON)
    structlog.get_logger().info(Event.INTERFACE_GATED, interface="veth0", pod="default/web")
    line = json.loads(output.getvalue())
    assert line.pop("time")
    assert list(line.items()) == [
        ("level", "info"),
        ("event", "interface_gated"),
        ("message", "Gate attached to pod interface."),
        ("interface", "veth0"),
        ("pod", "default/web"),
    ]


def test_lines_of_libraries_have_a_key_of_their_own(configure: Configure) -> None:
    output = configure(LogFormat.JSON)
    logging.getLogger("aiohttp").warning("slow %s", "client")
    line = json.loads(output.getvalue())
    assert (line["level"], line["event"], line["message"]) == ("warning", "library", "slow client")


def test_text_begins_with_time_level_and_sentence(configure: Configure) -> None:
    output = configure(LogFormat.TEXT)
    structlog.get_logger().warning(Event.GATE_LOST, pod="default/web", ifindex=7)
    time, rest = output.getvalue().split(maxsplit=1)
    assert time.endswith("Z")
    assert rest.startswith("[warning  ] Gate lost; attaching it again. ")
    assert rest.split()[-3:] == ["event=gate_lost", "pod=default/web", "ifindex=7"]


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "has_colors"),
    [(True, None, True), (True, "", True), (True, "1", False), (False, None, False)],
)
def test_text_has_colors_on_a_terminal_unless_they_are_switched_off(
    configure: Configure,
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    no_color: str | None,
    has_colors: bool,
) -> None:
    monkeypatch.setattr(Output, "is_terminal", is_terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    output = configure(LogFormat.TEXT)
    structlog.get_logger().info(Event.INTERFACE_GATED)
    assert ("\x1b[" in output.getvalue()) is has_colors


@pytest.mark.parametrize(
    ("level", "events"),
    [
        (LogLevel.INFO, ["interface_gated", "gate_lost", "pod_reconcile_failed"]),
        (LogLevel.WARNING, ["gate_lost", "pod_reconcile_failed"]),
        (LogLevel.ERROR, ["pod_reconcile_failed"]),
    ],
)
def test_lines_below_the_level_are_not_logged(
    configure: Configure, level: LogLevel, events: list[str]
) -> None:
    output = configure(LogFormat.JSON, level)
    log = structlog.get_logger()
    log.info(Event.INTERFACE_GATED)
    log.warning(Event.GATE_LOST)
    log.error(Event.POD_RECONCILE_FAILED)
    assert [json.loads(line)["event"] for line in output.getvalue().splitlines()] == events


def test_warnings_of_libraries_have_a_level(configure: Configure) -> None:
    output = configure(LogFormat.JSON, LogLevel.ERROR)
    logging.getLogger("aiohttp").warning("slow client")
    assert output.getvalue() == ""


def test_exceptions_are_in_the_line(configure: Configure) -> None:
    output = configure(LogFormat.JSON)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        structlog.get_logger().error(Event.POD_RECONCILE_FAILED, exc_info=True)
    assert "RuntimeError: broken" in json.loads(output.getvalue())["exception"]


def test_line_that_cannot_be_written_is_lost_and_raises_nothing(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the supervisor that reports a component's failure, and so the agent."""
    configure(LogFormat.JSON)
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:  # its close
        monkeypatch.setattr(sys, "stderr", full)
        logs.configure(LogFormat.JSON)
        structlog.get_logger().error(Event.COMPONENT_FAILED, component="pods", error="x" * 10_000)
        logging.getLogger("aiohttp").warning("slow %s", "client")


def test_sentences_are_sentences() -> None:
    names = "cgroup", "eBPF", "podgate"
    messages = [event.message for event in Event]
    starts = [text for text in messages if not (text[0].isupper() or text.startswith(names))]
    assert starts == []
    assert [text for text in messages if not text.endswith(".")] == []


def test_log_calls_name_an_event() -> None:
    calls = log_reference.log_calls()
    assert [call.place for call in calls if not call.events and not call.is_parameter] == []


def test_each_event_is_logged() -> None:
    logged = {event for call in log_reference.log_calls() for event in call.events}
    assert set(Event) - logged == set()


def test_fields_are_not_the_names_of_the_head() -> None:
    reserved = {"time", "level", "event", "message"}
    assert [c.place for c in log_reference.log_calls() if reserved & set(c.fields)] == []


def test_sentences_have_no_banned_words() -> None:
    texts = [voice.Text(1, event.message, "string") for event in Event]
    assert list(voice.problems("", texts)) == []


@pytest.mark.parametrize(
    ("modules", "has_rich"),
    [
        ("agent.logs", False),
        ("agent.logs, rich.console", True),
        ("rich.console, agent.logs", True),
    ],
)
def test_rich_is_imported_only_by_what_uses_it(modules: str, has_rich: bool) -> None:
    program = f"import sys, {modules}; print('structlog' in sys.modules, 'rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert result.stdout.decode().split() == ["True", str(has_rich)]
