"""Not a test: Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Self

ANSWER_S = 60.0


class Browser:
    """A headless Chromium with one page. Every wait has a deadline.

    Args:
        profile: an empty folder for it.
    """

    def __init__(self, profile: Path) -> None:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-component-update"]
        flags += ["--disable-background-networking", "--disable-sync", "--remote-debugging-pipe"]
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()

        def at_3_and_4() -> None:  # where Chromium expects its pipes
            os.dup2(read_there, 13)
            os.dup2(write_there, 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        self._process = subprocess.Popen(
            ["chromium", *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=at_3_and_4,
            pass_fds=(3, 4, read_there, write_there),
        )
        os.close(read_there)
        os.close(write_there)
        self._read, self._write, self._buffer = read_here, write_here, b""
        self._numbers = itertools.count(1)
        self._page: str | None = None
        self.events: list[dict[str, Any]] = []
        """All of the protocol's events so far."""

    def __enter__(self) -> Self:
        targets = self.send("Target.getTargets")["targetInfos"]
        (page,) = [target["targetId"] for target in targets if target["type"] == "page"]
        self._page = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._page is not None:
            message["sessionId"] = self._page
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], ANSWER_S)
            assert ready, "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url: str) -> None:
        """Go there, and wait until the page has loaded."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, within_s: float = 60.0) -> None:
        """Wait until the expression holds."""
        deadline = time.monotonic() + within_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, pressed and released."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def size(self, width: int, height: int) -> None:
        """Of the window, in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, to: Path) -> None:
        to.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    @property
    def errors(self) -> list[str]:
        """What went wrong in pages so far: exceptions, and errors on the console."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        found = [event["params"] for event in self.events if event.get("method") in kinds]
        return [json.dumps(each) for each in found if each.get("entry", {"level": "error"})["level"] == "error"]

    @property
    def hosts(self) -> set[str]:
        """Hosts that pages asked for anything."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return {url.split("/")[2] for url in asked if url.startswith(("http", "ws"))}
