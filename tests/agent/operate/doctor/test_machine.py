"""Findings about the container runtime, by a real client and a stand-in server."""

import pathlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest

from agent.cri import runtime_pb2
from agent.operate.doctor import runtime
from agent.operate.doctor.finding import Severity
from tests.runtime import servers
from tests.runtime.servers import FakeRuntime


@pytest.fixture
def fake() -> FakeRuntime:
    made = FakeRuntime()
    made.responses["Status"] = runtime_pb2.StatusResponse()
    return made


@pytest.fixture
async def path(tmp_path: pathlib.Path, fake: FakeRuntime) -> AsyncIterator[pathlib.Path]:
    async with servers.serving(tmp_path / "runtime.sock", fake):
        yield tmp_path / "runtime.sock"


async def test_runtime_is_named_with_its_version(path: pathlib.Path) -> None:
    finding = await runtime.check(None, [path])
    assert (finding.severity, finding.text) == (Severity.OK, f"fake 1 at {path} responds.")


async def test_runtime_that_is_not_ready_is_a_warning(
    path: pathlib.Path, fake: FakeRuntime
) -> None:
    condition = runtime_pb2.RuntimeCondition(type="NetworkReady", message="no plugin")
    fake.responses["Status"] = runtime_pb2.StatusResponse(
        status=runtime_pb2.RuntimeStatus(conditions=[condition])
    )
    finding = await runtime.check(None, [path])
    assert finding.severity is Severity.WARNING
    assert "is not ready: NetworkReady is false (no plugin)." in finding.text


async def test_missing_or_broken_runtime_is_a_problem(
    path: pathlib.Path, fake: FakeRuntime, tmp_path: pathlib.Path
) -> None:
    missing = await runtime.check(None, [tmp_path / "missing.sock"])
    assert missing.severity is Severity.PROBLEM
    assert "no container runtime's socket found" in missing.text
    fake.responses["Version"] = grpc.StatusCode.INTERNAL
    assert (await runtime.check(path)).severity is Severity.PROBLEM


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
    finding = await runtime.check(path)
    assert finding.severity is Severity.PROBLEM
    assert f"{path} {text}" in finding.text


async def test_socket_that_nothing_serves_is_named_with_the_kernels_reason(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "runtime.sock"
    with socket.socket(socket.AF_UNIX) as unserved:
        unserved.bind(str(path))
        finding = await runtime.check(path)
    assert finding.severity is Severity.PROBLEM
    assert f"no container runtime responds at {path} (" in finding.text
    assert "Connection refused" in finding.text
    path.unlink()
    path.touch()
    assert f"{path} is not a socket" in (await runtime.check(path)).text
