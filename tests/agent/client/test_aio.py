"""The clients for asyncio: as the others, and cancelled as any coroutine."""

import asyncio
import contextlib
import pathlib
from collections.abc import Callable

import grpc
import pytest

from agent.client import base
from agent.client.base import StreamError
from agent.client.podinfo import AsyncPodInfoClient
from agent.services.client.services import AsyncServicesClient
from tests import polling
from tests.agent.api.podinfo.serving import PATIENCE_SECONDS, Node
from tests.agent.services.api.conftest import Served
from tests.agent.services.client.test_services import HEADER, WEB, end, scripted

_SECONDS = PATIENCE_SECONDS


async def test_next_continues_after_a_restart(served: Served) -> None:
    problems: list[str] = []
    async with AsyncServicesClient(
        served.target, error_delay_seconds=0.02, on_problem=problems.append
    ) as client:
        waiting = asyncio.create_task(client.next())
        await polling.until("one problem", lambda: len(problems) == 1)
        await served.start()
        async with asyncio.timeout(_SECONDS):
            first = await waiting
            assert list(first.by_name()) == [("default", "web")]
            waiting = asyncio.create_task(client.next())
            await served.stop()
            await polling.until("two problems", lambda: len(problems) == 2)
            await served.start()
            second = await waiting
        assert second.instance_id != first.instance_id


async def test_cancelled_next_loses_no_state(served: Served) -> None:
    await served.start()
    async with AsyncServicesClient(served.target) as client:
        await client.next()
        waiting = asyncio.create_task(client.next())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await served.change("api")
        async with asyncio.timeout(_SECONDS):
            assert len((await client.next()).services) == 2


async def test_once_raises_without_a_server_and_without_a_state(
    served: Served, tmp_path: pathlib.Path
) -> None:
    async with AsyncServicesClient(f"unix:{tmp_path / 'nothing'}") as client:
        with pytest.raises(StreamError, match="cannot read the service endpoints"):
            await client.once(_SECONDS)
    await served.start(is_complete=False)
    async with AsyncServicesClient(served.target) as client:
        with pytest.raises(StreamError, match=r"within 0\.2 s") as caught:
            await client.once(0.2)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_incomplete_state_is_discarded(tmp_path: pathlib.Path) -> None:
    problems: list[str] = []
    with scripted(tmp_path / "s", [HEADER, WEB], [HEADER, WEB, end(2)], [HEADER, WEB, end(1)]):
        async with AsyncServicesClient(
            f"unix:{tmp_path / 's'}", error_delay_seconds=0.01, on_problem=problems.append
        ) as client:
            async with asyncio.timeout(_SECONDS):
                state = await client.next()
    assert (state.rev, [one.name for one in state.services]) == (3, ["web"])
    assert problems == [
        "cannot read the service endpoints of this node: the response is incomplete"
    ]


async def test_watch_list_and_get_of_pods(node: Node) -> None:
    pod = node.add("web")
    async with (
        node.serving(),
        AsyncPodInfoClient(f"unix://{node.path}") as client,
        asyncio.timeout(_SECONDS),
        contextlib.aclosing(client.watch()) as states,
    ):
        first = await anext(states)
        assert list(first.by_uid()) == [pod.uid]
        node.set(pod, False)
        second = await anext(states)
        assert second.rev == first.rev + 1
        assert (await client.list(_SECONDS)).pods == second.pods
        assert await client.get(pod.uid, _SECONDS) == second.pods[0]
        with pytest.raises(StreamError) as caught:
            await client.get("other", _SECONDS)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_impossible_position_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match="-1"):
        AsyncServicesClient("unix:/nowhere", rev=-1)


class StuckChannel:
    """In place of gRPC's, which ends no call."""

    def unary_stream(self, path: str, **_: object) -> Callable[..., "StuckCall"]:
        return lambda *_, **options: StuckCall()

    async def close(self) -> None:
        pass


class StuckCall:
    async def read(self) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        pass


async def test_call_that_grpc_does_not_end_is_made_over_another_connection(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await served.start()
    for name in ("CALL_SECONDS", "STUCK_SECONDS"):
        monkeypatch.setattr(base, name, 0.1)
    problems: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(grpc.aio, "insecure_channel", lambda *_, **options: StuckChannel())
        client = AsyncServicesClient(
            served.target, error_delay_seconds=0.02, on_problem=problems.append
        )
    async with client, asyncio.timeout(_SECONDS):
        assert list((await client.next()).by_name()) == [("default", "web")]
    assert problems == ["no state of the service endpoints of this node within 0.1 s"]
