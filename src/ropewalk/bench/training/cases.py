"""Cases of the training benchmark: models of transformers, their batches, and one batch of random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingCase:
    """A model, its batch, and the precisions it is trained in."""

    name: str
    words: str
    family: str  # of `CANDIDATES`
    config: dict[str, Any]  # of transformers
    batch: int
    tokens: int  # of each row, padding included
    shortest: int | None  # rows have seeded lengths, uniform from here to `tokens`; None: no padding, and no mask
    modes: tuple[str, ...]  # precisions
    dtype: str = "float32"  # of the weights under autocast

    @property
    def description(self) -> str:
        """The model and the batch in words."""
        return f"{self.words}, batch {self.batch} of {self.tokens} tokens"


MODES = {"autocast": "float32 weights under bfloat16 autocast", "bf16": "everything in bfloat16"}


def _decoder(hidden_size: int, layers: int, heads: int, kv_heads: int, tokens: int) -> dict[str, Any]:
    """Return the config of a stack of layers, whose table and head cost next to nothing."""
    return {
        "vocab_size": 1024,
        "hidden_size": hidden_size,
        "intermediate_size": 7 * hidden_size // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "use_cache": False,
    }


_BASE: dict[str, Any] = {}  # BertConfig's defaults are BERT-base
_SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL_QUIET = {**_SMALL, **_QUIET}
_LLAMA, _LLAMA_4 = (_decoder(4096, layers, 32, 8, 8192) for layers in (8, 4))
_ALONE, _PLAIN = "12 layers, attention alone", "12 layers, and the rotation"
_BOTH, _BF16 = ("autocast", "bf16"), ("bf16",)
_ROW = (1, 4096, None, _BF16)
_12 = (_decoder(1024, 12, 16, 4, 2048), 4, 512, None, _BF16)
CASES = (
    TrainingCase("bert-base-rope", "BERT-base with RoPE, masked tokens", "bert-rope", _BASE, 64, 512, 256, _BOTH),
    TrainingCase("bert-base", "unmodified BERT-base, masked tokens", "bert", _BASE, 64, 512, 256, _BOTH),
    TrainingCase("llama-8-layers", "8 layers of Llama 3 8B", "llama", _LLAMA, *_ROW),
    # Models whose steps wait for the host.
    TrainingCase("bert-4x256", "BERT of 4 layers, padded rows", "bert", _SMALL_QUIET, 64, 128, 64, _BF16),
    TrainingCase("bert-4x256-dropout", "the same with dropout", "bert", _SMALL, 64, 128, 64, _BF16),
    TrainingCase("bert-4x256-full", "the same, no padding, no dropout", "bert", _SMALL_QUIET, 64, 128, None, _BF16),
    TrainingCase("bert-base-8x128", "BERT-base, padded rows, no dropout", "bert", _QUIET, 8, 128, 64, _BF16),
    TrainingCase("bert-base-64x512", "BERT-base, padded rows, no dropout", "bert", _QUIET, 64, 512, 256, _BF16),
    TrainingCase("llama-12x1024-attention", _ALONE, "llama-attention", *_12),
    TrainingCase("llama-12x1024", _PLAIN, "llama", *_12),
    TrainingCase("qwen3-12x1024-attention", _ALONE, "qwen3-attention", *_12),
    TrainingCase("qwen3-12x1024", _PLAIN, "qwen3", *_12),
    TrainingCase("llama-4x4096-attention", "4 layers, attention alone", "llama-attention", _LLAMA_4, *_ROW),
    TrainingCase("llama-4x4096", "4 layers, and the rotation", "llama", _LLAMA_4, *_ROW),
)


@dataclass(frozen=True)
class Inputs:
    """One batch, on the device."""

    input_ids: Tensor  # (B, T)
    attention_mask: Tensor | None  # (B, T), 1 for tokens
    labels: Tensor  # (B, T), −100 where nothing is to be predicted
    n_tokens: int  # without padding


def make_inputs(case: TrainingCase, vocab_size: int, device: torch.device, seed: int) -> Inputs:
    """Draw random tokens, of which 15 % are to be predicted, in rows of seeded lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.batch, case.tokens)
    ids, is_token = torch.randint(vocab_size, shape, generator=generator), torch.ones(shape, dtype=torch.bool)
    if case.shortest is not None:
        lengths = torch.randint(case.shortest, case.tokens + 1, (case.batch, 1), generator=generator)
        is_token = torch.arange(case.tokens) < lengths
    labels = torch.where(is_token & (torch.rand(shape, generator=generator) < 0.15), ids, -100)
    mask = None if case.shortest is None else is_token.long().to(device)
    return Inputs(ids.to(device), mask, labels.to(device), int(is_token.sum()))
