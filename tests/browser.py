"""A headless Chromium for tests, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

#: Without Chromium's own background requests, all requests that are seen are those of the page.
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)
_TIMEOUT = 60.0


@dataclass
class View:
    """A page as a browser shows it.

    Attributes:
        requests: URLs that were requested, that of the page included, ``data:`` URLs excluded.
        complaints: Console messages, exceptions, and requests that failed or were blocked.
        results: Value of each JavaScript expression.
        picture: PNG of the whole page.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    picture: bytes = b""


def view(page: Path, *expressions: str, width: int = 1200, dark: bool = False) -> View:
    """Opens a file, evaluates expressions and takes a screenshot; skips the test if Chromium is missing."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    pytest.importorskip("aiohttp", reason="talks to Chromium: pip install 'dtrain[http]'")
    return asyncio.run(asyncio.wait_for(_view(browser, page.resolve().as_uri(), expressions, width, dark), _TIMEOUT))


async def _view(browser: str, url: str, expressions: tuple[str, ...], width: int, dark: bool) -> View:
    seen = View()
    async with _tab(browser) as tab:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await tab.call("Emulation.setDeviceMetricsOverride", size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await tab.call("Emulation.setEmulatedMedia", {"features": [theme]})
        await tab.call("Page.navigate", {"url": url})
        await tab.event("Page.loadEventFired")
        for expression in expressions:
            asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
            seen.results[expression] = (await tab.call("Runtime.evaluate", asked))["result"].get("value")
        shot = await tab.call("Page.captureScreenshot", {"captureBeyondViewport": True})
        seen.picture = base64.b64decode(shot["data"])
        for event in tab.events:
            method, details = event["method"], event["params"]
            if method == "Network.requestWillBeSent" and not details["request"]["url"].startswith("data:"):
                seen.requests.append(details["request"]["url"])
            elif method in (
                "Runtime.consoleAPICalled",
                "Runtime.exceptionThrown",
                "Log.entryAdded",
                "Network.loadingFailed",
            ):
                seen.complaints.append(f"{method}: {details}")
    return seen


class _Tab:
    """A connection to one tab."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._sent = 0
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
        self._sent += 1
        await self._socket.send_json({"id": self._sent, "method": method, "params": dict(arguments or {})})
        while (answer := await self._socket.receive_json()).get("id") != self._sent:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def event(self, method: str) -> None:
        while all(event["method"] != method for event in self.events):
            self.events.append(await self._socket.receive_json())


@asynccontextmanager
async def _tab(browser: str) -> AsyncIterator[_Tab]:
    import aiohttp

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await _port(running, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield _Tab(socket)
        finally:
            running.terminate()
            running.wait()


async def _port(running: subprocess.Popen[bytes], file: Path) -> str:
    while not (file.exists() and file.read_text().strip()):
        assert running.poll() is None, f"Chromium ended with {running.returncode}"
        await asyncio.sleep(0.05)
    return file.read_text().split()[0]
