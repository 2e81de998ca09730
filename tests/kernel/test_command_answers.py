"""What commands print beside a real agent: documents as their schemas describe, and answers from
the pins while the agent hangs and after it was killed."""

import json
import os
import pathlib
import signal
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.lab import attempts
from agent.lab.agent_process import AgentProcess
from agent.lab.lab import Lab, LabPod
from agent.operate.cli.main import main
from tests import polling
from tests.agent.operate.cli.test_schemas import check

pytestmark = pytest.mark.kernel

PORT = 80
CONTAINER = {"readinessProbe": {"tcpSocket": {"port": PORT}}}


class Commands:
    """Commands for one agent."""

    def __init__(self, operator: AgentProcess) -> None:
        self._run = ("--run-directory", str(operator.run_directory))
        self._bpffs = ("--bpffs", str(operator.bpffs))

    def run(self, *words: str, has_bpffs: bool = True) -> Result:
        where = self._run if words[0] not in ("maps", "programs") else ()
        return CliRunner().invoke(main, [*words, *where, *(self._bpffs if has_bpffs else ())])

    def document(self, *words: str, has_bpffs: bool = True) -> Any:
        """What the command prints as JSON."""
        result = self.run(*words, "-o", "json", has_bpffs=has_bpffs)
        assert isinstance(result.exception, SystemExit | None), result.exception
        return json.loads(result.stdout)


@pytest.fixture
def web(lab: Lab) -> LabPod:
    return lab.add_pod("web", 1)


@pytest.fixture
def commands(operator: AgentProcess, web: LabPod) -> Commands:
    """Beside an agent that enforces for one pod, and has dropped a packet."""
    operator.write_manifest(web, mode="enforce", container=CONTAINER)
    operator.start()
    operator.wait_for("the gate", lambda report: bool(report.pods and report.pods[0].gates))
    observed = attempts.connect_from_node(web, "IPv4", PORT + 1, is_rejected=True)
    assert observed in (attempts.REFUSED, attempts.DROPPED)
    return Commands(operator)


def test_documents_are_as_their_schemas_describe(commands: Commands, web: LabPod) -> None:
    for name in ("status", "drops", "rules"):
        check(name, commands.document(name))
    for name in ("probes", "pods", "suggest"):
        check(name, commands.document(name, has_bpffs=False))
    check("doctor", commands.document("doctor"))
    check("maps", commands.document("maps"))
    for found in commands.document("maps"):
        check("map", commands.document("maps", found["name"]))
    check("programs", commands.document("programs"))
    flow = ("--from", f"pid:{os.getpid()}", "--to", "web", "--port", str(PORT))
    check("explain", commands.document("explain", *flow))
    check("explain-pod", commands.document("explain", "pod", "web"))
    netns = ("--netns", web.netns.path)
    check("probe", commands.document("probe", "tcp", str(PORT), *netns, has_bpffs=False))


@pytest.mark.parametrize("state", ["hangs", "killed"])
def test_status_drops_and_rules_are_read_from_the_pins(
    commands: Commands, operator: AgentProcess, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    polling.wait_until("the drop", lambda: commands.document("drops")["sources"])
    if state == "hangs":
        os.kill(operator.pid, signal.SIGSTOP)
        monkeypatch.setattr("agent.admin.client.ALIVE_SECONDS", 0.2)
    else:
        operator.stop(signal.SIGKILL)
    status = commands.document("status")
    check("status-without-agent", status)
    (gate,) = status["gates"]
    assert (gate["pod"], gate["mode"], bool(gate["attachment"])) == ("web", "enforce", True)
    assert status["heartbeatAgeSeconds"] is not None
    drops = commands.document("drops")
    check("drops", drops)
    assert [(one["pod"], one["port"]) for one in drops["sources"]] == [("web", PORT + 1)]
    check("rules", commands.document("rules"))
    table = commands.run("status")
    assert table.exit_code == 0
    assert table.stderr.startswith("podgate: no agent responds")
    assert "agent: its last heartbeat was" in table.stdout
    assert commands.run("probes", has_bpffs=False).exit_code == 3


def test_nothing_pinned_is_no_answer(tmp_path: pathlib.Path, isolated: None) -> None:
    directory = str(tmp_path)
    for name in ("status", "drops", "rules"):
        result = CliRunner().invoke(
            main, [name, "--run-directory", directory, "--bpffs", directory]
        )
        assert (result.exit_code, result.stdout) == (3, "")
        assert "nothing is pinned" in result.stderr
        assert result.stderr.count("\n") == 1
