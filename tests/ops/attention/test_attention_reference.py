"""The reference of attention against a naive definition in float64, its gradients, and what it does in blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import REFERENCE
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, PositionScheme, Rope
from ropewalk.testing import assert_close_to_truth, unchanged

B, H, K, D = 4, 4, 2, 16  # as many batches as heads: the two are easily mistaken for one another
TQ, TK = 5, 7
INV_FREQ = [1.0, 0.25, 0.0625]
SLOPES = [0.5, 0.0, 1.5, -0.25]
SLOPES_OF_ROWS = [SLOPES, [0.1, 2.0, 0.0, 0.3], [0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.5, 0.2]]
PUBLISHED_SLOPES = {1: [2**-8], 4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}

Table = Callable[[Tensor], Tensor]


def exact(table: Tensor) -> Tensor:
    """A table as the equations have it."""
    return table


def rounded(table: Tensor) -> Tensor:
    """A table as the library documents it, in float32."""
    return table.float().double()


def left_alone(x: Tensor, positions: Tensor, table: Table) -> Tensor:
    """No map of features."""
    return x


class Definition(NamedTuple):
    """A scheme's equations: features of x (B, H, T, D) at positions (B or 1, T), and scores at distances."""

    scheme: PositionScheme
    features: Callable[[Tensor, Tensor, Table], Tensor] = left_alone
    scores: Callable[[Tensor, Tensor, Table], Tensor] = lambda scores, distance, table: scores


def turn(
    x: Tensor,
    positions: Tensor,
    omega: list[float],
    table: Table,
    interleaved: bool = False,
    factor: float = 1.0,
    amplitude: Tensor | None = None,
) -> Tensor:
    """Multiply pairs, as complex numbers, by factor · amplitude · exp(i · position · ω)."""
    angles = positions[..., None] * torch.tensor(omega, dtype=torch.float64, device=x.device)
    cos, sin = table(angles.cos() * factor), table(angles.sin() * factor)
    if amplitude is not None:
        cos, sin = table(cos * table(amplitude)), table(sin * table(amplitude))
    n = len(omega)
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    turned = torch.complex(x[..., first], x[..., second]) * torch.complex(cos, sin)[:, None]
    y = x.clone()
    y[..., first], y[..., second] = turned.real, turned.imag
    return y


