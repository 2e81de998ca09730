"""Writes this node's NodeReport: one small object, and only when something changed.

A policy changes on all nodes at once, so each waits for a random time before it writes, and then
does not write again for a minute. Numbers of pods change all the time: alone they are written every
five minutes.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from agent import backoff
from agent.kube import node_report
from agent.kube.client import APPLY, ApiClient, ApiError
from agent.kube.node_report import NodeStatus
from agent.logs import Event

log = structlog.get_logger(__name__)

_POLL_SECONDS: Final = 0.5
SPREAD_SECONDS: Final = 20.0
"""5,000 nodes are 250 writes a second for this time, half of what their Leases are always."""
PERIOD_SECONDS: Final = 60.0
"""Between writes of one node: 83 a second from 5,000 nodes whose policies change all the time."""
COUNTS_SECONDS: Final = 300.0
"""Between writes of numbers of pods: 17 a second from 5,000 nodes whose pods come and go."""
_SEND_SECONDS: Final = 10.0
# The resource may be installed, or the permission be granted, later.
_ABSENT_SECONDS: Final = 300.0
_MANAGER: Final = {"fieldManager": "podgate-agent", "force": "true"}


class NodeReporter:
    """The one writer of a node's report."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        *,
        status: Callable[[], NodeStatus | None],
        node_uid: Callable[[], str],
        jitter: backoff.Jitter = random.random,
    ) -> None:
        """status: None while changes are being brought into force; node_uid: of the Node object,
        empty while it is unknown."""
        self._api = api
        self._node_name = node_name
        self._status = status
        self._node_uid = node_uid
        self._jitter = jitter
        self._written_at = 0.0
        self._backoff = backoff.Backoff(base_seconds=5.0, cap_seconds=120.0, jitter=jitter)

    async def run(self) -> None:
        """Write changes until cancelled."""
        written: NodeStatus | None = None
        while True:
            await self._until_changed(written)
            await asyncio.sleep(SPREAD_SECONDS * self._jitter())
            status = await self._until_changed(written)
            try:
                await self._write(status)
            except ApiError as error:
                await self._handle_error(error)
                continue
            self._backoff.reset()
            written = status
            self._written_at = asyncio.get_running_loop().time()
            await asyncio.sleep(PERIOD_SECONDS * (0.5 + self._jitter()))

    async def _until_changed(self, written: NodeStatus | None) -> NodeStatus:
        while True:
            status = self._status()
            if status is not None and self._node_uid() and self._is_due(status, written):
                return status
            await asyncio.sleep(_POLL_SECONDS)

    def _is_due(self, status: NodeStatus, written: NodeStatus | None) -> bool:
        if written is None or status.differs_from(written):
            return True
        age_seconds = asyncio.get_running_loop().time() - self._written_at
        return status != written and age_seconds >= COUNTS_SECONDS

    async def _write(self, status: NodeStatus) -> None:
        owner = {
            "apiVersion": "v1",
            "kind": "Node",
            "name": self._node_name,
            "uid": self._node_uid(),
        }
        body = {
            "apiVersion": node_report.API_VERSION,
            "kind": node_report.KIND,
            "metadata": {"name": self._node_name, "ownerReferences": [owner]},
            "status": msgspec.to_builtins(status),
        }
        await self._api.request(
            "PATCH",
            f"{node_report.PATH}/{self._node_name}",
            query=_MANAGER,
            body=body,
            content_type=APPLY,
            timeout_seconds=_SEND_SECONDS,
        )

    async def _handle_error(self, error: ApiError) -> None:
        if not self._backoff.failures:
            log.warning(Event.NODE_REPORT_NOT_WRITTEN, error=str(error), code=error.code)
        seconds = max(error.retry_after_seconds, self._backoff.next_seconds())
        if error.code in (403, 404):
            seconds = max(seconds, _ABSENT_SECONDS * (0.5 + self._jitter()))
        await asyncio.sleep(seconds)
