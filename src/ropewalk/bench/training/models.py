"""Models of the training benchmark: each case's model with attention by each candidate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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

    def __init__(self, theirs: Any, head_dim: int, max_tokens: int, *, by_sdpa: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = theirs.query, theirs.key, theirs.value
        self.head_dim, self.dropout, self.by_sdpa = head_dim, theirs.dropout.p, by_sdpa
        angles = torch.outer(torch.arange(max_tokens), 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.rotate = torch.compile(_rotate) if by_sdpa else _rotate

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        projections = (self.query, self.key, self.value)
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in projections)
        tokens, p = q.shape[2], self.dropout if self.training else 0.0
        cos, sin = (self.get_buffer(name)[:tokens].to(q.dtype) for name in ("cos", "sin"))
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


def _bert(case: TrainingCase, inputs: Inputs, attention: str, convert: Callable[[Any], object] | None) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**case.config, attn_implementation=attention)
    module = BertForMaskedLM(config)
    if convert is not None:
        convert(module)
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    return Model(
        module,
        loss=lambda: module(**given, labels=inputs.labels).loss,
        hidden=lambda: module.bert(**given).last_hidden_state,
    )


def _rope_in_pytorch(module: Any, *, by_sdpa: bool) -> None:
    """Replace a BERT's attention by `RopeSelfAttention`, without its table."""
    config, table = module.config, module.bert.embeddings.position_embeddings
    for layer in module.bert.encoder.layer:
        theirs = layer.attention.self
        head_dim = config.hidden_size // config.num_attention_heads
        layer.attention.self = RopeSelfAttention(theirs, head_dim, config.max_position_embeddings, by_sdpa=by_sdpa)
    nn.init.zeros_(table.weight)
    table.weight.requires_grad_(False)


def _ours_rope(case: TrainingCase, inputs: Inputs) -> Model:
    def convert(module: Any) -> None:
        huggingface.convert_bert(module, position="rope", interleaved=False)

    return _bert(case, inputs, "eager", convert)


def _compiled_rope(case: TrainingCase, inputs: Inputs) -> Model:
    return _bert(case, inputs, "sdpa", lambda module: _rope_in_pytorch(module, by_sdpa=True))


def _eager_rope(case: TrainingCase, inputs: Inputs) -> Model:
    return _bert(case, inputs, "eager", lambda module: _rope_in_pytorch(module, by_sdpa=False))


def _decoder(kind: str, case: TrainingCase, inputs: Inputs, attention: str) -> Model:
    """Return the stack of layers of a kind of model, "Llama" or "Qwen3"."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**case.config, attn_implementation=attention)
    module = getattr(transformers, f"{kind}Model")(config)
    direction = torch.randn(config.hidden_size)

    def hidden() -> Tensor:
        return module(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state

    return Model(module, loss=lambda: (hidden().float() @ direction).mean(), hidden=hidden)


def _our_decoder(kind: str, case: TrainingCase, inputs: Inputs) -> Model:
    model = _decoder(kind, case, inputs, OURS)
    # The rotation is replaced for all models of the class: it must be theirs again when another candidate runs.
    return Model(model.module, model.loss, model.hidden, lambda: huggingface.use_ropewalk_rope(model.module))


def _decoders(kind: str, *, rotates: bool) -> dict[str, Callable[[TrainingCase, Inputs], Model]]:
    """Return the candidates of a kind of model: ours with our rotation or with the model's own."""

    def ours(case: TrainingCase, inputs: Inputs) -> Model:
        return _our_decoder(kind, case, inputs) if rotates else _decoder(kind, case, inputs, OURS)

    return {OURS: ours, "sdpa": lambda case, inputs: _decoder(kind, case, inputs, "sdpa")}


# By family: ours, then what it is measured against. The last one says in float32 what is right.
CANDIDATES: dict[str, dict[str, Callable[[TrainingCase, Inputs], Model]]] = {
    "bert-rope": {OURS: _ours_rope, "compiled RoPE + sdpa": _compiled_rope, "RoPE + eager": _eager_rope},
    "bert": {
        OURS: lambda case, inputs: _bert(case, inputs, OURS, None),
        "sdpa": lambda case, inputs: _bert(case, inputs, "sdpa", None),
        "eager": lambda case, inputs: _bert(case, inputs, "eager", None),
    },
    "llama": _decoders("Llama", rotates=True),
    "llama-attention": _decoders("Llama", rotates=False),
    "qwen3": _decoders("Qwen3", rotates=True),
    "qwen3-attention": _decoders("Qwen3", rotates=False),
}
