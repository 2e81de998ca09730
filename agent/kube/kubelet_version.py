"""The version of the node's kubelet, which is part of its http probes: `kube-probe/1.36`.

The watch of nodes has metadata only, so the object is requested: once at first, after each restart
of the kubelet, and rarely in between.
"""

import asyncio
import random
import re
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from agent.backoff import Backoff, Jitter
from agent.kube import responses
from agent.kube.client import ApiClient, ApiError
from agent.logs import Event

log = structlog.get_logger(__name__)

_PERIOD_SECONDS: Final = 1800.0
"""5,000 nodes are three requests a second."""
_STATUS_SECONDS: Final = 15.0
# hack/lib/version.sh of Kubernetes: builds that are not of a release's tag have a plus.
_VERSION = re.compile(r"v([0-9]{1,4})\.([0-9]{1,4})(?:\.[0-9]+)?(-[^+]*)?(?:\+.*)?")


class _NodeInfo(msgspec.Struct, rename="camel"):
    kubelet_version: str = ""


class _NodeStatus(msgspec.Struct, rename="camel"):
    node_info: _NodeInfo = msgspec.field(default_factory=_NodeInfo)


class _Node(msgspec.Struct):
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)


class _NodeList(msgspec.Struct):
    items: list[_Node] = []


class KubeletVersion:
    """Publishes the User-Agent of the kubelet's http probes."""

    def __init__(
        self,
        api: ApiClient,
        node_name: str,
        *,
        needed: asyncio.Event,
        publish: Callable[[str], None],
        jitter: Jitter = random.random,
    ) -> None:
        """needed: nothing is requested before it is set."""
        self._api = api
        # From the API server's cache: a version that is some seconds old is good enough.
        self._query = {"fieldSelector": f"metadata.name={node_name}", "resourceVersion": "0"}
        self._needed = needed
        self._publish = publish
        self._hinted = asyncio.Event()
        self._backoff = Backoff(base_seconds=1.0, cap_seconds=120.0, jitter=jitter)

    def hint(self) -> None:
        """The kubelet has been restarted."""
        self._hinted.set()

    async def run(self) -> None:
        """Until cancelled."""
        await self._needed.wait()
        while True:
            self._hinted.clear()
            try:
                await self._read()
            except (ApiError, msgspec.DecodeError) as error:
                seconds = self._backoff.next_seconds()
                log.warning(
                    Event.KUBELET_VERSION_UNKNOWN, error=str(error), retry_seconds=round(seconds)
                )
                await asyncio.sleep(seconds)
                continue
            self._backoff.reset()
            try:
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._hinted.wait()
            except TimeoutError:
                continue
            # It writes its version with its first status, some seconds after its start.
            await asyncio.sleep(_STATUS_SECONDS)

    async def _read(self) -> None:
        """Raises `ApiError`, and `msgspec.DecodeError` for what is no list of nodes."""
        body = await self._api.request("GET", "/api/v1/nodes", query=self._query)
        for node in responses.decode(body, _NodeList).items:
            if agent := user_agent(node.status.node_info.kubelet_version):
                self._publish(agent)


def user_agent(version: str) -> str | None:
    """Of a kubelet of this version (pkg/probe/http/request.go); None for what is no version."""
    found = _VERSION.fullmatch(version)
    if found is None:
        return None
    return f"kube-probe/{found[1]}.{found[2]}{'+' if found[3] else ''}"
