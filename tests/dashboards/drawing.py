"""Draws a dashboard as one SVG: its figures, and lines over time with a legend."""

import html
import math
from collections.abc import Iterator, Sequence

from agent.operate.monitoring.panels import Dashboard, Panel, Stat
from tests.dashboards.prometheus import Series

_WIDTH, _HEIGHT = 560, 230
_MARGIN, _GAP, _HEAD = 16, 12, 44
_STAT_HEIGHT = 76
_PLOT_TOP, _PLOT_HEIGHT, _AXIS = 34, 130, 54
_LEGENDS, _LEGEND_CHARACTERS = 6, 19
_COLOURS = ("#3274d9", "#e02f44", "#56a64b", "#f2cc0c", "#8f3bb8", "#ff780a", "#37872d", "#1f60c4")

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
_UNITS = {"s": "s", "pps": "p/s", "short": "", "bytes": "B"}


def picture(dashboard: Dashboard, stats: Sequence[Series], panels: Sequence[Series]) -> str:
    """stats, panels: the series of each, in order. Texts are left out."""
    rows = (len(dashboard.panels) + 1) // 2
    width = 2 * _MARGIN + 2 * _WIDTH + _GAP
    below = _HEAD + _STAT_HEIGHT + _GAP
    height = below + rows * (_HEIGHT + _GAP) + _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#24292e">',
        f"<title>{html.escape(dashboard.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
        f'<text x="{_MARGIN}" y="28" font-size="17">{html.escape(dashboard.title)}</text>',
    ]
    stat_width = (width - 2 * _MARGIN + _GAP) / len(dashboard.stats) - _GAP
    for i, (stat, series) in enumerate(zip(dashboard.stats, stats, strict=True)):
        x = _MARGIN + i * (stat_width + _GAP)
        parts += [f'<g transform="translate({x:.0f},{_HEAD})">', *_stat(stat, series, stat_width)]
        parts.append("</g>")
    for i, (panel, series) in enumerate(zip(dashboard.panels, panels, strict=True)):
        x = _MARGIN + i % 2 * (_WIDTH + _GAP)
        y = below + i // 2 * (_HEIGHT + _GAP)
        parts += [f'<g transform="translate({x},{y})">', *_panel(panel, series), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _stat(stat: Stat, series: Series, width: float) -> Iterator[str]:
    yield f'<rect width="{width:.0f}" height="{_STAT_HEIGHT}" rx="3" fill="#fff" stroke="#dcdee0"/>'
    yield f'<text x="12" y="20" font-size="13" font-weight="bold">{html.escape(stat.title)}</text>'
    last = [values[-1][1] for values in series.values() if not math.isnan(values[-1][1])]
    text = amount(last[0], stat.unit) if last else "No data"
    colour = "#888"
    if last:
        has_limit = stat.red_above is not None or stat.red_below is not None
        colour = "#e02f44" if stat.is_red(last[0]) else "#37872d" if has_limit else "#24292e"
    yield f'<text x="12" y="58" font-size="27" fill="{colour}">{text}</text>'


def _panel(panel: Panel, series: Series) -> Iterator[str]:
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="3" fill="#fff" stroke="#dcdee0"/>'
    yield f'<text x="12" y="20" font-size="13" font-weight="bold">{html.escape(panel.title)}</text>'
    points = [point for values in series.values() for point in values]
    if not points:
        yield f'<text x="{_WIDTH / 2}" y="110" text-anchor="middle" fill="#888">No data</text>'
        return
    top = max(value for _, value in points) * 1.1 or 1.0
    start, end = min(at for at, _ in points), max(at for at, _ in points)
    yield from _axis(top, panel.unit)
    for (_, values), colour in zip(_chosen(series), _COLOURS, strict=False):
        line = " ".join(
            f"{_AXIS + (at - start) / (end - start or 1) * (_WIDTH - _AXIS - 14):.0f},"
            f"{_PLOT_TOP + _PLOT_HEIGHT * (1 - value / top):.1f}"
            for at, value in values
        )
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    yield from _legend(series, panel.unit)


def _axis(top: float, unit: str) -> Iterator[str]:
    for share in (0, 0.5, 1):
        y = _PLOT_TOP + _PLOT_HEIGHT * (1 - share)
        yield f'<line x1="{_AXIS}" x2="{_WIDTH - 14}" y1="{y}" y2="{y}" stroke="#e8e9ea"/>'
        text = amount(top * share, unit)
        yield f'<text x="{_AXIS - 6}" y="{y + 4}" text-anchor="end" fill="#666">{text}</text>'


def _legend(series: Series, unit: str) -> Iterator[str]:
    for i, ((name, values), colour) in enumerate(zip(_chosen(series), _COLOURS, strict=False)):
        x, y = 14 + i % 3 * 182, 186 + i // 3 * 17
        text = name if len(name) <= _LEGEND_CHARACTERS else f"{name[: _LEGEND_CHARACTERS - 1]}…"
        yield f'<rect x="{x}" y="{y}" width="9" height="3" fill="{colour}"/>'
        yield (
            f'<text x="{x + 13}" y="{y + 5}">{html.escape(text)} '
            f'<tspan fill="#777">{amount(values[-1][1], unit)}</tspan></text>'
        )
    if len(series) > _LEGENDS:
        yield f'<text x="14" y="{_HEIGHT - 6}" fill="#777">and {len(series) - _LEGENDS} more</text>'


def _chosen(series: Series) -> list[tuple[str, list[tuple[float, float]]]]:
    """Those with the highest values; in the order of their names."""
    highest = sorted(series.items(), key=lambda item: -max(value for _, value in item[1]))
    return sorted(highest[:_LEGENDS])


def amount(value: float, unit: str) -> str:
    """Three digits, with a prefix and the unit."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if not value:
        return f"0 {_UNITS[unit]}".rstrip()
    scale, prefix = next((pair for pair in _PREFIXES if abs(value) >= pair[0]), _PREFIXES[-1])
    if unit != "s" and scale < 1:
        scale, prefix = 1, ""
    return f"{value / scale:.3g} {prefix}{_UNITS[unit]}".rstrip()
