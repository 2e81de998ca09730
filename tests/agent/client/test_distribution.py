"""podgate-client, installed from its wheel: what it imports, and programs that use it."""

import ast
import asyncio
import pathlib
import subprocess
import sys

import pytest

from agent import VERSION
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node
from tests.agent.client import distribution
from tests.agent.services.api.conftest import Served

_FOLLOWING = """
import asyncio, sys
from podgate_client import diff, services

async def main():
    differ = diff.Differ()
    async with services.AsyncServicesClient(sys.argv[1]) as client:
        async for state in client.watch():
            change = differ.compare(state.by_name())
            differ.accept()
            print(*(name for _, name in change.added), flush=True)
            if len(state.services) == 2:
                return

asyncio.run(main())
"""

_CONDITIONS = """
from podgate_client import podinfo
podinfo.run(lambda state: print(*(pod.pod_name for pod in state.pods), flush=True))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of an environment that has nothing else."""
    directory = tmp_path_factory.mktemp("client")
    return distribution.install(distribution.build(directory), directory / "environment")


def test_version_is_the_agents(python: pathlib.Path) -> None:
    code = "import importlib.metadata; print(importlib.metadata.version('podgate-client'))"
    assert output(python, code) == f"{VERSION}\n"


def test_import_graph_has_two_third_party_packages(python: pathlib.Path) -> None:
    (package,) = python.parents[1].glob("lib/python*/site-packages/podgate_client")
    sources = list(package.rglob("*.py"))
    assert len(sources) >= 8
    assert third_party(sources) == {"grpc", "google.protobuf"}
    names = [
        "podgate_client." + ".".join(path.relative_to(package).with_suffix("").parts)
        for path in sources
        if path.name != "__init__.py"
    ]
    assert output(python, f"import {', '.join(names)}; print('imported')") == "imported\n"


def third_party(sources: list[pathlib.Path]) -> set[str]:
    """Packages that the sources import, neither their own nor of Python."""
    found = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module))
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    others = {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}
    return {".".join(name.split(".")[: 2 if name.startswith("google") else 1]) for name in others}


def output(python: pathlib.Path, code: str) -> str:
    return subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout


async def start(python: pathlib.Path, code: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(str(python), "-I", "-c", code, *arguments), stdout=subprocess.PIPE
    )


async def test_asyncio_program_gets_what_is_added(python: pathlib.Path, served: Served) -> None:
    await served.start()
    child = await start(python, _FOLLOWING, served.target)
    assert child.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await child.stdout.readline() == b"web\n"
        await served.change("api")
        assert (await child.communicate())[0] == b"api\n"
    assert child.returncode == 0


async def test_program_of_one_line_shows_conditions(python: pathlib.Path, node: Node) -> None:
    node.add("web")
    async with node.serving(), asyncio.timeout(PATIENCE_SECONDS):
        target = ("--target", f"unix://{node.path}", "--error-delay", "0.1")
        child = await start(python, _CONDITIONS, *target, "--once")
        assert (await child.communicate())[0] == b"web\n"
    assert child.returncode == 0
