"""Reductions that Triton below 3.8 compiles wrong: those whose axis lies in lanes of a warp that are no neighbours.

Such a layout comes of `reshape` and `permute`. Lanes are exchanged as if they were neighbours, without any error.
"""

from __future__ import annotations

import ast
import re

LINEAR = re.compile(r"^(#\w+) = #ttg\.linear<\{.*lane = (\[.*?\]), warp", re.MULTILINE)
_OPERAND = r"tensor<[^,<]*, ([^)]*?)>(?:, tensor<|\))"  # the first one's layout
REDUCED = re.compile(rf'"tt\.reduce"\([^)]*\) <\{{axis = (\d+)[^}}]*\}}> \(\{{.*?\}}\) : \({_OPERAND}', re.DOTALL)
SLICE = re.compile(r"^#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$")


def scattered_reductions(ttgir: str) -> list[str]:
    """Return the layouts, with their lanes, over which a program for GPUs reduces along scattered lanes."""
    lanes = {name: ast.literal_eval(bases) for name, bases in LINEAR.findall(ttgir)}
    found = []
    for axis, layout in REDUCED.findall(ttgir):
        dims, name = [], layout
        while match := SLICE.match(name):
            dims.append(int(match[1]))
            name = match[2]
        if name not in lanes:
            continue
        kept = list(range(len(lanes[name][0])))
        for dim in reversed(dims):  # the outermost parent first
            kept.pop(dim)
        of_axis = [index for index, base in enumerate(lanes[name]) if base[kept[int(axis)]]]
        if of_axis and of_axis[-1] - of_axis[0] + 1 != len(of_axis):
            found.append(f"axis {axis} of {layout}: lanes {lanes[name]}")
    return found
