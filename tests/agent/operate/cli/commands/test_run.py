"""Options of `podgate run` that exclude or need each other."""

import click.testing
import pytest

from agent.operate.cli import main

CLUSTER = ["--node-name", "node1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "use either --node-name NAME"),
        ([*CLUSTER, "--manifests", "/etc/pods"], "use either --node-name NAME"),
        (
            ["--manifests", "/etc/pods", "--metrics-address", "0.0.0.0:9651"],
            "--metrics-address needs --node-name",
        ),
        ([*CLUSTER, "--metrics-tls-cert", "/tls.crt"], "--metrics-tls-key together"),
        ([*CLUSTER, "--metrics-tls-key", "/tls.key"], "--metrics-tls-key together"),
        (
            [*CLUSTER, "--metrics-tls-cert", "/tls.crt", "--metrics-tls-key", "/tls.key"],
            "--metrics-tls-cert needs --metrics-address",
        ),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], words: str) -> None:
    result = click.testing.CliRunner().invoke(main.main, ["run", *arguments])
    assert result.exit_code == 2
    assert words in result.output
