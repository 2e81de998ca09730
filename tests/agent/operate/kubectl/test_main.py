"""The plugin's command line, and the one file that it is packed into."""

import argparse
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
from types import ModuleType

import pytest

from agent import VERSION
from agent.operate.kubectl import main, reading
from agent.operate.kubectl.cluster import Cluster
from tests.agent.operate.kubectl.standin import KubectlStandin

ROOT = pathlib.Path(__file__).parents[4]


def test_error_of_kubectl_is_one_sentence(
    kubectl: KubectlStandin, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.respond("get", error="The connection to the server was lost\n")
    assert main.main(["--kubectl", kubectl.command, "status"]) == 1
    assert capsys.readouterr().err == "kubectl podgate: The connection to the server was lost\n"


def test_global_options_reach_kubectl(kubectl: KubectlStandin) -> None:
    kubectl.serve_nodes()
    options = ["--kubectl", kubectl.command, "--context", "shop", "--kubeconfig", "/file"]
    assert main.main([*options, "status"]) == 0
    calls = kubectl.calls()
    assert calls == kubectl.calls("--context=shop", "--kubeconfig=/file")
    assert calls


def test_reader_that_goes_away_gets_no_traceback(kubectl: KubectlStandin) -> None:
    kubectl.serve_nodes()
    command = [sys.executable, "-m", "agent.operate.kubectl.main", "--kubectl", kubectl.command]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*command, "status"], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_packed_file_names_the_python_that_it_needs(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "kubectl-podgate"
    subprocess.run([sys.executable, ROOT / "deploy/plugin.py", target], check=True)
    older = "import runpy, sys; sys.version_info = (3, 8, 18); runpy.run_path(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", older, target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "needs Python 3.11 or newer" in line
    assert "is 3.8;" in line


def test_packed_file_runs_without_any_package(tmp_path: pathlib.Path) -> None:
    target = tmp_path / "kubectl-podgate"
    subprocess.run([sys.executable, ROOT / "deploy/plugin.py", target], check=True)
    done = subprocess.run(
        [sys.executable, "-I", "-S", target, "--version"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"kubectl-podgate {VERSION}\n"
    assert target.stat().st_mode & 0o111


@pytest.mark.parametrize("command", main._COMMANDS, ids=lambda command: command.__name__)
def test_each_command_runs_its_module(command: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    parsers = parser.add_subparsers()
    command.register(parsers)
    runs = {made.get_default("run") for made in parsers.choices.values()}
    assert {run.__module__ for run in runs} == {command.__name__}


def test_options_have_the_defaults_that_their_help_names() -> None:
    """In words: "TIME: 90s, 5m (default)"; "(default: 10)"."""
    (commands,) = (
        action.choices
        for action in main.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    checked = 0
    for parser in (main.parser(), *commands.values()):
        for action in parser._actions:
            named = re.search(r"\(default: ([^)]+)\)|(\S+) \(default\)", action.help or "")
            if named and "context" not in named[0]:
                default = str(named[1] or named[2])
                read = action.type(default) if callable(action.type) else default
                assert action.default == read, f"{parser.prog} {action.option_strings}"
                checked += 1
    assert checked > 10


@pytest.mark.parametrize(
    ("seconds", "is_valid"), [("0.9", False), ("1", True), ("3600", True), ("3601", False)]
)
def test_time_for_a_request_is_a_second_to_an_hour(seconds: str, *, is_valid: bool) -> None:
    if is_valid:
        parsed = main.parser().parse_args(["--timeout", seconds, "status"])
        assert parsed.timeout == float(seconds)
    else:
        with pytest.raises(SystemExit) as raised:
            main.parser().parse_args(["--timeout", seconds, "status"])
        assert raised.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "namespace"),
    [
        (("status",), ""),
        (("drops",), ""),
        (("drops", "-n", "shop"), "shop"),
        (("drops", "-n", "shop", "-n", "dev"), ""),
        (("drops", "--pod", "shop/web"), "shop"),
        (("drops", "--pod", "web"), ""),
        (("drops", "--pod", "shop/web", "-n", "dev"), "dev"),
        (("why-not-ready", "shop/web"), "shop"),
        (("why-not-ready", "web", "-n", "shop"), "shop"),
        (("enforce", "shop"), "shop"),
    ],
)
def test_answers_may_be_read_by_the_account_of_the_commands_namespace(
    kubectl: KubectlStandin,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    namespace: str,
) -> None:
    found = []

    class Reader(reading.Reader):
        def __init__(self, cluster: Cluster, namespace: str = "") -> None:
            super().__init__(cluster, namespace)
            found.append(namespace)

    monkeypatch.setattr(main, "Reader", Reader)
    main.main(["--kubectl", kubectl.command, *arguments])
    assert found == [namespace]


def test_interrupt_is_no_traceback(
    kubectl: KubectlStandin,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("agent.operate.kubectl.status.run", interrupt)
    assert main.main(["--kubectl", kubectl.command, "status"]) == 130
    assert capsys.readouterr().err == ""


def test_krew_installs_the_packed_file(tmp_path: pathlib.Path) -> None:
    plugin = tmp_path / "kubectl-podgate"
    subprocess.run([sys.executable, ROOT / "deploy/plugin.py", plugin], check=True)
    url = "https://github.com/OWNER/REPOSITORY/releases/download/v0.1.0/"
    made = []
    for _ in range(2):
        subprocess.run([sys.executable, ROOT / "deploy/krew.py", plugin, url], check=True)
        made.append((tmp_path / "kubectl-podgate.tar.gz").read_bytes())
    assert made[0] == made[1]
    manifest = json.loads((tmp_path / "podgate.krew.yaml").read_text(encoding="utf-8"))
    spec = manifest["spec"]
    (platform,) = spec["platforms"]
    assert (manifest["metadata"]["name"], spec["version"]) == ("podgate", f"v{VERSION}")
    # krew's index rejects longer ones.
    assert len(spec["shortDescription"]) <= 50
    assert spec["homepage"] == "https://github.com/OWNER/REPOSITORY"
    assert platform["uri"] == f"{url}kubectl-podgate.tar.gz"
    assert platform["sha256"] == hashlib.sha256(made[0]).hexdigest()
    with tarfile.open(tmp_path / "kubectl-podgate.tar.gz") as archive:
        assert archive.getnames() == [one["from"] for one in platform["files"]]
        assert archive.getmember(platform["bin"]).mode & 0o111
        content = archive.extractfile(platform["bin"])
        assert content is not None
        assert content.read() == plugin.read_bytes()
