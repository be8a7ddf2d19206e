"""The page in a real Chromium: what is drawn, how it follows, and that nothing overlaps."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.views.report import write_report
from holdfast.views.web import Web

from . import chromium
from .logs import House, storm

PROGRAM = chromium.find()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        PROGRAM is None and "CI" not in os.environ, reason="Chromium is not installed"
    ),
]

OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const boxes = [...svg.querySelectorAll('text')]
    .map((label) => [label.textContent, label.getBoundingClientRect()]);
  const beside = (a, b) => a.left < b.right - 1 && b.left < a.right - 1;
  const above = (a, b) => a.top < b.bottom - 3 && b.top < a.bottom - 3;
  return boxes.flatMap(([name, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => beside(a, b) && above(a, b)).map(([other]) => name + ' / ' + other));
})
"""
OUTSIDE = """
[...document.querySelectorAll('svg')].flatMap((svg) => {
  const box = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter((t) => {
    const at = t.getBoundingClientRect();
    return at.left < box.left - 1 || at.right > box.right + 1;
  }).map((t) => t.textContent);
})
"""


@pytest.fixture
async def report(tmp_path: Path) -> AsyncIterator[chromium.Tab]:
    storm(tmp_path)
    assert PROGRAM is not None
    async with chromium.tab(PROGRAM, tmp_path, write_report(tmp_path).as_uri()) as tab:
        await tab.until("document.querySelector('#lanes svg') !== null")
        yield tab
        assert tab.problems == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
async def test_the_report_is_readable(
    report: chromium.Tab, tmp_path: Path, width: int, dark: bool
) -> None:
    """No panel is empty, no label covers another, nothing is wider than the screen."""
    await report.shape(width, dark=dark)
    await report.until(f"document.querySelector('#lanes svg').viewBox.baseVal.width < {width}")
    assert await report.look("document.querySelectorAll('.empty').length") == 0
    assert await report.look("document.documentElement.scrollWidth") <= width
    assert await report.look(OVERLAPS) == []
    assert await report.look(OUTSIDE) == []
    assert await report.look("document.querySelectorAll('#reward polyline').length") == 3
    assert await report.look("document.querySelectorAll('#lanes .death').length") >= 10
    assert await report.look("document.querySelectorAll('#lanes .paused').length") == 1
    assert await report.look("document.querySelectorAll('#faults tbody tr').length") == 7
    assert await report.look("document.querySelectorAll('#jobs tbody tr').length") == 3
    assert "8a8042be" in await report.look("document.querySelector('#final').textContent")
    await report.shot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000


async def test_text_from_events_stays_text(report: chromium.Tab) -> None:
    """A reward function's error with a tag in it is shown as it is, and makes no element."""
    assert await report.look("document.querySelectorAll('img').length") == 0
    filtered = "find.value = 'onerror'; find.dispatchEvent(new Event('input')); log.textContent"
    filtered = filtered.replace("find.", "document.getElementById('find').")
    filtered = filtered.replace("log.", "document.getElementById('log').")
    assert "<img src=x onerror=alert(1)>" in await report.look(filtered)


async def test_the_log_can_be_filtered(report: chromium.Tab) -> None:
    """Words, process and type each leave only the lines that fit."""
    await report.look(
        "const kind = document.getElementById('kind'); kind.value = 'part.died';"
        "kind.dispatchEvent(new Event('input'))"
    )
    rows = (
        "[...document.querySelectorAll('#log tbody tr')].map((row) => row.children[2].textContent)"
    )
    assert set(await report.look(rows)) == {"part.died"}
    assert len(await report.look(rows)) == 4


async def test_the_page_follows_and_finds_its_server_again(tmp_path: Path) -> None:
    """Steps appear by themselves; after the server was away the page goes on by itself."""
    folder = tmp_path / "run"
    house = House(folder)
    house.begin()
    web = Web(folder)
    web.start()
    assert PROGRAM is not None
    async with chromium.tab(PROGRAM, tmp_path, web.url) as tab:
        step = "document.querySelector('#tiles b')?.textContent"
        await tab.until(f"{step} === '0/30'")
        house.train()
        await tab.until(f"{step} === '1/30'")
        port = web.port
        web.stop()
        await tab.until("document.getElementById('link').textContent.startsWith('no connection')")
        web = Web(folder, port=port)
        web.start()
        house.train()
        await tab.until(f"{step} === '2/30'")
        lines = "document.getElementById('shown').textContent"
        assert (await tab.look(lines)).endswith(f" of {web.live.picture.serial}")
        # What a server says that is not there, or is just leaving.
        away = ("ERR_CONNECTION_REFUSED", "503")
        problems = [one for one in tab.problems if not any(word in one for word in away)]
    web.stop()
    assert problems == []
