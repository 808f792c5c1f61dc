"""The page in a real browser: nothing is fetched, nothing fails, everything is visible, nothing hostile acts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser

from appliance.record.session import RunRecord, RunStatus, Session
from appliance.report.folder import RunReader
from appliance.report.page import write_page

pytestmark = pytest.mark.slow

FIGURES = 19
BOXES = """[...document.querySelectorAll('svg.chart polyline.curve, svg.chart polygon.part, svg.chart rect.band')]
    .map(each => each.getBoundingClientRect()).map(box => [box.width, box.height])"""
CONTRAST = """(() => {
    const channels = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = colour => channels(colour).map(c => c / 255)
        .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const page = light(getComputedStyle(document.body).backgroundColor);
    const card = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
    const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const colour = (selector, name) => light(getComputedStyle(document.querySelector(selector))[name]);
    return {text: ratio(colour('body', 'color'), page), soft: ratio(colour('.unit', 'color'), card),
        verdict: ratio(colour('.word', 'color'), page), tick: ratio(colour('svg.chart text', 'fill'), card),
        curve: ratio(colour('polyline.curve', 'stroke'), card)};
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None and os.environ.get("APPLIANCE_REQUIRE_BROWSER") == "1":
        pytest.fail("APPLIANCE_REQUIRE_BROWSER=1, and no Chromium is on the PATH", pytrace=False)
    if program is None:
        pytest.skip("no Chromium is on the PATH")
    with Browser(program, profile=tmp_path_factory.mktemp("chromium")) as started:
        yield started


def page_of(run_dir: Path) -> Path:
    write_page(RunReader(run_dir), target=run_dir / "report.html")
    return run_dir / "report.html"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_visible_and_nothing_is_fetched(
    browser: Browser, tmp_path: Path, make_run: Callable[..., Path], dark: bool
) -> None:
    path = page_of(make_run(tmp_path))
    browser.open(path, dark=dark)
    assert browser.problems == [] and browser.requests == [path.as_uri()]
    boxes = browser.value(BOXES)
    assert len(boxes) > FIGURES and all(width > 5 for width, _ in boxes)
    assert browser.value("document.querySelectorAll('figure svg.chart').length") == FIGURES
    said = browser.value("document.body.innerText")
    for expected in ("Did the reward climb?", "0.100 before, 0.900 after", "bound 0.015", "What the model said"):
        assert expected in said
    contrast = browser.value(CONTRAST)
    assert contrast["text"] > 10 and min(contrast["soft"], contrast["verdict"], contrast["tick"]) > 4.5  # WCAG 2, AA
    assert contrast["curve"] > 3
    assert (browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)") is dark


def test_nothing_is_wider_than_a_narrow_window(browser: Browser, tmp_path: Path, make_run: Callable[..., Path]) -> None:
    browser.open(page_of(make_run(tmp_path)), width=390)
    assert browser.value("document.documentElement.scrollWidth") <= 390


def test_what_a_model_wrote_does_nothing(
    browser: Browser, tmp_path: Path, make_run: Callable[..., Path], hostile: str
) -> None:
    path = page_of(make_run(tmp_path))
    browser.open(path)
    assert browser.value("[document.title, document.images.length, document.scripts.length]") == ["made: done", 0, 1]
    browser.value("document.querySelectorAll('details').forEach(fold => fold.open = true)")
    assert hostile in browser.value("document.body.innerText")
    # The policy is a second wall: the same text unescaped is an element, and still does nothing.
    text = path.read_text()
    path.write_text(text.replace("<h2>What ran</h2>", hostile))
    browser.open(path)
    assert browser.value("[document.title, document.images.length]") == ["made: done", 1]
    assert browser.requests == [path.as_uri()] and any("Content Security Policy" in each for each in browser.problems)


def test_a_curve_shows_its_numbers_under_the_pointer(
    browser: Browser, tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    browser.open(page_of(make_run(tmp_path)))
    box = "document.querySelector('svg[data-hover]').getBoundingClientRect()"
    left, top, width, height = browser.value(f"(b => [b.left, b.top, b.width, b.height])({box})")
    assert browser.value("document.getElementById('tip').hidden") is True
    browser.point(left + width * 0.99, top + height / 2)
    assert browser.value("document.getElementById('tip').innerText").split() == ["step", "10", "value", "0.4"]
    assert browser.problems == []


def test_the_page_of_a_run_that_goes_on_loads_itself_again_and_keeps_what_is_open(
    browser: Browser, tmp_path: Path, make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.report.page.RELOAD_S", 1)
    run_dir = make_run(tmp_path, done=4, state=RunStatus.RUNNING, exit_code=None)
    with Session(run_dir, record=RunRecord(RunStatus.RUNNING)):
        browser.open(page_of(run_dir))
        assert browser.value("document.getElementById('forsaken').hidden") is True
        browser.value("document.getElementById('recipe').open = true")
    page_of(run_dir)
    browser.wait(lambda: browser.value("document.title") == "made: stopped")
    assert browser.value("document.getElementById('recipe').open") is True
    assert browser.problems == []
