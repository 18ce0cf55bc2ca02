"""The features of `attention`, and their values: the one table of products, of sequences and of docs/support.md.

A feature's first value is its neutral one: all features at their neutral values are the plainest call. A row names a
value of each feature. `calls.build` makes the call of a row, `RULES` says which values name no call together, and what
`attention` or a backend refuses is asked of them (`cover.refusal`).

A new argument of `attention` needs a feature here, or a value of one, and a line where `calls.py` builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Feature(NamedTuple):
    """A feature: the arguments of `attention` that it sets, and its values."""

    arguments: tuple[str, ...]
    values: tuple[str, ...]


FEATURES: dict[str, Feature] = {
    "dtype": Feature(("q", "k", "v"), ("bfloat16", "float16", "float32", "float64")),
    "head_dim": Feature(("q", "k", "v"), ("64", "128", "256", "96", "20", "512", "192/128", "64/32")),
    "heads": Feature(("q", "k", "v"), ("4/2", "4/4", "6/1", "21/3")),
    "batch": Feature(("q", "k", "v"), ("2", "1")),
    "layout": Feature(("layout",), ("bthd", "bhtd", "thd")),
    "tokens": Feature(
        ("q", "k", "v"), ("equal", "odd", "fewer queries", "more queries", "one query", "few queries", "no keys")
    ),
    "bounds": Feature(("cu_seqlens_q", "cu_seqlens_k"), ("one", "equal", "unequal", "with empty", "with a tail")),
    "pages": Feature(
        ("block_table", "k_scale", "v_scale"),
        ("none", "own 16", "own 64", "fp8 16", "int8 16", "int4 16", "dense cache"),
    ),
    "scheme": Feature(
        ("position",),
        (
            *("none", "rope", "rope interleaved", "rope partial", "rope offset", "rope blocks", "rope axes"),
            *("rope frequencies", "alibi", "alibi learned", "t5", "t5 learned", "exposb"),
            *("exposb decay", "exposb bands", "exposb bands decay", "rerope", "rerope leak", "self-extend"),
            *(
                "own score_mod",
                "own kernel",
                "own kernel learned",
                "own rotation",
                "own rotation learned",
                "own two-range",
            ),
        ),
    ),
    "positions": Feature(("positions_q", "positions_k"), ("none", "queries", "keys", "one tensor", "two tensors")),
    "keys_rotated": Feature(("keys_rotated",), ("no", "yes")),
    "causal": Feature(("causal",), ("no", "yes")),
    "window": Feature(("window",), ("none", "int", "left", "right", "pair")),
    "mask": Feature(("mask",), ("none", "keys", "pairs", "rows", "heads")),
    "blocks": Feature(("blocks",), ("none", "causal", "sliding", "own 128", "own 64", "BlockMask")),
    "key_lengths": Feature(("key_lengths",), ("none", "given", "with zero")),
    "key_starts": Feature(("key_starts",), ("none", "given")),
    "query_starts": Feature(("query_starts",), ("none", "given")),
    "scale": Feature(("scale",), ("default", "given", "negative")),
    "softcap": Feature(("softcap",), ("none", "given")),
    "sinks": Feature(("sinks",), ("none", "fixed", "learned")),
    "dropout": Feature(("dropout_p",), ("none", "given")),
    "norm": Feature(("norm",), ("none", "before", "after", "per head", "across heads", "without weights")),
    "gate": Feature(("gate",), ("none", "head", "feature")),
    "results": Feature(
        ("return_lse", "return_max_logits"), ("out", "lse", "lse and its gradient", "max logits", "all")
    ),
    "precision": Feature(("precision",), ("none", "int8", "int8-fp8", "neither turned nor centred")),
    "gradients": Feature((), ("none", "all", "q", "k and v", "options")),
    "deterministic": Feature(("deterministic",), ("no", "yes")),
    "memory": Feature((), ("dense", "sliced heads", "sliced features", "misaligned", "features apart", "broadcast")),
    "grad memory": Feature((), ("dense", "expanded", "features apart")),
}
NOT_VALUES = ("impl",)  # every row runs by each backend

Row = dict[str, str]
NEUTRAL: Row = {name: feature.values[0] for name, feature in FEATURES.items()}


class Rule(NamedTuple):
    """Values of some features that name a call together."""

    features: tuple[str, ...]
    allows: Callable[..., bool]


RULES = (
    Rule(("bounds", "layout"), lambda bounds, layout: bounds == "one" or layout == "thd"),
    Rule(("bounds", "pages"), lambda bounds, pages: pages == "none" or bounds in ("one", "with empty", "with a tail")),
    Rule(
        ("tokens", "layout", "bounds", "pages"),
        lambda tokens, layout, bounds, pages: (
            layout != "thd" or pages != "none" or bounds == "unequal" or tokens in ("equal", "odd")
        ),
    ),
    Rule(("tokens", "pages"), lambda tokens, pages: pages == "none" or tokens not in ("more queries", "no keys")),
    Rule(("tokens", "blocks"), lambda tokens, blocks: tokens != "no keys" or blocks == "none"),
    Rule(
        ("layout", "pages", "key_lengths"),
        lambda layout, pages, lengths: layout != "thd" or pages != "none" or lengths == "none",
    ),
    Rule(("layout", "key_starts"), lambda layout, starts: layout != "thd" or starts == "none"),
    Rule(("layout", "query_starts"), lambda layout, starts: layout != "thd" or starts == "none"),
    Rule(("layout", "blocks"), lambda layout, blocks: layout != "thd" or blocks == "none"),
    Rule(("layout", "mask"), lambda layout, mask: layout != "thd" or mask == "none"),
    Rule(("pages", "layout"), lambda pages, layout: pages != "dense cache" or layout == "thd"),
    Rule(("pages", "key_lengths"), lambda pages, key_lengths: pages == "none" or key_lengths != "none"),
    Rule(("pages", "gradients"), lambda pages, gradients: pages == "none" or gradients == "none"),
    Rule(("pages", "norm"), lambda pages, norm: pages == "none" or norm == "none"),
    Rule(
        ("results", "gradients"),
        lambda results, gradients: gradients != "none" or results in ("out", "lse", "max logits"),
    ),
    Rule(("grad memory", "gradients"), lambda memory, gradients: memory == "dense" or gradients != "none"),
    Rule(("memory", "layout", "batch"), lambda memory, layout, batch: memory != "broadcast" or batch != "1"),
)


def names_a_call(row: Row) -> bool:
    """Say whether no rule is against a row."""
    return all(rule.allows(*(row[name] for name in rule.features)) for rule in RULES)


# What a value needs of other features, in the plainest call that has it.
NEEDS: dict[tuple[str, str], Row] = {
    **{("bounds", value): {"layout": "thd"} for value in FEATURES["bounds"].values[1:]},
    **{("pages", value): {"key_lengths": "given"} for value in FEATURES["pages"].values[1:]},
    ("pages", "dense cache"): {"key_lengths": "given", "layout": "thd"},
    **{("grad memory", value): {"gradients": "all"} for value in FEATURES["grad memory"].values[1:]},
    **{("results", value): {"gradients": "all"} for value in ("lse and its gradient", "all")},
}


def plainest(*chosen: tuple[str, str]) -> Row | None:
    """Return a row that has some values, and else as many neutral ones as it can; None if no call has them."""
    row = dict(chosen)
    if len(row) < len(chosen):
        return None
    for pair in chosen:
        for name, value in NEEDS.get(pair, {}).items():
            row.setdefault(name, value)
    row = {**NEUTRAL, **row}
    if names_a_call(row):
        return row
    broken = [rule for rule in RULES if not rule.allows(*(row[name] for name in rule.features))]
    fixed = {name for name, _ in chosen}
    for name in dict.fromkeys(name for rule in broken for name in rule.features if name not in fixed):
        for value in FEATURES[name].values:
            changed = {**row, name: value}
            if names_a_call(changed):
                return changed
    return None
