"""Chromium without a display, by its DevTools protocol (https://chromedevtools.github.io)."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from tests.polling import until

_LIMIT_SECONDS = 60
_PORT_FILE = "DevToolsActivePort"


class Tab:
    """One tab. requests: addresses that it has requested; messages: of the console and security."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._results: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.messages: list[str] = []

    async def read(self) -> None:
        """Handle what the browser sends, until it closes the connection."""
        async for message in self._connection:
            content = json.loads(message.data)
            if "id" in content:
                self._results.pop(content["id"]).set_result(content)
                continue
            method, values = content["method"], content["params"]
            if method == "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
            elif method == "Log.entryAdded":
                self.messages.append(values["entry"]["text"])
            elif method == "Page.loadEventFired":
                self._loaded.set()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._results[number] = future
        await self._connection.send_json({"id": number, "method": method, "params": parameters})
        content = await asyncio.wait_for(future, _LIMIT_SECONDS)
        assert "error" not in content, content
        result: dict[str, Any] = content["result"]
        return result

    async def show(self, url: str, *, width: int, height: int, scheme: str) -> None:
        """Open a page. width, height: in CSS pixels; scheme: light or dark."""
        self.requests.clear()
        self.messages.clear()
        self._loaded.clear()
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), _LIMIT_SECONDS)

    async def value(self, script: str) -> Any:
        """The value of an expression in the page, whatever its policy allows."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    async def picture(self, *, height: int) -> bytes:
        """The page's upper `height` CSS pixels as PNG."""
        width = await self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])


@contextlib.asynccontextmanager
async def tab(directory: pathlib.Path) -> AsyncIterator[Tab]:
    """A tab of a browser of its own. directory: for the browser's profile."""
    program = shutil.which("chromium")
    assert program, "install the package chromium"
    browser = await asyncio.create_subprocess_exec(
        program,
        "--headless",
        "--no-sandbox",  # root cannot have one, and the page is ours
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
        "--remote-debugging-port=0",
        f"--user-data-dir={directory}",
        "about:blank",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Its own processes end with it.
        start_new_session=True,
    )
    try:
        port_file = directory / _PORT_FILE
        await until("Chromium listens", lambda: port_file.exists() and port_file.read_text())
        port = port_file.read_text().splitlines()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as response:
                pages = [page for page in await response.json() if page["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as connection:
                opened = Tab(connection)
                reading = asyncio.create_task(opened.read(), name="devtools")
                try:
                    for domain in ("Page", "Network", "Log", "Runtime"):
                        await opened.call(f"{domain}.enable")
                    yield opened
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        await browser.wait()
