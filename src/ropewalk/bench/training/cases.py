"""Cases of the training benchmark: models of transformers by each candidate, and one batch of random tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.integrations import huggingface

OURS = "ropewalk"


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
        return f"{self.words}, batch {self.batch} of {self.tokens} tokens"


MODES = {"autocast": "float32 weights under bfloat16 autocast", "bf16": "everything in bfloat16"}


def _decoder(hidden_size: int, layers: int, heads: int, kv_heads: int, tokens: int) -> dict[str, Any]:
    """Return the config of a stack of layers, whose table and head cost next to nothing."""
    config = {"vocab_size": 1024, "hidden_size": hidden_size, "intermediate_size": 7 * hidden_size // 2}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": hidden_size // heads, "max_position_embeddings": tokens, "use_cache": False}
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


_SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA, _LLAMA_4 = (_decoder(4096, layers, 32, 8, 8192) for layers in (8, 4))
_ALONE, _PLAIN = "12 layers, attention alone", "12 layers, and the rotation"
_BOTH, _BF16 = ("autocast", "bf16"), ("bf16",)
_ROW = (1, 4096, None, _BF16)
_12 = (_decoder(1024, 12, 16, 4, 2048), 4, 512, None, _BF16)
_CASES: tuple[tuple[Any, ...], ...] = (
    ("bert-base-rope", "BERT-base with RoPE, masked tokens", "bert-rope", {}, 64, 512, 256, _BOTH),
    ("bert-base", "unmodified BERT-base, masked tokens", "bert", {}, 64, 512, 256, _BOTH),
    ("llama-8-layers", "8 layers of Llama 3 8B", "llama", _LLAMA, *_ROW),
    # Models whose steps wait for the host.
    ("bert-4x256", "BERT of 4 layers, padded rows", "bert", {**_SMALL, **_QUIET}, 64, 128, 64, _BF16),
    ("bert-4x256-dropout", "the same with dropout", "bert", _SMALL, 64, 128, 64, _BF16),
    ("bert-4x256-full", "the same, no padding, no dropout", "bert", {**_SMALL, **_QUIET}, 64, 128, None, _BF16),
    ("bert-base-8x128", "BERT-base, padded rows, no dropout", "bert", _QUIET, 8, 128, 64, _BF16),
    ("bert-base-64x512", "BERT-base, padded rows, no dropout", "bert", _QUIET, 64, 512, 256, _BF16),
    ("llama-12x1024-attention", _ALONE, "llama-attention", *_12),
    ("llama-12x1024", _PLAIN, "llama", *_12),
    ("qwen3-12x1024-attention", _ALONE, "qwen3-attention", *_12),
    ("qwen3-12x1024", _PLAIN, "qwen3", *_12),
    ("llama-4x4096-attention", "4 layers, attention alone", "llama-attention", _LLAMA_4, *_ROW),
    ("llama-4x4096", "4 layers, and the rotation", "llama", _LLAMA_4, *_ROW),
)
CASES = tuple(TrainingCase(*case) for case in _CASES)


class Inputs(NamedTuple):
    input_ids: Tensor  # (B, T)
    attention_mask: Tensor | None  # (B, T), 1 for tokens
    labels: Tensor  # (B, T), −100 where nothing is to be predicted
    n_tokens: int  # without padding


def make_inputs(case: TrainingCase, vocab_size: int, device: torch.device, seed: int) -> Inputs:
    """Draw random tokens, of which 15 % are to be predicted, in rows of seeded lengths."""
    shape, generator = (case.batch, case.tokens), torch.Generator().manual_seed(seed)
    ids, is_token = torch.randint(vocab_size, shape, generator=generator), torch.ones(shape, dtype=torch.bool)
    if case.shortest is not None:
        lengths = torch.randint(case.shortest, case.tokens + 1, (case.batch, 1), generator=generator)
        is_token = torch.arange(case.tokens) < lengths
    labels = torch.where(is_token & (torch.rand(shape, generator=generator) < 0.15), ids, -100)
    mask = None if case.shortest is None else is_token.long().to(device)
    return Inputs(ids.to(device), mask, labels.to(device), int(is_token.sum()))


class Model(NamedTuple):
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
            scores = scores if attention_mask is None else scores + attention_mask
            context = F.dropout(scores.softmax(dim=-1), p, self.training) @ v
        return context.transpose(1, 2).flatten(2), None


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    (q1, q2), (k1, k2) = (x.chunk(2, dim=-1) for x in (q, k))
    return q * cos + torch.cat((-q2, q1), dim=-1) * sin, k * cos + torch.cat((-k2, k1), dim=-1) * sin


def _rope_in_pytorch(module: Any, *, by_sdpa: bool) -> None:
    """Replace a BERT's attention by `RopeSelfAttention`, without its table."""
    for layer in module.bert.encoder.layer:
        theirs = layer.attention.self
        layer.attention.self = RopeSelfAttention(theirs, module.config.max_position_embeddings, by_sdpa=by_sdpa)
    nn.init.zeros_(module.bert.embeddings.position_embeddings.weight).requires_grad_(False)


def _bert(attention: str, case: TrainingCase, inputs: Inputs, convert: Any = lambda module: None) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    module = BertForMaskedLM(BertConfig(**case.config, attn_implementation=attention))
    convert(module)
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    loss, stack = partial(module, **given, labels=inputs.labels), partial(module.bert, **given)
    return Model(module, lambda: loss().loss, lambda: stack().last_hidden_state)


def _stack(kind: str, attention: str, case: TrainingCase, inputs: Inputs, rotates: bool = False) -> Model:
    """Return the stack of layers of a kind of model, "Llama" or "Qwen3", with our rotation or the model's own."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**case.config, attn_implementation=attention)
    module = getattr(transformers, f"{kind}Model")(config)
    direction = torch.randn(config.hidden_size)
    # The rotation is replaced for all models of the class: it must be theirs again when another candidate runs.
    context = partial(huggingface.use_ropewalk_rope, module) if rotates else nullcontext

    def hidden() -> Tensor:
        return module(inputs.input_ids, attention_mask=inputs.attention_mask).last_hidden_state

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
        _ours = partial(_stack, _kind, OURS, rotates=_rotates)
        CANDIDATES[_kind.lower() + _end] = {OURS: _ours, "sdpa": partial(_stack, _kind, "sdpa")}
