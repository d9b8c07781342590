"""A headless Chromium, driven over its DevTools protocol through a pipe: no driver, no port, no package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LIMIT_SECONDS = 300  # for anything that a page should do at once, on a busy machine
AXE = Path(__file__).parents[1] / "watch" / "vendor" / "axe.min.js"
OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows", "--disable-gpu",
    "--disable-renderer-backgrounding", "--disable-dev-shm-usage", "--hide-scrollbars", "--lang=en-US",
    "--force-color-profile=srgb",
)  # fmt: skip
KEYS = {
    "Enter": 13, "Escape": 27, "Tab": 9, "Space": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


def chromium() -> str:
    """The path of Chromium. Without it the test is skipped, in CI it fails."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    reason = "Chromium is not installed: apt-get install chromium"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class ScriptError(Exception):
    """An exception in the page."""


class Browser:
    """A Chromium with a profile of its own. Every page has its own cookies and storage."""

    def __init__(self, profile: Path) -> None:
        options = [*OPTIONS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        # Chromium reads the protocol from descriptor 3 and writes it to descriptor 4.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>/dev/null', chromium(), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._last = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self.pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        left = b""
        while data := self._process.stdout.read1(1 << 20):  # type: ignore[attr-defined]
            *messages, left = (left + data).split(b"\0")
            for message in map(json.loads, messages):
                with self._changed:
                    if "id" in message:
                        self._answers[message["id"]] = message
                    elif page := self.pages.get(message.get("sessionId", "")):
                        page.hear(message["method"], message["params"])
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        assert self._process.stdin is not None
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._process.stdin.write(json.dumps(message).encode() + b"\0")  # without the lock, which the reader needs
        self._process.stdin.flush()
        with self._changed:
            answered = self._changed.wait_for(lambda: number in self._answers, LIMIT_SECONDS)
            assert answered, f"no answer to {method}"
            answer = self._answers.pop(number)
        if "error" in answer:
            raise ScriptError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """A new page at this address."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log", "Audits"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        page.emulate(scheme)
        page.send("Emulation.setFocusEmulationEnabled", enabled=True)
        page.send("Page.navigate", url=url)
        return page

    def close(self) -> None:
        self.send("Browser.close")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT_SECONDS)
        self._reader.join(LIMIT_SECONDS)
        self._process.stdout.close()


class Page:
    """A tab: what it requested, what went wrong in it, and the means to use it as a person does."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target
        self.requests: list[str] = []
        self.problems: list[str] = []  # errors and warnings of the console, exceptions, violations of the policy
        self.dialogs: list[str] = []  # what a script that should not run would show

    def hear(self, method: str, event: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(event["url"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(each.get("value", each.get("description"))) for each in event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and event["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.problems.append(json.dumps(event["issue"]["details"]))
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(event["message"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if details := answer.get("exceptionDetails"):
            raise ScriptError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression once it is true. Until then it may raise, because parts of the page are absent."""
        deadline = time.monotonic() + LIMIT_SECONDS
        seen: Any = None
        while time.monotonic() < deadline:
            try:
                if seen := self.evaluate(f"((value) => value instanceof Node || value)({expression})"):
                    return seen
            except ScriptError as error:
                seen = error
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(
            f"the page did not come to {expression} (last: {seen}); problems: {self.problems}; text: {text[:1500]}"
        )

    def texts(self, selector: str) -> list[str]:
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")

    def click(self, selector: str, containing: str = "") -> None:
        """A click with the mouse in the middle of the first such element, once it is there and visible."""
        found = (
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".find((e) => e.textContent.includes({json.dumps(containing)}) && e.getClientRects().length)"
        )
        self.wait(f"!!{found}")
        place = self.evaluate(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            " return {x: r.x + r.width / 2, y: r.y + r.height / 2}; })()"
        )
        self.mouse("mousePressed", **place)
        self.mouse("mouseReleased", **place)

    def mouse(self, kind: str, x: float, y: float) -> None:
        button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key of the keyboard; `modifiers` 8 is Shift."""
        text = key if len(key) == 1 else {"Enter": "\r", "Space": " "}.get(key)
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        name = " " if key == "Space" else key
        words = {"key": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **words, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **words)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def emulate(self, scheme: str, motion: str = "no-preference") -> None:
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        self.send("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in features.items()])

    def barriers(self) -> list[str]:
        """Serious and critical findings of axe-core."""
        if not self.evaluate("'axe' in globalThis"):
            self.evaluate(AXE.read_text())
        found = self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations"
            ".filter((v) => ['serious', 'critical'].includes(v.impact))"
            ".map((v) => `${v.id}: ${v.help}: ${v.nodes.slice(0, 3).map((n) => n.html).join(' ')}`))"
        )
        assert isinstance(found, list)
        return found

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A Chromium that ends with the block."""
    made = Browser(profile)
    try:
        yield made
    finally:
        made.close()
