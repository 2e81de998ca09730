"""Usage of `podgate explain`; its answers are in tests/kernel/test_explain_command.py."""

import ipaddress
import pathlib

import click.testing
import msgspec
import pytest

from agent.operate.cli import explaining, main
from agent.operate.explain import flows, model
from agent.operate.explain.sources import SourceName
from tests.agent.operate.cli import kernel_reports


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "a flow needs --from and --to"),
        (("--from", "kernel"), "a flow needs --from and --to"),
        (("--from", "service:x", "--to", "web", "--port", "1"), "is no source; use one of pid:"),
        (("--from", "pid:x", "--to", "web", "--port", "1"), "'x' is no process id"),
        (("--from", "cgroup:x", "--to", "web", "--port", "1"), "'x' is no cgroup"),
        (("--from", "ip:x", "--to", "web", "--port", "1"), "'x' is no IP address"),
        (("--from", "kernel", "--to", "web"), "tcp has ports: name the pod's by --port"),
        (
            ("--from", "kernel", "--to", "web", "--port", "1", "--protocol", "icmp"),
            "icmp has no ports",
        ),
        (("--from", "kernel", "--to", "web", "--source-address", "x"), "does not appear to be"),
        (("--from", "kernel", "pod", "web"), "--from and --to explain a flow"),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], words: str) -> None:
    result = click.testing.CliRunner().invoke(main.main, ["explain", *arguments])
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("verdict", "status"), [(model.DROP, 1), (model.PASS, 0), (model.WOULD_DROP, 0)]
)
def test_exit_status_is_1_for_a_drop_alone(
    monkeypatch: pytest.MonkeyPatch, verdict: str, status: int
) -> None:
    questions: list[flows.Question] = []

    def explain(question: flows.Question, *_: pathlib.Path) -> model.Explanation:
        questions.append(question)
        return msgspec.structs.replace(kernel_reports.DROPPED, verdict=verdict)

    monkeypatch.setattr(explaining, "flow", explain)
    arguments = ["explain", "--from", "kernel", "--to", "web", "--port", "80"]
    result = click.testing.CliRunner().invoke(main.main, arguments)
    assert result.exit_code == status, result.output
    assert result.output.startswith(f"{verdict.upper()}: ")
    assert questions == [flows.Question(SourceName.parse("kernel"), "web", "tcp", 80)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--protocol", "icmp"), {"protocol": "icmp", "port": 0}),
        (
            ("--port", "80", "--source-port", "53", "--source-address", "198.18.0.9"),
            {"source_port": 53, "source_address": ipaddress.ip_address("198.18.0.9")},
        ),
    ],
)
def test_options_are_the_question(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: dict[str, object]
) -> None:
    questions: list[flows.Question] = []

    def explain(question: flows.Question, *_: pathlib.Path) -> model.Explanation:
        questions.append(question)
        return kernel_reports.DROPPED

    monkeypatch.setattr(explaining, "flow", explain)
    command = ["explain", "--from", "kernel", "--to", "web", *arguments]
    click.testing.CliRunner().invoke(main.main, command)
    (question,) = questions
    assert {name: getattr(question, name) for name in expected} == expected
