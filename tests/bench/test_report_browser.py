"""The report's page in a real browser: charts, sorting, filters, themes, narrow pages, and no network at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly")

from test_report import ATTENTIONS, CPU, GPU, HOSTILE, LARGE, ROTATIONS, rotation, write

from ropewalk.bench.cases import SWEEP
from ropewalk.bench.report.page import write_report

WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
_MANY_CASES = [
    rotation(replace(LARGE, name=name, batch=batch), "fwd", impl, kind, time * batch)
    for name, batch in (("case-2", 2), ("case-10", 10))
    for impl, kind, time in (("native", "ours", 10.0), (f"peer {HOSTILE}", "peer", 12.0))
]
_SWEEP = [rotation(case, "fwd", "native", "ours", 1.0 + case.tokens, copy=1.0 + case.tokens) for case in SWEEP[:18]]
_CPU = [replace(row, host=None, graph=None, peak_bytes=None) for row in ROTATIONS[:4]]


def _missing(what: str) -> None:
    """Skip, but not where nothing may be left out."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing")
    pytest.skip(f"{what} is missing")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's browser, started once."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        _missing("playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        _missing("a browser: chromium or google-chrome")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of three records, two of one machine; what can be hostile in one, is."""
    folder = tmp_path_factory.mktemp("report")
    run = {**GPU, "rates": {"copy_gb_per_s": 4000.0, "matmul_tflops": {"bfloat16": 800.0}}}
    records = [
        write(folder / "all.jsonl", {**run, "system": HOSTILE}, [*ROTATIONS, *_MANY_CASES, *ATTENTIONS]),
        write(folder / "sweep.jsonl", {**run, "system": HOSTILE}, _SWEEP),
        write(folder / "cpu.jsonl", CPU, _CPU),
    ]
    return write_report(records, folder / "report.html").as_uri()


@dataclass
class Opened:
    """A page that was opened, and what went wrong in it."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Opener:
    """Opens pages, and closes them with what they were opened in."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.contexts: list[Any] = []
        self.opened: list[Opened] = []

    def __call__(self, address: str, viewport: dict[str, int] = WIDE, scheme: str = "light") -> Opened:
        context = self.browser.new_context(viewport=viewport, color_scheme=scheme)
        self.contexts.append(context)
        opened = Opened(context.new_page())
        self.opened.append(opened)

        def route(found: Any) -> None:
            opened.requests.append(found.request.url)
            if found.request.url.startswith("file:"):
                found.continue_()
            else:
                found.abort()

        page = opened.page
        context.route("**/*", route)
        page.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (opened.complaints.append("a dialog"), dialog.dismiss()))
        page.goto(address)
        page.wait_for_selector("html[data-ready]", state="attached", timeout=20000)
        return opened

    def close(self) -> None:
        """Close them: there was no error in them, and no request but for the page itself."""
        for context in self.contexts:
            context.close()
        for opened in self.opened:
            assert opened.complaints == []
            assert len(opened.requests) == 1
            assert opened.requests[0].startswith("file:")


@pytest.fixture
def opens(browser: Any) -> Iterator[Opener]:
    """Opens pages of a test's own."""
    opener = Opener(browser)
    yield opener
    opener.close()


@pytest.fixture(scope="module")
def common(browser: Any, address: str) -> Iterator[Any]:
    """A page for tests that leave charts and filters as they are."""
    opener = Opener(browser)
    yield opener(address).page
    opener.close()


def drawn(page: Any, chart: str) -> dict[str, int]:
    """How many marks, lines and bars a chart has on the page."""
    kinds = {"marks": ".points path", "lines": ".js-line", "bars": ".bars .point path", "names": ".legendtext"}
    return {kind: page.locator(f"#{chart} .plot .main-svg {selector}").count() for kind, selector in kinds.items()}


def choose(page: Any, chart: str, what: str, value: str) -> None:
    page.locator(f'#{chart} select[aria-label="{what}"]').select_option(value)


