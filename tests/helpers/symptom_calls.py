"""What users of other libraries met, one check for each symptom, within a group of processes. `run_all` runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ropewalk import Alibi, NoPosition, PositionScheme, Rope, attention
from ropewalk.parallel import (
    SequenceLayout,
    context_parallel,
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    unshard_sequence,
)

T, H, K, D, DV = 21, 4, 2, 8, 12
METHODS = ("gather", "ulysses", "ring")


def _layout(kind: str = "zigzag", **keywords: Any) -> SequenceLayout:
    return SequenceLayout(dist.group.WORLD, T, kind, **keywords)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-11 * max(1.0, float(y.detach().abs().max())))


def _qkv(dim_of_v: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return _draw(1, T, H, D), _draw(1, T, K, D), _draw(1, T, K, dim_of_v + 1)[..., 1:]


def _attend(layout: SequenceLayout, xs: tuple[Tensor, ...], **keywords: Any) -> Tensor:
    """Attend by shards, and gather the output."""
    shards = [shard_sequence(x, layout) for x in xs]
    out: Tensor = context_parallel_attention(*shards, layout=layout, **keywords)
    return unshard_sequence(out, layout)


def check_a_rings_backward_does_not_read_the_first_steps_keys_at_every_step(rank: int) -> None:
    """In diffusers #14265 the gradients were wrong, and nothing was raised."""
    layout, (q, k, v) = _layout("contiguous"), _qkv()
    grads = []
    for method in ("gather", "ring"):
        leaves = [shard_sequence(x, layout).requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, layout=layout, method=method)
        grads.append(torch.autograd.grad(out, leaves, shard_sequence(_draw(1, T, H, D), layout)))
    for x, y in zip(*grads, strict=True):
        _close(x, y)


def check_packed_documents_do_not_attend_each_other(rank: int) -> None:
    """In axolotl #3608 the loss was 1.83 times too high."""
    bounds = torch.tensor([0, 8, T])
    q, k, v = _qkv()
    changed = (q, torch.cat((k[:, :8] + 100, k[:, 8:]), 1), torch.cat((v[:, :8] - 100, v[:, 8:]), 1))
    for kind in ("zigzag", "contiguous", "balanced"):  # a shard cuts the second document
        layout = _layout(kind, cu_seqlens=bounds)
        out, other = (_attend(layout, xs, position=Rope(), causal=True) for xs in ((q, k, v), changed))
        assert torch.equal(out[:, 8:], other[:, 8:])
        assert not torch.equal(out[:, :8], other[:, :8])


def check_sinks_are_not_swallowed(rank: int) -> None:
    """In prime-rl #3397 keywords that nobody read made attention "numerically wrong with no error and no warning"."""
    layout, xs, sinks = _layout(), _qkv(), torch.linspace(-1, 1, H, dtype=torch.float64)
    for method in METHODS:
        out = _attend(layout, xs, sinks=sinks, causal=True, method=method)
        _close(out, attention(*xs, sinks=sinks, causal=True))
        assert not torch.allclose(out, attention(*xs, causal=True))
    shards = [shard_sequence(x, layout) for x in xs]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sink'"):
        context_parallel_attention(*shards, layout=layout, sink=sinks)


def check_alibi_has_the_offset_of_its_shard(rank: int) -> None:
    """In TransformerEngine #1046 the kernel could not be told "what's the sequence offset"."""
    xs = _qkv()
    for kind in ("zigzag", "contiguous"):
        for method in METHODS:  # under Ulysses each rank has its own heads' slopes
            _close(
                _attend(_layout(kind), xs, position=Alibi(), causal=True, method=method),
                attention(*xs, position=Alibi(), causal=True),
            )


def check_a_length_that_does_not_divide_keeps_its_last_token(rank: int) -> None:
    """It hung in EasyContext #10, did not match in #47, and the last token was ignored in TransformerEngine #1930."""
    assert T % dist.get_world_size()
    layout, xs = _layout(), _qkv()
    for method in METHODS:
        leaves = [x.clone().requires_grad_() for x in xs]
        out = _attend(layout, tuple(leaves), position=Rope(), causal=True, method=method)
        _close(out, attention(*xs, position=Rope(), causal=True))
        (out[:, -1].sum() / dist.get_world_size()).backward()  # all ranks have this loss
        assert leaves[2].grad is not None
        total = leaves[2].grad.clone()
        dist.all_reduce(total)
        expected = [x.clone().requires_grad_() for x in xs]
        attention(*expected, position=Rope(), causal=True)[:, -1].sum().backward()
        assert expected[2].grad is not None
        _close(total, expected[2].grad)


def check_mrope_positions_are_sharded_along_their_tokens(rank: int) -> None:
    """In Automodel #1482 positions of (3, B, T) were sharded along the batch."""
    layout = _layout()
    positions = torch.arange(3 * 2 * T).view(3, 2, T)
    mine = shard_sequence(positions, layout, dim=2)
    assert mine.shape == (3, 2, layout.n_local)
    assert torch.equal(unshard_sequence(mine, layout, dim=-1), positions)
    with pytest.raises(ValueError, match="x has 2 tokens in dimension 1, but must have 21"):
        shard_sequence(positions, layout)


