"""`podgate probe`: each step of one probe, and one sentence for each error."""

import json
import pathlib
from collections.abc import Callable

import click.testing
import pytest

from agent.operate.cli import main as cli
from agent.operate.cli.commands import probe_runner
from probes.netns import Netns
from probes.protocols.client_certificates import Certificates
from probes.results import ProbeOutcome, ProbeResult
from probes.spec.definitions import Grpc, HttpGet, Probe
from tests.probes.authorities import Authority, serving
from tests.probes.conftest import Sandbox, sandbox_netns
from tests.probes.single_probe import OK


def podgate(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli.main, ["probe", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tcp", "80"], "either --netns PATH or --pod NAME"),
        (["--netns", "/x", "--pod", "y", "tcp", "80"], "either --netns PATH or --pod NAME"),
        (["--netns", "/x", "tcp", "65536"], "not in the range"),
        (["--netns", "/x", "udp", "80"], "'udp' is not one of"),
        (["--netns", "/x", "http", "80", "--header", "A B: c"], "is not 'Name: value'"),
        (["--netns", "/x", "http", "80", "--timeout", "0"], "not in the range"),
        (["--netns", "/x", "http", "80", "--timeout", "nan"], "nan is not a time"),
        (["--netns", "/x", "http", "80", "--tls", "--h2c"], "leave out --tls"),
        (["--netns", "/x", "tcp", "80", "--hook"], "--hook requires http"),
        (["--netns", "/x", "http", "80", "--tls", "--cert", "/a"], "--cert and --key belong"),
        (["--netns", "/x", "http", "80", "--cert", "/a", "--key", "/b"], "is for probes with"),
        (["--netns", "/x", "http"], "only a hook has a default: 80, with --tls 443"),
    ],
)
def test_usage_error_names_the_option(arguments: list[str], words: str) -> None:
    result = podgate(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_missing_namespace_is_one_sentence(tmp_path: pathlib.Path) -> None:
    result = podgate("--netns", str(tmp_path / "none"), "tcp", "80")
    assert result.exit_code == 1
    assert result.output.startswith("podgate: ")
    assert result.output.count("\n") == 1


def test_without_an_agent_a_pod_cannot_be_found(tmp_path: pathlib.Path) -> None:
    result = podgate("--pod", "web", "tcp", "80", "--run-directory", str(tmp_path))
    assert result.exit_code == 3
    assert "no agent responds" in result.output


class Runner:
    """In the place of a pod: the probes that it was to run, of which each has one step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.result = ProbeResult.SUCCESS
        self.probes: list[tuple[Probe, bool]] = []
        monkeypatch.setattr(probe_runner, "find_netns", self._find)
        monkeypatch.setattr(probe_runner, "run", self._run)

    async def _find(self, path: str) -> probe_runner.ProbeLocation:
        return probe_runner.ProbeLocation(Netns(path, 4, 1), ("198.18.0.1",))

    async def _run(
        self,
        location: probe_runner.ProbeLocation,
        probe: Probe,
        *,
        is_hook: bool,
        on_step: Callable[[float, str, str], None],
        certificates: Certificates,
    ) -> ProbeOutcome:
        assert not certificates
        self.probes.append((probe, is_hook))
        on_step(1.26, location.addresses[0], "connected")
        return ProbeOutcome(self.result, "done", duration_seconds=0.002)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "handler", "is_hook"),
    [
        (["http", "--hook"], HttpGet(80, "/", "HTTP", (), "HTTP1"), True),
        (["http", "--hook", "--tls"], HttpGet(443, "/", "HTTPS", (), "HTTP1"), True),
        (["http", "81", "--h2c"], HttpGet(81, "/", "HTTP", (), "HTTP2"), False),
        (
            ["http", "81", "--path", "/x", "--header", "A: b"],
            HttpGet(81, "/x", "HTTP", (("A", "b"),), "HTTP1"),
            False,
        ),
        (["grpc", "81", "--service", "s"], Grpc(81, "s", "Plaintext"), False),
        (["grpc", "81", "--tls"], Grpc(81, "", "TLS"), False),
    ],
)
def test_options_make_the_probe(
    runner: Runner, arguments: list[str], handler: object, *, is_hook: bool
) -> None:
    assert podgate("--netns", "/x", *arguments).exit_code == 0
    ((probe, was_hook),) = runner.probes
    assert (probe.handler, was_hook, probe.target) == (handler, is_hook, "pod")


@pytest.mark.parametrize(
    ("result", "status"),
    [(ProbeResult.SUCCESS, 0), (ProbeResult.WARNING, 0), (ProbeResult.FAILURE, 1)],
)
def test_each_step_is_a_line_and_a_failure_is_status_1(
    runner: Runner, result: ProbeResult, status: int
) -> None:
    runner.result = result
    found = podgate("--netns", "/x", "tcp", "80", "--localhost")
    assert found.exit_code == status
    step, end = found.output.splitlines()
    assert step == "      1.3 ms  198.18.0.1  connected"
    assert end.startswith(f"      2.0 ms  {result.value}")
    assert runner.probes[0][0].target == "localhost"


def test_json_has_the_steps_and_no_other_line(runner: Runner) -> None:
    document = json.loads(podgate("--netns", "/x", "tcp", "80", "-o", "json").output)
    assert document["steps"] == [
        {"milliseconds": 1.26, "address": "198.18.0.1", "text": "connected"}
    ]
    assert (document["result"], document["milliseconds"]) == ("success", 2.0)


@pytest.fixture
def pod() -> object:
    with sandbox_netns() as made:
        yield made


@pytest.mark.kernel
def test_tcp_steps_are_shown(pod: Sandbox) -> None:
    with pod.listen() as sock:
        port = str(sock.getsockname()[1])
        result = podgate("--netns", pod.path, "tcp", port, "--ip-family", "IPv4")
    assert result.exit_code == 0, result.output
    dialled, connected, end = result.output.splitlines()
    assert dialled.endswith(f"198.18.0.1  dials tcp 198.18.0.1:{port}")
    assert connected.endswith("198.18.0.1  connected")
    assert end.endswith("success over IPv4")


@pytest.mark.kernel
def test_connection_refused_by_both_families_is_a_failure(pod: Sandbox) -> None:
    result = podgate("--netns", pod.path, "http", "9", "--output", "json")
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert document["result"] == "failure"
    assert "connection refused" in document["message"]
    texts = [step["text"] for step in document["steps"]]
    assert texts[0].startswith("dials tcp ")
    assert {step["address"] for step in document["steps"]} == {"198.18.0.1", "fd00:18::1"}


@pytest.mark.kernel
def test_client_certificate_is_shown_to_a_server_that_demands_one(
    pod: Sandbox, tmp_path: pathlib.Path
) -> None:
    authority = Authority()
    certificate, key = authority.files(tmp_path, "client")
    with serving(pod.listen(), authority.demanding(tmp_path), OK) as port:
        arguments = ("--netns", pod.path, "http", str(port), "--tls", "--ip-family", "IPv4")
        assert podgate(*arguments).exit_code == 1
        result = podgate(*arguments, "--cert", str(certificate), "--key", str(key))
        assert result.exit_code == 0, result.output
        result = podgate(*arguments, "--cert", str(certificate), "--key", str(certificate))
        assert result.exit_code == 1
        assert "tls.key has no readable private key in PEM" in result.output


@pytest.mark.kernel
@pytest.mark.parametrize(("options", "port"), [((), 80), (("--tls",), 443)])
def test_hook_has_a_default_port(pod: Sandbox, options: tuple[str, ...], port: int) -> None:
    result = podgate("--netns", pod.path, "http", "--hook", *options)
    assert f"dials tcp 198.18.0.1:{port}" in result.output


@pytest.mark.kernel
def test_timeout_names_the_step_that_did_not_finish(pod: Sandbox) -> None:
    # The kernel accepts the connection; no program responds.
    with pod.listen() as sock:
        port = str(sock.getsockname()[1])
        result = podgate(
            *("--netns", pod.path, "http", port, "--path", "/x?y", "--timeout", "0.05"),
            *("--ip-family", "IPv4", "--hook", "--header", "X-A: 1"),
        )
    assert result.exit_code == 1
    assert "sends " in result.output
    assert "GET /x?y HTTP/1.1\\r\\n" in result.output
    assert "stops waiting for the answer: the time is over" in result.output
