"""`podgate bugtool` beside an agent that responds, one that hangs, and one that was killed."""

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from agent.lab.agent_process import AgentProcess, execute
from agent.lab.lab import Lab, LabPod
from bpf import abi, map_specs, maps, pins
from tests.kernel.test_agent import PORT, isolated_as, refuses
from tests.kernel.test_agent_down import wait_for_saved_name

pytestmark = pytest.mark.kernel

ENVIRONMENT, SPEC, STATE, LOG, TOKEN = (
    f"planted-{place}-hunter2" for place in ("environment", "spec", "state", "log", "token")
)
# Of an HTTP probe, which no status shows.
PROBE = {
    "httpGet": {
        "port": PORT,
        "httpHeaders": [{"name": "Authorization", "value": f"Bearer {SPEC}"}],
    },
    "periodSeconds": 1,
}


@pytest.fixture
def web(lab: Lab) -> Iterator[LabPod]:
    pod = lab.add_pod("web", 1)
    with pod.listen(PORT):
        yield pod


def archive_of(operator: AgentProcess, *arguments: str) -> dict[str, bytes]:
    """The files of an archive that the command writes to its standard output."""
    where = ("--run-directory", str(operator.run_directory), "--bpffs", str(operator.bpffs))
    done = subprocess.run(
        [sys.executable, "-m", "agent", "bugtool", "-o", "-", *where, *arguments],
        check=True,
        capture_output=True,
        timeout=300,
    )
    found = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout), mode="r:gz") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read()
    return found


def problems_of(files: dict[str, bytes]) -> dict[str, str]:
    """By file, of the parts that have one."""
    parts = json.loads(files["manifest.json"])["parts"]
    return {part["file"]: part["problem"] for part in parts if part["problem"]}


def value_of(installation: pins.Pins, spec: map_specs.MapSpec) -> bytes:
    with maps.Map.open(installation.map(spec), spec) as opened:
        value = opened.get(bytes(4))
    assert value is not None
    return value


def test_archive_has_no_secrets_whatever_state_the_agent_is_in(
    operator: AgentProcess, web: LabPod, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", ENVIRONMENT)
    container: dict[str, Any] = {
        "readinessProbe": PROBE,
        "env": [{"name": "API_KEY", "value": SPEC}],
        "command": ["serve", f"--token={SPEC}"],
    }
    operator.write_manifest(web, mode="enforce", container=container)
    secrets = pathlib.Path("/run/secrets/kubernetes.io/serviceaccount")
    secrets.mkdir(parents=True, exist_ok=True)
    (secrets / "token").write_text(TOKEN, encoding="utf-8")
    log = tmp_path / "container.log"
    log.write_text(
        f'{{"event":"api_failed","error":"401: Authorization: Bearer {LOG}"}}\nlast line\n',
        encoding="utf-8",
    )
    # The archive has what /proc has of the agent: command line and environment.
    operator.launch = execute
    operator.start()
    operator.wait_for("the gate", isolated_as("web", "Enforced"))
    wait_for_saved_name(operator, web)
    (operator.run_directory / "kubeconfig").write_text(f"token: {STATE}", encoding="utf-8")
    (operator.run_directory / "state" / "other.json").write_text(f'"{STATE}"', encoding="utf-8")
    assert refuses(web)

    installation = pins.Pins(operator.bpffs)
    key = abi.CReplyKey.from_buffer_copy(value_of(installation, map_specs.REPLY_KEY))
    unit = abi.CKubeletUnit.from_buffer_copy(value_of(installation, map_specs.KUBELET_UNIT))
    unwanted = [ENVIRONMENT, SPEC, STATE, LOG, TOKEN, *map(str, key.words)]
    if unit.priority:
        mark = f"{unit.priority >> 16:x}:{unit.priority & 0xFFFF:x}"
        unwanted += [str(unit.priority), mark]

    options = ("--log-file", str(log))
    files = {"alive": archive_of(operator, *options)}
    os.kill(operator.pid, signal.SIGSTOP)
    files["hung"] = archive_of(operator, *options)
    os.kill(operator.pid, signal.SIGCONT)
    operator.stop(signal.SIGKILL)
    files["killed"] = archive_of(operator, *options)

    for state, archive in files.items():
        for name, content in archive.items():
            found = [one for one in unwanted if one.encode() in content]
            assert not found, f"{name} with the agent {state}"
        assert b"last line" in archive["logs/0-container.log"]
        (gate,) = json.loads(archive["pins/status.json"])["gates"]
        assert (gate["interface"], gate["pod"], gate["mode"]) == (web.interface, "web", "enforce")
        assert json.loads(archive["pins/drops.json"])["sources"]
        assert {"gates", "config"} <= {
            one["name"] for one in json.loads(archive["pins/entries.json"])
        }
        assert "gate_egress" in archive["pins/programs.json"].decode()
        assert "reply_key" not in archive["pins/entries.json"].decode()
        assert "table inet podgate" in archive["network/nft.txt"].decode()
    assert problems_of(files["alive"]) == {}
    assert json.loads(files["alive"]["agent/status.json"])["pods"]
    assert b"podgate_" in files["alive"]["agent/metrics.txt"]
    assert b"\ntask readiness: " in files["alive"]["agent/stacks.txt"]
    assert json.loads(files["hung"]["agent/process.json"])["pid"]
    assert problems_of(files["hung"]) == {}
    assert problems_of(files["killed"]).keys() == {"agent/process.json"}
    for state in ("hung", "killed"):
        assert "agent/status.json" not in files[state]
        assert "no agent responds" in json.loads(files[state]["manifest.json"])["agent"]


def test_archive_is_for_root_alone_and_replaces_no_file(
    operator: AgentProcess, fresh_pins: pins.Pins, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "bug.tar.gz"
    where = ("--run-directory", str(tmp_path / "none"), "--bpffs", str(fresh_pins.bpffs))
    done = operator.run("bugtool", "-o", str(path), *where)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    assert "pins/status.json: PinsUnreadableError: nothing is pinned" in done.stderr
    again = operator.run("bugtool", "-o", str(path), *where)
    assert again.returncode == 1
    assert "File exists" in again.stderr
