"""The API client of the leader: it writes only while this process holds the Lease."""

from collections.abc import Mapping

from agent.controller.lease import Lease
from agent.kube.client import JSON, ApiClient, ApiError

_REQUEST_SECONDS = 30.0


class NotLeaderError(ApiError):
    """A write that was not sent, since this process no longer holds the Lease."""


class LeaderClient(ApiClient):
    """An `ApiClient` whose writes end before another candidate may take over.

    Reads and watches are those of any client. A write carries the resource version of what it
    changes where its result depends on that, so that even a request that is delivered late is
    rejected (409) and not applied.
    """

    lease: Lease | None = None
    """Set once, after `open`. Without it nothing is written."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
        accept: str = JSON,
        timeout_seconds: float = _REQUEST_SECONDS,
    ) -> bytes:
        """As `ApiClient.request`. Raises `NotLeaderError` for a write of a former leader."""
        if method != "GET":
            remaining = self.lease.remaining_seconds() if self.lease else 0.0
            if remaining <= 0:
                raise NotLeaderError("this process is not the leader; nothing was written")
            timeout_seconds = min(timeout_seconds, remaining)
        return await super().request(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            accept=accept,
            timeout_seconds=timeout_seconds,
        )
