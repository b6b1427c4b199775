"""The page that shows the scripts side by side, in a real browser."""
import itertools
import re
import shutil

import build_page
import pytest
import search
from conftest import ROOT

PAGE = ROOT / "docs/index.html"
SHOWN, CONTRAST = ((ROOT / f"tests/programs/{name}.js").read_text() for name in ("shown", "contrast"))


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver",
                                    reason="no Selenium: pip install -r requirements/drill.txt")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    html = build_page.build()
    assert re.findall(r"<(?:link|script|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?([^\"' >]*)", html) == ["data:,"]
    assert not re.search(r"@import|url\(", html)  # so the page loads nothing
    PAGE.write_text(html)
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for name in ("headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars", "disable-background-networking"):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.set_script_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture
def page(browser):
    """Return a function that opens the page at an address, wide or narrow, light or dark, without stored settings."""

    def open_page(address="", width=1366, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        browser.get(PAGE.as_uri())
        browser.execute_script("localStorage.clear()")
        browser.get("about:blank")
        browser.get(PAGE.as_uri() + address)
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        return browser

    browser.get_log("browser")
    yield open_page
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def becomes(wanted, get):
    """Wait until `get()` returns the expected value, because some browser actions take time."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(None, 10, 0.02).until(lambda _: get() == wanted, f"not {wanted}")


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*keys).perform()


def address(browser):
    return browser.current_url.partition("#")[2]


def shown(browser, pairs, unified=False):
    found = []
    for start in range(0, len(pairs), 14):  # the browser answers within 30 s, or not at all
        part = browser.execute_async_script(SHOWN, pairs[start:start + 14], unified)
        assert isinstance(part, list), part
        found += part
    return dict(zip(map(tuple, pairs), found, strict=True))


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_pair_shows_both_scripts_whole_and_the_numbers_of_the_markers(page, step):
    """The test compares each script with its parents, and the next script with it: all pairs would take minutes.

    By day, it compares each fourth of these pairs.
    """
    browser = page()
    scripts = build_page.read_scripts()
    families = [(parent, script.name) for script in scripts.values() for parent in script.parents]
    backward = [pair[::-1] for pair in itertools.pairwise(scripts)]
    pairs = sorted({*families, *backward})[::step]
    lines = {name: list(enumerate(script.lines, 1)) for name, script in scripts.items()}
    for (left, right), found in shown(browser, pairs).items():
        assert [(number, text) for number, text, *_ in found["rows"] if text is not None] == lines[left]
        assert [(number, text) for _, _, number, text, _ in found["rows"] if text is not None] == lines[right]
        if scripts[right].parents == [left]:
            assert found["count"] == sum(block.changed for block in scripts[right].blocks)
            assert found["blocks"] == [block.reason for block in scripts[right].blocks]
    for (_, right), found in shown(browser, pairs[::4], unified=True).items():
        assert [(number, text) for _, _, number, text, _ in found["rows"] if text is not None] == lines[right]


def test_keys_step_through_the_changes(page):
    browser = page("#train.py...train_DDP.py")
    reasons = [block.reason for block in build_page.read_scripts()["train_DDP.py"].blocks]
    changes, live = len(reasons), browser.find_element("id", "live")
    assert browser.find_element("id", "position").text == f"{changes} changes"
    for number in range(1, changes + 1):
        press(browser, "j")
        assert browser.find_element("id", "position").text == f"change {number} of {changes}"
        assert reasons[number - 1] in live.get_attribute("textContent")
        assert 0 <= browser.execute_script("return document.activeElement.getBoundingClientRect().top") < 800
    press(browser, "k", "u")
    assert address(browser) == f"train.py...train_DDP.py:{changes - 1}"
    assert browser.find_elements("css selector", "#diff table.unified")


def test_a_pitfall_stands_beside_its_lines(page):
    note = page("#train.py...train_DDP.py").find_element("css selector", "#diff details[data-trap=D2]")
    block = note.find_element("xpath", "ancestor::tbody")
    assert "range(rank, len(val_set), world_size)" in block.get_attribute("textContent")
    note.find_element("tag name", "summary").click()
    becomes(True, lambda: "Symptom" in note.text)


@pytest.mark.parametrize("dark", [False, True])
def test_everything_can_be_read(page, dark):
    browser = page("#train.py...train_DDP.py", dark=dark)
    press(browser, "j", "f")
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    assert browser.execute_script(CONTRAST) == {}


def test_the_search_box_finds_what_the_command_finds(page):
    browser = page()
    sections = search.read()
    weights = search.weigh(sections)
    symptoms = (ROOT / "tests/unit/symptoms.txt").read_text().splitlines()
    texts = [line.split(" -> ")[0] for line in symptoms if line and not line.startswith("#")]
    found = browser.execute_script("return arguments[0].map(text => search(text).map(number =>"
                                   " bestLine(index.sections[number][1], text)))", texts)
    assert found == [[search.best_line(section, text) for section in search.search(sections, weights, text)]
                     for text in texts]
    assert browser.execute_script(
        "return index.sections.flatMap(([targets]) => targets.map(([, address]) => address))"
        ".filter(address => address[0] === '#' && !byId(address.slice(1)))") == []


def test_the_search_box_works_with_the_keyboard(page):
    from selenium.webdriver import Keys

    browser = page()
    press(browser, "/", "stops in the first epoch, keys begin with module.")
    assert browser.find_element("id", "found").text == "5 results"
    links = browser.find_elements("css selector", "#results a")
    assert "#E5" in [link.get_attribute("href").partition("index.html")[2] for link in links]
    press(browser, Keys.TAB)
    assert browser.execute_script("return document.activeElement") == links[0]
    assert browser.execute_script(CONTRAST) == {}
    press(browser, Keys.SHIFT, Keys.TAB)
    browser.find_element("id", "query").clear()
    browser.find_element("id", "query").send_keys("qwertz")
    assert browser.find_element("id", "found").text == "No page has any of these words."


def test_chosen_ideas_show_where_they_meet(page):
    browser = page("#ideas=amp+grad_accum")
    combined = build_page.read_scripts()["train_combined.py"]
    both = [combined.lines[block.first - 1].strip() for block in combined.marked
            if block.reason.startswith("amp + grad_accum:")]
    meeting = [block.text for block in browser.find_elements("css selector", "#diff .meeting")]
    assert len(both) >= 2 and all(any(line in text for text in meeting) for line in both)
    browser.find_element("css selector", "[data-idea=amp]").click()
    becomes("ideas=grad_accum", lambda: address(browser))
