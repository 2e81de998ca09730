"""Options of `podgate run` that exclude or need each other."""

import gc
import os
import pathlib

import click.testing
import pytest

from agent import logs
from agent.app import preflight, program_loading, startup
from agent.linux import malloc, scheduling
from agent.operate.cli import main
from agent.operate.cli.commands import options
from agent.settings import FlowFileSettings, FlowOtlpSettings, Settings
from bpf.attachment import Attachment
from bpf.verdicts import Mode

CLUSTER = ["--node-name", "node1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "use one of --node-name NAME"),
        ([*CLUSTER, "--manifests", "/etc/pods"], "use one of --node-name NAME"),
        ([*CLUSTER, "--standalone"], "use one of --node-name NAME"),
        (
            ["--standalone", "--service-endpoints"],
            "--service-endpoints needs --node-name or --services-from",
        ),
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
        (
            [*CLUSTER, "--flows-file=-", "--flows-otlp=http://a"],
            "--flows-file and --flows-otlp exclude each other",
        ),
        ([*CLUSTER, "--flows-otlp-ca=/ca.crt"], "need --flows-otlp"),
        ([*CLUSTER, "--flows-drops=1"], "--flows-drops needs --flows-file or --flows-otlp"),
        *(
            ([*CLUSTER, f"--flows-otlp={url}"], "it must be a URL with http or https")
            for url in ("a:4318", "grpc://a", "http://", "http://a:b", "http://a:0")
        ),
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], words: str) -> None:
    result = click.testing.CliRunner().invoke(main.main, ["run", *arguments])
    assert result.exit_code == 2
    assert words in result.output


class Started:
    """The settings of agents that were to start, which end at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: list[Settings] = []
        monkeypatch.setattr(logs, "configure", lambda *_: None)
        monkeypatch.setattr(preflight, "check", lambda: None)
        monkeypatch.setattr(program_loading, "start", lambda _: None)
        monkeypatch.setattr(scheduling, "shorten_slice", lambda: None)
        monkeypatch.setattr(malloc, "keep_little", lambda: None)
        monkeypatch.setattr(gc, "freeze", lambda: None)
        monkeypatch.setattr(startup, "run", self._run)

    async def _run(self, settings: Settings, _: object) -> None:
        self.settings.append(settings)


def test_options_are_the_settings_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    arguments = [
        *("--http-address", "127.0.0.1:9000", "--metrics-address", "0.0.0.0:9001"),
        *("--metrics-tls-cert", "/tls.crt", "--metrics-tls-key", "/tls.key"),
        *("--mode", "enforce", "--max-mode", "enforce", "--attach", "clsact"),
    ]
    command = ["run", *CLUSTER, *arguments]
    result = click.testing.CliRunner().invoke(main.main, command)
    assert result.exit_code == 0, result.output
    (settings,) = started.settings
    assert (settings.http_host, settings.http_port) == ("127.0.0.1", 9000)
    assert settings.metrics_address == ("0.0.0.0", 9001)
    assert settings.metrics_certificate == (pathlib.Path("/tls.crt"), pathlib.Path("/tls.key"))
    assert (settings.mode, settings.max_mode) == (Mode.ENFORCE, Mode.ENFORCE)
    assert settings.attachment is Attachment.CLSACT
    assert gc.isenabled()


@pytest.mark.parametrize("source", [CLUSTER, ["--manifests", "/etc/pods"], ["--standalone"]])
def test_agent_needs_only_the_source_of_its_pods(
    monkeypatch: pytest.MonkeyPatch, source: list[str]
) -> None:
    started = Started(monkeypatch)
    result = click.testing.CliRunner().invoke(main.main, ["run", *source])
    assert result.exit_code == 0, result.output
    (settings,) = started.settings
    assert settings.attachment is None
    assert settings.metrics_certificate is None


@pytest.mark.parametrize(
    ("text", "address"),
    [(":9650", ("", 9650)), ("[::1]:65535", ("::1", 65535)), ("127.0.0.1:0", ("127.0.0.1", 0))],
)
def test_address_has_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert options.parse_address(text) == address


@pytest.mark.parametrize("text", ["127.0.0.1", "a:b", ":65536", "a:-1", ":"])
def test_text_that_is_no_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        options.parse_address(text)


TLS = [f"--services-tls-{name}=/{name}" for name in ("ca", "cert", "key")]


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["--service-endpoints"], None),
        (["--services-from", "./services.yaml"], pathlib.Path("services.yaml")),
        (["--services-from", "hub:1, [::1]:65535", *TLS], ("hub:1", "[::1]:65535")),
    ],
)
def test_services_are_served_from_their_source(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], source: object
) -> None:
    started = Started(monkeypatch)
    result = click.testing.CliRunner().invoke(main.main, ["run", *CLUSTER, *arguments])
    assert result.exit_code == 0, result.output
    (settings,) = started.settings
    services = settings.service_endpoints
    assert services is not None
    assert services.source == source
    assert (services.node, services.zone) == (os.uname().nodename, "")
    assert (services.tls is not None) == (TLS[0] in arguments)


def test_node_of_services_has_the_name_and_zone_that_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = Started(monkeypatch)
    place = ["--services-node", "n7", "--services-zone", "z", "--localnet-address", "[::1]:65535"]
    arguments = ["--manifests", "/etc/pods", "--services-from", "./services", *place]
    result = click.testing.CliRunner().invoke(main.main, ["run", *arguments])
    assert result.exit_code == 0, result.output
    services = started.settings[0].service_endpoints
    assert services is not None
    assert (services.node, services.zone, services.address) == ("n7", "z", ("::1", 65535))


def test_services_are_not_served_unless_that_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    result = click.testing.CliRunner().invoke(main.main, ["run", *CLUSTER])
    assert result.exit_code == 0, result.output
    assert started.settings[0].service_endpoints is None


FILE = FlowFileSettings(path=pathlib.Path("/var/log/flows.json"), max_bytes=100 << 20, files=5)


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--flows-file=/var/log/flows.json"], FILE),
        (["--flows-file=-"], None),
        (["--flows-otlp=http://[::1]:4318"], FlowOtlpSettings(url="http://[::1]:4318/v1/logs")),
        (["--flows-otlp=https://a/"], FlowOtlpSettings(url="https://a/v1/logs")),
        (
            ["--flows-otlp=https://a/otlp", "--flows-otlp-headers=/h", "--flows-otlp-ca=/ca"],
            FlowOtlpSettings(
                url="https://a/otlp", headers=pathlib.Path("/h"), authority=pathlib.Path("/ca")
            ),
        ),
    ],
)
def test_records_of_flows_go_to_their_output(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], output: object
) -> None:
    started = Started(monkeypatch)
    command = ["run", *CLUSTER, *arguments, "--flows-drops=7"]
    result = click.testing.CliRunner().invoke(main.main, command)
    assert result.exit_code == 0, result.output
    flows = started.settings[0].flows
    assert flows is not None
    assert flows.output == output
    assert flows.drops_per_second == 7
