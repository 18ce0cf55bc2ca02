"""The benchmark of training steps: whole models of transformers, with attention by us and by PyTorch.

Each step is forward, backward and AdamW. Before, hidden states and gradients are compared, without dropout, with those
of the same weights in float32: their error may be at most twice that of eager attention, or of SDPA for Llama.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from ropewalk.bench.core.gate import Verdict, worst
from ropewalk.bench.core.load import Row
from ropewalk.bench.core.options import MISSING, Options
from ropewalk.bench.core.peers import Library
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right
from ropewalk.bench.core.summary import number
from ropewalk.bench.core.timing import interleave, peak_memory, quantiles, ratios
from ropewalk.integrations import huggingface
from ropewalk.ops.attention import backends

OURS, FLASH = "ropewalk", "flash_attention_4"  # the latter is transformers' name of flash-attn 4
CPU_TOKENS = 512  # of a batch that a CPU trains on unless a case is named
ROUNDS = 8
_STEPS = 3  # between two waits for the device
_TOLERANCE = 2.0  # times the error of the same model by PyTorch's eager attention (SDPA where there is none)
# Projections of the first layer.
_PROBED = re.compile(r"(.*\.layer\.0|layers\.0)\..*\b(query|key|value|q_proj|k_proj|v_proj)\.weight").fullmatch


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


def _decoder(hidden_size: int, layers: int, heads: int, kv_heads: int, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the config of a stack of layers, whose table and head cost next to nothing."""
    config = {"vocab_size": 1024, "hidden_size": hidden_size, "intermediate_size": 7 * hidden_size // 2}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": hidden_size // heads, "max_position_embeddings": tokens, "use_cache": False}
    return {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, **more}


_SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA, _LLAMA_4 = (_decoder(4096, layers, 32, 8, 8192) for layers in (8, 4))
_QWEN = _decoder(4096, 8, 32, 8, 8192, intermediate_size=12288)
_GEMMA = _decoder(3072, 4, 16, 16, 8192, intermediate_size=24576, head_dim=256)
_ALONE, _PLAIN = "12 layers, attention alone", "12 layers, and the rotation"
_BOTH, _BF16 = ("autocast", "bf16"), ("bf16",)
_ROW = (1, 4096, None, _BF16)
_12 = (_decoder(1024, 12, 16, 4, 2048), 4, 512, None, _BF16)
_CASES: tuple[tuple[Any, ...], ...] = (
    ("bert-base-rope", "BERT-base with RoPE, masked tokens", "bert-rope", {}, 64, 512, 256, _BOTH),
    ("bert-base", "unmodified BERT-base, masked tokens", "bert", {}, 64, 512, 256, _BOTH),
    ("llama-8-layers", "8 layers of Llama 3 8B", "llama", _LLAMA, *_ROW),
    ("qwen3-8-layers", "8 layers of Qwen3 8B", "qwen3", _QWEN, *_ROW),
    ("gemma-4-layers", "4 layers of Gemma 7B, head dim 256", "gemma", _GEMMA, *_ROW),
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
    model_inputs = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    loss, stack = partial(module, **model_inputs, labels=inputs.labels), partial(module.bert, **model_inputs)
    return Model(module, lambda: loss().loss, lambda: stack().last_hidden_state)


def _stack(kind: str, attention: str, case: TrainingCase, inputs: Inputs, rotates: bool = False) -> Model:
    """Return the stack of layers of a kind of model, as "Llama", with our rotation or the model's own."""
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
# By family: ours, then what it is measured against. The last one says in float32 what is right, and runs everywhere.
CANDIDATES: dict[str, dict[str, Build]] = {
    "bert-rope": {
        OURS: partial(_bert, "eager", convert=_OUR_ROPE),
        "compiled RoPE + sdpa": partial(_bert, "sdpa", convert=partial(_rope_in_pytorch, by_sdpa=True)),
        "RoPE + eager": partial(_bert, "eager", convert=partial(_rope_in_pytorch, by_sdpa=False)),
    },
    "bert": {name: partial(_bert, name) for name in (OURS, FLASH, "sdpa", "eager")},
}
for _kind in ("Llama", "Qwen3", "Gemma"):
    for _end, _rotates in (("", True), ("-attention", False)):
        _ours = partial(_stack, _kind, OURS, rotates=_rotates)
        _theirs = {name: partial(_stack, _kind, name) for name in (FLASH, "sdpa")}
        CANDIDATES[_kind.lower() + _end] = {OURS: _ours, **_theirs}


Opened = tuple[Inputs, tuple[Tensor, Tensor]]  # and the right results


class TrainingBench(Bench):
    name = "training"
    cases = CASES
    modes = MODES
    impls = ()
    peers = {  # noqa: RUF012
        "transformers": Library("transformers", "transformers", "transformers", False),
        FLASH: Library(FLASH, "flash_attn.cute", "flash-attn-4", True),
    }
    columns = (
        ("tokens/s", number("tokens_per_second", ",.0f")),
        ("peak, GiB", number("peak_bytes", ".1f", 2**30)),
        ("hidden error", number("hidden_error", ".2g")),
        ("gradient's", number("gradient_error", ".2g")),
    )

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        huggingface.register()
        self.rounds = options.rounds or ROUNDS
        super().__init__(options, device, console)

    @property
    def row_options(self) -> Mapping[str, object]:
        """The options that rows depend on, and which of our implementations there are."""
        attention = {impl: backends.why_missing(impl, self.device) or "yes" for impl in backends.BACKENDS}
        return {"rounds": self.rounds, "attention": attention}

    def is_too_large(self, case: TrainingCase) -> bool:
        return case.batch * case.tokens > CPU_TOKENS

    def open(self, case: TrainingCase) -> Opened:
        """Make the batch, and the right results, in float32 by the family's last candidate."""
        inputs = make_inputs(case, case.config.get("vocab_size", 30522), self.device, self.options.seed)
        return inputs, _Trainee(self, case, inputs, [*CANDIDATES[case.family]][-1], "float32").probe()

    def candidates(self, case: TrainingCase, mode: str, opened: Opened) -> Iterator[Candidate]:
        """Yield ours, then what it is measured against; the last one's errors are the budget of all."""
        inputs, truth = opened
        *_, last = names = CANDIDATES[case.family]
        budget = _Trainee(self, case, inputs, last, mode).compare(truth)

        def check(name: str) -> tuple[Verdict, _Trainee]:
            trainee = _Trainee(self, case, inputs, name, mode)
            errors = trainee.compare(truth)
            share = worst(error / most if most else 0.0 for error, most in zip(errors, budget, strict=True))
            complaint = None if share <= _TOLERANCE else f"the errors of hidden states and gradients are {errors}"
            return Verdict(share, _TOLERANCE, complaint), trainee

        for name in names:
            reason = self._why_not_flash(case) if name == FLASH else None
            yield Candidate(name, "ours" if name == OURS else "peer", partial(check, name), reason=reason)

    def _why_not_flash(self, case: TrainingCase) -> str | None:
        """Say why flash-attn 4 does not run a case: BERT's dropout is there unless the config says otherwise."""
        if case.family == "bert" and case.config.get("attention_probs_dropout_prob", 0.1):
            return "dropout is not supported"
        version = self.versions[FLASH]
        return version.removeprefix(f"{MISSING}: ") if version.startswith(MISSING) else None

    def time(self, case: TrainingCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        def one_round(order: Sequence[str]) -> dict[str, float]:
            return {name: right[name][1].time_steps() for name in order}

        samples = interleave(right, one_round, warmup=1, rounds=self.rounds)
        for name, (row, trainee) in right.items():
            times, n_tokens = quantiles(samples[name]), trainee.inputs.n_tokens
            row = {**row, "n_tokens": n_tokens, "parameters": trainee.n_parameters, "time": times}
            row |= {"hidden_error": trainee.errors[0], "gradient_error": trainee.errors[1]}
            row |= {"ratios": ratios(samples, name), "tokens_per_second": n_tokens * 1e6 / times.p50}
            if self.device.type == "cuda":
                with trainee.model.context():
                    row["peak_bytes"] = peak_memory(trainee.step, self.device)
            yield row


class _Trainee:
    """A candidate with its weights, its optimiser and its errors."""

    def __init__(self, bench: Bench, case: TrainingCase, inputs: Inputs, name: str, precision: str) -> None:
        self.inputs, self.device = inputs, bench.device
        torch.manual_seed(bench.options.seed)
        with self.device:
            self.model = CANDIDATES[case.family][name](case, inputs)
        if precision == "bf16":
            for parameter in self.model.module.parameters():  # and no buffer: frequencies stay in float32
                parameter.data = parameter.data.bfloat16()
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        self.n_parameters = sum(parameter.numel() for parameter in parameters)
        self.optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=self.device.type == "cuda")
        self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=precision == "autocast")

    def step(self) -> None:
        with self.autocast():
            loss = self.model.loss()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def time_steps(self) -> float:
        """Return the microseconds of a step, a mean of some between two waits for the device."""
        wait = partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else lambda: None
        with self.model.context():
            wait()
            start = time.perf_counter()
            for _ in range(_STEPS):
                self.step()
            wait()
        return (time.perf_counter() - start) * 1e6 / _STEPS

    def probe(self) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the tokens, and the gradient of the first layer's projections."""
        mask, module = self.inputs.attention_mask, self.model.module.eval()  # no dropout
        with self.model.context():
            with self.autocast():
                hidden = self.model.hidden()
            unmasked = hidden.float() if mask is None else hidden.float()[mask.bool()]
            unmasked.backward(
                torch.randn(unmasked.shape, generator=torch.Generator().manual_seed(0)).to(unmasked.device)
            )
        found = [
            p.grad.float().flatten() for name, p in module.named_parameters() if _PROBED(name) and p.grad is not None
        ]
        self.optimiser.zero_grad()
        module.train()
        return unmasked.detach(), torch.cat(found)

    def compare(self, truth: tuple[Tensor, Tensor]) -> list[float]:
        """Return the errors of hidden states and of gradients: the norm of the difference over the norm."""
        self.errors = [float((a - b).norm() / b.norm()) for a, b in zip(self.probe(), truth, strict=True)]
        return self.errors
