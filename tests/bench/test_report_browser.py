"""The report's page in a real browser: charts, the table, the theme, and no network at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ropewalk.cli import app

pytest.importorskip("plotly")
pytestmark = pytest.mark.browser
RECORDS = Path(__file__).parents[2] / "results"


def _missing(what: str) -> None:
    """Skip, but not where nothing may be left out."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"{what} is missing")


@pytest.fixture
def browser() -> Iterator[Any]:
    """The system's browser."""
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


def test_a_report_of_a_record_opens(browser: Any, tmp_path: Path) -> None:
    record = min(RECORDS.glob("attention-*.jsonl"), key=lambda path: path.stat().st_size)
    output = tmp_path / "report.html"
    made = CliRunner().invoke(app, ["report", str(record), "-o", str(output)])
    assert made.exit_code == 0, made.output
    page = browser.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(output.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached", timeout=20000)
    assert page.locator("#charts .plot .main-svg").count() > 0
    rows = page.locator("#table tbody tr")
    total = rows.count()
    assert total > 0
    page.locator("#filters [name=text]").fill("there is no such row")
    assert rows.count() == 0
    page.locator("#theme").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert complaints == []
    assert requests == [output.as_uri()]
