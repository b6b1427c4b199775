"""The page that shows the scripts side by side, in a real browser."""
import itertools
import json
import re
import shutil
import time

import build_page
import markers
import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
PAGE = DOCS / "index.html"
CHILDREN = [path for path in markers.scripts() if len(markers.parents_of(path)) == 1]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


SCRIPTS = [name_of(path) for path in markers.scripts()]
FAMILIES = [(name_of(parent), name_of(path)) for path in markers.scripts() for parent in markers.parents_of(path)]


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver",
                                    reason="no Selenium: pip install -r requirements-drill.txt")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for name in ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync",
                 "hide-scrollbars", "disable-background-networking", "disable-component-update"):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
    browser.set_script_timeout(60)
    yield browser
    browser.quit()


@pytest.fixture
def page(browser):
    """Return a function that opens the page at an address, wide or narrow, light or dark, as a newcomer."""

    def open_page(address="", width=1366, dark=False, keep=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
        if not keep:
            browser.get(PAGE.as_uri())
            browser.execute_script("localStorage.clear()")
        browser.get("about:blank")
        browser.get(PAGE.as_uri() + address)
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        return browser

    browser.get_log("browser"), browser.get_log("performance")
    yield open_page
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    requested = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [message["params"]["request"]["url"].split("#")[0] for message in requested
                 if message["method"] == "Network.requestWillBeSent"]
    assert set(requested) <= {PAGE.as_uri(), "data:,", "about:blank"}


def script(browser, code, *arguments):
    return browser.execute_script("return " + code, *arguments)


def becomes(wanted, get):
    """Wait until `get()` is what is wanted: some of what a browser does takes a moment."""
    end = time.monotonic() + 10
    while get() != wanted and time.monotonic() < end:
        time.sleep(0.02)
    assert get() == wanted
    return True


def press(browser, *keys):
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(browser).send_keys(key).perform()


def address(browser):
    return browser.current_url.partition("#")[2]


SHOWN = (ROOT / "tests/programs/shown.js").read_text()


def shown(browser, pairs, unified=False):
    found = []
    for start in range(0, len(pairs), 14):  # the browser answers within 30 s, or not at all
        part = browser.execute_async_script(SHOWN, pairs[start:start + 14], unified)
        assert isinstance(part, list), part
        found += part
    return dict(zip(map(tuple, pairs), found, strict=True))


def test_every_pair_shows_both_scripts_whole(page):
    """Each script alone, beside its parents and beside the next one, both ways: all pairs take three minutes."""
    browser = page()
    near = {*FAMILIES, *itertools.pairwise(SCRIPTS)}
    pairs = [*((name, name) for name in SCRIPTS), *sorted(near | {pair[::-1] for pair in near})]
    lines = {name: list(enumerate((ROOT / name).read_text().splitlines(), 1)) for name in SCRIPTS}
    for (left, right), found in shown(browser, pairs).items():
        old = [(number, text) for number, text, *_ in found["rows"] if text is not None]
        new = [(number, text) for _, _, number, text, _ in found["rows"] if text is not None]
        assert (old, new) == (lines[left] if left != right else [], lines[right])
        if left == right:  # a script alone
            assert (found["count"], found["changes"]) == (0, 0)
            assert not any(marked for *_, marked in found["rows"])
    for (left, right), found in shown(browser, pairs, unified=True).items():
        new = [(number, text) for _, _, number, text, _ in found["rows"] if text is not None]
        assert new == lines[right]
        assert {text for _, text, *_ in found["rows"] if text} <= {text for _, text in lines[left]}


def test_the_numbers_are_those_of_the_markers(page):
    pairs = [(name_of(markers.parents_of(path)[0]), name_of(path)) for path in CHILDREN]
    both_ways = pairs + [pair[::-1] for pair in pairs]
    browser = page()
    cards = script(browser, "[...document.querySelectorAll('.card')].map(card => card.innerText)")
    counts = {name_of(path): sum(block.changed for block in markers.compare(path)) for path in CHILDREN}
    blocks = {name_of(path): [block.reason for block in markers.compare(path)] for path in CHILDREN}
    for (left, right), found in shown(browser, both_ways).items():
        child = right if (left, right) in pairs else left
        assert found["count"] == counts[child]
        assert found["changes"] == len(blocks[child])
        assert found["blocks"] == blocks[child]
        if (left, right) in pairs:
            assert any(right in card and f"{found['count']} changed" in card for card in cards)


def test_what_changed_inside_a_line_is_shown(page):
    browser = page("#train.py...train_DDP.py")
    parts = script(browser, "[...document.querySelectorAll('#diff ins, #diff del')].map(e => e.textContent)")
    assert "RandomSampler" in parts and "DistributedSampler" in parts


def test_the_tree_is_the_way_in(page):
    browser = page()
    nested = script(browser, """[...document.querySelectorAll(".card")].map(card =>
        [card.querySelector(".script").textContent, card.parentElement.parentElement.closest("li")
         ?.querySelector(".script").textContent ?? null,
         card.querySelector(".command code").textContent])""")
    assert sorted(name for name, _, _ in nested) == SCRIPTS
    for name, parent, command in nested:
        assert parent == (name_of(markers.parents_of(ROOT / name)[0]) if parent else None)
        assert name in command
    link = browser.find_element("css selector", ".card a.script[href$='train_amp.py']")
    link.click()
    assert becomes("train_DDP.py...train_amp.py", lambda: address(browser))
    assert becomes("compare-title", lambda: script(browser, "document.activeElement.id"))
    assert -5 <= script(browser, "document.getElementById('compare').getBoundingClientRect().top") < 200


def test_folds_open_and_close(page):
    from selenium.webdriver.common.keys import Keys

    browser = page("#train.py...train_DDP.py")
    visible = "[...document.querySelectorAll('#diff tr')].filter(row => row.offsetHeight).length"
    folded = script(browser, visible)
    button = browser.find_element("css selector", "#diff .fold button")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    lines = int(re.search(r"\d+", button.text)[0])
    assert lines <= script(browser, visible) - folded <= lines + 5  # blank lines do not count
    button.click()
    assert script(browser, visible) == folded
    browser.find_element("id", "unfold").click()
    assert script(browser, visible) > 250
    press(browser, "f")
    assert script(browser, visible) == folded


def test_keys_step_through_the_changes(page):
    browser = page("#train.py...train_DDP.py")
    reasons = [block.reason for block in markers.compare(ROOT / "train_DDP.py")]
    changes = len(reasons)

    def position():
        return browser.find_element("id", "position").text

    assert position() == f"{changes} changes"
    for number in range(1, changes + 1):
        press(browser, "j")
        assert position() == f"change {number} of {changes}"
        assert script(browser, "document.activeElement.id") == f"change-{number}"
        box = script(browser, "document.activeElement.getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < 800
    press(browser, "j")
    assert position() == f"change {changes} of {changes}"
    assert "the last" in browser.find_element("id", "live").get_attribute("textContent")
    press(browser, "k", "k")
    assert position() == f"change {changes - 2} of {changes}"
    live = browser.find_element("id", "live")
    assert live.get_attribute("aria-live") == "polite"
    assert reasons[changes - 3] in live.get_attribute("textContent")
    browser.find_element("id", "next").click()
    browser.find_element("id", "previous").click()
    assert position() == f"change {changes - 2} of {changes}"
    assert address(browser) == f"train.py...train_DDP.py:{changes - 2}"

    press(browser, "u")
    assert browser.find_element("id", "unified").get_attribute("aria-pressed") == "true"
    assert browser.find_elements("css selector", "#diff table.unified")
    assert position() == f"change {changes - 2} of {changes}"
    browser.execute_script("document.getElementById('left').focus()")
    press(browser, "u")  # in a list of choices, letters choose
    assert browser.find_elements("css selector", "#diff table.unified")


def test_the_address_keeps_the_choice(page):
    from selenium.webdriver.support.ui import Select

    def names():
        return [browser.find_element("id", side).get_attribute("value") for side in ("left", "right")]

    browser = page()
    assert becomes(["minimal/train.py", "minimal/train_DDP.py"], names)
    Select(browser.find_element("id", "right")).select_by_visible_text("train_mp.py")
    assert becomes("minimal/train.py...train_mp.py", lambda: address(browser))
    browser.find_element("id", "to-parent").click()
    assert becomes("train_DDP.py...train_mp.py", lambda: address(browser))
    browser.find_element("id", "swap").click()
    assert becomes(["train_mp.py", "train_DDP.py"], names)
    browser.back()
    assert becomes(["train_DDP.py", "train_mp.py"], names)
    browser.back()
    assert becomes(["minimal/train.py", "train_mp.py"], names)
    browser.back()
    assert becomes(["minimal/train.py", "minimal/train_DDP.py"], names)
    browser.forward()
    browser.forward()
    assert becomes(["train_DDP.py", "train_mp.py"], names)
    browser.refresh()
    assert becomes(["train_DDP.py", "train_mp.py"], names)

    page("#train_DDP.py...train_amp.py:2")
    assert browser.find_element("id", "position").text.startswith("change 2 of")
    page("#train_none.py...train.py")
    assert becomes(["minimal/train.py", "minimal/train_DDP.py"], names)


def test_notes_stand_beside_their_blocks(page):
    browser = page("#train.py...train_DDP.py")
    note = browser.find_element("css selector", "#diff details[data-trap=D2]")
    block = note.find_element("xpath", "ancestor::tbody")
    assert "val_shard = range(rank, len(val_set), world_size)" in block.get_attribute("textContent")
    note.find_element("tag name", "summary").click()
    assert becomes(True, lambda: "Symptom" in note.text)
    assert "0.833" in note.text and "Beside" not in note.text
    block.find_element("partial link text", "The sampler's shares").click()
    assert becomes("how-the-samplers-shares", lambda: address(browser))
    top = script(browser, "document.getElementById('how-the-samplers-shares').getBoundingClientRect().top")
    assert 0 <= top < 200
    browser.back()
    assert becomes("train.py...train_DDP.py", lambda: address(browser))
    assert script(browser, "document.getElementById('right').value") == "train_DDP.py"

    shown_traps, shown_parts = set(), set()
    for left, right in FAMILIES:
        choice = "{left: numberOf[arguments[0]], right: numberOf[arguments[1]], chosen: [], change: -1}"
        browser.execute_script(f"show({choice})", left, right)
        shown_traps |= set(script(browser, "[...document.querySelectorAll('#diff details')]"
                                           ".map(e => e.dataset.trap)"))
        shown_parts |= set(script(browser, "[...document.querySelectorAll('#diff .in > p a')]"
                                           ".map(e => e.hash)"))
    assert len(shown_traps) > 20
    assert shown_parts == {f"#{name}" for name, _, _ in build_page.read_parts(DOCS / "how-it-works.md")}


@pytest.mark.parametrize("old_browser", [False, True])
def test_copying_takes_the_whole_script(page, old_browser):
    browser = page("#train.py...train_amp.py")
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    read = "const done = arguments[0]; navigator.clipboard.readText().then(done, done)"
    if old_browser:
        browser.execute_script("navigator.clipboard.writeText = () => Promise.reject()")
    for button, name in (("copy-left", "train.py"), ("copy-right", "train_amp.py")):
        browser.find_element("id", button).click()
        assert becomes((ROOT / name).read_text(), lambda: browser.execute_async_script(read))
        assert browser.find_element("id", "live").get_attribute("textContent") == f"copied {name}"
    browser.find_element("css selector", ".card .copy").click()
    assert becomes("python minimal/train.py", lambda: browser.execute_async_script(read))


def test_selecting_takes_one_side(page):
    browser = page("#train_DDP.py...train_amp.py")
    browser.execute_script("document.querySelector('#diff .c.s1').dispatchEvent("
                           "new MouseEvent('mousedown', {bubbles: true}))")
    assert script(browser, "getComputedStyle(document.querySelector('#diff .c.s0')).userSelect") == "none"
    assert script(browser, "getComputedStyle(document.querySelector('#diff .c.s1')).userSelect") != "none"


def luminance(browser):
    return script(browser, "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
                           ".reduce((sum, part) => sum + part, 0) / 765")


def test_the_theme_follows_the_system_and_the_button(page):
    browser = page()
    assert luminance(browser) > 0.9
    browser = page(dark=True)
    assert luminance(browser) < 0.15
    button = browser.find_element("id", "theme")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert luminance(browser) > 0.9
    browser = page(dark=True, keep=True)
    assert luminance(browser) > 0.9


CONTRAST = (ROOT / "tests/programs/contrast.js").read_text()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("address", ["#train.py...train_DDP.py", "#ideas=amp+grad_accum"])
def test_everything_can_be_read(page, address, dark):
    browser = page(address, dark=dark)
    press(browser, "j", "f")
    browser.execute_script("for (const part of document.querySelectorAll('details')) part.open = true")
    assert browser.execute_script(CONTRAST) == {}


def test_a_screen_reader_finds_its_way(page):
    browser = page("#train.py...train_DDP.py")
    assert script(browser, "document.documentElement.lang") == "en"
    for landmark in ("header", "main", "nav[aria-label]"):
        assert browser.find_elements("css selector", landmark)
    headings = script(browser, "[...document.querySelectorAll('h1, h2, h3, h4')].map(h => +h.tagName[1])")
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))
    assert script(browser, """[...document.querySelectorAll("button, a, select, summary")].filter(element =>
        element.checkVisibility() && !(element.ariaLabel || element.textContent.trim())).length""") == 0
    assert script(browser, "document.querySelector('#left').labels[0].textContent").startswith("From")
    caption = script(browser, "document.querySelector('#diff caption').textContent")
    assert caption == "train.py beside train_DDP.py"
    assert script(browser, "document.querySelector('#diff .n.add').textContent").endswith("added")
    assert script(browser, "[...document.querySelectorAll('figure')].every(e => e.ariaLabel.length > 30)")
    ids = script(browser, "[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids))
    links = script(browser, "[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
    links = [link[1:] for link in links if link.startswith("#")]
    assert {link for link in links if "..." not in link} <= set(ids)
    assert {name for link in links if "..." in link for name in link.split("...")} <= set(SCRIPTS)


@pytest.mark.parametrize("width", [390, 1024])
def test_a_small_screen_is_enough(page, width):
    browser = page("#train_DDP.py...train_grad_accum.py", width=width)
    assert bool(browser.find_elements("css selector", "#diff table.unified")) == (width < 600)
    browser.find_element("id", "unfold").click()
    assert script(browser, "document.documentElement.scrollWidth") <= width
    assert script(browser, "[...document.querySelectorAll('#diff td')]"
                           ".every(cell => cell.scrollWidth <= cell.clientWidth + 1)")


def test_it_prints_what_is_being_read(page):
    browser = page("#train.py...train_DDP.py")
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    for part in ("#diff", "#head", ".choice", "#scripts", "#pitfalls"):
        seen = script(browser, "document.querySelector(arguments[0]).checkVisibility()", part)
        assert seen == (part in ("#diff", "#head")), part
    assert len(browser.print_page()) > 10_000


def test_hiding_a_tag_leaves_the_rest(page):
    """Without DDP's blocks, train_DDP.py alone is train.py without what DDP replaced."""
    browser = page("#train_DDP.py...train_DDP.py")
    lines = "[...document.querySelectorAll('#diff .c.s1')].map(cell => cell.textContent)"
    whole = script(browser, lines)
    blocks = markers.compare(ROOT / "train_DDP.py")
    browser.find_element("css selector", "#tags button").click()
    covered = {number for block in blocks for number in range(block.first, block.last + 1)}
    assert script(browser, lines) == [line for number, line in enumerate(whole, 1) if number not in covered]
    assert browser.find_element("id", "live").get_attribute("textContent") == "DDP blocks hidden"
    assert script(browser, "document.activeElement.ariaPressed") == "false"
    browser.find_element("css selector", "#tags button").click()
    assert script(browser, lines) == whole

    page("#train_DDP.py...train_amp.py")
    names = script(browser, "[...document.querySelectorAll('#tags button')].map(button => button.textContent)")
    assert names == ["DDP", "amp"]
    edges = script(browser, """[...document.querySelectorAll("#diff .marker")].map(marker => [marker.textContent,
        getComputedStyle(marker.closest("tr").querySelector(".n.s1")).boxShadow])""")
    colors = {text.split()[3]: edge for text, edge in edges if edge != "none"}
    assert colors.keys() == {"DDP", "amp"} and colors["DDP"] != colors["amp"]


MEETING = "[...document.querySelectorAll('#diff .meeting')].map(block => block.innerText)"


def test_chosen_ideas_show_their_blocks_and_where_they_meet(page):
    from selenium.webdriver.common.keys import Keys

    def button(idea):
        return browser.find_element("css selector", f"[data-idea={idea}]")

    def pressed():
        return script(browser, "[...document.querySelectorAll('#ideas [aria-pressed=true]')].map(b => b.textContent)")

    browser = page("#train_DDP.py...train_amp.py")
    assert pressed() == []
    button("amp").send_keys(Keys.SPACE)
    assert becomes("ideas=amp", lambda: address(browser))
    assert becomes([], lambda: script(browser, MEETING))  # one idea meets nothing
    button("grad_accum").send_keys(Keys.ENTER)
    assert becomes("ideas=amp+grad_accum", lambda: address(browser))
    assert becomes(["amp", "grad_accum"], pressed)
    assert script(browser, "document.activeElement.dataset.idea") == "grad_accum"
    assert button("elastic").is_enabled() and not button("FSDP").is_enabled()

    lines = (ROOT / "train_combined.py").read_text().splitlines()
    names = {block.first: {block.tag, *re.findall(r"[\w-]+", block.reason.rpartition(": ")[0])}
             for block in markers.find_blocks(ROOT / "train_combined.py")}
    chosen = [first for first, found in names.items() if found & {"amp", "grad_accum"}]
    both = [first for first, found in names.items() if found >= {"amp", "grad_accum"}]
    assert len(both) >= 2
    assert script(browser, "[...document.querySelectorAll('#diff .change')].map(block =>"
                           " parseInt(block.querySelector('.n.s1').textContent))") == chosen
    meeting = script(browser, MEETING)
    assert all(lines[first - 1].strip() in text for first, text in zip(both, meeting, strict=True))
    assert all(text.startswith("amp and grad_accum meet") for text in meeting)
    assert any("scaler.scale(loss).backward()" in text for text in meeting)
    said = browser.find_element("id", "live").get_attribute("textContent")
    assert said == f"{len(chosen)} blocks of amp and grad_accum in train_combined.py. " \
                   f"The ideas meet in {len(both)} of them."
    assert browser.find_element("id", "head").text == said

    press(browser, "j")
    assert browser.find_element("id", "position").text == f"block 1 of {len(chosen)}"
    assert address(browser) == "ideas=amp+grad_accum:1"
    visible = "[...document.querySelectorAll('#diff .c.s1')].filter(e => e.checkVisibility()).map(e => e.textContent)"
    assert len(script(browser, visible)) < len(lines) / 2
    press(browser, "f")
    assert script(browser, visible) == lines
    browser.refresh()
    assert len(script(browser, MEETING)) == len(both) and pressed() == ["amp", "grad_accum"]
    browser.back()
    assert becomes(["amp"], pressed)
    browser.back()
    assert becomes([], pressed)
    assert becomes("train_DDP.py", lambda: browser.find_element("id", "left").get_attribute("value"))


def test_the_address_keeps_the_chosen_ideas(page):
    from selenium.webdriver.support.ui import Select

    browser = page("#ideas=yolov3+DDP", width=390)
    assert script(browser, "document.documentElement.scrollWidth") <= 390
    own = markers.compare(ROOT / "train_yolov3_DDP.py")
    meeting = zip(own, script(browser, MEETING), strict=True)
    assert all(block.reason in " ".join(text.split()) for block, text in meeting)
    page("#ideas=DDP+amp")
    assert script(browser, MEETING) == []
    assert browser.find_element("id", "head").text.endswith("in train_amp.py. The ideas meet in none of them.")
    browser.find_element("css selector", "[data-idea=DDP]").click()  # train_amp.py has all of amp, too
    assert becomes(True, lambda: browser.find_element("id", "head").text.endswith("blocks of amp in train_amp.py."))
    Select(browser.find_element("id", "right")).select_by_visible_text("train_mp.py")
    assert becomes("train_amp.py...train_mp.py", lambda: address(browser))
    assert not browser.find_elements("css selector", "#ideas [aria-pressed=true], #ideas button:disabled")
    for unknown in ("#ideas=amp+none", "#ideas=amp+FSDP", "#ideas="):
        page(unknown)
        assert browser.find_element("id", "right").get_attribute("value") == "minimal/train_DDP.py"


def test_it_opens_as_fast_as_its_html(browser, tmp_path):
    """Measured against the same page without its program, by turns: how busy the machine is does not matter."""
    text = re.sub(r"<script>(?!try).*?</script>", "<script>document.documentElement.dataset.ready = 'yes'</script>",
                  PAGE.read_text(), flags=re.S)
    (tmp_path / "plain.html").write_text(text)
    ratios = []
    for _ in range(15):
        times = []
        for target in (PAGE, tmp_path / "plain.html"):
            browser.get("about:blank")
            browser.get(target.as_uri() + "#train.py...train_DDP.py")
            entry = "performance.getEntriesByType('navigation')[0]"
            times.append(script(browser, f"{entry}.domContentLoadedEventEnd - {entry}.responseEnd"))
        ratios.append(times[0] / times[1])
    print("ratios", sorted(round(ratio, 2) for ratio in ratios))
    assert sorted(ratios)[7] < 5
