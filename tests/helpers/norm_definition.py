"""RMS norm and rotation a second time, for the tests alone: plain float64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from helpers.rope_definition import definition, random_tables, random_tensor
from ropewalk import QKNorm, apply_rope
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

# Roundings in float32 that a result has behind it: squares, sums, a root, a product, a rotation.
ROUNDINGS = 12


@dataclass(frozen=True)
class Case:
    """A convention: the fields of the norm, the shapes, and keywords of `apply_rope`."""

    weights: str | None = "vector"  # None, or of the shapes "vector" (D,), "heads" (H, D) and "across" (H·D,)
    norm: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    rotary_dim: int = 16
    with_k: bool = True
    biases: bool = False  # of q (H, D), of k (K·D,)


AXES_POSITIONS = [
    [[0, 1, 2, 60, 4, 5, 9], [3, 2, 1, 0, 9, 8, 7]],
    [[7, 7, 9, 3, 1, 0, 127], [5, 6, 8, 8, 127, 2, 4]],
    [[9, 8, 7, 6, 5, 4, 3], [30, 31, 2, 33, 1, 35, 36]],
]
ONE_ROW = {"positions": [row[:1] for row in AXES_POSITIONS], "axes": [1, 0, 2, 1]}
CASES = {
    "qwen3": Case(),
    "gemma3": Case(norm={"offset": 1.0}),
    "qwen3-next": Case(norm={"offset": 1.0}, head_dim=32, rotary_dim=8, heads=(3, 1)),
    "olmo2": Case("across", {"across_heads": True}, heads=(3, 2)),
    "olmo2-after": Case("across", {"across_heads": True, "after": True}, {"rotary_offset": 4}, rotary_dim=8),
    "llama4": Case(None, {"after": True}, {"interleaved": True}),
    "hunyuan": Case(norm={"after": True}, call={"layout": "bhtd"}),
    "cohere-weights": Case("heads", call={"interleaved": True}, heads=(3, 1)),
    "heads-bhtd": Case("heads", call={"layout": "bhtd"}),
    "no-weight": Case(None, {"eps": 1e-5}),
    "offset-features": Case(call={"rotary_offset": 4}, rotary_dim=8),
    "odd-offset": Case(norm={"after": True}, call={"rotary_offset": 3}, rotary_dim=8),
    "odd-offset-interleaved": Case(call={"rotary_offset": 3, "interleaved": True}, rotary_dim=8),
    "odd-head-dim": Case(head_dim=15, rotary_dim=8),
    "odd-head-dim-interleaved": Case(head_dim=15, rotary_dim=8, call={"interleaved": True}),
    "wide-pairs": Case(head_dim=40, rotary_dim=40),
    "packed": Case(call={"layout": "thd", "cu_seqlens": [0, 2, 2, 7]}),
    "packed-tokens": Case("heads", call={"layout": "thd", "positions": [6, 5, 4, 3, 2, 1, 0]}),
    "offsets": Case(call={"offsets": [5, 90]}),
    "tokens": Case(call={"positions": [[3, 3, 1, 0, 127, 60, 2], [9, 8, 7, 6, 5, 4, 3]]}),
    "q-alone": Case(with_k=False),
    "biases": Case(biases=True, norm={"offset": 1.0}),
    "biases-bhtd": Case(
        "heads", {"after": True}, {"layout": "bhtd", "rotary_offset": 3}, head_dim=15, rotary_dim=8, biases=True
    ),
    "biases-across": Case("across", {"across_heads": True}, {"interleaved": True}, heads=(3, 2), biases=True),
    "bias-alone": Case(None, with_k=False, call={"layout": "thd", "cu_seqlens": [0, 2, 2, 7]}, biases=True),
    "axes": Case(call={"positions": AXES_POSITIONS, "axes": [0, 0, 1, 2, 1, 2, 2, 0]}),
    "axes-after": Case("across", {"across_heads": True, "after": True}, {**ONE_ROW, "rotary_offset": 3}, rotary_dim=8),
    "axes-interleaved": Case("heads", call={**ONE_ROW, "rotary_offset": 3, "interleaved": True}, rotary_dim=8),
    "axes-bhtd": Case(norm={"offset": 1.0}, call={**ONE_ROW, "layout": "bhtd"}, head_dim=15, rotary_dim=8),
    "axes-packed": Case(
        call={"layout": "thd", "positions": [row[0] for row in AXES_POSITIONS], "axes": [2, 0, 1] * 4},
        head_dim=24,
        rotary_dim=24,
    ),
    "blocks": Case("heads", call={"pair_block": 8}),
    "blocks-partial": Case(norm={"after": True}, call={"pair_block": 4, "rotary_offset": 3}, rotary_dim=12),
    "blocks-axes": Case(
        call={"positions": AXES_POSITIONS[:2], "axes": [0] * 6 + [1] * 6, "pair_block": 12}, head_dim=24, rotary_dim=24
    ),
    "blocks-rest": Case(call={**ONE_ROW, "layout": "bhtd", "pair_block": 4}, head_dim=15, rotary_dim=8),
}
B, T, ROWS = 2, 7, 128


BIASES = ("q_bias", "k_bias")


def norm_definition(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm: QKNorm,
    *,
    bias: Tensor | None = None,
    **call: Any,
) -> Tensor:
    """Normalise and rotate one tensor, by the equations of the norm's docstring."""
    rotated = {name: value for name, value in call.items() if name not in BIASES}
    layout = call.get("layout", "bthd")

    def normed(x: Tensor) -> Tensor:
        axes = (layout.index("h"), -1) if norm.across_heads else (-1,)
        n = x / (x.square().mean(axes, keepdim=True) + norm.eps).sqrt()
        if weight is None:
            return n
        factors = weight.cpu().double() + norm.offset
        if factors.numel() > x.shape[-1] or factors.ndim == 2:
            shape = [1] * x.ndim
            shape[layout.index("h")], shape[-1] = x.shape[layout.index("h")], x.shape[-1]
            factors = factors.reshape(shape)
        return n * factors

    x = x.cpu().double()
    if bias is not None:
        bias = bias.cpu().double().reshape(-1, x.shape[-1])
        x = x + (bias[:, None] if layout == "bhtd" else bias)
    return normed(definition(x, cos, sin, **rotated)) if norm.after else definition(normed(x), cos, sin, **rotated)


