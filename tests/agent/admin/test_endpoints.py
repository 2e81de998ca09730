"""/metrics, /healthz and /readyz: who gets which response."""

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from agent.admin import endpoints


class Process:
    unhealthy = ""
    unready: str | None = None

    def unhealthy_reason(self) -> str | None:
        return self.unhealthy

    def unready_reason(self) -> str | None:
        return self.unready

    async def metrics(self) -> bytes:
        return b"up 1\n"


async def responses(**options: Any) -> dict[str, tuple[int, str]]:
    """By path."""
    process = Process()
    process.unready = "pod shop/web has no gate"
    async with TestClient(TestServer(endpoints.application(process, **options))) as client:
        found = {}
        for path in ("/healthz", "/readyz", "/metrics"):
            response = await client.get(path)
            found[path] = (response.status, await response.text())
            if path == "/metrics" and response.status == 200:
                content_type = response.headers["Content-Type"]
                assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return found


async def test_process_is_healthy_and_not_ready_for_a_reason() -> None:
    assert await responses() == {
        "/healthz": (200, "ok\n"),
        "/readyz": (503, "pod shop/web has no gate\n"),
        "/metrics": (200, "up 1\n"),
    }


async def test_reason_is_not_shown_to_clients_that_may_not_read_names_of_pods() -> None:
    async def reject(request: web.Request) -> web.Response | None:
        return web.Response(status=401, text="no\n")

    assert await responses(reject=reject, shows_reasons=False) == {
        "/healthz": (200, "ok\n"),
        "/readyz": (503, "not ok; the reason is in the agent's log and in podgate status\n"),
        "/metrics": (401, "no\n"),
    }


@pytest.mark.parametrize(
    ("host", "remote", "is_served"),
    [
        ("127.0.0.1:9650", "127.0.0.1", True),
        ("[::1]:9650", "::1", True),
        ("localhost:9650", "127.0.0.1", True),
        ("198.18.0.1:9650", "127.0.0.1", False),
        ("pages.example:9650", "127.0.0.1", False),
        ("127.0.0.1:9650", "198.18.0.1", False),
        ("localhost", "fd00:18::1", False),
        ("localhost", "", False),
        ("localhost", "unix:", False),
    ],
)
async def test_names_of_pods_are_for_this_machine_by_its_own_name(
    host: str, remote: str, *, is_served: bool
) -> None:
    request = make_mocked_request("GET", "/metrics", headers={"Host": host})
    rejection = await endpoints.reject_remote(request.clone(remote=remote))
    if is_served:
        assert rejection is None
        return
    assert rejection is not None
    assert (rejection.status, rejection.text) == (
        403,
        "this is served to this machine only; for metrics see --metrics-address\n",
    )
