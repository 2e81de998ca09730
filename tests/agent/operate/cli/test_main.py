"""Errors of commands: exit status 1 and one sentence for failures, 2 for wrong usage."""

import pathlib

import click.testing
import pytest

from agent.errors import PodgateError
from agent.operate.cli.main import main
from bpf import errors


def podgate(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PodgateError("another agent is running"), "another agent is running"),
        (errors.CompileError("gate.c: no headers"), "gate.c: no headers"),
        (errors.BpfError(1, "bpf(2) is not allowed"), "[Errno 1] bpf(2) is not allowed"),
        (PermissionError(13, "Permission denied", "/run"), "[Errno 13] Permission denied: '/run'"),
    ],
)
def test_failure_is_one_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def check() -> None:
        raise error

    monkeypatch.setattr("agent.app.preflight.check_rights", check)
    result = podgate("cleanup")
    assert (result.exit_code, result.stderr) == (1, f"podgate: {sentence}\n")


def test_missing_agent_is_one_sentence_and_status_3(tmp_path: pathlib.Path) -> None:
    result = podgate("status", "--run-directory", str(tmp_path))
    assert result.exit_code == 3
    assert result.stderr.startswith("podgate: no agent ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "use one of --node-name"),
        (["--node-name", "n", "--manifests", "/"], "use one of --node-name"),
        (["--manifests", "/", "--service-endpoints"], "--service-endpoints needs --node-name"),
        (["--node-name", "n", "--localnet-address", "[::1]:1"], "needs --service-endpoints"),
        *(
            (["--node-name", "n", option, value], f"{option} needs --service-endpoints or")
            for option, value in (
                *(("--services-listen", ":9653"), ("--services-state", "/s")),
                ("--localnet-address", "127.0.0.1:1"),
            )
        ),
        *(
            (["--node-name", "n", option, "x"], "--services-zone need --manifests")
            for option in ("--services-node", "--services-zone")
        ),
        *(
            (["--node-name", "n", "--services-from", source], "is neither a path with a slash")
            for source in ("hub", ":9653", "hub:0", "hub:65536", "hub:9653,other")
        ),
        (["--node-name", "n", "--services-from", "hub:9653"], "need --services-tls-ca"),
        (
            ["--node-name", "n", "--service-endpoints", "--services-listen", ":9653"],
            "need --services-tls-ca",
        ),
        *(
            (["--node-name", "n", f"--services-tls-{name}", "/f"], "--services-tls-key together")
            for name in ("ca", "cert", "key")
        ),
        (["--mode", "lax"], "'lax' is not one of"),
        (["--kubelet", "k3s"], "does not name a kubelet"),
        (["--feature-gates", "X=true"], "unknown feature gate 'X'"),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], words: str) -> None:
    result = podgate("run", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