def cells(page: Any, heading: str) -> list[str]:
    """The texts of a column of the table of all rows, from the top down."""
    column = page.locator("#table thead th").evaluate_all(
        "(cells, heading) => cells.findIndex((cell) => cell.textContent === heading)", heading
    )
    assert column >= 0, heading
    return page.locator(f"#table tbody td:nth-child({column + 1})").all_text_contents()


def sort_by(page: Any, heading: str) -> str:
    """Click on a heading; returns what it says of the order."""
    cell = page.locator("#table thead th").filter(has_text=re.compile(f"^{re.escape(heading)}$"))
    cell.locator("button").click()
    return cell.get_attribute("aria-sort")


def test_all_charts_are_drawn(common: Any) -> None:
    assert drawn(common, "speed") == {"marks": 9, "lines": 0, "bars": 0, "names": 6}
    assert drawn(common, "roofline")["marks"] == 8
    assert drawn(common, "roofline")["lines"] == 2  # a copy's roof, and a matrix product's where it is in sight
    assert drawn(common, "host")["bars"] == 3
    assert drawn(common, "memory")["bars"] > 0
    for chart in ("speed", "roofline", "host", "memory"):
        box = common.locator(f"#{chart} .plot .main-svg").first.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 80


def test_choices_change_the_charts(opens: Opener, address: str) -> None:
    page = opens(address).page
    choose(page, "speed", "record", "sweep")
    assert drawn(page, "speed") == {"marks": 18, "lines": 1, "bars": 0, "names": 0}
    assert page.locator("#speed .ytitle").text_content() == "time on the device, µs"
    choose(page, "speed", "metric", "gb_per_s")
    assert page.locator("#speed .ytitle").text_content() == "GB/s"
    choose(page, "speed", "record", "cpu")
    choose(page, "speed", "metric", "time")
    assert page.locator("#speed .xtitle").text_content() == "time of the call, µs"
    choose(page, "speed", "record", "all")
    choose(page, "speed", "what", "RoPE and attention, decode, hot")
    assert drawn(page, "speed")["marks"] == 3
    choose(page, "roofline", "what", "RoPE and attention, training, hot")
    assert "matrix product in bfloat16 runs at 800 TFLOP/s" in page.locator("#roofline .note").text_content()


def test_a_legend_takes_a_trace_away(opens: Opener, address: str) -> None:
    page = opens(address).page
    name = page.locator("#speed .legendtext").first.text_content()
    assert name == "native"
    page.locator("#speed .legendtoggle").first.click()
    page.locator("#speed .legend .traces[style*='opacity: 0.5']").wait_for()
    assert drawn(page, "speed")["marks"] == 6


def test_a_point_says_what_it_is(common: Any) -> None:
    common.locator("#speed .points path").first.hover(force=True)
    common.wait_for_selector("#speed .hovertext")
    said = common.locator("#speed .hovertext").first.text_content()
    assert "llama3-8b (B2 T8192 H32/8 D128, bfloat16, half, out of place)" in said
    assert "11.0 µs" in said


def test_numbers_sort_as_numbers_and_what_is_missing_comes_last(common: Any) -> None:
    unsorted = cells(common, "time, µs")
    for order, sign in (("ascending", 1), ("descending", -1)):
        assert sort_by(common, "time, µs") == order
        times = cells(common, "time, µs")
        assert sorted(times) == sorted(unsorted)
        present = [float(text) for text in times if text != "–"]
        assert 0 < len(present) < len(times)
        assert present == sorted(present, key=lambda time: sign * time)
        assert set(times[len(present) :]) == {"–"}
    assert sort_by(common, "case") == "ascending"
    names = list(dict.fromkeys(cells(common, "case")))
    assert names.index("case-2") < names.index("case-10")
    sorted_headings = common.locator('#table th[aria-sort]:not([aria-sort="none"])').all_text_contents()
    assert sorted_headings == ["case"]


def test_the_table_can_be_sorted_by_the_keyboard(common: Any) -> None:
    common.locator("#table thead th button").first.focus()
    common.keyboard.press("Tab")
    common.keyboard.press("Enter")
    assert common.locator("#table thead th").nth(1).get_attribute("aria-sort") == "ascending"


