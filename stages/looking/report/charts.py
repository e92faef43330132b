"""Charts as SVG, drawn by Vega-Lite when the page is made: the page carries pictures, and no plotting library.

Colours are CSS variables of the page, so one picture serves light and dark. Each point says in its label what it is.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoskyrl.stages.core.errors import SettingsError, told_as

WIDTH, HEIGHT = 360, 160
WIDE = 1180
"""Of a chart that has a row of the page for itself."""
DECADES = 100.0
"""A curve above 0 whose largest value is so many times its smallest is drawn on a logarithmic scale."""
POINTS = 120
"""Steps up to which each one is marked by a point."""
MOST = 3000
"""Steps of a curve above which several share a point of it: their mean, with their range as a band."""
COLORS = 8
"""Variables `--s0` to `--s7` of the page."""
CONFIG = {
    "background": None,
    "view": {"stroke": None},
    "font": "system-ui, sans-serif",
    "axis": {
        "labelColor": "var(--muted)", "titleColor": "var(--muted)", "gridColor": "var(--grid)", "grid": True,
        "domainColor": "var(--grid)", "tickColor": "var(--grid)", "labelFontSize": 11, "titleFontSize": 11,
        "titleFontWeight": "normal",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    name: str
    color: int
    """Index of its colour."""
    steps: Sequence[int]
    values: Sequence[float | None]
    low: Sequence[float | None] | None = None
    """Lower and upper end of a band, or of an interval of each point; None: there is none."""
    high: Sequence[float | None] | None = None

    def points(self) -> list[dict[str, Any]]:
        """Return its points, those without a value left out."""
        size = -(-len(self.steps) // MOST) if len(self.steps) > MOST else 1
        return [point for at in range(0, len(self.steps), size) if (point := self._point(at, at + size))]

    def _point(self, start: int, end: int) -> dict[str, Any] | None:
        values = [value for value in self.values[start:end] if value is not None]
        if not values:
            return None
        lows = [value for value in (self.low or self.values)[start:end] if value is not None]
        highs = [value for value in (self.high or self.values)[start:end] if value is not None]
        value, step = sum(values) / len(values), self.steps[start]
        wide = self.low is not None or len(values) > 1
        band = f", {_short(min(lows))} to {_short(max(highs))}" if wide and lows and highs else ""
        steps = f"step {step}" if end - start == 1 else f"steps {step} to {self.steps[min(end, len(self.steps)) - 1]}"
        found = {"x": step, "y": value, "series": self.name, "c": self.color, "label": f"{self.name} | {steps} | "}
        found["label"] += f"{_short(value)}{band}"
        return {**found, "low": min(lows), "high": max(highs)} if wide and lows and highs else found


def _short(value: float) -> str:
    return f"{value:.4g}"


def curves(series: Sequence[Series], *, share: bool = False, intervals: bool = False, x: str = "step") -> str:
    """Return curves as SVG; empty without a point.

    Args:
        series: Drawn over each other.
        share: The axis goes from 0 to 1.
        intervals: Ends are whiskers of each point, and no band.
        x: What is counted to the right.
    """
    points = [point for one in series for point in one.points()]
    if not points:
        return ""
    color = {"field": "c", "type": "nominal", "legend": None, "scale": _colors()}
    y: dict[str, Any] = {"field": "y", "type": "quantitative", "title": None}
    y["scale"] = {"domain": [0, 1]} if share else {"zero": False}
    values = [point[end] for point in points for end in ("y", "low", "high") if end in point]
    y["axis"] = {"tickCount": 5, "format": ".0%" if share else "~s" if max(values) >= 1000 else "~g"}
    if not share and min(values) > 0 and max(values) > DECADES * min(values):
        y["scale"] = {"type": "log"}
        decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        y["axis"]["values"] = [10.0**decade for decade in decades]  # left to itself, it has a line for every digit
    across: dict[str, Any] = {"field": "x", "type": "quantitative", "title": x, "scale": {"nice": False}}
    across["axis"] = {"tickMinStep": 1, "grid": False, "format": "d"}
    shared = {"x": across, "color": color, "detail": {"field": "series"}}
    ends = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    band = {"type": "rule", "opacity": 0.6, "strokeWidth": 3} if intervals else {"type": "area", "opacity": 0.18}
    layers: list[dict[str, Any]] = []
    if any("low" in point for point in points):
        layers.append(
            {
                "mark": {**band, "aria": False},
                "encoding": {**shared, **ends},
                "transform": [{"filter": "isValid(datum.low)"}],
            }
        )
    layers.append({"mark": {"type": "line", "strokeWidth": 1.8, "aria": False}, "encoding": {**shared, "y": y}})
    if max(len(one.steps) for one in series) <= POINTS:
        dots = {"type": "point", "filled": True, "size": 26, "opacity": 1}
        layers.append({"mark": dots, "encoding": {**shared, "y": y, "description": {"field": "label"}}})
    return _drawn({"data": {"values": points}, "layer": layers})


def stacked(steps: Sequence[int], parts: Mapping[str, Sequence[float | None]], unit: str) -> str:
    """Return a stacked bar for each step as SVG: how much of it each part takes."""
    size = -(-len(steps) // POINTS)
    bars = []
    for color, (name, values) in enumerate(parts.items()):
        for at in range(0, len(steps), size):
            known = [value for value in values[at : at + size] if value is not None]
            if known:
                value = sum(known) / len(known)
                label = f"{name} | step {steps[at]} | {_short(value)} {unit}"
                bars.append({"x": steps[at], "y": value, "part": name, "c": color, "label": label})
    if not bars:
        return ""
    across = {"labelOverlap": True, "labelAngle": 0, "grid": False}
    encoding = {
        "x": {"field": "x", "type": "ordinal", "title": "step", "axis": across},
        "y": {"field": "y", "type": "quantitative", "title": unit, "axis": {"tickCount": 5, "format": "~s"}},
        "color": {"field": "c", "type": "nominal", "legend": None, "scale": _colors()},
        "order": {"field": "c"},
        "description": {"field": "label"},
    }
    chart = {"data": {"values": bars}, "mark": {"type": "bar"}, "encoding": encoding}
    return _drawn(chart, width=WIDE)


def _colors() -> dict[str, Any]:
    return {"domain": list(range(COLORS)), "range": [f"var(--s{index})" for index in range(COLORS)]}


def _drawn(spec: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return a Vega-Lite chart as SVG that is as wide as the page lets it.

    Raises:
        SettingsError: the library that draws is not installed.
    """
    with told_as(SettingsError, "charts are drawn by vl-convert", ImportError, hint="pip install 'nanoskyrl[looking]'"):
        import vl_convert

    fit = {"type": "fit-x", "contains": "padding"}
    whole = {"width": width, "height": HEIGHT, "config": CONFIG, "autosize": fit, "padding": 4, **spec}
    svg = vl_convert.vegalite_to_svg(whole)
    # What the page itself sets: the size, and names that the picture does not use.
    return re.sub(r' (?:width="[\d.]+" height="[\d.]+"(?= viewBox)|xmlns(?::xlink)?="[^"]*")', "", svg)
