"""A real Chromium, driven through its DevTools port: no other package is needed."""

import base64
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from holdfast import proc
from patience import auntil


def find() -> str | None:
    """The browser of this machine; `CHROMIUM` names another."""
    return (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.problems: list[str] = []
        """Errors, and what the content security policy has refused."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Ask the browser for something."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            said = await self._socket.receive_json()
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(str(said["params"]))
            if said.get("id") == self._number:
                assert "error" not in said, said
                return dict(said["result"])

    async def look(self, script: str) -> Any:
        """What a script gives."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a script gives something true."""
        await auntil(lambda: self.look(script), script)

    async def shape(self, width: int, *, dark: bool = False) -> None:
        """The size of the window, and the colours that its owner likes."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def shot(self, path: Path) -> None:
        """Keep a picture of the whole page."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def tab(program: str, folder: Path, url: str) -> AsyncIterator[Tab]:
    """A browser with one page, which ends with the block."""
    profile = folder / "profile"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    command = [program, *flags, f"--user-data-dir={profile}", "about:blank"]
    child = proc.spawn(command, name="chromium", log=folder / "chromium.log")
    try:
        told = profile / "DevToolsActivePort"
        await auntil(lambda: told.exists() and told.read_text().count("\n"))
        port = int(told.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                [page] = [one for one in await answer.json() if one["type"] == "page"]
            address = page["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=1 << 26) as socket:
                one = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await one.call(f"{domain}.enable")
                await one.shape(1280)
                await one.call("Page.navigate", url=url)
                yield one
    finally:
        child.kill_group()
