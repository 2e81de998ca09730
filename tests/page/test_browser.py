"""The status page of a real agent as Chromium shows it, on a screen and on a phone."""

import pathlib
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.page import browser, node
from tests.page.browser import Tab

pytestmark = pytest.mark.kernel

SCREEN, PHONE = (1280, 900), (390, 844)

# Contrast of text with the background behind it, by WCAG 2.2, 1.4.3: at least 4.5.
CONTRASTS = """
(() => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(Number)
    .map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e)
    .backgroundColor; if (!/, 0\\)$/.test(c)) return c } return 'rgb(255, 255, 255)' };
  return [...document.querySelectorAll('body *')]
    .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())
                 && e.closest('svg') == null)
    .map(e => { const [a, b] = [light(getComputedStyle(e).color), light(behind(e))]
      .sort((x, y) => y - x); return [(a + .05) / (b + .05), e.textContent.slice(0, 40)] })
    .filter(([contrast]) => contrast < 4.5)
})()
"""


@pytest.fixture(scope="module")
def address(isolated: None) -> Iterator[str]:
    with node.running() as (found, _):
        yield found


@pytest.fixture
async def tab(tmp_path: pathlib.Path) -> AsyncIterator[Tab]:
    async with browser.tab(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [SCREEN, PHONE])
async def test_page_is_whole_and_readable(
    address: str, tab: Tab, size: tuple[int, int], scheme: str
) -> None:
    """No scrolling sideways, enough contrast, its own style sheet, and nothing from elsewhere."""
    width, height = size
    await tab.show(address, width=width, height=height, scheme=scheme)
    assert tab.requests == [address]
    assert tab.messages == []
    assert await tab.value("document.documentElement.scrollWidth") <= width
    assert await tab.value(CONTRASTS) == []
    text = await tab.value("document.body.innerText")
    for words in ("demo/web", "host-process", "Strict", "probes-passing is False"):
        assert words in text
    is_dark = await tab.value("getComputedStyle(document.body).backgroundColor")
    assert is_dark == ("rgb(15, 19, 24)" if scheme == "dark" else "rgb(246, 247, 249)")


async def test_problem_is_above_all_tables(address: str, tab: Tab) -> None:
    await tab.show(address, width=SCREEN[0], height=SCREEN[1], scheme="light")
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert await tab.value(top.format(".problems")) < await tab.value(top.format("table"))
    assert await tab.value(f"{top.format('.problems')} < innerHeight")


async def test_rows_are_cards_on_a_phone(address: str, tab: Tab) -> None:
    await tab.show(address, width=PHONE[0], height=PHONE[1], scheme="light")
    assert await tab.value("getComputedStyle(document.querySelector('thead')).display") == "none"
    label = await tab.value("getComputedStyle(document.querySelector('td'), '::before').content")
    assert label == '"pod"'


async def test_charts_have_bars_of_passed_and_failed_probes(address: str, tab: Tab) -> None:
    await tab.show(address, width=SCREEN[0], height=SCREEN[1], scheme="light")
    for kind in ("passed", "failed"):
        box = f"document.querySelector('.spark .{kind}').getBoundingClientRect()"
        assert await tab.value(f"{box}.width > 0 && {box}.height > 0")
    fill = "getComputedStyle(document.querySelector('.spark .{}')).fill"
    assert await tab.value(fill.format("passed")) != await tab.value(fill.format("failed"))


async def test_page_loads_itself_again(address: str, tab: Tab) -> None:
    await tab.show(address, width=SCREEN[0], height=SCREEN[1], scheme="light")
    refresh = "document.querySelector('meta[http-equiv=refresh]').content"
    assert await tab.value(refresh) == "10"
