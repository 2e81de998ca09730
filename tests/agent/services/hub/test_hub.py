"""`podgate hub` as a process: certificates, views of nodes, health, and its API server."""

import asyncio
import contextlib
import json
import pathlib
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from agent.api.tls import TlsFiles
from agent.operate.cli.main import main
from agent.services.api.api_objects import SERVICES, SLICES
from agent.services.client.services import METHOD
from agent.services.client.v1alpha1 import endpoints_pb2 as pb
from tests import polling
from tests.agent.api.certificates import Authority
from tests.agent.kube.apiserver import NODES, ApiServer
from tests.agent.kube.conftest import write_kubeconfig
from tests.agent.services.api.making import endpoint_json, service_json, slice_json, targets

_ROOT = pathlib.Path(__file__).parents[4]
_WAIT_SECONDS = 30.0


@pytest.fixture
def files(tmp_path: pathlib.Path) -> TlsFiles:
    return Authority.make().files(tmp_path / "tls")


class Hub:
    """A process, and what it has logged."""

    def __init__(self, directory: pathlib.Path, files: TlsFiles) -> None:
        self.run_directory = directory / "run"
        self.lines: list[dict[str, Any]] = []
        self._files = files

    @contextlib.asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator["Hub"]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", "hub", "--run-directory", str(self.run_directory)),
            *("--services-listen", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--services-tls-ca", str(self._files.authorities)),
            *("--services-tls-cert", str(self._files.certificate)),
            *("--services-tls-key", str(self._files.key), *arguments),
            cwd=_ROOT,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        following = asyncio.create_task(self._follow(process.stderr))
        try:
            yield self
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            await following

    async def _follow(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            with contextlib.suppress(ValueError):
                self.lines.append(json.loads(line))

    async def value(self, key: str, field: str) -> Any:
        """A field of a log line, once it exists."""

        def found() -> Any:
            values = [one.get(field) for one in self.lines if one["event"] == key]
            return next(filter(None, values), None)

        return await polling.until(f"{field} of {key}", found)

    async def view(self, node: str) -> list[str]:
        """Endpoints of the service web as this node uses them; retried until there is one."""
        port = await self.value("services_listening", "port")
        content = await asyncio.to_thread(self._files.read)
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", content.channel_credentials()
        ) as channel:
            call = channel.unary_stream(
                METHOD,
                request_serializer=pb.NextFilter.SerializeToString,
                response_deserializer=pb.NextItem.FromString,
            )(pb.NextFilter(node=node), timeout=_WAIT_SECONDS)
            found = [one async for item in call for one in item.services.items]
        return [target for one in found for target in targets(one.ports[0])]


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_hub_of_a_cluster_serves_the_view_of_any_node(
    files: TlsFiles, tmp_path: pathlib.Path
) -> None:
    server = ApiServer()
    for name, zone in (("a", "east"), ("b", "west")):
        labels = {"topology.kubernetes.io/zone": zone}
        server.put({"metadata": {"name": name, "uid": name, "labels": labels}}, path=NODES)
    server.put(service_json(), path=SERVICES.path)
    found = [
        endpoint_json("198.19.0.1", node="a", zones=["east"]),
        endpoint_json("198.19.0.2", node="b", zones=["west"]),
    ]
    server.put(slice_json(*found), path=SLICES.path)
    async with server.running():
        kubeconfig = write_kubeconfig(tmp_path / "kube", f"http://127.0.0.1:{server.port}")
        async with Hub(tmp_path, files).running("--kubeconfig", kubeconfig) as hub:
            views = {node: await hub.view(node) for node in ("a", "b", "c")}
    assert views == {
        "a": ["198.19.0.1:8080"],
        "b": ["198.19.0.2:8080"],
        "c": ["198.19.0.1:8080", "198.19.0.2:8080"],
    }


async def test_hub_of_a_directory_is_ready_once_it_is_read(
    files: TlsFiles, tmp_path: pathlib.Path
) -> None:
    directory = tmp_path / "services"
    async with Hub(tmp_path, files).running("--services-from", str(directory)) as hub:
        port = await hub.value("hub_started", "http_port")
        status, reason = await asyncio.to_thread(fetch, port, "/readyz")
        assert (status, "has not sent all services yet" in reason) == (503, True)
        assert (await asyncio.to_thread(fetch, port, "/healthz"))[0] == 200
        directory.mkdir()
        (directory / "web.json").write_text(
            json.dumps({"apiVersion": "v1", "kind": "Service", **service_json()}), encoding="utf-8"
        )
        await polling.request_until(
            "readiness",
            lambda: asyncio.to_thread(fetch, port, "/readyz"),
            lambda found: found[0] == 200,
        )
        _, metrics = await polling.request_until(
            "the service",
            lambda: asyncio.to_thread(fetch, port, "/metrics"),
            lambda found: "podgate_services 1.0" in found[1],
        )
        assert "process_resident_memory_bytes " in metrics
        shown = await asyncio.to_thread(
            CliRunner().invoke,
            main,
            ["services", "--node", "a", "--run-directory", str(hub.run_directory)],
        )
        assert "default/web" in shown.output


def podgate(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


WRONG = [
    (("hub",), "hubs and their clients need --services-tls-ca"),
    (("hub", "--services-tls-ca", "x"), "use --services-tls-ca, --services-tls-cert and"),
    (("run", "--node-name", "n", "--services-from", "h:1"), "hubs and their clients need"),
    (
        ("run", "--node-name", "n", "--service-endpoints", "--services-listen", ":1"),
        "hubs and their clients need",
    ),
    (
        ("run", "--node-name", "n", "--services-from", "services.yaml"),
        "'services.yaml' is neither a path with a slash (./services.yaml) nor HOST:PORT",
    ),
    (("run", "--node-name", "n", "--services-from", "h:0"), "'h:0' is neither a path"),
    (
        ("run", "--manifests", "/", "--service-endpoints"),
        "--service-endpoints needs --node-name or --services-from",
    ),
    (
        ("run", "--node-name", "n", "--services-state", "/x"),
        "--services-state needs --service-endpoints or --services-from",
    ),
    (
        ("run", "--node-name", "n", "--services-from", "/x", "--services-zone", "a"),
        "--services-node and --services-zone need --manifests",
    ),
    (("services", "--all", "--type", "NodePort"), "--all has everything"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_wrong_options_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = podgate(*arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.replace("│", " ").split())
