"""Usage of `podgate explain`; its answers are in tests/kernel/test_explain_command.py."""

import click.testing
import pytest

from agent.operate.cli import main


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
