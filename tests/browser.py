"""Drive Chromium by its DevTools protocol over a websocket: pages, keys, clicks, screenshots.

The protocol gives what the tests of the page ask for (every request, every violation of the content
security policy, keys and widths), and needs no package beside aiohttp.
"""

import asyncio
import base64
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from quadriga.clock import now

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0")  # fmt: skip
TIMEOUT_S = 30.0
MAX_LOOK_S = 5.0
"""After so long a page that waits for a condition is asked again."""
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37,
        "ArrowRight": 39, " ": 32, "Home": 36, "End": 35}  # fmt: skip
TEXTS = {"Enter": "\r", " ": " "}
SHIFT, CONTROL = 8, 2


def find_chromium() -> str | None:
    """Return the path of the browser; None: there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@contextmanager
def running_chromium(program: str) -> Iterator[str]:
    """Yield the address of the websocket of a browser that has a profile of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            yield _address(process)
        finally:
            process.kill()
            process.communicate()


def _address(process: "subprocess.Popen[bytes]") -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found.group(1).decode()
    raise AssertionError(f"the browser did not start: status {process.wait()}")


class BrowserError(Exception):
    """The browser refused a command, or a script of a page failed."""


class Connection:
    """Commands to a browser and its events, by the session of a page."""

    def __init__(self, socket: "aiohttp.ClientWebSocketResponse[bool]") -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.pages: dict[str, Page] = {}

    async def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        return await asyncio.wait_for(answer, TIMEOUT_S)

    async def read(self) -> None:
        """Hand on answers and events until the socket closes."""
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._answer(content)
            elif page := self.pages.get(content.get("sessionId", "")):
                page.on_event(content["method"], content["params"])

    def _answer(self, content: dict[str, Any]) -> None:
        answer = self._answers.pop(content["id"])
        if answer.done():
            return
        if "error" in content:
            answer.set_exception(BrowserError(content["error"]["message"]))
        else:
            answer.set_result(content["result"])


class Page:
    """A tab with cookies, storage and cache of its own.

    Attributes:
        requests: addresses that the page asked for.
        complaints: errors of scripts, violations of the content security policy, and warnings.
    """

    def __init__(self, connection: Connection, session: str, target: str) -> None:
        self._connection = connection
        self._session = session
        self.target = target
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command to this page."""
        return await self._connection.send(method, self._session, **parameters)

    def on_event(self, method: str, parameters: dict[str, Any]) -> None:
        """Note a request or a complaint."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", details).get("description", "failed"))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] != "verbose":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Audits.issueAdded" and "Security" in parameters["issue"]["code"]:
            self.complaints.append(str(parameters["issue"]))

    async def open(self, url: str) -> None:
        """Go to an address."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def reload(self) -> None:
        """Load the page again, and return when it is there."""
        await self.evaluate("window.isOld = true")
        await self.send("Page.reload")
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression, or of its promise."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", details).get("description", "failed"))
        return answer["result"].get("value")

    async def until(self, condition: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the value of an expression as soon as it is true."""
        script = (
            f"new Promise((found) => {{ const last = performance.now() + {1000 * MAX_LOOK_S};"
            " const look = () => { const value = (() => { try { return"
            f" ({condition}) }} catch {{ return false }} }})();"
            " if (value) found([value]); else if (performance.now() > last) found(null);"
            " else setTimeout(look, 15) }; look() })"
        )
        ends_at = now() + timeout_s
        while now() < ends_at:
            try:
                if found := await self.evaluate(script):
                    return found[0]
            except BrowserError as error:  # the page was left meanwhile
                if "navigated" not in str(error) and "context" not in str(error):
                    raise
        text = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {condition}\nthe page says:\n{text}")

    async def click(self, selector: str) -> None:
        """Click on the middle of an element that is in view, at rest, and covered by no other."""
        place = await self.until(
            f"(() => {{ const one = document.querySelector({selector!r});"
            " if (document.getAnimations().some(({effect}) => effect.target?.contains(one)))"
            " return false;"
            " one.scrollIntoView({block: 'nearest', inline: 'nearest'});"
            " const box = one.getBoundingClientRect();"
            " const at = [box.x + box.width / 2, box.y + box.height / 2];"
            " return box.width && one.contains(document.elementFromPoint(...at)) && at })()"
        )
        at = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
        await self.send("Input.dispatchMouseEvent", type="mousePressed", **at)
        await self.send("Input.dispatchMouseEvent", type="mouseReleased", **at)

    async def type(self, text: str) -> None:
        """Enter a text where the focus is."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key."""
        code = KEYS.get(key) or ord(key.upper())
        about = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": code}
        text = "" if modifiers & CONTROL else TEXTS.get(key, key if len(key) == 1 else "")
        kind = "keyDown" if text else "rawKeyDown"
        await self.send("Input.dispatchKeyEvent", type=kind, text=text, **about)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    async def set_colors(self, scheme: str) -> None:
        """Prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Set the size of the window, in CSS pixels."""
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                        deviceScaleFactor=1, mobile=is_phone)  # fmt: skip

    async def set_offline(self, is_offline: bool) -> None:
        """Cut all connections of the page, or allow new ones."""
        await self.send("Network.emulateNetworkConditions", offline=is_offline, latency=0,
                        downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        """Write what the window shows as a file in the format of its name, .png or .webp."""
        kind = path.suffix.removeprefix(".")
        quality = {"quality": 80} if kind == "webp" else {}
        answer = await self.send("Page.captureScreenshot", format=kind, **quality)
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def open_page(address: str, url: str, width: int = 1280) -> AsyncIterator[Page]:
    """Yield a new tab of the browser at `address` that shows `url`."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(address, max_msg_size=0) as socket,
    ):
        connection = Connection(socket)
        reading = asyncio.create_task(connection.read())
        context = (await connection.send("Target.createBrowserContext"))["browserContextId"]
        try:
            page = await _new_page(connection, context)
            await page.resize(width, 800)
            await page.open(url)
            yield page
        finally:
            await connection.send("Target.disposeBrowserContext", browserContextId=context)
            reading.cancel()


async def _new_page(connection: Connection, context: str) -> Page:
    target = await connection.send(
        "Target.createTarget", url="about:blank", browserContextId=context
    )
    attached = await connection.send(
        "Target.attachToTarget", targetId=target["targetId"], flatten=True
    )
    page = Page(connection, attached["sessionId"], target["targetId"])
    connection.pages[attached["sessionId"]] = page
    for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
        await page.send(f"{domain}.enable")
    return page
