"""Draw a record of `ropewalk bench parallel` on the curves of a cost model, and print docs/parallel.md's table of it.

`python tools/parallel_figure.py RECORD` writes the figure beside the record.

The model predicts the efficiency of context parallelism on H200s. Attention is tiles of 128 queries, dealt to the
processors longest first; transfers are volumes over a bandwidth; all but the first group of heads is gathered, and all
but the last group's gradients are sent, while others are attended. Contention, power limits and the host are left out.

Letters: T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

import functools
import heapq
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ropewalk.bench.core.figure import page_figure
from ropewalk.bench.core.load import Record, Row, read_record, to_digits

PROCESSORS, TILE = 132, 128
FORWARD, BACKWARD = 705e12, 690e12  # FLOP/s of causal attention: FlashAttention-4 in results/attention-h200.jsonl
NVLINK = 350e9  # bytes/s each way that copies between two H200 reach: measured
NETWORK = 45e9  # bytes/s each way and GPU between nodes: assumed
MEMORY = 3.8e12  # bytes/s of a GPU's own
LAUNCH = 4e-6  # seconds between two kernels
NODE = 8  # GPUs
_EDGE = 1.5  # a tile's masked half and its beginning and end, in tiles of keys
_OF_BACKWARD = 2.5  # its operations, over the forward's
_MANY = 64 * PROCESSORS  # tiles: as good as even


class Shape(NamedTuple):
    """The heads of a call."""

    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128


LLAMA = Shape()


def predict_efficiency(tokens: int, ranks: int, shape: Shape = LLAMA) -> float:
    """Predict the time on one GPU over n times that on each of n, by gather over zigzag shards."""
    return _one(tokens, shape) / ranks / gather_seconds(tokens, ranks, shape)


@functools.cache
def gather_seconds(tokens: int, ranks: int, shape: Shape) -> float:
    """Predict the time of forward and backward on n GPUs of one node, by the best number of groups of heads."""
    half = tokens // (2 * ranks)
    received = _key_bytes(tokens, shape) * (ranks - 1) / ranks / NVLINK
    best = float("inf")
    for groups in (count for count in (1, 2, 4, 8) if shape.k_heads % count == 0):
        heads = shape.q_heads // groups
        slowest = 0.0
        for rank in (0, ranks - 1):
            starts = (rank * half, (2 * ranks - 1 - rank) * half)
            forward, backward = _call(starts, half, heads, shape)
            get = put = received / groups
            ahead = groups - 1
            total = get + forward + ahead * max(forward, get)
            total += get + backward + ahead * max(backward, get + put) + put
            slowest = max(slowest, total)
        best = min(best, slowest)
    return best


def predict_nodes(tokens: int, gpus: int, shape: Shape = LLAMA) -> float:
    """Predict the efficiency on nodes of 8 GPUs: Ulysses inside, a zigzag ring between, gradients in float32."""
    nodes = gpus // NODE
    of_node, heads = tokens // nodes, shape.q_heads // NODE
    pairs = of_node * of_node / 2
    step = 4 * shape.head_dim * heads * pairs  # operations of each step: the own one and all later ones have as many
    forward, backward = step / FORWARD + LAUNCH, _OF_BACKWARD * step / BACKWARD + LAUNCH
    keys = of_node * 2 * max(1, shape.k_heads // NODE) * shape.head_dim
    hop = 2 * keys / NETWORK if nodes > 1 else 0.0
    hop_back = (2 + 4) * keys / NETWORK if nodes > 1 else 0.0
    share = of_node / NODE * (NODE - 1) / NODE
    exchange = share * 2 * (shape.q_heads + max(shape.k_heads, NODE)) * shape.head_dim * 2 / NVLINK
    merged = of_node * heads * shape.head_dim * 10 / MEMORY  # a step's part is added to a sum in float32
    total = nodes * (max(forward, hop) + max(backward, hop_back) + 2 * merged) + hop_back + 2 * exchange
    return _one(tokens, shape) / gpus / total


def _one(tokens: int, shape: Shape) -> float:
    return sum(_call((0,), tokens, shape.q_heads, shape))


def _key_bytes(tokens: int, shape: Shape) -> float:
    return tokens * 2 * shape.k_heads * shape.head_dim * 2.0  # K and V in bfloat16


def _call(starts: Sequence[int], queries: int, heads: int, shape: Shape) -> tuple[float, float]:
    """Return the seconds of forward and backward of runs of causal queries, in one launch each."""
    tiles = makespan(tuple(starts), queries, heads)
    operations = 4 * TILE * TILE * shape.head_dim * tiles * PROCESSORS
    return operations / FORWARD + LAUNCH, _OF_BACKWARD * operations / BACKWARD + LAUNCH


@functools.cache
def makespan(starts: tuple[int, ...], queries: int, heads: int) -> float:
    """Return how many tiles of keys the busiest processor attends to."""
    costs = [start / TILE + i + _EDGE for start in starts for i in range(max(1, queries // TILE))]
    if len(costs) * heads > _MANY:
        return heads * sum(costs) / PROCESSORS
    busy = [0.0] * PROCESSORS
    for cost in sorted(costs * heads, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + cost)
    return max(busy)


SHAPES = (LLAMA, Shape(k_heads=32))
RANKS = (2, 4, 8)
_MARKERS = {"gather": "o", "ulysses": "^", "ring": "s", "others": "x"}
_MARKERS |= {"Ulysses within, gather between": "D", "Ulysses within, ring between": "P"}
_TOKENS = [1 << power for power in range(13, 21)]
_COLOURS = {2: "#1f5fbf", 4: "#e07b39", 8: "#3a9d5d"}
_FAR = {1 << 20: "#5b7fd1", 1 << 22: "#c9a400", 1 << 24: "#8e5ab5"}


def draw(record: Record, path: Path) -> bool:
    """Draw the rows of plain causal attention with RoPE, for each number of key heads. False: there are none."""
    rows = [row for row in record.of("parallel") if "efficiency" in row and is_plain(row["case"])]
    if not rows:
        return False
    low = min(row["efficiency"] for row in rows)
    with page_figure(path, 6.4) as figure:
        above, below = figure.subfigures(2, height_ratios=(5, 3))
        panels = dict(zip(SHAPES, above.subplots(1, len(SHAPES), sharey=True), strict=True))
        predicted = below.subplots()
        for shape, axes in panels.items():
            of_shape = [row for row in rows if row["case"]["k_heads"] == shape.k_heads]
            for ranks in RANKS:
                curve = [predict_efficiency(tokens, ranks, shape) for tokens in _TOKENS]
                low = min(low, *curve)
                axes.plot(_TOKENS, curve, color=_COLOURS[ranks])
            for row in of_shape:
                colour, marker = _COLOURS[row["ranks"]], _MARKERS[method_of(row)]
                # An open marker: the yardstick is a part of the tokens, scaled.
                face = "none" if "yardstick_tokens" in row and marker != "x" else colour
                look = {"marker": marker, "s": 18, "c": face, "edgecolors": None if marker == "x" else colour}
                axes.scatter(row["case"]["tokens"], row["efficiency"], zorder=3, **look)
        for shape, axes in panels.items():
            _finish(axes, "tokens of the sequence", f"{shape.q_heads} / {shape.k_heads} heads of {shape.head_dim}", low)
            axes.set_xticks(_TOKENS, [f"{tokens >> 10}k" if tokens < 1 << 20 else "1M" for tokens in _TOKENS])
        first = panels[LLAMA]
        first.set_ylabel("time on one GPU / (n × time on n)")
        handles = [first.plot([], [], color=_COLOURS[ranks], label=f"{ranks} GPUs")[0] for ranks in RANKS]
        for method in dict.fromkeys(map(method_of, rows)):
            look = {"marker": _MARKERS[method], "s": 18, "color": "#333333", "label": method}
            handles.append(first.scatter([], [], **look))
        for tokens, colour in _FAR.items():
            gpus = [8 << power for power in range(1, 10) if tokens / (8 << power) >= 512]
            curve = [predict_nodes(tokens, count) for count in gpus]
            predicted.plot(gpus, curve, "--", color=colour, label=f"{tokens >> 20}M tokens")
        _finish(predicted, "GPUs, 8 in a node", "predicted for many nodes: Ulysses in a node, ring between", 0.0)
        predicted.xaxis.set_major_formatter("{x:g}")
        predicted.legend(loc="lower left")
        title = f"Context parallelism on {record.run['device']}: efficiency of causal attention in bfloat16,\n"
        figure.suptitle(f"{title}forward and backward. Lines are predicted (gather), marks measured.")
        above.legend(handles=handles, loc="outside lower center", ncols=3)
    return True


def is_plain(case: Mapping[str, Any]) -> bool:
    """Whether a case is causal attention with RoPE of a whole sequence, of one of `SHAPES`."""
    shape = Shape(case["q_heads"], case["k_heads"], case["head_dim"])
    return case["setting"] == "rope" and not case["window"] and not case["shortest"] and shape in SHAPES


def method_of(row: Mapping[str, Any]) -> str:
    """Return what a row is called in the figure: one of `_MARKERS`."""
    if row["kind"] == "peer":
        return "others"
    method, *nodes = row["served_by"].split(", ")
    return f"Ulysses within, {method} between" if nodes else method


def table(record: Record) -> list[str]:
    """Return the record as lines of a table: ours by method, and torch's context_parallel by cuDNN without positions.

    Of several methods of a case the one that a call without a name takes is bold. An efficiency after ≈ has a yardstick
    of fewer tokens, scaled. torch's time is in the first line of its case.
    """
    known = [row for row in record.of("parallel") if "time" in row]
    counts = sorted({row["ranks"] for row in known})
    ours, torch = dict[tuple[str, str, int], Row](), dict[tuple[str, int], Row]()
    for row in known:
        case, ranks = row["case"]["name"], row["ranks"]
        if row["kind"] == "ours":
            ours[case, row.get("served_by", ""), ranks] = row
        elif row["impl"] == "torch_cudnn_bare":
            torch[case, ranks] = row
    titles = [f"{ranks} GPUs, ms | efficiency | torch's, ms" for ranks in counts]
    lines = [f"| case | method | {' | '.join(titles)} |", f"| --- | --- |{' --- | --- | --- |' * len(counts)}"]
    of = {row["case"]["name"]: row["case"] for row in known}
    names = list(of)  # plain ones first, by key heads and tokens
    plain = sorted(filter(lambda name: is_plain(of[name]), names), key=lambda x: (of[x]["k_heads"], of[x]["tokens"]))
    cases = [case for case in dict.fromkeys((*plain, *names)) if any(key[0] == case for key in ours)]
    for case in cases:
        several = {ranks for ranks in counts if sum(key[::2] == (case, ranks) for key in ours) > 1}
        methods = dict.fromkeys(method for name, method, _ in ours if name == case)
        for number, method in enumerate(methods):
            cells = []
            for ranks in counts:
                mine, peer = ours.get((case, method, ranks), {}), torch.get((case, ranks), {}) if number == 0 else {}
                bold = "**" if mine.get("impl") == "ropewalk" and ranks in several else ""
                about = "≈ " if "yardstick_tokens" in mine else ""
                cells += [f"{bold}{_milliseconds(mine)}{bold}" if mine else ""]
                cells += [f"{about}{mine['efficiency']:.3f}" if mine else "", _milliseconds(peer) if peer else ""]
            lines.append(f"| {f'`{case}`' if number == 0 else ''} | {method} | {' | '.join(cells)} |")
    return lines


def _milliseconds(row: Row) -> str:
    return to_digits(row["time"]["p50"] / 1e3, 4)


def _finish(axes: Any, across: str, title: str, low: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set(ylim=(max(0.0, low - 0.05), 1.02), xlabel=across, title=title)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        source = Path(argument)
        found = read_record(source)
        print("\n".join(table(found)))
        print(source.with_suffix(".png") if draw(found, source.with_suffix(".png")) else "nothing to draw")
