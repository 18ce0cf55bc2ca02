"""The other libraries of records: their names, and which of them were measured and which were not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
_BETA = re.compile(r"\d(a|b|rc|\.dev)\d")


def name_measured(timed: Iterable[str], runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Say in sentences which libraries were timed and, by what the runs say, which known ones were not installed."""
    known, missing = {*timed} - EAGER, dict[str, None]()
    versions: dict[str, dict[str, None]] = {}
    for run in runs:
        for peer, version in (run.get("peers") or {}).items():
            if str(version).startswith(_MISSING):
                missing.setdefault(peer)
            elif not str(run.get("torch", "")).startswith(version):  # PyTorch's own parts have its version
                versions.setdefault(peer, {})[version] = None
    # A library may have several names, and its version under one of them.
    by_name: dict[str, dict[str, None]] = {}
    for peer in (peer for peer in NAMES if peer in known):
        by_name.setdefault(NAMES[peer], {}).update(versions.get(peer, {}))
    said = [name if not of else f"{name} {_versions(of)}" for name, of in by_name.items()]
    absent = dict.fromkeys(name for peer, name in NAMES.items() if peer in missing and name not in by_name)
    found = [f"Other libraries that were measured: {', '.join(said)}."] if said else ["No other library was measured."]
    return [*found, f"Not installed, and so not measured: {', '.join(absent)}."] if absent else found


def _versions(versions: Iterable[str]) -> str:
    return " and ".join(f"{version} (a beta)" if _BETA.search(version) else version for version in versions)
