"""Base of the clients for asyncio: as `base.StreamClient`, but cancelled as any coroutine."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Generic, Self

import grpc

from . import base
from .base import Api, StateT


class AsyncStreamClient(Generic[StateT]):
    """Receives each new state, whole. Create and use it on one event loop, from one task.

    Its methods may be cancelled: no state is lost, since the next call continues from the last one.
    """

    API: Api[StateT]

    def __init__(
        self,
        target: str = "",
        *,
        instance_id: int = 0,
        rev: int = 0,
        error_delay_seconds: float = base.ERROR_DELAY_SECONDS,
        on_problem: Callable[[str], None] = lambda problem: None,
        session: base.Session[StateT] | None = None,
    ) -> None:
        """As `base.StreamClient`. Raises `ValueError` for numbers that no state has."""
        base.check_position(instance_id, rev)
        self.instance_id = instance_id
        self.rev = rev
        self._error_delay_seconds = error_delay_seconds
        self._on_problem = on_problem
        self._problem = ""
        self._call: Any = None
        self._session = session or self.API.session()
        self._ends_at = 0.0
        """When a call that gRPC has not ended by then is given up, with its channel."""
        self._target = target or self.API.default_target
        self._channel = self._open()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def next(self) -> StateT:
        """Wait for a state other than the last, through all errors. Never raises."""
        while True:
            try:
                state = await self._receive(base.CALL_SECONDS)
            except base.StreamError as error:
                if not self._problem:
                    self._problem = str(error)
                    self._on_problem(self._problem)
                await asyncio.sleep(base.delay_seconds(self._error_delay_seconds))
                continue
            self._problem = ""
            if state is not None:
                return state

    async def watch(self) -> AsyncGenerator[StateT, None]:
        """Each new state. Never raises, and never ends by itself."""
        while True:
            yield await self.next()

    async def once(self, timeout_seconds: float = 30.0) -> StateT:
        """Wait for a state other than the last, without retries. Raises `StreamError`; its code is
        DEADLINE_EXCEEDED if there is no such state in time."""
        self._end()
        state = await self._receive(timeout_seconds)
        if state is None:
            raise self.API.no_state(timeout_seconds)
        return state

    async def close(self) -> None:
        self._end()
        await self._channel.close()

    async def _receive(self, timeout_seconds: float) -> StateT | None:
        """Wait for a state other than the last; None if there was none. Raises `StreamError`."""
        if (call := self._call) is None:
            request = self._session.request(self.instance_id, self.rev)
            self._call = call = self.API.start(self._channel, request, timeout_seconds)
            now = asyncio.get_running_loop().time()
            self._ends_at = now + timeout_seconds + base.STUCK_SECONDS
        is_kept = False
        try:
            async with asyncio.timeout_at(self._ends_at):
                while (response := await call.read()) is not grpc.aio.EOF:
                    state = self._session.read(response)
                    if state is not None:
                        self.instance_id, self.rev = state.instance_id, state.rev
                        is_kept = self.API.is_followed
                        return state
        except TimeoutError:
            await self._replace_channel()
            raise self.API.no_state(timeout_seconds) from None
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            raise self.API.error(error) from None
        finally:
            # Also when cancelled: the call may have lost a part of a state.
            if not is_kept:
                self._end()
        raise self.API.ended()

    async def _replace_channel(self) -> None:
        self._end()
        stuck, self._channel = self._channel, self._open()
        await stuck.close()

    def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._target, options=base.OPTIONS)

    def _end(self) -> None:
        if (call := self._call) is not None:
            call.cancel()
            self._call = None
