"""The cases of the host's benchmark: a small layer, BERT-base's, and decoding steps.

A mode is a setting of attention with a direction, "fwd" without gradients or "train" for forward and backward in turns,
or `ROTATE`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from torch.nn.attention import sdpa_kernel

from ropewalk.bench.attention.cases import REROPE, AttentionCase
from ropewalk.bench.attention.peers import ATTENTION_PEERS, BACKENDS, AttentionPeer

ROTATE = "rotate-fwd"  # `apply_rope` alone, on q and k of the case
DIRECTIONS = {
    "fwd": "without gradients",
    "train": "a training loop: forward, then torch.autograd.grad, in turns",
}


def _modes(*settings: str) -> tuple[str, ...]:
    return tuple(f"{setting}-{direction}" for setting in settings for direction in DIRECTIONS)


def _layer(name: str, batch: int, tokens: int, heads: int) -> tuple[AttentionCase, ...]:
    """Make the cases of a layer's shape: one for each kind of mask and layout."""
    dense = AttentionCase(name, batch, tokens, heads, heads, 64)
    return (
        replace(dense, modes=(*_modes("none", "rope", "dropout", "sinks", "alibi-learned"), ROTATE)),
        replace(dense, name=f"{name}-lengths", padded=True, modes=_modes("rope")),
        replace(dense, name=f"{name}-packed", form="packed", shortest=tokens // 4, modes=_modes("rope")),
        replace(dense, name=f"{name}-window", causal=True, window=tokens // 4, modes=_modes("rope")),
        replace(dense, name=f"{name}-rerope", causal=True, far_window=tokens // 2, modes=REROPE),
    )


def _decode(rows: int) -> AttentionCase:
    """Make a decoding step: one query for each row of a cache of 8192 rotated keys."""
    shortest = 8192 if rows == 1 else 1024
    return AttentionCase(
        f"decode-{rows}", rows, 8192, 32, 8, 128, causal=True, modes=("rope-fwd",), form="cache", shortest=shortest
    )


CASES: tuple[AttentionCase, ...] = (
    *_layer("small", 2, 128, 4),
    *_layer("bert", 32, 512, 12),
    *(_decode(rows) for rows in (1, 8, 64)),
)

MODES = {
    **{mode: DIRECTIONS[mode.rpartition("-")[2]] for case in CASES for mode in case.modes},
    ROTATE: "apply_rope in place, out of place and recording, rotary_embedding, complex numbers",
}
_SDPA, _CUDNN = ATTENTION_PEERS["sdpa_default"], ATTENTION_PEERS["cudnn"]
# SDPA is the same call by PyTorch's choice and by cuDNN. A model makes the choice once, outside of the call.
HOST_PEERS: dict[str, AttentionPeer] = {
    "sdpa_default": replace(_SDPA, why_not=_CUDNN.why_not),
    "cudnn": replace(_CUDNN, build=_SDPA.build),
    **{name: ATTENTION_PEERS[name] for name in ("flash_attn_4", "flex")},
}
CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "cudnn": functools.partial(sdpa_kernel, BACKENDS["cudnn"])
}