def geometric(rotary_dim: int, base: float = 10000.0) -> list[float]:
    return [base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def exposb_features(x: Tensor, positions: Tensor, table: Table) -> Tensor:
    amplitude = 1 + 0.2 * torch.exp(-0.001 * positions)[..., None]
    d = torch.arange(D, dtype=torch.float64, device=x.device)
    gain = 0.8 + 0.4 * torch.exp(-((d - D // 4) ** 2) / (2 * (D // 8) ** 2))
    return table(gain.square()).sqrt() * turn(x, positions, geometric(D), table, True, 1.0, amplitude)


def exposb_decay(scores: Tensor, distance: Tensor, table: Table) -> Tensor:
    return scores * (0.7 + 0.3 * torch.exp(-0.005 * distance.abs()))


def falling(slopes: dict[int, Any]) -> Callable[[Tensor, Tensor, Table], Tensor]:
    def scores(scores: Tensor, distance: Tensor, table: Table) -> Tensor:
        slope = torch.tensor(slopes[scores.shape[1]], dtype=torch.float64, device=scores.device)
        return scores - slope[..., None, None] * distance.abs()

    return scores


DEFINITIONS = {
    "none": Definition(NoPosition()),
    "rope": Definition(Rope(), lambda x, p, table: turn(x, p, geometric(D), table)),
    "rope-interleaved": Definition(
        Rope(interleaved=True, base=500.0), lambda x, p, table: turn(x, p, geometric(D, 500.0), table, True)
    ),
    "rope-partial": Definition(Rope(rotary_dim=6), lambda x, p, table: turn(x, p, geometric(6), table)),
    "rope-given": Definition(
        Rope(inv_freq=torch.tensor(INV_FREQ), interleaved=True, attention_factor=1.25),
        lambda x, p, table: turn(x, p, INV_FREQ, table, True, 1.25),
    ),
    "alibi": Definition(Alibi(), scores=falling(PUBLISHED_SLOPES)),
    "alibi-given": Definition(Alibi(torch.tensor(SLOPES)), scores=falling({H: SLOPES})),
    "exposb": Definition(ExpoSB(), exposb_features),
    "exposb-decay": Definition(ExpoSB(distance_decay=True), exposb_features, exposb_decay),
}
SCHEMES = [pytest.param(definition, id=name) for name, definition in DEFINITIONS.items()]
# Those whose parameters do not fix the number of heads.
ANY_HEADS = [pytest.param(definition, id=name) for name, definition in DEFINITIONS.items() if name != "alibi-given"]


def attended(
    batch: int, heads: int, queries: int, keys: int, *, causal=False, window=None, mask=None, key_lengths=None
) -> Tensor:
    """Which key (of the last axis) each query attends, asked one by one."""
    lengths = [keys] * batch if key_lengths is None else key_lengths.tolist()
    if mask is not None:
        shape = {2: (1, 1), 3: (batch, 1), 4: None}[mask.ndim]
        mask = mask.tolist() if shape is None else mask.reshape(*shape, queries, keys).tolist()

    def masked(*indices: int) -> bool:
        flags = mask
        for index in indices:
            flags = flags[index if len(flags) > 1 else 0]
        return not flags

    def attends(b: int, h: int, row: int, n: int) -> bool:
        index = row + keys - queries
        if causal and n > index:
            return False
        if isinstance(window, int) and abs(index - n) >= window:
            return False
        if isinstance(window, tuple) and (0 <= window[0] < index - n or 0 <= window[1] < n - index):
            return False
        return n < lengths[b] and not (mask is not None and masked(b, h, row, n))

    every = [attends(*indices) for indices in itertools.product(*map(range, (batch, heads, queries, keys)))]
    return torch.tensor(every, dtype=torch.bool).reshape(batch, heads, queries, keys)


def define(
    q: Tensor, k: Tensor, v: Tensor, definition: Definition, table: Table, *, scale=None, positions_q=None,
    positions_k=None, **masks
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by its definition in float64, over a whole matrix of scores."""
    q, k, v = q.detach().double(), k.detach().double(), v.detach().double()
    batch, heads, queries, head_dim = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    if positions_q is None:
        positions_q = torch.tensor([[m + keys - queries for m in range(queries)]], device=q.device)
    if positions_k is None:
        positions_k = torch.tensor([list(range(keys))], device=q.device)
    m, n = positions_q.double(), positions_k.double()
    heads_k, heads_v = ([x[:, h // group] for h in range(heads)] for x in (k, v))
    k, v = torch.stack(heads_k, dim=1), torch.stack(heads_v, dim=1)
    scores = torch.einsum("bhmd,bhnd->bhmn", definition.features(q, m, table), definition.features(k, n, table))
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    scores = definition.scores(scores, (m[:, :, None] - n[:, None, :])[:, None], table)
    if keys == 0:
        return torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    may = attended(batch, heads, queries, keys, **masks).to(q.device)
    largest = torch.where(may, scores, -math.inf).amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.where(may, torch.exp(scores - largest), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    nothing = total == 0
    out = torch.einsum("bhmn,bhnd->bhmd", weights, v) / torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -math.inf, largest + total.log())
    return out, lse[..., 0]


def attend(q: Tensor, k: Tensor, v: Tensor, position: PositionScheme, **arguments) -> tuple[Tensor, Tensor]:
    return REFERENCE.attend(make_call(q, k, v, layout="bhtd", position=position, **arguments))


def check(q: Tensor, k: Tensor, v: Tensor, definition: Definition, **arguments) -> None:
    """The reference gives what the definition gives, to float64's accuracy and that of its float32 tables."""
    with unchanged([q, k, v, *(x for x in arguments.values() if isinstance(x, Tensor))]):
        results = attend(q, k, v, definition.scheme, **arguments)
    truths = define(q, k, v, definition, exact, **arguments)
    baselines = truths if definition.features is left_alone else define(q, k, v, definition, rounded, **arguments)
    for result, truth, baseline in zip(results, truths, baselines, strict=True):
        error = float((baseline - truth).nan_to_num(0).abs().max()) if truth.numel() else 0.0
        torch.testing.assert_close(result, truth, rtol=1e-7, atol=1e-7 + 2 * error)


def make(device, *, queries=TQ, keys=TK, batch=B, heads=H, key_heads=K, head_dim=D, dtype=torch.float64):
    """Random q, k and v, (B, H, T, D)."""
    shapes = ((heads, queries), (key_heads, keys), (key_heads, keys))
    return [torch.randn(batch, *shape, head_dim, dtype=torch.float64).to(device, dtype) for shape in shapes]


def flags(device, *shape, kept=0.6):
    return (torch.rand(*shape) < kept).to(device)


MASK_SHAPES = {
    "no mask": None,
    "(Tq, Tk)": (TQ, TK),
    "(B, Tq, Tk)": (B, TQ, TK),
    "(B, 1, 1, Tk)": (B, 1, 1, TK),
    "(1, H, Tq, Tk)": (1, H, TQ, TK),
    "(B, H, Tq, 1)": (B, H, TQ, 1),
}


@pytest.mark.parametrize("mask_shape", MASK_SHAPES.values(), ids=MASK_SHAPES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, (2, 1), (-1, 1), (1, -1), (0, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("definition", SCHEMES)
def test_every_scheme_with_every_mask_is_as_defined(device, definition, causal, window, padded, mask_shape):
    mask = None if mask_shape is None else flags(device, *mask_shape)
    key_lengths = torch.tensor([TK, 0, 3, 1], device=device) if padded else None
    arguments = {"causal": causal, "window": window, "mask": mask, "key_lengths": key_lengths}
    check(*make(device), definition, **arguments)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (4, 1), (6, 3)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 6), (4, 6), (6, 4), (6, 1), (0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("definition", ANY_HEADS)
def test_every_number_of_tokens_and_heads_is_as_defined(device, definition, queries, keys, heads, key_heads, causal):
    tensors = make(device, queries=queries, keys=keys, batch=2, heads=heads, key_heads=key_heads)
    check(*tensors, definition, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_slopes_of_batch_rows_are_as_defined(device, causal):
    definition = Definition(Alibi(torch.tensor(SLOPES_OF_ROWS)), scores=falling({H: SLOPES_OF_ROWS}))
    check(*make(device), definition, causal=causal)


def scattered(rows, tokens, dtype):
    """Positions that repeat, fall and go past 16 million, where float32 no longer knows them apart."""
    near = torch.randint(-3, 9, (rows, tokens))
    far = torch.randint(2**24 - 5, 2**24 + 9, (rows, tokens))
    positions = torch.where(torch.rand(rows, tokens) < 0.5, near, far)
    positions[:, 0], positions[:, 1], positions[:, 2] = 2**24 + 1, 2, 2
    return positions.to(dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows_q", "rows_k"), [(1, 1), (B, B), (1, B), (B, 1), (B, None), (None, 1)])
@pytest.mark.parametrize("definition", SCHEMES)
def test_given_positions_move_the_scheme_and_not_the_masks(device, definition, rows_q, rows_k, dtype, causal):
    positions = {
        "positions_q": None if rows_q is None else scattered(rows_q, TQ, dtype).to(device),
        "positions_k": None if rows_k is None else scattered(rows_k, TK, dtype).to(device),
    }
    check(*make(device), definition, causal=causal, window=4 if causal else None, **positions)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.7, 30.0])
@pytest.mark.parametrize("definition", SCHEMES)
def test_the_scale_multiplies_the_products_alone(device, definition, scale):
    check(*make(device), definition, scale=scale)


@pytest.mark.parametrize("definition", SCHEMES)
def test_transposed_and_sliced_inputs_are_as_defined(device, definition):
    x = torch.randn(B, TK, H + 2 * K, D, dtype=torch.float64).to(device)
    q, k, v = (part.transpose(1, 2) for part in x.split([H, K, K], dim=2))
    check(q, k, v, definition, causal=True)


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isinf(), 0)


def small(device, batch=1):
    """q, k and v that require grad, and a mask: query 1 attends nothing, and nothing attends key 2."""
    tensors = [x.requires_grad_() for x in make(device, batch=batch, queries=3, keys=4)]
    mask = torch.ones(batch, 1, 3, 4, dtype=torch.bool, device=device)
    mask[:, :, 1] = False
    mask[:, :, :, 2] = False
    mask[:, :, 0, 0] = False
    return tensors, mask


@pytest.mark.parametrize("definition", SCHEMES)
def test_gradients_are_the_derivatives(device, definition):
    tensors, mask = small(device)

    def call(q, k, v):
        out, lse = attend(q, k, v, definition.scheme, mask=mask)
        return out, finite(lse)

    torch.autograd.gradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize("block_scores", [1, 1 << 24], ids=["blocked", "whole"])
@pytest.mark.parametrize("name", ["exposb-decay", "rope-partial"])
def test_second_gradients_are_the_derivatives_of_the_gradients(device, monkeypatch, name, block_scores):
    monkeypatch.setattr(reference, "BLOCK_SCORES", block_scores)
    mask = torch.tensor([[True, False, True], [False, False, False]], device=device)
    tensors = [x.requires_grad_() for x in make(device, batch=1, queries=2, keys=3, heads=2, key_heads=1, head_dim=8)]

    def call(q, k, v):
        out, lse = attend(q, k, v, DEFINITIONS[name].scheme, mask=mask)
        return out, finite(lse)

    torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def gradients(results, inputs, cotangents):
    return torch.autograd.grad(results, inputs, cotangents)


@pytest.mark.parametrize("definition", SCHEMES)
def test_rows_that_attend_nothing_pass_no_gradient_on(device, definition):
    tensors, mask = small(device, batch=2)
    results = attend(*tensors, definition.scheme, mask=mask)
    cotangents = [torch.randn_like(x) for x in results]
    q, k, v = gradients(results, tensors, cotangents)
    assert not any(x.isnan().any() for x in (q, k, v))
    assert not q[:, :, 1].any()
    assert not k[:, :, 2].any()
    assert not v[:, :, 2].any()
    assert q[:, :, [0, 2]].any(dim=-1).all()
    assert k[:, :, [0, 1, 3]].any(dim=-1).all()
    assert v[:, :, [0, 1, 3]].any(dim=-1).all()
    # What is asked of a masked row changes nothing for the keys and values either.
    results = attend(*tensors, definition.scheme, mask=mask)
    for x in cotangents:
        x[:, :, 1] *= 1e6
    for x, other in zip((q, k, v), gradients(results, tensors, cotangents), strict=True):
        assert torch.equal(x, other)


NOTHING = {
    "mask": lambda device: {"mask": torch.zeros(TQ, TK, dtype=torch.bool, device=device)},
    "key_lengths": lambda device: {"key_lengths": torch.zeros(B, dtype=torch.int32, device=device)},
    "together": lambda device: {
        "causal": True,
        "window": 1,
        "mask": ~torch.ones(TQ, TK, dtype=torch.bool, device=device).tril(TK - TQ).triu(TK - TQ),
    },
}


@pytest.mark.parametrize("block_scores", [1, 1 << 24], ids=["blocked", "whole"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("definition", SCHEMES)
def test_nothing_to_attend_gives_zeros(device, monkeypatch, definition, nothing, dtype, block_scores):
    monkeypatch.setattr(reference, "BLOCK_SCORES", block_scores)
    tensors = [x.requires_grad_() for x in make(device, dtype=dtype)]
    out, lse = attend(*tensors, definition.scheme, **NOTHING[nothing](device))
    assert not out.any()
    assert (lse == -math.inf).all()
    for x in gradients((out, lse), tensors, (torch.randn_like(out), torch.randn_like(lse))):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(0, 3, False), (0, 3, True), (0, 0, False), (0, 0, True), (3, 0, False), (3, 0, True)],
)
def test_no_tokens_give_zero_gradients(device, queries, keys, causal):
    tensors = [x.requires_grad_() for x in make(device, queries=queries, keys=keys)]
    out, lse = attend(*tensors, NoPosition(), causal=causal)
    for x, gradient in zip(tensors, gradients((out, lse), tensors, (out.detach(), finite(lse.detach()))), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("rows", [1, 2, TQ - 1])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("definition", SCHEMES)
def test_blocks_of_queries_change_nothing(device, monkeypatch, definition, positions, rows):
    tensors = [x.requires_grad_() for x in make(device)]
    arguments = {
        "causal": True,
        "window": 4,
        "mask": flags(device, B, H, TQ, TK, kept=0.8),
        "key_lengths": torch.tensor([TK, 0, 5, 4], device=device),
    }
    if positions:
        arguments["positions_q"] = scattered(B, TQ, torch.int64).to(device)
    cotangents = torch.randn(B, H, TQ, D, device=device).double(), torch.randn(B, H, TQ, device=device).double()
    whole = attend(*tensors, definition.scheme, **arguments)
    expected = (*whole, *gradients(whole, tensors, cotangents))

    heights = []
    block = reference._attend_block
    monkeypatch.setattr(reference, "BLOCK_SCORES", rows * B * H * TK)
    monkeypatch.setattr(reference, "_attend_block", lambda q, *rest: heights.append(q.shape[2]) or block(q, *rest))
    blocked = attend(*tensors, definition.scheme, **arguments)
    assert max(heights) == rows
    assert sum(heights) == TQ
    torch.testing.assert_close((*blocked, *gradients(blocked, tensors, cotangents)), expected)
    with torch.no_grad():
        torch.testing.assert_close(attend(*tensors, definition.scheme, **arguments), expected[:2])


class Largest(TorchDispatchMode):
    """Notes the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return results


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("definition", SCHEMES)
def test_blocks_hold_no_matrix_of_scores(device, monkeypatch, definition, blocked):
    tokens, rows = 64, 4
    if blocked:
        monkeypatch.setattr(reference, "BLOCK_SCORES", rows * H * tokens)
    tensors = [x.requires_grad_() for x in make(device, batch=1, queries=tokens, keys=tokens, head_dim=8)]
    saved = {}

    def save(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        out, lse = attend(*tensors, definition.scheme, causal=True)
        gradients((out, lse), tensors, (torch.randn_like(out), torch.randn_like(lse)))
    matrix = tokens * tokens
    assert (largest.numel < matrix) == blocked
    # Nor do the blocks leave pieces for the backward that make up one matrix for each head.
    assert (sum(storage.nbytes() for storage in saved.values()) < H * matrix * out.element_size()) == blocked


SDPA = {
    "plain": ({}, lambda x: {}),
    "causal": ({"causal": True}, lambda x: {"is_causal": True}),
    "scaled": ({"scale": 0.3, "causal": True}, lambda x: {"scale": 0.3, "is_causal": True}),
    "alibi": (
        {"position": Alibi()},
        lambda x: {
            "attn_mask": -torch.tensor(PUBLISHED_SLOPES[4], dtype=torch.float64, device=x.device)[:, None, None]
            * (torch.arange(TK, device=x.device)[:, None] - torch.arange(TK, device=x.device)).abs()
        },
    ),
}


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("case", SDPA)
def test_torchs_attention_is_the_same_where_it_computes_the_same(device, case, key_heads):
    ours, theirs = SDPA[case]
    tensors = [x.requires_grad_() for x in make(device, queries=TK, key_heads=key_heads)]
    ours, theirs = {"position": NoPosition()} | ours, theirs(tensors[0])
    out, _ = attend(*tensors, **ours)
    expected = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **theirs)
    cotangent = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients(out, tensors, cotangent), gradients(expected, tensors, cotangent))


@pytest.mark.parametrize("mask_shape", [shape for shape in MASK_SHAPES.values() if shape and len(shape) != 3])
def test_torchs_attention_is_the_same_with_masks(device, mask_shape):
    tensors = make(device)
    mask = flags(device, *mask_shape)
    mask[..., 0] = True  # a row without a key is torch's own affair
    mask |= ~mask.any(dim=-1, keepdim=True)
    out, _ = attend(*tensors, NoPosition(), mask=mask)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("definition", SCHEMES)
def test_low_precision_is_no_worse_than_torchs_own(device, monkeypatch, definition, dtype, blocked):
    queries, keys = 17, 33
    if blocked:
        monkeypatch.setattr(reference, "BLOCK_SCORES", 5 * 2 * H * keys)
    inputs = make(device, batch=2, queries=queries, keys=keys, dtype=dtype)
    cotangent = torch.randn(2, H, queries, D).to(device, dtype)

    def run(attention, working_dtype):
        tensors = [x.detach().to(working_dtype).requires_grad_() for x in inputs]
        out, lse = attention(make_call(*tensors, layout="bhtd", position=definition.scheme, causal=True))
        return out, lse, *gradients(out, tensors, cotangent.to(working_dtype))

    out, lse, *grads = run(REFERENCE.attend, dtype)
    truth_out, truth_lse, *truth_grads = run(REFERENCE.attend, torch.float64)
    base_out, _, *base_grads = run(reference.attend, dtype)
    assert (out.dtype, lse.dtype, *(x.dtype for x in grads)) == (dtype, torch.float32, dtype, dtype, dtype)
    assert_close_to_truth(out, truth_out, base_out)
    assert_close_to_truth(lse, truth_lse, run(reference.attend, torch.float32)[1])
    for actual, truth, baseline in zip(grads, truth_grads, base_grads, strict=True):
        assert_close_to_truth(actual, truth, baseline)
