"""`podgate services`, and its options of `podgate run`."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from agent.operate.cli.main import main
from tests.agent.services.api.conftest import WAIT_SECONDS, Served
from tests.agent.services.api.making import endpoint_json, endpoint_slice, service

ROOT = pathlib.Path(__file__).parents[5]


async def podgate(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments)


@pytest.fixture
def run_directory(served: Served) -> str:
    return str(served.socket.parent.parent)


async def test_services_are_a_table(served: Served, run_directory: str) -> None:
    await served.start()
    leaving = endpoint_json("198.19.0.9", ready=False, serving=True, terminating=True)
    served.publisher.store.set_service(None, service("dns", type="NodePort", ports=[PORT]))
    ports = [{"name": "dns", "protocol": "UDP", "port": 8080}]
    served.publisher.store.set_slice(
        None, endpoint_slice(leaving, service="dns", name="d", ports=ports)
    )
    served.publisher.store.set_service(None, service("set", clusterIP="None", clusterIPs=["None"]))
    served.publisher.store.set_service(None, service("bare", ports=None))
    await served.publisher.wait_newer(served.publisher.instance_id, 1)
    result = await podgate("services", "--run-directory", run_directory)
    lines = [line.split() for line in result.output.splitlines() if line.strip()]
    assert result.exit_code == 0
    assert lines[0] == ["SERVICE", "TYPE", "PORT", "ADDRESSES", "INTERNAL", "EXTERNAL"]
    assert lines[1] == ["default/bare", "cluster", "ip", "-", "198.18.0.1", "none", "none"]
    assert " ".join(lines[2]) == (
        "default/dns node port dns 53/udp, node 30053 198.18.0.1 "
        "198.19.0.9:8080 (x) 198.19.0.9:8080 (x)"
    )
    assert " ".join(lines[3]) == "default/set headless http 80/tcp - none none"
    assert " ".join(lines[4]) == (
        "default/web cluster ip http 80/tcp 198.18.0.1 198.19.0.1:8080* none"
    )
    assert " ".join(lines[5]).startswith("4 services, revision 2;")


PORT = {"name": "dns", "protocol": "UDP", "port": 53, "nodePort": 30053}


async def test_services_are_json(served: Served, run_directory: str) -> None:
    await served.start()
    result = await podgate("services", "--output", "json", "--run-directory", run_directory)
    found = json.loads(result.output)
    assert found["rev"] == "1"
    assert found["services"][0]["ports"][0]["endpoints"] == [
        {"address": "198.19.0.1", "port": 8080, "isLocal": True, "isInternal": True}
    ]


async def test_missing_server_is_one_sentence(tmp_path: pathlib.Path) -> None:
    result = await podgate("services", "--run-directory", str(tmp_path))
    assert result.exit_code == 3
    assert result.output.startswith("podgate: no agent serves service endpoints at unix:///")
    assert "--service-endpoints" in result.output
    assert result.output.count("\n") == 1


async def test_incomplete_services_are_one_sentence(
    served: Served, run_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.operate.cli.commands.services._ANSWER_SECONDS", 0.1)
    monkeypatch.setattr("agent.client.base._READY_SECONDS", 30)
    await served.start(is_complete=False)
    result = await podgate("services", "--run-directory", run_directory)
    assert result.exit_code == 1
    assert "has not listed all services yet" in result.output


def watching(run_directory: str) -> "subprocess.Popen[str]":
    command = (sys.executable, "-m", "agent", "services", "--watch", "--output", "json")
    return subprocess.Popen(
        [*command, "--run-directory", run_directory],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


async def test_watching_shows_each_state_until_interrupted(
    served: Served, run_directory: str
) -> None:
    await served.start()
    program = watching(run_directory)
    assert program.stdout is not None
    first = json.loads(await asyncio.to_thread(program.stdout.readline))
    await served.change("api")
    second = json.loads(await asyncio.to_thread(program.stdout.readline))
    program.send_signal(signal.SIGINT)
    await asyncio.to_thread(program.communicate, timeout=WAIT_SECONDS)
    assert (first["rev"], second["rev"], program.returncode) == ("1", "2", 0)


@pytest.mark.parametrize(
    "address", ["0.0.0.0:9651", "127.0.0.1", "127.0.0.1:99999", "localhost:9651", "x", ":9651"]
)
async def test_localnet_address_must_be_on_the_loopback(address: str) -> None:
    result = await podgate("run", "--node-name", "n", "--localnet-address", address)
    assert result.exit_code == 2
    assert "is not an address and port of the loopback" in result.output


async def test_services_are_filtered_by_the_agent(served: Served, run_directory: str) -> None:
    await served.start()
    content = service("db", type="ExternalName", clusterIP="", externalName="db.example")
    served.publisher.store.set_service(None, content)
    served.publisher.store.set_service(None, service("np", type="NodePort", labels={"app": "np"}))
    await served.publisher.wait_newer(served.publisher.instance_id, 1)
    for options, names in (
        ((), ["default/np", "default/web"]),
        (("--namespace", "other"), []),
        (("-n", "default", "--type", "NodePort"), ["default/np"]),
        (("--type", "ExternalName", "--type", "ClusterIP"), ["default/db", "default/web"]),
        (("--family", "IPv6"), []),
        (("--service-proxy-name", "own"), []),
        (("--labels", "app", "--type", "NodePort"), ["default/np"]),
    ):
        result = await podgate("services", "--run-directory", run_directory, *options)
        assert result.exit_code == 0
        lines = result.output.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("default/")] == names
        assert ("LABELS" in result.output and "app=np" in result.output) is ("--labels" in options)


async def test_details_are_shown_on_request(served: Served, run_directory: str) -> None:
    await served.start()
    found = endpoint_slice(
        endpoint_json("198.19.0.1", node="node1", uid="u1"),
        endpoint_json("198.19.0.2", ready=False),
    )
    served.publisher.store.set_slice(None, found)
    await served.publisher.wait_newer(served.publisher.instance_id, 0)
    command = ("services", "--run-directory", run_directory, "--all-endpoints")
    result = await podgate(*command, "--endpoint-details", "-o", "json")
    first, second = json.loads(result.output)["services"][0]["ports"][0]["endpoints"]
    assert first["pod"] == {"namespace": "default", "name": "p", "uid": "u1"}
    assert first["conditions"] == {"ready": True, "serving": True}
    assert (second["node"], second["conditions"]) == ("other", {"serving": True})
    result = await podgate(*command, "--endpoint-details")
    assert "198.19.0.1:8080* default/p on node1" in result.output
    assert "198.19.0.2:8080 on other" in result.output


async def test_invalid_filter_is_one_sentence(served: Served, run_directory: str) -> None:
    await served.start()
    patterns = (f"--labels=l{number}" for number in range(33))
    result = await podgate("services", "--run-directory", run_directory, *patterns)
    assert result.exit_code == 1
    assert result.output.endswith("32 is the maximum; use * in them\n")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    "filtering",
    [
        *(("--type", "NodePort"), ("--family", "IPv4"), ("--service-proxy-name", "own")),
        *(("--labels", "app"), ("--annotations", "*")),
    ],
)
async def test_all_excludes_the_other_filters(filtering: tuple[str, str]) -> None:
    result = await podgate("services", "--all", *filtering)
    assert result.exit_code == 2
    assert "--all has everything; leave out the other filters" in result.output
