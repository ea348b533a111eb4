"""The built site in a real browser: reading, searching, guessing, stepping; by mouse, by keyboard, from a file."""

import json
from pathlib import Path

import pytest

from .conftest import PAGES, ROOT

pytestmark = pytest.mark.site

LOAD = {"wait_until": "load"}
WIDTHS_SCRIPT = "() => [document.documentElement.scrollWidth, window.innerWidth]"
VITALS = """
  window.__shift = 0;
  new PerformanceObserver((list) => { for (const e of list.getEntries()) if (!e.hadRecentInput) window.__shift += e.value; })
    .observe({ type: "layout-shift", buffered: true });
"""


def pages_with(site: Path, what: str) -> list[str]:
    return [page for page in PAGES if what in (site / page).read_text(encoding="utf-8")]


def search(page, words):
    """Type the words into the search, as a reader does; the links found, best first."""
    field = page.locator("input.md-search__input")
    field.click()
    field.press("Control+A")
    field.press("Backspace")
    page.wait_for_function("() => !/matching/.test(document.querySelector('.md-search-result__meta').textContent)")
    field.press_sequentially(words)
    page.wait_for_function("() => /matching/.test(document.querySelector('.md-search-result__meta').textContent)")
    page.wait_for_timeout(250)          # the last letters are still on their way to the index
    return page.locator(".md-search-result__item a.md-search-result__link").all()


def test_reading_from_the_first_page_to_the_last(base, open_page):
    """`Next` walks the whole navigation, `Previous` walks back; nothing fails or complains on the way, nothing is asked of others."""
    watched = open_page()
    page = watched.page
    page.goto(base + PAGES[0], **LOAD)
    for i, name in enumerate(PAGES):
        assert page.url == base + name
        assert page.locator("article h1").count() == 1
        if i + 1 < len(PAGES):
            page.locator(".md-footer__link--next").click()
            page.wait_for_url(base + PAGES[i + 1], **LOAD)
    page.locator(".md-footer__link--prev").click()
    page.wait_for_url(base + PAGES[-2], **LOAD)
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith(base)] == []


def test_from_a_file(site, open_page):
    """Every page opened as a file: no request leaves the folder, nothing complains; the search finds there too."""
    watched = open_page()
    page = watched.page
    for name in PAGES:
        page.goto((site / name).as_uri(), **LOAD)
    page.goto((site / PAGES[4]).as_uri(), **LOAD)
    found = search(page, "__syncthreads")
    assert found, "the search finds nothing when opened as a file"
    assert found[0].get_attribute("href").startswith("file://")
    assert watched.complaints == []
    assert [url for url in watched.requests if not url.startswith((site.as_uri(), "about:", "data:"))] == []


def test_search_finds_identifiers_whole_and_in_part(site, base, open_page):
    """The page that comes first holds the word; a word that the book does not hold finds nothing."""
    page = open_page().page
    page.goto(base + "about.html", **LOAD)
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    for words in ("__syncthreads", "syncthreads", "sync", "tl.load", "load", "do_bench", "do_b", "bench"):
        found = search(page, words)
        assert found, f"nothing for {words!r}"
        address = found[0].get_attribute("href").removeprefix(base).split("?")[0].split("#")[0]
        text = json.dumps([doc for doc in index if doc["location"].split("#")[0] == address]).lower()
        assert words.strip("_") in text, f"{words!r} led to {address}"
    assert search(page, "xylophone") == []


def test_search_answers_to_first_letters(base, open_page):
    """Digits in the index once made the search fail for all words with one first letter, with a warning alone."""
    watched = open_page()
    watched.page.goto(base + "about.html", **LOAD)
    for letter in "acsmt_1":
        search(watched.page, letter)
    assert watched.complaints == []


def test_dark_and_light(base, open_page):
    """The theme follows the system, the toggle changes it, the choice lasts."""
    page = open_page(color_scheme="light").page
    page.goto(base + "about.html", **LOAD)
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("label[for=__palette_1]:visible").click()
    page.wait_for_function("() => document.body.dataset.mdColorScheme === 'slate'")
    dark = page.evaluate(paper)
    assert light != dark
    page.reload(**LOAD)
    assert page.evaluate(paper) == dark
    other = open_page(color_scheme="dark").page
    other.goto(base + "about.html", **LOAD)
    assert other.evaluate(paper) == dark


def test_predict_box_keeps_the_guess(site, base, open_page):
    names = pages_with(site, 'form class="predict"')
    assert names, "no page has a predict box"
    page = open_page().page
    page.goto(base + names[0], **LOAD)
    form = page.locator("form.predict").first
    answer = float(form.get_attribute("data-answer"))
    assert not form.locator("output").is_visible()
    assert form.locator("details").get_attribute("open") is None
    form.locator("button[type=submit]").click()            # nothing typed: nothing revealed
    assert not form.locator("output").is_visible()
    form.locator("input").fill("2")
    form.locator("input").press("Enter")
    verdict = form.locator("output").inner_text()
    assert "You guessed 2" in verdict
    assert f"Guess over record: {2 / answer:.3g}".rstrip("0") in verdict or "That is the figure itself" in verdict or "e" in f"{2 / answer:.3g}"
    assert form.locator("details").get_attribute("open") is not None
    page.reload(**LOAD)
    form = page.locator("form.predict").first
    assert form.locator("output").inner_text() == verdict
    form.locator("button.predict-reset").click()
    assert not form.locator("output").is_visible()
    page.reload(**LOAD)
    assert page.locator("form.predict").first.locator("input").input_value() == ""


