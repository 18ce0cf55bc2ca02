"""A small drawing of a group's verdicts: a mark for each case, placed by how many times as fast ours is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ropewalk.bench.report.formats import ratio
from ropewalk.bench.report.markup import Markup, element
from ropewalk.bench.report.verdicts import AHEAD, BEHIND, Group, Verdict

_WIDTH, _HEIGHT, _MARGIN, _MARK = 220.0, 52.0, 8.0, 6.5
_LIMITS = (0.5, 3.0)  # what is beyond is drawn at the edge


def scale_of(groups: Sequence[Group]) -> tuple[float, float]:
    """From how many times to how many, for all strips of a machine alike."""
    times = [one.times_as_fast for group in groups for one in group.verdicts if one.times_as_fast is not None]
    low, high = min([0.8, *times]), max([1.5, *times])
    return max(low, _LIMITS[0]), min(high, _LIMITS[1])


def draw_strip(group: Group, scale: tuple[float, float]) -> Markup:
    """The marks on a logarithmic axis, in heaps where they are close together, and the line at 1."""
    floor = _HEIGHT - 14
    parts = [
        element("line", x1="0", x2=f"{_WIDTH:g}", y1=f"{floor:g}", y2=f"{floor:g}", class_="axis"),
        element("line", x1=_at(1, scale), x2=_at(1, scale), y1="2", y2=f"{floor + 4:g}", class_="one"),
    ]
    for tick in (0.5, 0.7, 1, 1.5, 2, 3):
        if scale[0] <= tick <= scale[1]:
            text = f"{ratio(tick).rstrip('0').rstrip('.')}×"
            parts.append(element("text", text, x=_at(tick, scale), y=f"{_HEIGHT - 1:g}", text_anchor="middle"))
    heaps: dict[int, int] = {}
    compared = [one for one in group.verdicts if one.times_as_fast is not None]
    for one in sorted(compared, key=lambda one: one.times_as_fast or 0.0):
        at_one = float(_at(1, scale))
        heap = _heap(one, (float(_at(one.times_as_fast or 0.0, scale)) - at_one) / _MARK)
        level = heaps.get(heap, 0)
        heaps[heap] = level + 1
        parts.append(_mark(one, at_one + heap * _MARK, max(floor - 5 - level * _MARK, 3)))
    label = f"{group.title}: {group.count(AHEAD)} ahead, {group.count(BEHIND)} behind, of {group.compared}"
    view = f"0 0 {_WIDTH:g} {_HEIGHT:g}"
    return element("svg", *parts, class_="strip", viewBox=view, role="img", aria_label=label)


def _at(times: float, scale: tuple[float, float]) -> str:
    low, high = (math.log(edge) for edge in scale)
    x = (math.log(min(max(times, scale[0]), scale[1])) - low) / (high - low)
    return f"{_MARGIN + x * (_WIDTH - 2 * _MARGIN):.1f}"


def _heap(verdict: Verdict, x: float) -> int:
    """the heap nearest to x, on the side of the line that the verdict belongs to."""
    if verdict.outcome == AHEAD:
        return max(round(x), 1)
    return min(round(x), -1) if verdict.outcome == BEHIND else 0


def _mark(verdict: Verdict, x: float, y: float) -> Markup:
    title = element("title", f"{verdict.case_name}: {verdict.text}")
    if (verdict.times_as_fast or 0.0) > _LIMITS[1]:
        corners = f"{x - 2.5:.1f},{y - 3:.1f} {x + 3:.1f},{y:.1f} {x - 2.5:.1f},{y + 3:.1f}"
        return element("polygon", title, points=corners, class_=verdict.outcome)
    if verdict.outcome == BEHIND:
        corners = f"{x - 3.4:.1f},{y:.1f} {x:.1f},{y - 3.4:.1f} {x + 3.4:.1f},{y:.1f} {x:.1f},{y + 3.4:.1f}"
        return element("polygon", title, points=corners, class_=verdict.outcome)
    return element("circle", title, cx=f"{x:.1f}", cy=f"{y:.1f}", r="2.6", class_=verdict.outcome)