def check_a_shard_is_not_sharded_again(rank: int) -> None:
    """In axolotl #3498 the collator and the model both sharded."""
    layout, (q, k, v) = _layout(), _qkv()
    mine = shard_sequence(q, layout)
    with pytest.raises(ValueError, match=f"x has {layout.n_local} tokens in dimension 1, but must have {T}"):
        shard_sequence(mine, layout)
    with pytest.raises(ValueError, match="q has 21 tokens, but must have the"):
        context_parallel_attention(q, k, v, layout=layout)


def check_documents_have_positions_of_the_whole_sequence(rank: int) -> None:
    """In prime-rl #2392 cu_seqlens were made of a shard's positions."""
    bounds = torch.tensor([0, 8, T], dtype=torch.int32)
    layout = _layout(cu_seqlens=bounds)
    whole = torch.cat((torch.arange(8), torch.arange(T - 8)))
    assert torch.equal(unshard_sequence(layout.positions, layout, dim=0), whole)
    q, k, v = (shard_sequence(x, layout) for x in _qkv())
    with context_parallel(layout), pytest.raises(ValueError, match="cu_seqlens_q was passed within context_parallel"):
        attention(q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds, layout="thd")


def check_the_loss_is_not_scaled_by_the_ranks(rank: int) -> None:
    """In transformers #39648 and Megatron-LM #673 loss or gradients were as many times too large as there are ranks."""
    layout, vocabulary = _layout(), 7
    logits = _draw(1, T, vocabulary).requires_grad_()
    labels = torch.arange(T)[None] % vocabulary
    labels = labels.masked_fill(torch.arange(T) > 4, -100)  # zigzag's first rank has all but a few of them
    expected = F.cross_entropy(logits[0], labels[0], ignore_index=-100)
    (grad,) = torch.autograd.grad(expected, logits)
    mine = shard_sequence(logits, layout)
    at = shard_sequence(labels, layout).masked_fill(~layout.valid, -100)
    part = F.cross_entropy(mine[0], at[0], ignore_index=-100, reduction="sum") / (labels != -100).sum()
    (grad_of_mine,) = torch.autograd.grad(part, logits)
    total = part.detach().clone()
    dist.all_reduce(total)
    dist.all_reduce(grad_of_mine)
    _close(total, expected.detach())
    _close(grad_of_mine, grad)


def check_labels_are_shifted_before_they_are_sharded(rank: int) -> None:
    """Shifted within a shard they lose a token at each cut: transformers #35983."""
    layout = _layout("contiguous")
    text = torch.arange(T + 1)[None]
    tokens, labels = (shard_sequence(x, layout)[:, layout.valid] for x in (text[:, :-1], text[:, 1:]))
    assert torch.equal(labels, tokens + 1)
    assert labels.shape == tokens.shape


def check_windows_do_not_gather_everything(rank: int) -> None:
    """In Megatron-LM #2222 and #5593 a window's keys were all gathered."""
    layout = SequenceLayout(dist.group.WORLD, 4096)
    q, k, v = (torch.zeros(1, layout.n_local, heads, D) for heads in (H, K, K))
    choice = explain_context_parallel(q, k, v, layout=layout, causal=True, window=64)
    runs = 2
    assert choice.method == "halo"
    assert choice.bytes_received <= 1.05 * 64 * runs * 2 * K * D * 4


def check_attention_both_ways_runs(rank: int) -> None:
    """torch's raised for all but causal attention: pytorch #141429."""
    xs = _qkv()
    for scheme in (NoPosition(), Rope()):
        for kind in ("zigzag", "striped"):
            method = "gather" if kind == "zigzag" else "ring"
            _close(_attend(_layout(kind), xs, position=scheme, method=method), attention(*xs, position=scheme))


def check_values_may_have_another_width_than_keys(rank: int) -> None:
    """It crashed with grouped heads in TransformerEngine #2868."""
    layout, xs = _layout(), _qkv(DV)
    for method in METHODS:
        out = _attend(layout, xs, position=Rope(), causal=True, method=method)
        assert out.shape == (1, T, H, DV)
        _close(out, attention(*xs, position=Rope(), causal=True))


def check_float32_results_do_not_depend_on_the_number_of_ranks(rank: int) -> None:
    """In ring-flash-attention #42 and #67 errors grew with the ring; here each is as near as one call is."""
    schemes: tuple[PositionScheme, ...] = (NoPosition(), Rope())
    xs = _qkv()
    single = tuple(x.float() for x in xs)
    for scheme in schemes:
        truth = attention(*xs, position=scheme, causal=True)
        baseline = (attention(*single, position=scheme, causal=True) - truth).abs().max()
        for method in METHODS:
            out = _attend(_layout(), single, position=scheme, causal=True, method=method)
            budget = 2 * baseline + 2 * torch.finfo(torch.float32).eps * truth.abs().max()
            assert (out - truth).abs().max() <= budget, method


def run_all(rank: int) -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check(rank)
