"""The client: it continues after all errors, and stops when it is cancelled."""

import asyncio
import json
import pathlib
import signal
import subprocess
import sys

import pytest

from agent.client import base, podinfo
from agent.client.podinfo import PodInfoClient, PodInfoState
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node

_ROOT = pathlib.Path(__file__).parents[3]

_PRINTING = """
import sys
from agent.client import podinfo as client
loaded = {name.partition(".")[0] for name in sys.modules}
assert loaded.isdisjoint(("structlog", "msgspec", "aiohttp", "rich", "click")), loaded
client.run(lambda state: print(len(state.pods), state.instance_id, state.rev, flush=True))
"""


async def next_of(client: PodInfoClient) -> PodInfoState | None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await asyncio.to_thread(client.next)


async def test_next_continues_after_a_restart_and_an_unready_server(node: Node) -> None:
    problems: list[str] = []
    client = PodInfoClient(
        f"unix://{node.path}", error_delay_seconds=0.05, on_problem=problems.append
    )
    waiting = asyncio.create_task(next_of(client))
    await polling.until("one problem", lambda: len(problems) == 1)
    pod = node.add("web")
    async with node.serving():
        first = await waiting
        assert first is not None
        assert [one.pod_name for one in first.pods] == ["web"]
        node.set(pod, False)
        second = await next_of(client)
        assert second is not None
        assert (second.instance_id, second.rev) == (first.instance_id, first.rev + 1)
    node.unready_because = "not every sandbox has been looked at yet"
    waiting = asyncio.create_task(next_of(client))
    async with node.serving():
        await polling.until("two problems", lambda: len(problems) == 2)
        node.unready_because = None
        third = await waiting
        assert third is not None
        assert third.instance_id != first.instance_id
        assert [one.pod_name for one in third.pods] == ["web"]
    await asyncio.to_thread(client.close)
    assert len(problems) == 2


async def test_cancel_ends_a_waiting_next_and_all_later_ones(node: Node) -> None:
    node.add("web")
    async with node.serving():
        client = PodInfoClient(f"unix://{node.path}")
        await next_of(client)
        waiting = asyncio.create_task(next_of(client))
        await polling.until("one watch", lambda: node.has_watches(1))
        await asyncio.to_thread(client.cancel)
        assert await waiting is None
        assert await next_of(client) is None
        await asyncio.to_thread(client.close)


async def test_list_and_get_raise_with_the_code(node: Node) -> None:
    pod = node.add("web")
    async with node.serving():
        client = PodInfoClient(f"unix://{node.path}")
        listed = await asyncio.to_thread(client.list, PATIENCE_SECONDS)
        got = await asyncio.to_thread(client.get, pod.uid, PATIENCE_SECONDS)
        assert listed.pods == (got,)
        with pytest.raises(base.StreamError, match="no pod of that uid") as caught:
            await asyncio.to_thread(client.get, "other", PATIENCE_SECONDS)
        assert caught.value.code.name == "NOT_FOUND"
        await asyncio.to_thread(client.close)


async def start(node: Node, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PRINTING, "--target", f"unix://{node.path}", *arguments),
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_run_continues_from_the_printed_position(node: Node) -> None:
    pod = node.add("web")
    async with node.serving(), asyncio.timeout(2 * PATIENCE_SECONDS):
        output, errors = await (await start(node, "--once")).communicate()
        count, instance, rev = output.split()
        assert count == b"1"
        resume = errors.decode().partition("to continue: ")[2].split()
        assert resume == ["--instance-id", instance.decode(), "--rev", rev.decode()]
        child = await start(node, *resume)
        await polling.until("one watch", lambda: node.has_watches(1))
        node.set(pod, False)
        assert child.stdout is not None
        assert int((await child.stdout.readline()).split()[2]) == int(rev) + 1
        child.send_signal(signal.SIGTERM)
        rest, errors = await child.communicate()
        assert (rest, errors, child.returncode) == (b"", b"", 0)


async def podgate_pods(node: Node, *arguments: str) -> tuple[int | None, str, str]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "pods", "--run-directory", str(node.directory)),
        *arguments,
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(PATIENCE_SECONDS):
        output, errors = await child.communicate()
    return child.returncode, output.decode(), errors.decode()


async def test_podgate_pods_shows_a_table_and_json(node: Node) -> None:
    pod = node.add("web")
    node.set(pod, False, "connection refused")
    async with node.serving():
        status, table, _ = await podgate_pods(node)
        assert status == 0
        assert "tests/web" in table
        assert "podgate.io/probes-passing" in table
        _, text, _ = await podgate_pods(node, "--output", "json", "--uid", pod.uid)
        (told,) = json.loads(text)["pods"]
        reasons = {one["type"]: one["reason"] for one in told["conditions"]}
        assert reasons["podgate.io/probes-passing"] == "ProbeFailed"
        status, _, errors = await podgate_pods(node, "--uid", "other")
        assert (status, errors.count("\n")) == (1, 1)
    status, _, errors = await podgate_pods(node)
    assert status == 3
    assert "is 'podgate run' running" in errors


@pytest.mark.parametrize("delay", ["-1", "nan", "inf", "soon"])
def test_impossible_error_delay_is_a_usage_error(
    delay: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        podinfo.run(print, ["--target", "unix:/nowhere", f"--error-delay={delay}"])
    assert caught.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"--error-delay: {delay} is not a number of seconds from 0 to 3600")


def test_impossible_position_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        podinfo.run(print, ["--target", "unix:/nowhere", "--rev=-1"])
    assert caught.value.code == 2
    assert "-1" in capsys.readouterr().err.splitlines()[-1]


def test_impossible_position_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="-1"):
        PodInfoClient("unix:/nowhere", rev=-1)
