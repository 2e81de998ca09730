"""Small charts of the newest durations of a probe, as inline SVG."""

from collections.abc import Sequence

from agent.operate.page.markup import Markup, element

_HEIGHT = 20
_STEP = 4
_BAR = 3
# A failed probe is a bar of full height in the colour of failures.
_LEAST = 2


def draw(milliseconds: Sequence[float | None]) -> Markup:
    """One bar for each probe, the newest at the right; None for one that failed.

    A bar's height is relative to the slowest of them, which the text names.
    """
    if not milliseconds:
        return Markup("")
    passed = [value for value in milliseconds if value is not None]
    slowest = max(passed, default=0.0)
    failed = len(milliseconds) - len(passed)
    text = f"{len(milliseconds)} probes, slowest {slowest:.1f} ms, {failed} failed"
    bars = [_bar(number, value, slowest) for number, value in enumerate(milliseconds)]
    width = len(milliseconds) * _STEP
    return element(
        "svg",
        element("title", text),
        *(_bars(kind, bars) for kind in ("passed", "failed")),
        class_="spark",
        role="img",
        width=width,
        height=_HEIGHT,
        viewBox=f"0 0 {width} {_HEIGHT}",
    )


def _bar(number: int, value: float | None, slowest: float) -> tuple[str, str]:
    """Its class and its outline."""
    share = 1.0 if value is None or slowest <= 0 else value / slowest
    height = max(_LEAST, round(share * _HEIGHT))
    outline = f"M{number * _STEP} {_HEIGHT - height}h{_BAR}v{height}h-{_BAR}z"
    return "failed" if value is None else "passed", outline


def _bars(kind: str, bars: Sequence[tuple[str, str]]) -> Markup:
    """All of one class are one element: a node has thousands."""
    outlines = "".join(outline for found, outline in bars if found == kind)
    return element("path", class_=kind, d=outlines) if outlines else Markup("")
