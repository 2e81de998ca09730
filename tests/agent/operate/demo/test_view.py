"""The demo's screens: one line for each act, its evidence, and all checks if they are requested."""

import io
import json

import pytest
import rich.console

from agent.operate.demo import events
from agent.operate.demo.events import (
    Act,
    Check,
    Danger,
    Evidence,
    Fact,
    PodScene,
    Scene,
    Step,
    Subject,
)
from agent.operate.demo.view import JsonView, TextView

ENFORCE = Act("enforce", "Gates drop what the host starts, except the kubelet's probes.")
DROPPED = Fact("host dropped", Danger.CLOSED, Subject.HOST)
PODS = [
    PodScene(name, Fact("Enforced", Danger.CLOSED), Fact("not ready", Danger.COUNTED))
    for name in ("web", "rpc", "shop", "cart")
]
SCENE = Scene(Fact("running", Danger.CLOSED), PODS)


@pytest.fixture(autouse=True)
def no_terminal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)


def passed(name: str, fact: Fact | None = None) -> Check:
    return Check(name, "not permitted", "not permitted", True, fact)


FAILED = Check("host to web", "not permitted", "connects", False, DROPPED)


def screen(
    *messages: events.StageMessage,
    is_verbose: bool = False,
    is_terminal: bool = True,
    colours: bool = False,
) -> str:
    """What a terminal of 80 columns shows at the end, or what is piped."""
    stream = io.StringIO()
    console = rich.console.Console(
        file=stream,
        width=80,
        force_terminal=is_terminal,
        color_system="standard" if colours else None,
        highlight=False,
    )
    with TextView(console, is_verbose=is_verbose, is_live=False) as view:
        for message in messages:
            view.add(message)
    return stream.getvalue()


def test_act_is_one_line_with_each_fact_once() -> None:
    admitted = Fact("kubelet admitted", Danger.CLOSED, Subject.KUBELET)
    shown = screen(ENFORCE, passed("IPv4", DROPPED), passed("IPv6", DROPPED), passed("k", admitted))
    assert "✓ 1 enforce  host dropped · kubelet admitted\n" in shown.replace(" \n", "\n")


def test_line_of_an_act_grows_with_its_checks() -> None:
    console = rich.console.Console(file=io.StringIO(), width=80, force_terminal=True)
    view = TextView(console)
    view.add(ENFORCE)
    for name in ("host dropped", "pods connect"):
        before = len(running(view))
        view.add(passed(name, Fact(name)))
        assert name in running(view)
        assert len(running(view)) > before


def running(view: TextView) -> str:
    """What the terminal shows of the act that runs."""
    console = rich.console.Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        console.print(view.running())
    return capture.get()


def test_running_act_fits_a_terminal_of_24_lines() -> None:
    view = TextView(rich.console.Console(file=io.StringIO(), width=80, force_terminal=True))
    for message in (ENFORCE, SCENE, passed("a", DROPPED), Step("probing from inside the pods")):
        view.add(message)
    lines = running(view).splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    assert "probing from inside the pods" in lines[-1]


def test_facts_are_coloured_by_danger() -> None:
    shown = screen(
        ENFORCE,
        passed("a", Fact("host connects", Danger.OPEN)),
        passed("b", Fact("host counted", Danger.COUNTED)),
        passed("c", Fact("host dropped", Danger.CLOSED)),
        colours=True,
    )
    assert "\x1b[31mhost connects" in shown
    assert "\x1b[33mhost counted" in shown
    assert "\x1b[32mhost dropped" in shown


def test_failed_check_shows_no_fact_but_what_was_expected() -> None:
    shown = " ".join(screen(ENFORCE, FAILED, passed("other")).split())
    assert "✗ 1 enforce ✗ host to web" in shown
    assert "host dropped" not in shown
    assert "connects (expected: not permitted)" in shown
    assert "1 of 2 checks failed." in shown


def test_checks_that_passed_are_listed_if_verbose_only() -> None:
    messages = (ENFORCE, passed("host to routed pod, IPv4", DROPPED), events.Timings({"strict": 5}))
    assert "host to routed pod, IPv4" not in screen(*messages)
    verbose = screen(*messages, is_verbose=True)
    assert "host to routed pod, IPv4" in verbose
    assert "strict 5 ms" in verbose


def test_evidence_is_below_its_act_and_keeps_its_colours() -> None:
    evidence = Evidence("podgate drops", "POD\n\n\x1b[31mweb\x1b[0m  curl")
    shown = screen(ENFORCE, evidence, Act("strict", ""), passed("a"), colours=True)
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[lines.index("POD") + 1] == ""
    assert "$ podgate drops" in shown
    assert "\x1b[31mweb\x1b[0m  curl" in shown
    assert shown.index("curl") < shown.index("2 strict")


def test_long_evidence_is_cut_unless_verbose() -> None:
    messages = (ENFORCE, Evidence("podgate explain", "\n".join(map(str, range(100, 120)))))
    shown = screen(*messages)
    assert "111" in shown
    assert "112" not in shown
    assert "... and 8 more lines" in shown
    assert "119" in screen(*messages, is_verbose=True)


def test_picture_has_pods_gates_and_processes_within_80_columns() -> None:
    lines = screen(ENFORCE, SCENE, passed("a", DROPPED)).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    text = "\n".join(lines)
    for word in ("host process: dropped", "podgate: running", "web", "cart"):
        assert word in text
    assert text.count("● Enforced") == 4
    assert text.count("not ready") == 4


def test_narrow_terminal_has_no_picture() -> None:
    console = rich.console.Console(file=io.StringIO(), width=60, force_terminal=True)
    view = TextView(console)
    for message in (ENFORCE, SCENE, passed("a", DROPPED)):
        view.add(message)
    assert "╭" not in running(view)
    assert "host dropped" in running(view)


def test_end_names_three_next_commands() -> None:
    shown = screen(ENFORCE, passed("a"))
    assert "All 1 checks passed." in shown
    after = shown.partition("Next:")[2].splitlines()
    assert len([line for line in after if line.startswith("  ") and line[2] != " "]) == 3


def test_pipe_shows_steps_as_they_start() -> None:
    shown = screen(ENFORCE, Step("switching every pod to enforce"), is_terminal=False)
    assert "... switching every pod to enforce" in shown


def test_no_check_is_a_failure() -> None:
    assert "checks failed" in screen(ENFORCE)


def test_json_has_every_check_with_its_act(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    with JsonView() as view:
        for message in (ENFORCE, passed("a", DROPPED), FAILED, events.Timings({"strict": 5})):
            view.add(message)
    document = json.loads(capsysbinary.readouterr().out)
    assert not document["ok"]
    assert [check["name"] for check in document["checks"]] == ["a", "host to web"]
    assert {check["act"] for check in document["checks"]} == {"enforce"}
    assert document["timingsMs"] == {"strict": 5}


def test_json_shows_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    view = JsonView()
    view.add(ENFORCE)
    view.add(Step("probing from inside the pods"))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "podgate demo: enforce: probing from inside the pods\n"


def test_commands_print_what_fits_below_an_act() -> None:
    terminal = rich.console.Console(file=io.StringIO(), width=80, force_terminal=True)
    assert TextView(terminal).evidence_environment == {"FORCE_COLOR": "1", "COLUMNS": "76"}
    pipe = rich.console.Console(file=io.StringIO(), width=80)
    assert TextView(pipe).evidence_environment["NO_COLOR"] == "1"