def draw(
    case: Case, device: Any, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor | None], tuple[Tensor, Tensor], dict[str, Any]]:
    """Draw q and k, strided slices of one projection, their weights, the tables and keywords of the call."""
    call = {
        name: torch.tensor(value, device=device) if isinstance(value, list) else value
        for name, value in case.call.items()
    }
    layout, d = call.get("layout", "bthd"), case.head_dim
    heads = case.heads[: 1 + case.with_k]
    total = sum(heads) + 2
    fused = random_tensor(*((T,) if layout == "thd" else (B, T)), total, d, dtype=dtype, device=device)
    xs = list(fused.split([*heads, total - sum(heads)], dim=-2)[: len(heads)])
    if layout == "bhtd":
        xs = [x.transpose(1, 2) for x in xs]
    shapes = {"vector": lambda h: (d,), "heads": lambda h: (h, d), "across": lambda h: (h * d,)}
    weights = [
        None if case.weights is None else random_tensor(*shapes[case.weights](h), dtype=weight_dtype, device=device)
        for h in heads
    ]
    if case.biases:
        for name, _, shape in zip(BIASES, heads, ((heads[0], d), (heads[-1] * d,)), strict=False):
            call[name] = random_tensor(*shape, dtype=weight_dtype, device=device)
    return xs, weights, random_tables(ROWS, case.rotary_dim // 2, device=device), call


def make_norm(case: Case, weights: list[Tensor | None]) -> QKNorm:
    return QKNorm(*weights, **case.norm)


def run(case: Case, xs: list[Tensor], weights: list[Tensor | None], tables: Any, call: Any, impl: str) -> list[Tensor]:
    """The results of a call as a list."""
    k = xs[1] if len(xs) == 2 else None
    outs = apply_rope(xs[0], k, *tables, norm=make_norm(case, weights), impl=impl, **call)
    return [outs] if k is None else list(outs)


def check(
    case: Case,
    xs: list[Tensor],
    weights: list[Tensor | None],
    tables: Any,
    call: Any,
    impl: str,
    roundings: int = ROUNDINGS,
) -> None:
    """Compare the results and all gradients of a call with float64, the inputs untouched and memory poisoned."""
    xs = [x.detach().requires_grad_() for x in xs]
    weights = [None if weight is None else weight.detach().requires_grad_() for weight in weights]
    call = {name: x.detach().requires_grad_() if name in BIASES else x for name, x in call.items()}
    biases = [call.get(name) for name, _ in zip(BIASES, xs, strict=False)]
    learned = [x for x in (*weights, *biases) if x is not None]
    with poisoned_memory(), unchanged([*xs, *learned, *tables]):
        outs = run(case, xs, weights, tables, call, impl)
        cotangents = [random_tensor(*x.shape, dtype=x.dtype, device=x.device) for x in outs]
        actual = [*outs, *torch.autograd.grad(outs, [*xs, *learned], cotangents)]
    for x, out in zip(xs, outs, strict=True):
        assert out.stride() == torch.empty_like(x).stride()
    exact_xs = [x.detach().cpu().double().requires_grad_() for x in xs]
    exact_weights, exact_biases = (
        [None if x is None else x.detach().cpu().double().requires_grad_() for x in of_heads]
        for of_heads in (weights, biases)
    )
    norm = make_norm(case, exact_weights)
    truths = [
        norm_definition(x, weight, *tables, norm, bias=bias, **call)
        for x, weight, bias in zip(exact_xs, exact_weights, exact_biases, strict=True)
    ]
    exact_learned = [x for x in (*exact_weights, *exact_biases) if x is not None]
    exact_cotangents = [cotangent.cpu().double() for cotangent in cotangents]
    truths += torch.autograd.grad(truths, [*exact_xs, *exact_learned], exact_cotangents)
    assert [x.dtype for x in actual] == [x.dtype for x in (*xs, *xs, *learned)]
    for mine, truth in zip(actual, truths, strict=True):
        # float16 and bfloat16 are rounded once.
        n = 1 if mine.dtype in (torch.float16, torch.bfloat16) else roundings
        assert_close_to_truth(mine.detach().cpu(), truth.detach(), truth.detach().to(mine.dtype), n)
