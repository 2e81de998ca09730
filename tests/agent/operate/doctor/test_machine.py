"""Findings about the container runtime, by a real client and a stand-in server."""

import pathlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.admin import finding_kinds as kinds
from agent.admin.finding import Finding
from agent.cri import runtime_pb2
from agent.operate.doctor import runtime
from agent.operate.doctor.results import Passed
from tests.runtime import servers
from tests.runtime.servers import FakeRuntime


async def finding_of(named: pathlib.Path | None, *candidates: pathlib.Path) -> Finding:
    found = await runtime.check(named, candidates)
    assert isinstance(found, Finding)
    return found


READY = [
    runtime_pb2.RuntimeCondition(type=name, status=True)
    for name in ("RuntimeReady", "NetworkReady")
]


@pytest.fixture
def fake() -> FakeRuntime:
    made = FakeRuntime()
    made.responses["Status"] = runtime_pb2.StatusResponse(
        status=runtime_pb2.RuntimeStatus(conditions=READY)
    )
    return made


@pytest.fixture
async def path(tmp_path: pathlib.Path, fake: FakeRuntime) -> AsyncIterator[pathlib.Path]:
    async with servers.serving(tmp_path / "runtime.sock", fake):
        yield tmp_path / "runtime.sock"


async def test_runtime_is_named_with_its_version(path: pathlib.Path) -> None:
    expected = Passed("runtime", f"fake 1 at {path} responds.")
    assert await runtime.check(None, [path]) == expected


async def test_runtime_that_is_not_ready_is_a_warning(
    path: pathlib.Path, fake: FakeRuntime
) -> None:
    condition = runtime_pb2.RuntimeCondition(type="NetworkReady", message="no plugin")
    fake.responses["Status"] = runtime_pb2.StatusResponse(
        status=runtime_pb2.RuntimeStatus(conditions=[READY[0], condition])
    )
    finding = await finding_of(None, path)
    assert finding.kind == kinds.RUNTIME_NOT_READY.name
    assert "is not ready: NetworkReady is false (no plugin)." in finding.sentence


async def test_missing_or_broken_runtime_is_a_problem(
    path: pathlib.Path, fake: FakeRuntime, tmp_path: pathlib.Path
) -> None:
    missing = await finding_of(None, tmp_path / "missing.sock")
    assert missing.kind == kinds.RUNTIME_NOT_FOUND.name
    assert "o container runtime's socket found" in missing.sentence
    fake.responses["Version"] = grpc.StatusCode.INTERNAL
    assert (await finding_of(path)).kind == kinds.RUNTIME_NOT_FOUND.name


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "does not implement the CRI's Version"),
        (grpc.StatusCode.NOT_FOUND, "reports for Version: as the test wants it."),
        (grpc.StatusCode.INTERNAL, "failed Version: as the test wants it."),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "did not respond to Version within"),
    ],
)
async def test_error_of_the_runtime_is_one_sentence(
    path: pathlib.Path, fake: FakeRuntime, code: grpc.StatusCode, text: str
) -> None:
    fake.responses["Version"] = code
    finding = await finding_of(path)
    assert finding.kind == kinds.RUNTIME_NOT_FOUND.name
    assert f"{path} {text}" in finding.sentence


async def test_socket_that_nothing_serves_is_named_with_the_kernels_reason(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "runtime.sock"
    with socket.socket(socket.AF_UNIX) as unserved:
        unserved.bind(str(path))
        finding = await finding_of(path)
    assert finding.kind == kinds.RUNTIME_NOT_FOUND.name
    assert f"o container runtime responds at {path} (" in finding.sentence
    assert "Connection refused" in finding.sentence
    path.unlink()
    path.touch()
    assert f"{path} is not a socket" in (await finding_of(path)).sentence