def test_predict_box_from_a_file(site, open_page):
    page = open_page().page
    page.goto((site / pages_with(site, 'form class="predict"')[0]).as_uri(), **LOAD)
    form = page.locator("form.predict").first
    form.locator("input").fill("2")
    form.locator("button[type=submit]").click()
    assert "You guessed 2" in form.locator("output").inner_text()


def test_a_widget_is_stepped_by_keyboard(site, open_page):
    """The first button of a chapter's widget, reached and pressed without a mouse, changes what the widget shows; opened as a file."""
    names = [page for page in PAGES if "assets/widgets/" in (site / page).read_text(encoding="utf-8")]
    if not names and not list((ROOT / "docs/assets/widgets").glob("*.js")):
        pytest.fail("the book has no widget")
    assert names, "no page loads a widget"
    stepped = []
    for name in names:
        page = open_page().page
        page.goto((site / name).as_uri(), **LOAD)
        controls = page.locator("[class*=widget] button:visible:enabled, [id*=widget] button:visible:enabled, [data-widget] button:visible:enabled")
        for i in range(min(controls.count(), 4)):
            text = "() => [...document.querySelectorAll('[class*=widget], [id*=widget], [data-widget]')].map((e) => e.outerHTML).join()"
            before = page.evaluate(text)
            controls.nth(i).focus()
            page.keyboard.press("Enter")
            if page.evaluate(text) != before:
                stepped.append(name)
                break
    assert stepped, f"no button of a widget changes anything on {names}"


def test_copy_button(base, site, open_page):
    name = pages_with(site, '<div class="language-python highlight">')[0]
    watched = open_page(permissions=["clipboard-read", "clipboard-write"])
    page = watched.page
    page.goto(base + name, **LOAD)
    block = page.locator(".language-python.highlight").first
    block.locator("button[data-clipboard-target]").click()
    assert page.evaluate("() => navigator.clipboard.readText()").strip() == block.locator("code").inner_text().strip()


def test_the_menu_opens_by_keyboard_at_phone_width(base, open_page):
    page = open_page(width=390).page
    page.goto(base + "about.html", **LOAD)
    button = page.locator("header label[for=__drawer]")
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('__drawer').checked")


PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 1e9"


def test_narrow_light_and_quick(base, open_page):
    """At 390 px no page scrolls sideways; what is painted stays where it is, and soon."""
    watched = open_page(width=390)
    page = watched.page
    page.add_init_script(VITALS)
    wide, shifting, slow = [], [], []
    for name in PAGES:
        page.goto(base + name, **LOAD)
        page.wait_for_timeout(120)
        scroll, inner = page.evaluate(WIDTHS_SCRIPT)
        if scroll > inner:
            wide.append((name, scroll))
        shift = page.evaluate("() => window.__shift")
        if shift >= 0.02:
            shifting.append((name, shift))
        paints = [page.evaluate(PAINT)]
        while min(paints) >= 1000 and len(paints) < 5:  # a busy machine is late by chance, a heavy page always
            page.goto(base + name, **LOAD)
            page.wait_for_timeout(500)
            paints.append(page.evaluate(PAINT))
        if min(paints) >= 1000:
            slow.append((name, paints))
    assert wide == []
    assert shifting == []
    assert slow == []


@pytest.fixture(scope="module")
def axe_page(browser):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    yield context.new_page()
    context.close()


INVISIBLE = """() => [...document.querySelectorAll('article button, article a, article label, article th, article td, article summary')].filter((one) => {
      if (!one.textContent.trim() || !one.offsetWidth) return false;
      let ground = one, color = 'rgba(0, 0, 0, 0)';
      while (ground && color === 'rgba(0, 0, 0, 0)') { color = getComputedStyle(ground).backgroundColor; ground = ground.parentElement; }
      return getComputedStyle(one).color === color;
    }).map((one) => one.outerHTML.slice(0, 160))"""


@pytest.mark.parametrize("name", PAGES)
def test_accessible_in_light_and_dark(base, axe_page, name):
    """axe finds nothing, with everything unfolded. What is the same on all pages is left to a few: header, menu and footer, and the insides of listings."""
    from axe_playwright_python.sync_playwright import Axe

    page = axe_page
    page.goto(base + name, **LOAD)
    page.evaluate("() => document.querySelectorAll('article details').forEach((one) => { one.open = true; })")
    page.add_style_tag(content="*, *::before, *::after { transition: none !important; animation: none !important; }")  # a color on its way is none of the theme's
    whole = name.startswith("labs/") or name in ("index.html", "about.html", "cuda/tiles.html")
    context = None if whole else {"exclude": [[part] for part in (".highlight pre", ".md-header", ".md-sidebar", ".md-footer")]}
    found = {}
    for theme, options in (("default", {}), ("slate", {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}})):
        page.evaluate("(theme) => { document.body.dataset.mdColorScheme = theme; }", theme)
        page.wait_for_timeout(150)
        assert page.evaluate(INVISIBLE) == [], theme  # axe passes over text in the very color of its ground; here it counts
        result = Axe().run(page, context=context, options=options | {"resultTypes": ["violations"]}).response  # what passed need not be listed
        for violation in result["violations"]:
            found[f"{theme}: {violation['id']}"] = [node["html"][:160] for node in violation["nodes"][:4]]
    assert found == {}
