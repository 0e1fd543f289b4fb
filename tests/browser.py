"""A headless Chromium, spoken to through chromedriver's WebDriver interface with the standard library alone."""

import base64
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from waiting import wait_for_line

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "needs a browser: apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window. `log` has the kinds `browser` (console) and `performance` (network among others)."""

    def __init__(self, address: str, session: str):
        self._session = f"{address}/session/{session}"

    def _call(self, method: str, path: str, body: dict | None = None):
        return _request(f"{self._session}/{path}", method, body)

    def open(self, page: Path) -> None:
        self.visit(page.resolve().as_uri())

    def visit(self, address: str) -> None:
        self._call("POST", "url", {"url": address})

    def run(self, script: str, *arguments: object):
        """The value that the script returns."""
        return self._call("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: object) -> dict:
        """A command of the DevTools protocol."""
        return self._call("POST", "goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int = 900, phone: bool = False) -> None:
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """`dark` or `light`."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def hover(self, element: dict) -> None:
        """The mouse moves onto an element of a script's answer."""
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element}
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]})

    def press(self, key: str) -> None:
        """A key for the element in focus, as WebDriver codes it."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._act({"type": "key", "id": "keyboard", "actions": actions})

    def _act(self, source: dict) -> None:
        self._call("POST", "actions", {"actions": [source]})

    def click(self, element: dict) -> None:
        self._call("POST", f"element/{element[_ELEMENT]}/click", {})

    def log(self, kind: str) -> list[dict]:
        """The events since the last call."""
        return self._call("POST", "se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses of everything that was asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """The page as PNG, all of it or the window alone."""
        found = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))


def _request(url: str, method: str, body: dict | None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{method} {urlsplit(url).path}: {error.read().decode()[:500]}") from None


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in `folder`; it ends with the context."""
    log = folder.with_name(f"{folder.name}.log")
    with log.open("w") as lines:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=lines, stderr=lines)
    try:
        port = wait_for_line(driver, log, r"started successfully on port (\d+)")
        address = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = _request(f"{address}/session", "POST", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _request(f"{address}/session/{session}", "DELETE", None)
    finally:
        driver.terminate()
        driver.wait()
