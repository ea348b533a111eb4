"""The built site, served and in a real browser.

BOOK_SITE=<folder> tests a site that is already built; without it the site is built once, into a temporary folder, with STALE=show.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync"]
NO_BROWSER = "no Chromium found: `apt-get install chromium` (or `python -m playwright install chromium`), or set CHROMIUM to its path"


def chromium() -> str | None:
    """The path of a Chromium, or None."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"):
        if name and (found := shutil.which(name)):
            return found
    try:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            path = playwright.chromium.executable_path
            return path if Path(path).exists() else None
    except Exception:  # no playwright, or none of its browsers
        return None


def nav_pages() -> list[str]:
    """Addresses of the pages in the navigation, in order, relative to the site."""
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("", lambda loader, suffix, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]

    def walk(items):
        for item in items:
            for value in [item] if isinstance(item, str) else item.values():
                if isinstance(value, str):
                    yield str(Path(value).with_suffix(".html").as_posix())
                else:
                    yield from walk(value)

    return list(walk(nav))


PAGES = nav_pages()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the built site."""
    if given := os.environ.get("BOOK_SITE"):
        folder = Path(given).resolve()
        assert (folder / "index.html").is_file(), f"BOOK_SITE={given} holds no built site"
        return folder
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        return build(tmp_path_factory.mktemp("site") / "site")
    room = tmp_path_factory.getbasetemp().parent  # which all workers share: one builds, the others wait
    folder, failed = room / "site", room / "failed.txt"
    try:
        (room / "building").mkdir()
    except FileExistsError:
        until = time.monotonic() + 300
        while not (room / "built").exists():
            assert not failed.exists(), failed.read_text(encoding="utf-8")
            assert time.monotonic() < until, "the worker that builds the site has not ended"
            time.sleep(0.2)
        return folder
    try:
        build(folder)
    except BaseException as error:
        failed.write_text(str(error), encoding="utf-8")
        raise
    (room / "built").mkdir()
    return folder


def build(folder: Path) -> Path:
    environment = {**os.environ, "STALE": "show", "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                          cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"the site does not build:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return folder


@pytest.fixture(scope="session")
def base(site):
    """The address of the site on a local server, with a slash at its end."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    path = chromium()
    if path is None:
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=ARGS)
        yield running
        running.close()


class Watched:
    """A page with everything that it asked for and everything that it complained about."""

    def __init__(self, context):
        self.page = context.new_page()
        self.requests, self.complaints = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", lambda response: self.complaints.append(f"{response.status}: {response.url}") if response.status >= 400 else None)
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))

    def _failed(self, request):
        if request.failure != "net::ERR_ABORTED":      # leaving a page cuts off what it still asked for
            self.complaints.append(f"failed: {request.url} {request.failure}")


@pytest.fixture
def open_page(browser):
    """open_page(width=…, color_scheme=…) → a Watched page in a context of its own."""
    contexts = []

    def make(width=1280, height=800, color_scheme="light", **more):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=color_scheme, **more)
        context.set_default_timeout(8000)
        contexts.append(context)
        return Watched(context)

    yield make
    for context in contexts:
        context.close()


class Links(HTMLParser):
    """Every href and src of a page, and every id."""

    def __init__(self, html: str):
        super().__init__()
        self.links, self.ids = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if attributes.get("id") else []
        self.links += [attributes[name] for name in ("href", "src") if attributes.get(name)]