def test_filters_leave_fewer_rows(opens: Opener, address: str) -> None:
    page = opens(address).page
    total = page.locator("#table tbody tr").count()
    assert page.locator("#count").text_content() == f"{total} of {total} rows"
    page.locator("#filters [name=status]").select_option("wrong")
    assert cells(page, "implementation") == ["vllm"]
    assert cells(page, "reason") == [HOSTILE]
    page.locator("#filters [name=status]").select_option("")
    page.locator("#filters [name=implementation]").select_option("native")
    assert set(cells(page, "implementation")) == {"native"}
    page.locator("#filters [name=text]").fill("decode-64 NATIVE")
    assert cells(page, "case") == ["decode-64"]
    assert page.locator("#count").text_content() == f"1 of {total} rows"
    page.locator("#filters [name=text]").fill("there is no such row")
    assert page.locator("#table tbody tr").count() == 0


def test_what_was_chosen_stays_in_the_address(opens: Opener, address: str) -> None:
    page = opens(address).page
    sort_by(page, "time, µs")
    sort_by(page, "time, µs")
    page.locator("#filters [name=dtype]").select_option("bfloat16")
    page.locator("#filters [name=text]").fill("decode")
    page.locator("#theme").click()
    kept = opens(page.url).page
    assert cells(kept, "time, µs") == cells(page, "time, µs")
    assert kept.locator("#filters [name=text]").input_value() == "decode"
    assert kept.locator("html").get_attribute("data-theme") == "dark"


def test_the_rows_that_are_shown_are_copied(opens: Opener, address: str) -> None:
    opened = opens(address)
    page = opened.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#filters [name=status]").select_option("wrong")
    page.locator("#copy").click()
    page.locator("#copied", has_text="rows copied: 1").wait_for()
    heading, row, rest = page.evaluate("navigator.clipboard.readText()").split("\n")
    assert heading.startswith("case,record,direction,")
    assert ",roof," in heading
    assert row.startswith("llama3-8b,all,rope fwd,bfloat16,vllm,wrong,")
    assert '"' + HOSTILE.replace('"', '""') + '"' in row
    assert rest == ""


def colours(page: Any) -> list[str]:
    """Of the page, of the text, and of charts: the first mark, the grid and an axis' text."""
    return page.evaluate(
        """() => {
            const of = (selector, name) => getComputedStyle(document.querySelector(selector))[name];
            return [of("body", "backgroundColor"), of("body", "color"), of("#speed .points path", "fill"),
                    of("#speed .gridlayer path", "stroke"), of("#speed .xtick text", "fill"),
                    of(".chip", "backgroundColor")];
        }"""
    )


def test_dark_is_another_page_and_charts_follow(opens: Opener, address: str) -> None:
    page = opens(address).page
    light = colours(page)
    page.locator("#theme").click()
    dark = colours(page)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"
    page.locator("#theme").click()
    assert colours(page) == light
    assert colours(opens(address, scheme="dark").page) == dark


def test_a_phone_shows_it_without_scrolling_sideways(opens: Opener, address: str) -> None:
    page = opens(address, viewport=PHONE).page
    page.evaluate("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.evaluate("window.scrollTo(500, 0)")
    assert page.evaluate("window.scrollX") == 0
    wide = page.locator(".scroll.tall").evaluate("(node) => node.scrollWidth > node.clientWidth")
    assert wide  # in a box of its own
    assert drawn(page, "speed")["marks"] == 9
    assert page.locator("#speed .plot").bounding_box()["width"] <= PHONE["width"]


def test_a_page_without_rows_has_no_charts(opens: Opener, tmp_path: Path) -> None:
    output = write_report([write(tmp_path / "empty.jsonl", CPU, [])], tmp_path / "report.html")
    page = opens(output.as_uri()).page
    assert not page.locator("#charts").is_visible()
    assert page.locator("#table tbody tr").count() == 0
    assert "GPU" not in page.locator("body").inner_text()
    assert "There are no rows in this record." in page.locator("#verdict").inner_text()
