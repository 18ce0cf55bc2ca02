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
    description: str
    family: str  # of `CANDIDATES`
    config: dict[str, Any]  # of transformers
    batch: int
    tokens: int  # of each row, padding included
    shortest: int | None  # rows have seeded lengths, uniform from here to `tokens`; None: no padding, and no mask
    precisions: tuple[str, ...]


_BASE: dict[str, Any] = {}  # BertConfig's defaults are BERT-base
_LLAMA = {
    "vocab_size": 1024,  # a stack of layers: neither the table nor a head should cost anything
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "use_cache": False,
}
_BOTH = ("autocast", "bf16")
CASES = (
    TrainingCase(
        "bert-base-rope", "BERT-base with RoPE, masked-language modelling", "bert-rope", _BASE, 64, 512, 256, _BOTH
    ),
    TrainingCase("bert-base", "unmodified BERT-base, masked-language modelling", "bert", _BASE, 64, 512, 256, _BOTH),
    TrainingCase("llama-8-layers", "8 layers of Llama 3 8B", "llama", _LLAMA, 1, 4096, None, ("bf16",)),
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
    ids = torch.randint(vocab_size, shape, generator=generator)
    is_token = torch.ones(shape, dtype=torch.bool)
    if case.shortest is not None:
        lengths = torch.randint(case.shortest, case.tokens + 1, (case.batch, 1), generator=generator)
        is_token = torch.arange(case.tokens) < lengths
    is_label = is_token & (torch.rand(shape, generator=generator) < 0.15)
    labels = torch.where(is_label, ids, -100)
    mask = None if case.shortest is None else is_token.long().to(device)
    return Inputs(ids.to(device), mask, labels.to(device), int(is_token.sum()))
