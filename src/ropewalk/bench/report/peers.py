"""The other libraries of records: their names, and which of them were measured and which were not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# By the name that records have, in the order of tables.
NAMES = {
    "compiled": "compiled PyTorch",
    "huggingface": "transformers, eager",
    "liger_kernel": "Liger",
    "quack": "QuACK",
    "flash_attn": "flash-attn's Triton",
    "flash_attn_4": "FlashAttention-4",
    "flash_attn_3": "FlashAttention-3",
    "flash_attn_2": "FlashAttention-2",
    "flashinfer": "FlashInfer",
    "vllm": "vLLM",
    "cudnn": "cuDNN",
    "cudnn_frontend": "cuDNN by its Python frontend",
    "cudnn_fp8": "cuDNN in fp8",
    "sageattention_1": "SageAttention 1",
    "sageattention_2": "SageAttention 2",
    "transformer_engine": "Transformer Engine",
    "xformers": "xFormers",
    "flex": "FlexAttention",
    "sdpa_flash": "SDPA's FlashAttention-2",
    "sdpa_default": "SDPA",
    "sdpa": "SDPA",
    "flash_attention_4": "FlashAttention-4",
    "flash": "two calls of FlashAttention-4",  # of ReRoPE: our backend merges them, the library computes both
    "compiled RoPE + sdpa": "compiled RoPE and SDPA",
    "RoPE + eager": "eager PyTorch",
    "eager": "eager PyTorch",
}
# PyTorch's operators one by one, as models' own code has them: tables show them, and no verdict is against them.
EAGER = frozenset({"huggingface", "RoPE + eager", "eager"})
_MISSING = "missing"
_NONE = "No other library was measured."
_BETA = re.compile(r"\d(a|b|rc|\.dev)\d")


def name_measured(timed: Iterable[str], runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say in sentences which libraries were timed and, by what the runs say, which known ones were not installed.

    There is a run for each case, the same one for several: a library that was installed for some alone is named with
    their number.
    """
    by_name, runs = _by_name(timed), list(runs)
    found = [peer for run in runs for peer in run.get("peers") or {}]
    said = [_describe(name, peers, runs) for name, peers in by_name.items()]
    missing = {
        peer for peer in found if all(_is_missing(run, peer) for run in runs if peer in (run.get("peers") or {}))
    }
    absent = dict.fromkeys(name for peer, name in NAMES.items() if peer in missing and name not in by_name)
    sentences = [f"Other libraries that were measured: {', '.join(said)}."] if said else [_NONE]
    return [*sentences, f"Not installed, and so not measured: {', '.join(absent)}."] if absent else sentences


def lacked_by(run: Mapping[str, Any], timed: Iterable[str], runs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the libraries of those that were timed in any of `runs` that this run lacked, by their names in tables."""
    runs = list(runs)
    return tuple(name for name, peers in _by_name(timed).items() if _lacks(run, peers, runs))


def _by_name(timed: Iterable[str]) -> dict[str, list[str]]:
    """Return libraries by their names in tables: one may have several in records, and its version under one of them."""
    known, by_name = {*timed} - EAGER, dict[str, list[str]]()
    for peer in (peer for peer in NAMES if peer in known):
        by_name.setdefault(NAMES[peer], []).append(peer)
    return by_name


def _lacks(run: Mapping[str, Any], peers: Sequence[str], runs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a run names all of a library's names as missing, or looked for all libraries before this was known."""
    named = [peer for peer in peers if peer in (run.get("peers") or {})]
    if named:
        return all(_is_missing(run, peer) for peer in named)
    like = (one.get("peers") or {} for one in runs if one["benchmark"] == run["benchmark"])
    return _looked_for_all(run) and any(peer in found for found in like for peer in peers)


def _is_missing(run: Mapping[str, Any], peer: str) -> bool:
    return str((run.get("peers") or {}).get(peer, "")).startswith(_MISSING)


def _describe(name: str, peers: Iterable[str], runs: Iterable[Mapping[str, Any]]) -> str:
    """Name a library with its versions and, where some cases lacked it, the number of those that had it."""
    with_it = [run for run in runs if any(peer in (run.get("peers") or {}) for peer in peers)]
    had = [run for run in with_it if not all(_is_missing(run, peer) for peer in peers if peer in run["peers"])]
    # A run that names a missing library looked for all that were known: one that it does not name came later.
    benchmarks = {run["benchmark"] for run in with_it}
    looked = [run for run in runs if run["benchmark"] in benchmarks and _looked_for_all(run)]
    cases = {id(run): run for run in (*with_it, *looked)}
    count = sum(id(run) in cases for run in runs)
    versions = dict.fromkeys(
        run["peers"][peer]
        for run in had
        for peer in peers
        # PyTorch's own parts have its version.
        if peer in run["peers"]
        and not _is_missing(run, peer)
        and not str(run.get("torch", "")).startswith(run["peers"][peer])
    )
    public = dict.fromkeys(version.partition("+")[0] for version in versions)  # records have the commit of a build
    texts = [f"{version} (a beta)" if _BETA.search(version) else version for version in public]
    named = " ".join([name, *([" and ".join(texts)] if texts else [])])
    return named if len(had) in (0, count) else f"{named} (installed in {len(had)} of {count} cases)"


def _looked_for_all(run: Mapping[str, Any]) -> bool:
    return any(_is_missing(run, peer) for peer in run.get("peers") or {})
