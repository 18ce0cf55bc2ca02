"""Write docs/support.md: which backend of attention runs what, by their own refusals.

python tools/support.py

Rows are the values of the table of products (`tests/products/table.py`), each in the plainest call that has it, and
some combinations. Calls are made on the CPU, and their q, k and v are then imagined to be on a GPU: every machine with
Triton writes the same. Pairs take a minute; `tests/products/refused_pairs.jsonl` keeps what they gave.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

TESTS = Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from products import foreign  # noqa: E402
from products.cover import all_pairs, refusal, refusals  # noqa: E402
from products.table import FEATURES, NEUTRAL, Row, names_a_call, plainest  # noqa: E402

from ropewalk import PositionScheme  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs/support.md"
PAIRS = TESTS / "products/refused_pairs.jsonl"
COLUMNS = {
    "triton": "`triton`",
    "gluon": "`gluon`",
    "flash": "`flash`",
    "sdpa": "`sdpa` (cuDNN)",
    "reference": "`reference`",
}
EACH = "each"  # in place of a backend: `attention` itself refuses

# Features by their sections, and how the page calls their values. A neutral value without a label has no row.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Position schemes": ("scheme", "positions", "keys_rotated"),
    "Which keys a query attends": (
        *("causal", "window", "mask", "key_lengths", "key_starts", "query_starts", "blocks", "tokens"),
    ),
    "Packed sequences and pages": ("layout", "bounds", "pages"),
    "Everything else": (
        *("scale", "softcap", "sinks", "dropout", "norm", "gate", "results", "deterministic", "precision"),
        *("dtype", "head_dim", "heads", "batch", "memory", "gradients", "grad memory"),
    ),
}
LABELS: dict[tuple[str, str], str] = {
    ("scheme", "none"): "`NoPosition()`",
    ("scheme", "rope"): "`Rope()`",
    ("scheme", "rope interleaved"): "`Rope(interleaved=True)`",
    ("scheme", "rope partial"): "`Rope(rotary_dim=…)`",
    ("scheme", "rope offset"): "`Rope(rotary_dim=…, rotary_offset=…)`",
    ("scheme", "rope blocks"): "`Rope(pair_block=…)`, pairs inside blocks",
    ("scheme", "rope axes"): "`Rope(axes=…)`",
    ("scheme", "rope frequencies"): "`Rope(inv_freq=…, attention_factor=…)`",
    ("scheme", "alibi"): "`Alibi()`",
    ("scheme", "alibi learned"): "`Alibi(slopes)`, learned",
    ("scheme", "t5"): "`T5Bias(table)`",
    ("scheme", "t5 learned"): "`T5Bias(table, bidirectional=False)`, learned",
    ("scheme", "exposb"): "`ExpoSB()`",
    ("scheme", "exposb decay"): "`ExpoSB(distance_decay=True)`",
    ("scheme", "exposb bands"): "`ExpoSB(band_weights=…)`, learned",
    ("scheme", "exposb bands decay"): "`ExpoSB(band_weights=…, distance_decay=True)`, learned",
    ("scheme", "rerope"): "`ReRope(window)`",
    ("scheme", "rerope leak"): "`ReRope(window, leak=…, log_n=…)`",
    ("scheme", "self-extend"): "`SelfExtend(window, group, log_n=…)`",
    ("scheme", "own score_mod"): "your own: `score_mod` alone",
    ("scheme", "own kernel"): "your own: `kernel_score_mod`",
    ("scheme", "own kernel learned"): "your own: `kernel_score_mod` with `param_grad`, learned",
    ("scheme", "own rotation"): "your own: `rotation`",
    ("scheme", "own rotation learned"): "your own: `rotation`, learned",
    ("scheme", "own two-range"): "your own: `far_window` and `far_rotation`",
    ("positions", "queries"): "`positions_q`",
    ("positions", "keys"): "`positions_k`",
    ("positions", "one tensor"): "`positions_q` and `positions_k`, one tensor",
    ("positions", "two tensors"): "`positions_q` and `positions_k`, two tensors",
    ("keys_rotated", "yes"): "`keys_rotated` without pages",
    ("causal", "yes"): "`causal`",
    ("window", "int"): "`window`",
    ("window", "left"): "`window=(left, -1)`",
    ("window", "right"): "`window=(-1, right)`",
    ("window", "pair"): "`window=(left, right)`",
    ("mask", "keys"): "`mask` of keys",
    ("mask", "pairs"): "`mask` of pairs",
    ("mask", "rows"): "`mask` of pairs, per batch row",
    ("mask", "heads"): "`mask` of pairs, per head",
    ("key_lengths", "given"): "`key_lengths`",
    ("key_lengths", "with zero"): "`key_lengths`, one of them 0",
    ("key_starts", "given"): "`key_starts`",
    ("query_starts", "given"): "`query_starts`",
    ("blocks", "causal"): "`blocks`: `BlockLists.causal`",
    ("blocks", "sliding"): "`blocks`: `BlockLists.sliding_window`",
    ("blocks", "own 128"): "`blocks`, your own lists of 128 × 128",
    ("blocks", "own 64"): "`blocks`, your own lists of 64 × 64",
    ("blocks", "BlockMask"): "`blocks`: FlexAttention's `BlockMask`",
    ("tokens", "odd"): "a number of tokens that is no multiple of 16",
    ("tokens", "fewer queries"): "fewer queries than keys",
    ("tokens", "more queries"): "more queries than keys",
    ("tokens", "one query"): "one query",
    ("tokens", "few queries"): "5 queries",
    ("tokens", "no keys"): "no keys",
    ("layout", "bhtd"): '`layout="bhtd"`',
    ("layout", "thd"): "packed: `cu_seqlens_q`",
    ("bounds", "equal"): "packed: `cu_seqlens_q` and an equal `cu_seqlens_k`",
    ("bounds", "unequal"): "packed: `cu_seqlens_q` and another `cu_seqlens_k`",
    ("bounds", "with empty"): "packed, some sequences empty",
    ("bounds", "with a tail"): "packed, with tokens after the last sequence",
    ("pages", "own 16"): "`block_table`, pages of 16 keys",
    ("pages", "own 64"): "`block_table`, pages of 64 keys",
    ("pages", "fp8 16"): "`block_table`, fp8 pages with `k_scale` and `v_scale`",
    ("pages", "int8 16"): "`block_table`, int8 pages with `k_scale` and `v_scale`",
    ("pages", "int4 16"): "`block_table`, int4 pages with `k_scale` and `v_scale`",
    ("pages", "dense cache"): "packed over a dense cache: `cu_seqlens_q`, `key_lengths`",
    ("scale", "given"): "`scale`",
    ("scale", "negative"): "a scale of 0 or less",
    ("softcap", "given"): "`softcap`",
    ("sinks", "fixed"): "`sinks`",
    ("sinks", "learned"): "`sinks`, learned",
    ("dropout", "given"): "`dropout_p`",
    ("norm", "before"): "`norm`: `QKNorm(q_weight, k_weight, offset=1.0)`",
    ("norm", "after"): "`norm`: `QKNorm(…, after=True)`",
    ("norm", "per head"): "`norm`: `QKNorm(…)` with weights per head",
    ("norm", "across heads"): "`norm`: `QKNorm(…, across_heads=True)`",
    ("norm", "without weights"): "`norm`: `QKNorm()`",
    ("gate", "head"): "`gate` of a number per head",
    ("gate", "feature"): "`gate`",
    ("results", "lse"): "`return_lse`",
    ("results", "lse and its gradient"): "`return_lse`, with a gradient of it",
    ("results", "max logits"): "`return_max_logits`",
    ("results", "all"): "`return_lse` and `return_max_logits`",
    ("deterministic", "yes"): "`deterministic=True`",
    ("precision", "int8"): '`precision="int8"`',
    ("precision", "int8-fp8"): '`precision="int8-fp8"`',
    ("precision", "neither turned nor centred"): "`precision=QuantizedProducts(…, hadamard=False, centre=False)`",
    ("dtype", "float16"): "float16",
    ("dtype", "float32"): "float32",
    ("dtype", "float64"): "float64",
    ("head_dim", "128"): "head dim 128",
    ("head_dim", "256"): "head dim 256",
    ("head_dim", "96"): "head dim 96",
    ("head_dim", "20"): "a head dim that is no multiple of 8, 20",
    ("head_dim", "512"): "head dim 512",
    ("head_dim", "192/128"): "v's head dim another, 192 and 128",
    ("head_dim", "64/32"): "v's head dim another, 64 and 32",
    ("heads", "4/4"): "as many key heads as query heads",
    ("heads", "6/1"): "one key head for 6 query heads",
    ("heads", "21/3"): "3 key heads for 21 query heads",
    ("batch", "1"): "a batch of 1",
    ("memory", "sliced heads"): "q, k and v: slices of heads of wider tensors",
    ("memory", "sliced features"): "q, k and v: slices of features of wider tensors",
    ("memory", "misaligned"): "q, k and v whose rows are not aligned to 16 bytes",
    ("memory", "features apart"): "q, k and v whose features are not contiguous",
    ("memory", "broadcast"): "k and v that are expanded over the batch",
    ("gradients", "all"): "gradients of all tensors",
    ("gradients", "q"): "a gradient of q alone",
    ("gradients", "k and v"): "gradients of k and v alone",
    ("gradients", "options"): "gradients of options alone: sinks, gates, what schemes learn",
    ("grad memory", "expanded"): "a gradient of the output that is expanded",
    ("grad memory", "features apart"): "a gradient of the output whose features are not contiguous",
}


@dataclass(frozen=True)
class Case:
    """A row of the page: how it is called, its values, and a scheme that the table does not have."""

    label: str
    values: Row
    position: PositionScheme | None = field(default=None, compare=False)

    def row(self) -> Row:
        """Return the plainest row with these values."""
        found = plainest(*self.values.items())
        if found is None:
            raise SystemExit(f"{self.label} has values that name no call together: {self.values}")
        return found


def _pages(**values: str) -> Row:
    return {"pages": "own 16", "tokens": "one query", **values}


# Combinations of which the page says more than of their values alone.
COMBINATIONS: dict[str, list[Case]] = {
    "Position schemes": [
        Case("`ReRope(window)`, causal", {"scheme": "rerope", "causal": "yes"}),
        Case("`ReRope(window, leak=…)`, causal", {"scheme": "rerope leak", "causal": "yes"}),
        Case("`SelfExtend(window, group)`, causal", {"scheme": "self-extend", "causal": "yes"}),
        Case(
            "`ReRope(window)`, causal, fewer queries than keys",
            {"scheme": "rerope", "causal": "yes", "tokens": "fewer queries"},
        ),
        Case(
            "`ReRope(window)`, causal, positions per token",
            {"scheme": "rerope", "causal": "yes", "positions": "queries"},
        ),
        Case("your own: `far_window` and `far_rotation`, causal", {"scheme": "own two-range", "causal": "yes"}),
        Case(
            "your own: `kernel_score_mod` without `param_grad`, learned",
            {"scheme": "own kernel"},
            foreign.OwnWithFunctions(torch.rand(4).requires_grad_()),
        ),
        Case("your own: a subclass of `Rope` with its own `rotation`", {"scheme": "rope"}, foreign.OwnRope()),
        Case("your own: a subclass of `Alibi` with its own `score_mod`", {"scheme": "alibi"}, foreign.OwnAlibi()),
        Case("`Rope()`, positions per token", {"scheme": "rope", "positions": "queries"}),
        Case("`Rope()`, positions of keys and queries", {"scheme": "rope", "positions": "two tensors"}),
        Case("`Rope(axes=…)`, positions on several axes", {"scheme": "rope axes", "positions": "queries"}),
        Case("`Rope()`, `keys_rotated` without pages", {"scheme": "rope", "keys_rotated": "yes"}),
    ],
    "Which keys a query attends": [
        Case("`causal`, fewer queries than keys", {"causal": "yes", "tokens": "fewer queries"}),
        Case("`causal`, `window`", {"causal": "yes", "window": "int"}),
        Case("`causal`, `key_starts`", {"causal": "yes", "key_starts": "given"}),
        Case(
            "`causal`, `query_starts`, fewer queries than keys",
            {"causal": "yes", "query_starts": "given", "tokens": "fewer queries"},
        ),
    ],
    "Packed sequences and pages": [
        Case("packed: `cu_seqlens_q`, `causal`", {"layout": "thd", "causal": "yes"}),
        Case(
            "packed over pages, `keys_rotated=True`",
            {"layout": "thd", "pages": "own 16", "causal": "yes", "scheme": "rope", "keys_rotated": "yes"},
        ),
        Case(
            "packed over pages, keys not rotated",
            {"layout": "thd", "pages": "own 16", "causal": "yes", "scheme": "rope"},
        ),
        Case("`block_table`, one query", _pages()),
        Case("`block_table`, one query, keys not rotated", _pages(scheme="rope")),
        Case("`block_table`, one query, `keys_rotated=True`", _pages(scheme="rope", keys_rotated="yes")),
        Case("`block_table`, one query, `ReRope(window)`", _pages(scheme="rerope")),
        Case(
            "`block_table`, one query, int8 pages, `keys_rotated=True`",
            _pages(pages="int8 16", scheme="rope", keys_rotated="yes"),
        ),
        Case("`block_table`, one query, `return_max_logits`", _pages(results="max logits")),
    ],
    "Everything else": [Case("head dim 512 in float32", {"head_dim": "512", "dtype": "float32"})],
}


def label_of(name: str, value: str) -> str:
    """Return how the page calls a value; raise if nobody has named it."""
    label = LABELS.get((name, value))
    if label is None:
        raise SystemExit(f"{name} has the value {value!r}, but LABELS of tools/support.py has no label for it")
    return label


def cases() -> dict[str, list[Case]]:
    """Return the rows of each section: the values of its features, and combinations."""
    placed = [name for names in SECTIONS.values() for name in names]
    for name in FEATURES:
        if placed.count(name) != 1:
            raise SystemExit(f"{name} is in {placed.count(name)} of SECTIONS of tools/support.py, but must be in one")
    return {
        title: [
            *(
                Case(label_of(name, value), {name: value})
                for name in names
                for value in FEATURES[name].values
                if value != NEUTRAL[name] or (name, value) in LABELS
            ),
            *COMBINATIONS[title],
        ]
        for title, names in SECTIONS.items()
    }


def why_not(case: Case, *, training: bool) -> dict[str | None, str | None]:
    """Say why each backend does not run a case on a GPU, with a backward or without one; None if it does."""
    row = case.row()
    if not training:
        gradients = "none"
    elif row["gradients"] == "none":
        gradients = "all"
    else:
        gradients = row["gradients"]
    return refusals({**row, "gradients": gradients}, COLUMNS, position=case.position)


# === pairs ===

Choice = tuple[str, str]  # a feature and its value
Pair = tuple[Choice, Choice]


class Refused(NamedTuple):
    """A pair of values that a backend does not run together, though it runs each."""

    impl: str
    pair: Pair
    reason: str


def pairs() -> list[Pair]:
    """Return the pairs of values that are not neutral."""
    return [pair for pair in all_pairs() if all(value != NEUTRAL[name] for name, value in pair)]


def refused_of(some: Iterable[Pair]) -> Iterator[Refused]:
    """Find the pairs that `attention` or a backend refuses, though it runs each value alone."""
    impls = (None, *COLUMNS)
    known: dict[Choice, dict[str | None, str | None]] = {}

    def runs(choice: Choice, impl: str | None) -> bool:
        if choice not in known:
            row = plainest(choice)
            known[choice] = dict.fromkeys(impls, "no call has it") if row is None else refusals(row, impls)
        return known[choice][impl] is None

    for pair in some:
        row = plainest(*pair)
        if row is None:
            continue
        asked = [impl for impl in impls if all(runs(choice, impl) for choice in pair)]
        reasons = refusals(row, asked)
        for impl in asked[:1] if reasons.get(None) is not None else asked:
            reason = reasons[impl]
            if reason is None:
                continue
            smallest = smallest_refused(row, impl)  # what else the row has may be why
            if dict(pair).items() <= smallest.items() and all(runs(choice, impl) for choice in smallest.items()):
                yield Refused(EACH if impl is None else impl, pair, reason)


def smallest_refused(row: Row, impl: str | None) -> Row:
    """Return the fewest values of a refused row that are refused, too, beside neutral ones."""
    kept = dict(row)
    for name, neutral in NEUTRAL.items():
        tried = {**kept, name: neutral}
        if tried != kept and names_a_call(tried) and refusal(tried, impl) is not None:
            kept = tried
    return {name: value for name, value in kept.items() if value != NEUTRAL[name]}


def read_refused() -> list[Refused]:
    """Return the refused pairs that the file keeps."""
    found = []
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        for (a, x), (b, y) in kept["pairs"]:
            found.append(Refused(kept["impl"], ((a, x), (b, y)), kept["reason"]))
    return found


def write_refused(refused: Iterable[Refused]) -> None:
    """Keep refused pairs, those of a backend and a reason on a line."""
    lines: dict[tuple[str, str], list[Pair]] = {}
    for impl, pair, reason in refused:
        lines.setdefault((impl, reason), []).append(pair)
    text = [
        json.dumps({"impl": impl, "reason": reason, "pairs": found}, ensure_ascii=False)
        for (impl, reason), found in lines.items()
    ]
    PAIRS.write_text("\n".join(text) + "\n", encoding="utf-8")


def pair_rows(refused: Iterable[Refused]) -> list[str]:
    """Return the table of pairs: values of a feature, those of another, who refuses them, and why."""
    refused_by: dict[tuple[Pair, str], list[str]] = {}
    for impl, pair, reason in refused:
        refused_by.setdefault((pair, reason), []).append(impl)
    partners: dict[tuple[str, str, str, str], dict[str, list[str]]] = {}  # the values of a of each value of b
    for (((a, x), (b, y)), reason), impls in refused_by.items():
        by = "each" if impls == [EACH] else ", ".join(f"`{impl}`" for impl in impls)
        partners.setdefault((a, b, by, reason), {}).setdefault(y, []).append(x)
    lines = []
    for (a, b, by, reason), found in partners.items():
        merged: dict[tuple[str, ...], list[str]] = {}
        for y, values in found.items():
            merged.setdefault(tuple(values), []).append(y)
        lines += [f"| {_join(a, values)} | {_join(b, others)} | {by} | {reason} |" for values, others in merged.items()]
    return lines


def _join(name: str, values: Sequence[str]) -> str:
    """Name some values of a feature."""
    arguments = FEATURES[name].arguments
    if len(values) > 1 and len(values) == len(FEATURES[name].values) - 1 and arguments[:1] not in ((), ("q",)):
        return f"any `{arguments[0]}`"
    return "; ".join(label_of(name, value) for value in values)


# === the page ===


def render(refused: Iterable[Refused]) -> str:
    """Return the page; raise if a feature has no section, or a value no label."""
    notes: dict[str, int] = {}

    def row(case: Case) -> str:
        forward, both = (why_not(case, training=training) for training in (False, True))
        cells = []
        for impl in COLUMNS:
            reason = forward[impl] or both[impl]
            if reason is None:
                cells.append("yes")
                continue
            number = notes.setdefault(reason, len(notes) + 1)
            cells.append(f"{'–' if forward[impl] else 'forward'} ({number})")
        return f"| {case.label} | {' | '.join(cells)} |"

    lines = [INTRODUCTION]
    for title, rows in cases().items():
        lines += [f"## {title}", "", f"| | {' | '.join(COLUMNS.values())} |", f"| --- {'| --- ' * len(COLUMNS)}|"]
        lines += [row(case) for case in rows]
        lines.append("")
    lines += ["## Why not", "", *(f"{number}. {reason}" for reason, number in notes.items()), ""]
    lines += [PAIRS_INTRODUCTION, "| | with | not by | because |", "| --- | --- | --- | --- |", *pair_rows(refused)]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# Which backend of attention runs what

<!-- Written by tools/support.py from the backends' own refusals. Do not edit. -->

The GPU is an NVIDIA one of compute capability 9.0, with cuDNN, flash-attn 4 and a Triton that has Gluon.
Calls are in bfloat16, with 256 queries and keys, 4 query heads, 2 key heads and a head dim of 64, unless a row says
otherwise.
“yes” is forward and backward, with the gradient of what is learned; “forward” is without any gradient.
Numbers in brackets are of the [reasons](#why-not).
The frequencies that `Rope` is given are constants.

Rows are the values of the table that the tests of products read, each in the plainest call that has it.
Rows of “your own” are schemes that the library does not know.
A backend runs a call that combines features if it runs each of them, but for the
[pairs that do not go together](#pairs-that-do-not-go-together).
`explain_choice` answers for your call, on your machine.
`impl=None` goes by a measured order of backends on Hopper, and by an expected one elsewhere.
"""

PAIRS_INTRODUCTION = """\
## Pairs that do not go together

The backend runs each value alone, and not both together.
“each” says that `attention` raises, whatever the backend.
"""


if __name__ == "__main__":
    torch.set_num_threads(1)  # calls are small
    refused = list(refused_of(pairs()))
    write_refused(refused)
    PAGE.write_text(render(refused), encoding="utf-8")
    print(f"wrote {PAGE} and {PAIRS}")
