"""`podgate hub`: its options are the settings of the hub; tests/agent/services/hub runs it."""

import pathlib

import click.testing
import pytest

from agent import logs
from agent.operate.cli import main
from agent.services.hub import hub


def test_options_are_the_settings_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    started: list[hub.HubSettings] = []

    async def run(settings: hub.HubSettings) -> None:
        started.append(settings)

    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(hub, "run", run)
    files = [f"--services-tls-{name}=/{name}" for name in ("ca", "cert", "key")]
    arguments = ["--http-address", "127.0.0.1:9000", "--run-directory", str(tmp_path), *files]
    result = click.testing.CliRunner().invoke(main.main, ["hub", *arguments])
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert (settings.http_host, settings.http_port) == ("127.0.0.1", 9000)
    assert settings.run_directory == tmp_path
    assert settings.services.tls is not None


@pytest.mark.parametrize("names", [(), ("ca",), ("ca", "cert"), ("key",)])
def test_hub_without_all_of_its_files_is_wrong_usage(names: tuple[str, ...]) -> None:
    arguments = [f"--services-tls-{name}=/{name}" for name in names]
    result = click.testing.CliRunner().invoke(main.main, ["hub", *arguments])
    assert result.exit_code == 2
    assert "--services-tls-ca, --services-tls-cert and --services-tls-key" in result.output
