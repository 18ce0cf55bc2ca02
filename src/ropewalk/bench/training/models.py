"""Models of the training benchmark: each case's model with attention by each candidate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.bench.training.cases import Inputs, TrainingCase
from ropewalk.integrations import huggingface

OURS = "ropewalk"


@dataclass(frozen=True)
class Model:
    """A model that learns: its calls, and their context."""

    module: nn.Module
    loss: Callable[[], Tensor]
    hidden: Callable[[], Tensor]  # the last hidden states, (B, T, hidden_size)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


class RopeSelfAttention(nn.Module):
    """BERT's self-attention with RoPE in plain PyTorch: rotate, then SDPA or matrix products."""

    def __init__(self, theirs: Any, max_tokens: int, *, by_sdpa: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = theirs.query, theirs.key, theirs.value
        self.head_dim, self.dropout, self.by_sdpa = theirs.attention_head_size, theirs.dropout.p, by_sdpa
        frequencies = 10000 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(max_tokens), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.rotate = torch.compile(_rotate) if by_sdpa else _rotate

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **others: Any) -> tuple[Tensor, None]:
        projections = (self.query, self.key, self.value)
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in projections)
        p = self.dropout if self.training else 0.0
        cos, sin = (self.get_buffer(name)[: q.shape[2]].to(q.dtype) for name in ("cos", "sin"))
        q, k = self.rotate(q, k, cos, sin)
        if self.by_sdpa:
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=p)
        else:
            scores = q @ k.mT * self.head_dim**-0.5
            if attention_mask is not None:
                scores = scores + attention_mask
            context = F.dropout(scores.softmax(dim=-1), p, self.training) @ v
        return context.transpose(1, 2).flatten(2), None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


def _rope_in_pytorch(module: Any, *, by_sdpa: bool) -> None:
    """Replace a BERT's attention by `RopeSelfAttention`, without its table."""
    for layer in module.bert.encoder.layer:
        theirs = layer.attention.self
        layer.attention.self = RopeSelfAttention(theirs, module.config.max_position_embeddings, by_sdpa=by_sdpa)
    nn.init.zeros_(module.bert.embeddings.position_embeddings.weight).requires_grad_(False)


def _bert(
    attention: str, case: TrainingCase, inputs: Inputs, convert: Callable[[Any], object] = lambda module: None
) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    module = BertForMaskedLM(BertConfig(**case.config, attn_implementation=attention))
    convert(module)
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    return Model(
        module, lambda: module(**given, labels=inputs.labels).loss, lambda: module.bert(**given).last_hidden_state
    )


def _decoder(kind: str, attention: str, case: TrainingCase, inputs: Inputs, rotates: bool = False) -> Model:
    """Return the stack of layers of a kind of model, "Llama" or "Qwen3", with our rotation or the model's own."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**case.config, attn_implementation=attention)
    module = getattr(transformers, f"{kind}Model")(config)
    direction = torch.randn(config.hidden_size)

    def hidden() -> Tensor:
        return module(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state

    # The rotation is replaced for all models of the class: it must be theirs again when another candidate runs.
    context = partial(huggingface.use_ropewalk_rope, module) if rotates else nullcontext
    return Model(module, lambda: (hidden().float() @ direction).mean(), hidden, context)


Build = Callable[[TrainingCase, Inputs], Model]
_OUR_ROPE = partial(huggingface.convert_bert, position="rope", interleaved=False)
# By family: ours, then what it is measured against. The last one says in float32 what is right.
CANDIDATES: dict[str, dict[str, Build]] = {
    "bert-rope": {
        OURS: partial(_bert, "eager", convert=_OUR_ROPE),
        "compiled RoPE + sdpa": partial(_bert, "sdpa", convert=partial(_rope_in_pytorch, by_sdpa=True)),
        "RoPE + eager": partial(_bert, "eager", convert=partial(_rope_in_pytorch, by_sdpa=False)),
    },
    "bert": {name: partial(_bert, name) for name in (OURS, "sdpa", "eager")},
}
for _kind in ("Llama", "Qwen3"):
    for _end, _rotates in (("", True), ("-attention", False)):
        _ours = partial(_decoder, _kind, OURS, rotates=_rotates)
        CANDIDATES[_kind.lower() + _end] = {OURS: _ours, "sdpa": partial(_decoder, _kind, "sdpa")}
