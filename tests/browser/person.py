"""What a person does with a page, by Chromium's own mouse and keyboard, and the server that sees it."""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flask import Flask
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait
from werkzeug.serving import WSGIRequestHandler, make_server

from tests import servers
from tests.harness import wait_until

__all__ = ["Chrome", "Person", "Site", "chromium", "in_a_new_window"]

WAIT_S = 20.0
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@contextlib.contextmanager
def chromium(directory: Path, *, javascript: bool = True) -> Iterator[Chrome]:
    """Chromium with a profile of its own in the directory; see `servers.missing` for where it isn't there."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        servers.missing("a browser", "install Debian's packages chromium and chromium-driver")
    options = ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={directory}"):
        options.add_argument(flag)
    if not javascript:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    # Given its path, Selenium looks for nothing and downloads nothing.
    chrome = Chrome(options, ChromeService(driver))
    try:
        chrome.set_page_load_timeout(WAIT_S)
        yield chrome
    finally:
        chrome.quit()


@contextlib.contextmanager
def in_a_new_window(chrome: Chrome) -> Iterator["Person"]:
    """A person at a window with no history; it is closed afterwards."""
    first = chrome.current_window_handle
    chrome.switch_to.new_window("window")
    try:
        yield Person(chrome)
    finally:
        chrome.close()
        chrome.switch_to.window(first)


class Person:
    """Somebody at a window."""

    def __init__(self, chrome: Chrome) -> None:
        self.chrome = chrome

    def open(self, url: str) -> None:
        self.chrome.get(url)

    @property
    def text(self) -> str:
        """What the page says."""
        return self.chrome.find_element(By.TAG_NAME, "body").text

    @property
    def url(self) -> str:
        return str(self.chrome.current_url)

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def value(self, selector: str) -> str:
        """What a form's field holds."""
        return self.find(selector).get_dom_attribute("value") or ""

    def fill(self, selector: str, text: str) -> None:
        """Put the text in the place of what is in the field."""
        field = self.find(selector)
        field.clear()
        field.send_keys(text)

    def click(self, selector: str) -> None:
        ActionChains(self.chrome).click(self.find(selector)).perform()

    def double_click(self, selector: str) -> None:
        """Two clicks as fast as the mouse gives them, a "double click" to the browser."""
        ActionChains(self.chrome).double_click(self.find(selector)).perform()

    def click_twice(self, selector: str, seconds: float) -> None:
        """Two clicks at one place with a pause between, wherever the page is by then."""
        ActionChains(self.chrome).move_to_element(self.find(selector)).click().pause(seconds).click().perform()

    def back(self) -> None:
        """The browser's own button."""
        self.chrome.back()

    def reads(self, text: str) -> None:
        """Wait until the page says so."""
        WebDriverWait(self.chrome, WAIT_S, poll_frequency=0.05, ignored_exceptions=[Exception]).until(
            lambda _: text in self.text, f"the page never said {text!r}"
        )


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


class Site:
    """An app on a real server, and every request that it saw: ``arrivals`` holds ``"POST /orders"`` and the like."""

    def __init__(self, app: Flask) -> None:
        self.arrivals: list[str] = []
        self._server = make_server("127.0.0.1", 0, self._count(app), threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.port}"

    def _count(self, app: Flask) -> Any:
        def counted(environ: Any, start_response: Any) -> Any:
            self.arrivals.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            return app(environ, start_response)

        return counted

    def wait_for(self, arrival: str, count: int) -> None:
        wait_until(lambda: self.arrivals.count(arrival) >= count, f"{arrival} for the {count}. time", WAIT_S)

    def __enter__(self) -> "Site":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
