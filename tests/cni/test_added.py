"""The plugin's report of a pod that has its network, from its socket to the agent."""

import asyncio
import gc
import json
import pathlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from agent.cni import added
from agent.cni.added import AddedError
from agent.cri.models import NetworkedSandbox
from agent.logs import Event
from tests.cni import calling
from tests.cni.calling import POD, call
from tests.polling import until

RESULT = {
    "cniVersion": "1.0.0",
    "ips": [{"address": "198.18.10.2/24"}, {"address": "fd00:18::2/64"}],
}


def conf(directory: pathlib.Path, result: object = RESULT) -> dict[str, Any]:
    """A configuration that leads to nothing of this machine but the run directory."""
    return {
        **{"cniVersion": "1.0.0", "name": "pods", "bpffs": "/nowhere"},
        **{"runDirectory": str(directory), "prevResult": result},
    }


@pytest.fixture
async def sandboxes(tmp_path: pathlib.Path) -> AsyncIterator["asyncio.Queue[NetworkedSandbox]"]:
    """What the agent receives."""
    found: asyncio.Queue[NetworkedSandbox] = asyncio.Queue()

    async def follow() -> None:
        async for one in added.received(tmp_path):
            found.put_nowait(one)

    task = asyncio.create_task(follow())
    await until("the agent's socket", (tmp_path / "cni" / "added.sock").exists)
    yield found
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_agent_receives_the_sandbox_with_its_addresses(
    plugin: pathlib.Path, tmp_path: pathlib.Path, sandboxes: "asyncio.Queue[NetworkedSandbox]"
) -> None:
    answer = await asyncio.to_thread(call, plugin, "ADD", conf(tmp_path), POD)
    assert answer.result == RESULT
    found = await asyncio.wait_for(sandboxes.get(), 30)
    sandbox = found.sandbox
    assert (sandbox.id, found.netns_path) == ("c0", "/nowhere")
    assert (sandbox.pod_uid, sandbox.full_name) == ("1", "demo/web")
    assert [str(ip) for ip in sandbox.ips] == ["198.18.10.2", "fd00:18::2"]


async def test_run_directory_is_made_and_a_socket_that_was_left_is_replaced(
    tmp_path: pathlib.Path,
) -> None:
    directory = tmp_path / "run" / "podgate"
    path = directory / "cni" / "added.sock"
    content = {"sandbox": "c0", "netns": "/n", "args": POD["CNI_ARGS"], "result": {}}
    for _ in range(2):
        receiving = cast(AsyncGenerator[NetworkedSandbox, None], added.received(directory))
        first = asyncio.ensure_future(anext(receiving))
        await asyncio.sleep(0.01)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(json.dumps(content).encode(), str(path))
        found = await asyncio.wait_for(first, 30)
        assert (found.netns_path, found.sandbox.pod_uid, found.sandbox.ips) == ("/n", "1", ())
        await receiving.aclose()


@pytest.mark.looptime
async def test_directory_where_no_socket_can_be_is_tried_again(tmp_path: pathlib.Path) -> None:
    receiving = asyncio.ensure_future(anext(added.received(tmp_path / (100 * "x"))))
    with structlog.testing.capture_logs() as logged:
        await asyncio.sleep(25)
    assert [line["event"] for line in logged] == [Event.CNI_SOCKET_UNAVAILABLE] * 3
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    gc.collect()


async def test_only_root_enters_the_sockets_directory(
    tmp_path: pathlib.Path, sandboxes: "asyncio.Queue[NetworkedSandbox]"
) -> None:
    assert (tmp_path / "cni").stat().st_mode & 0o777 == 0o700


async def test_broken_datagrams_affect_no_other(
    plugin: pathlib.Path, tmp_path: pathlib.Path, sandboxes: "asyncio.Queue[NetworkedSandbox]"
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for content in (b"", b"{", b"[]", b'{"sandbox": 1}', b"x" * 100_000):
            sender.sendto(content, str(tmp_path / "cni" / "added.sock"))
            await asyncio.sleep(0)
    no_uid = {**POD, "CNI_ARGS": "K8S_POD_NAME=web;K8S_POD_NAMESPACE=demo"}
    await asyncio.to_thread(call, plugin, "ADD", conf(tmp_path), no_uid)
    await asyncio.to_thread(call, plugin, "ADD", conf(tmp_path), POD)
    found = await asyncio.wait_for(sandboxes.get(), 30)
    assert found.sandbox.pod_uid == "1"
    assert sandboxes.empty()


@pytest.mark.parametrize("has_file", [False, True])
def test_without_an_agent_the_call_is_as_before(
    plugin: pathlib.Path, tmp_path: pathlib.Path, has_file: bool
) -> None:
    if has_file:  # of an agent that was killed
        (tmp_path / "cni").mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(tmp_path / "cni" / "added.sock"))
    assert call(plugin, "ADD", conf(tmp_path), POD).result == RESULT


def test_agent_that_hangs_does_not_delay_pods(plugin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "cni").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hung:
        hung.bind(str(tmp_path / "cni" / "added.sock"))
        limit = int(pathlib.Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        for _ in range(limit + 5):
            assert call(plugin, "ADD", conf(tmp_path), POD).status == 0


def test_result_that_no_datagram_holds_is_passed_on(
    plugin: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    result = {"cniVersion": "1.0.0", "x": "y" * 900_000}
    (tmp_path / "cni").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "cni" / "added.sock"))
        assert call(plugin, "ADD", conf(tmp_path, result), POD).result == result


def test_names_with_quotes_are_escaped(plugin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "cni").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "cni" / "added.sock"))
        call(plugin, "ADD", conf(tmp_path), {**POD, "CNI_CONTAINERID": 'a"b\\c\n\xe9'})
        content = listening.recv(1 << 16)
    assert json.loads(content)["sandbox"] == 'a"b\\c???'
    assert calling.POD["CNI_ARGS"] == json.loads(content)["args"]


@given(
    content=st.binary(max_size=200)
    | st.text(max_size=100).map(
        lambda text: json.dumps(
            {"sandbox": text, "netns": text, "args": text, "result": {"ips": [{"address": text}]}}
        ).encode()
    )
)
def test_any_datagram_is_read_or_rejected(content: bytes) -> None:
    try:
        added.read(content)
    except AddedError:
        return
