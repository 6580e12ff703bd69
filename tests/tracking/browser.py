"""Chromium without a window, on the pages of an MLflow server: what a person would see there."""

from __future__ import annotations

import contextlib
import io
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

#: Debian's names, and those of others.
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"

#: Of one wait, in seconds: a page of MLflow's loads megabytes of scripts, on a machine that does other things.
PATIENCE = 180.0
WIDTH, HEIGHT = 1280, 800

#: It asks nobody but the server. It is told that there is a mouse: without one MLflow's charts show all their buttons.
ARGUMENTS = (
    "--headless=new",
    f"--window-size={WIDTH},{HEIGHT}",
    "--no-sandbox",  # which root can't have
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
    "--lang=en-US",
)

#: MLflow opens a panel to chat in on the first visit.
NO_CHAT = {"mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true", "mlflow.assistant.panelOpen_v1": "false"}

#: Of a screenshot that is kept, and the seconds in which nothing in it may move.
COLOURS = 128
MOMENT = 0.5

T = TypeVar("T")


def missing() -> str | None:
    """Why there can be no browser here; None where there can."""
    if find_spec("selenium") is None:
        return "selenium is not installed"
    if program() is None:
        return f"there is no Chromium: none of {', '.join(PROGRAMS)} is on the path"
    return None if shutil.which(DRIVER) else f"there is no {DRIVER} (Debian: chromium-driver)"


def program() -> str | None:
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A WebDriver; what it writes is in a folder of the test's, and its processes end with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program()
    for argument in (*ARGUMENTS, f"--user-data-dir={folder}/profile"):
        options.add_argument(argument)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(folder))
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "localhost,127.0.0.1")
        service = Service(shutil.which(DRIVER), log_output=str(folder / "driver.log"))
        driver = webdriver.Chrome(options, service)
        driver.set_page_load_timeout(PATIENCE)
        driver.set_script_timeout(PATIENCE)
        family = [*psutil.Process(service.process.pid).children(recursive=True), psutil.Process(service.process.pid)]
        try:
            yield driver
        finally:
            with contextlib.suppress(Exception):  # of one that hangs
                driver.quit()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


class Pages:
    """The pages of a server.

    Args:
        driver: a WebDriver.
        uri: of the server.
        pictures: a folder for screenshots; none are written where None.
    """

    def __init__(self, driver: Any, uri: str, pictures: Path | None = None) -> None:
        self.driver = driver
        self._uri = uri
        self._pictures = pictures
        driver.get(f"{uri}/health")
        for key, value in NO_CHAT.items():
            driver.execute_script("localStorage.setItem(arguments[0], arguments[1])", key, value)

    def open(self, link: str) -> None:
        """Opens a page anew, by its link or by its place in the UI, as MLflow shows training."""
        self.driver.get("about:blank")  # another fragment of the same address is no new page
        self.driver.get(link if "://" in link else f"{self._uri}/#/{link}?workflowType=machine_learning")

    def text(self) -> str:
        """What is to be read, blanks and ends of lines made one blank."""
        return " ".join(str(self.driver.execute_script("return document.body.innerText")).split())

    def sees(self, *texts: str) -> None:
        """Waits until all of the texts are on the page."""
        sought = [" ".join(text.split()) for text in texts]

        def lacks() -> list[str]:
            text = self.text()
            return [part for part in sought if part not in text]

        self.until(lambda: not lacks(), f"{sought} on the page")

    def until(self, found: Callable[[], T], what: str = "that") -> T:
        """Waits until a function gives something; where the page changes while it looks, it looks again."""
        from selenium.common.exceptions import StaleElementReferenceException, TimeoutException, WebDriverException
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = (StaleElementReferenceException, WebDriverException)
        waiting = WebDriverWait(self.driver, PATIENCE, 0.1, ignored)
        try:
            return waiting.until(lambda _: found())
        except TimeoutException:
            raise AssertionError(f"no {what} in {PATIENCE:.0f} s; the page says:\n{self.text()}") from None

    def find(self, selector: str) -> Sequence[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def click(self, selector: str, text: str = "") -> None:
        """Clicks on the first element that a selector finds and has a text."""

        def clicked() -> bool:
            for element in self.find(selector):
                if not text or element.text.strip() == text:
                    element.click()
                    return True
            return False

        self.until(clicked, f"{selector} with the text {text!r} to click on")

    def type(self, placeholder: str, text: str) -> None:
        """Types into the field that says so."""
        (field,) = self.until(lambda: self.find(f"input[placeholder={placeholder!r}]"), f"field {placeholder}")
        field.send_keys(text)

    def photograph(self, name: str, above: tuple[str, str] | None = None) -> None:
        """Writes what is seen, once nothing moves any more, as a PNG with few colours.

        Args:
            name: of the file.
            above: a selector and a text: the picture ends above the element.
        """
        if self._pictures is None:
            return
        from PIL import Image

        self._pictures.mkdir(parents=True, exist_ok=True)
        with Image.open(io.BytesIO(self.until(self._still, "page that stands still"))) as seen:
            bottom = next((each.rect["y"] for each in self.find(above[0]) if each.text == above[1]), 0) if above else 0
            seen.crop((0, 0, seen.width, bottom or seen.height)).convert("RGB").quantize(COLOURS).save(
                self._pictures / f"{name}.png", optimize=True
            )

    def _still(self) -> bytes | None:
        """What is seen, if it is the same a moment later."""
        seen: bytes = self.driver.get_screenshot_as_png()
        time.sleep(MOMENT)
        return seen if seen == self.driver.get_screenshot_as_png() else None
