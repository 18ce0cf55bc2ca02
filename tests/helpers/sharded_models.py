"""What a rank checks of models, gradients and refusals within a group. `run_all` runs every `check_…` of here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ropewalk import (
    Alibi,
    BlockLists,
    QKNorm,
    ReRope,
    Rope,
    RoPEAttention,
    RoPEBERTAttention,
    StandardBERTAttention,
    attention,
)
from ropewalk.ops.attention.api import takes_shards
from ropewalk.parallel import (
    SequenceLayout,
    context_parallel,
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    unshard_sequence,
)

T, H, D = 26, 4, 8


def _layout(kind: str = "zigzag", **keywords: Any) -> SequenceLayout:
    return SequenceLayout(dist.group.WORLD, T, kind, **keywords)


def _draw(*shape: int) -> Tensor:
    """The same numbers on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def _close(x: Tensor, y: Tensor) -> None:
    """Compare numbers that are sums of products near 1, or greater."""
    torch.testing.assert_close(x, y, rtol=0, atol=1e-11 * max(1.0, float(y.detach().abs().max())))


def _sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def check_a_loss_of_one_rank_reaches_every_shard(rank: int) -> None:
    layout = _layout()
    x = shard_sequence(_draw(2, T, 3), layout).requires_grad_()
    whole = unshard_sequence(x, layout)
    assert torch.equal(whole, _draw(2, T, 3))
    (whole * _draw(2, T, 3)).sum().mul(1.0 if rank == 1 else 0.0).backward()
    assert x.grad is not None
    _close(x.grad, shard_sequence(_draw(2, T, 3), layout))


def check_a_shards_gradient_is_zero_outside(rank: int) -> None:
    layout = _layout()
    x = _draw(2, T, 3).requires_grad_()
    shard_sequence(x, layout).sum().backward()
    assert x.grad is not None
    mine = torch.zeros(T, dtype=torch.float64)
    mine[layout.indices[layout.valid]] = 1
    assert torch.equal(x.grad, mine[:, None].expand(2, T, 3))


def _train(model: nn.Module, run: Callable[..., Tensor], weights: Tensor) -> dict[str, Tensor]:
    (run(model) * weights).sum().backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _compare_modules(make: Callable[[], nn.Module], call: Callable[..., Tensor], width: int = H * D) -> None:
    """Compare a module's output and its gradients, summed over the ranks, with one process."""
    layout = _layout()
    x, weights = _draw(2, T, width), _draw(2, T, width) * 0.5
    torch.manual_seed(3)
    whole = make().double().eval()
    torch.manual_seed(3)
    sharded = make().double().eval()
    expected = _train(whole, lambda model: call(model, x, None), weights)
    with context_parallel(layout):
        out = call(sharded, shard_sequence(x, layout), layout.positions[None])
        assert takes_shards()
        (out * shard_sequence(weights, layout)).sum().backward()
    assert not takes_shards()
    _close(unshard_sequence(out.detach(), layout), call(whole, x, None).detach())
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None
        _close(_sum(parameter.grad), expected[name])


def check_rope_attention(rank: int) -> None:
    make = lambda: RoPEAttention(H * D, H, norm=QKNorm(torch.ones(D), torch.ones(D)))  # noqa: E731
    _compare_modules(make, lambda model, x, _: model(x, causal=True))
    _compare_modules(make, lambda model, x, _: checkpoint(model, x, causal=True, use_reentrant=False))


def check_bert_modules(rank: int) -> None:
    for kind in (RoPEBERTAttention, StandardBERTAttention):
        _compare_modules(lambda kind=kind: kind(H * D, H), lambda model, x, at: model(x, position_ids=at)[0])
    layout = _layout()
    with context_parallel(layout), pytest.raises(ValueError, match="position_ids is None, but must be layout"):
        StandardBERTAttention(H * D, H)(shard_sequence(_draw(2, T, H * D), layout).float())


def check_a_transformers_model(rank: int) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from ropewalk.integrations import huggingface

    huggingface.register()
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": 2, "head_dim": D}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 31}
    layout = _layout()
    for window in (None, 5, T - 1):  # the last is wider than a shard
        torch.manual_seed(3)
        config = MistralConfig(**sizes, sliding_window=window, attn_implementation="ropewalk")
        model = MistralForCausalLM(config).double()
        tokens = torch.randint(31, (1, T), generator=torch.Generator().manual_seed(5))
        weights = _draw(1, T, 31)
        whole = model(tokens, use_cache=False).logits
        parameters = list(model.parameters())
        expected = torch.autograd.grad((whole * weights).sum(), parameters)
        with context_parallel(layout):
            mine = shard_sequence(tokens, layout)
            logits = model(mine, position_ids=layout.positions[None], use_cache=False).logits
            grads = torch.autograd.grad((logits * shard_sequence(weights, layout)).sum(), parameters)
            with pytest.raises(ValueError, match="position_ids are not the layout's"):
                model(mine, use_cache=False)
            with pytest.raises(ValueError, match="attention_mask was passed within context_parallel"):
                model(mine, attention_mask=torch.ones_like(mine), position_ids=layout.positions[None], use_cache=False)
        _close(unshard_sequence(logits.detach(), layout), whole.detach())
        for grad, other in zip(grads, expected, strict=True):
            _close(_sum(grad), other)


def check_wrapped_models(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.slopes = nn.Parameter(torch.linspace(0.1, 0.7, H))
            self.project = nn.Linear(H * D, 3 * H * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, H, D)).unbind(-3)
            return attention(q, k, v, position=Alibi(self.slopes), causal=True).flatten(2)

    x, weights = _draw(2, T, H * D), _draw(2, T, H * D) * 0.5
    expected = _train(Model().double(), lambda model: model(x), weights)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout = SequenceLayout(mesh, T)
    ddp: Callable[[nn.Module], nn.Module] = nn.parallel.DistributedDataParallel
    for wrap in (ddp, lambda model: fully_shard(model, mesh=mesh)):
        model = Model().double()
        wrapped = wrap(model)
        with context_parallel(layout):
            out = wrapped(shard_sequence(x, layout))
        (out * shard_sequence(weights, layout)).sum().mul(layout.size).backward()  # wrappers average
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            _close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, expected[name])


def check_refusals_reach_all_ranks(rank: int) -> None:
    layout = _layout()
    x = shard_sequence(_draw(1, T, H, D), layout)

    def attend(x: Tensor = x, **keywords: Any) -> Any:
        return context_parallel_attention(x, x, x, **{"layout": layout, "position": Rope(), "causal": True, **keywords})

    with pytest.raises(ValueError, match="q has 26 tokens, but must have the" if rank == 0 else "rank 0 raised Value"):
        attend(_draw(1, T, H, D) if rank == 0 else x)
    with pytest.raises(ValueError, match="has other shapes or keywords on ranks"):
        attend(causal=rank == 0)
    with pytest.raises(NotImplementedError, match="layout is 'striped'"):
        attend(layout=SequenceLayout(dist.group.WORLD, layout.n_local * layout.size, "striped"), method="gather")
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.5, but must be 0"):
        attend(method="ring", dropout_p=0.5)
    with pytest.raises(ValueError, match="method is 'rings', but must be None or one of"):
        attend(method="rings")
    with pytest.raises(TypeError, match="norm is float, but must be a"):
        attend(norm=1.0)
    with context_parallel(layout):
        for name, value in {"mask": torch.ones(T, T).bool(), "key_lengths": torch.tensor([3])}.items():
            with pytest.raises(ValueError, match=f"{name} was passed within context_parallel"):
                attention(x, x, x, **{name: value})
        with pytest.raises(NotImplementedError, match="blocks was passed within context_parallel"):
            attention(x, x, x, blocks=BlockLists(torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int()))
        with pytest.raises(NotImplementedError, match="return_max_logits is True"):
            attention(x, x, x, return_max_logits=True)
        positions = layout.positions[None]
        with pytest.raises(NotImplementedError, match="positions_q must be None for Alibi"):
            attention(x, x, x, position=Alibi(), positions_q=positions, positions_k=positions)
    with pytest.raises(ValueError, match="x has 3 tokens in dimension 1, but must have 26"):
        shard_sequence(torch.ones(1, 3), layout)
    attend()  # all ranks are still in step


def check_other_keywords_on_a_rank_raise_on_all(rank: int) -> None:
    layout, mine = _layout(), rank == 0
    x = shard_sequence(_draw(1, T, H, D), layout)
    slopes = torch.ones(H, dtype=torch.float64)
    differing: list[dict[str, Any]] = [
        {"scale": 1.0 if mine else 2.0},
        {"softcap": None if mine else 2.0},
        {"position": Rope(100.0 if mine else 1000.0)},
        {"position": ReRope(3 if mine else 4)},
        {"position": Alibi(slopes.clone().requires_grad_(mine))},
        {"norm": QKNorm() if mine else None},
        {"norm": QKNorm(eps=0.1 if mine else 0.2)},
        {"sinks": slopes.clone().requires_grad_(mine)},
        {"gate": x if mine else None},
        {"return_lse": mine},
        {"impl": "reference" if mine else None},
    ]
    for keywords in differing:
        with pytest.raises(ValueError, match="the call has other shapes or keywords on ranks"):
            context_parallel_attention(x, x, x, layout=layout, **keywords)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"norm": QKNorm(torch.ones(3, dtype=torch.float64))}, "norm.q_weight"),
        ({"position": Alibi(torch.ones(H + 1, dtype=torch.float64))}, "slopes"),
        ({"position": Rope(rotary_dim=2 * D)}, "Rope rotates 16 features"),
        ({"impl": "fast"}, "impl is 'fast'"),
        ({"impl": "gluon"}, "impl is 'gluon'"),
    ]
    for keywords, text in wrong:
        with pytest.raises(ValueError, match=text if mine else f"rank 0 raised ValueError: .*{text}"):
            context_parallel_attention(x, x, x, layout=layout, **(keywords if mine else {}))
    with pytest.raises(ValueError, match="x has 3 tokens" if mine else "rank 0 raised ValueError: x has 3 tokens"):
        unshard_sequence(x[:, :3] if mine else x, layout)
    with pytest.raises(ValueError, match="the call has other shapes"):
        unshard_sequence(x[..., :3] if mine else x, layout)
    context_parallel_attention(x, x, x, layout=layout)  # all ranks are still in step


def check_each_token_is_held_once(rank: int) -> None:
    size = dist.get_world_size()
    bounds = torch.tensor([0, 3, 500, 501, 900])
    for kind in ("zigzag", "contiguous", "striped", "balanced"):
        layout = SequenceLayout(dist.group.WORLD, 1000, kind, bounds)
        every = torch.cat([layout.indices_of(other) for other in range(size)])
        assert torch.equal(every[every >= 0].sort().values, torch.arange(1000))
        assert every.numel() == size * layout.n_local
        positions = torch.cat([torch.arange(n) for n in (3, 497, 1, 399, 100)])
        assert torch.equal(layout.positions, torch.where(layout.valid, positions[layout.indices], 0))
    parts = torch.arange(8 * size).chunk(2 * size)
    zigzag = SequenceLayout(dist.group.WORLD, 8 * size)
    assert torch.equal(zigzag.indices, torch.cat((parts[rank], parts[2 * size - 1 - rank])))
    striped = SequenceLayout(dist.group.WORLD, 8 * size, "striped")
    assert torch.equal(striped.indices, torch.arange(rank, 8 * size, size))


def check_balanced_shards_attend_as_many_pairs(rank: int) -> None:
    bounds = torch.tensor([0, 40_000, 41_000, 50_000, 64_000])
    layout = SequenceLayout(dist.group.WORLD, 64_000, "balanced", bounds)
    pairs = (layout.positions[layout.valid] + 1).sum()
    assert pairs < 1.05 * _sum(pairs) / layout.size


def check_bad_layouts(rank: int) -> None:
    group = dist.group.WORLD
    for error, message, *arguments in (
        (TypeError, "mesh_or_group is str", "world", 4),
        (TypeError, "n_tokens is 4.0", group, 4.0),
        (ValueError, "n_tokens is 0", group, 0),
        (ValueError, "kind is 'zig'", group, 4, "zig"),
        (ValueError, "cu_seqlens is None, but kind 'balanced' needs it", group, 4, "balanced"),
        (ValueError, "cu_seqlens goes from 0 to 5", group, 4, "zigzag", torch.tensor([0, 5])),
        (ValueError, "cu_seqlens goes from 0 to 2", group, 4, "zigzag", torch.tensor([0, 3, 2])),
        (TypeError, "cu_seqlens is torch.float32", group, 4, "zigzag", torch.tensor([0.0, 4.0])),
    ):
        with pytest.raises(error, match=message):
            SequenceLayout(*arguments)


def check_more_ranks_than_tokens(rank: int) -> None:
    for kind in ("contiguous", "zigzag", "striped"):
        layout = SequenceLayout(dist.group.WORLD, 1, kind)
        whole = [_draw(1, 1, H, D).requires_grad_() for _ in range(3)]
        mine = [shard_sequence(x.detach(), layout).requires_grad_() for x in whole]
        expected = attention(*whole, causal=True)
        out = context_parallel_attention(*mine, layout=layout, causal=True)
        _close(unshard_sequence(out, layout), expected)
        grads = torch.autograd.grad(out, mine, torch.ones_like(out))
        others = torch.autograd.grad(expected, whole, torch.ones_like(expected))
        for grad, other in zip(grads, others, strict=True):
            torch.testing.assert_close(unshard_sequence(grad, layout), other, rtol=0, atol=1e-14)


def check_heads_that_a_nodes_ranks_do_not_share(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("between", "within"))
    for kind in ("zigzag", "striped", "balanced"):
        bounds = torch.tensor([0, 9, T]) if kind == "balanced" else None
        layout = SequenceLayout(mesh, T, kind, bounds)
        x = _draw(2, T, 3, D).requires_grad_()
        mine = shard_sequence(x.detach(), layout).requires_grad_()
        out = context_parallel_attention(mine, mine, mine, layout=layout, position=Rope(), causal=True)
        documents = (x,) if bounds is None else x.split([9, T - 9], 1)
        expected = torch.cat([attention(y, y, y, position=Rope(), causal=True) for y in documents], 1)
        _close(unshard_sequence(out, layout), expected)
        (grad,), (other,) = (torch.autograd.grad(y.square().sum(), z) for y, z in ((out, mine), (expected, x)))
        _close(unshard_sequence(grad, layout), other)
        assert explain_context_parallel(mine, mine, mine, layout=layout, causal=True).method in ("gather", "ring")
        with pytest.raises(NotImplementedError, match="q has 3 heads"):
            context_parallel_attention(mine, mine, mine, layout=layout, method="ring")
    x = torch.ones(1, layout.n_local, H, D)
    out = unshard_sequence(context_parallel_attention(x, x, x, layout=layout, dropout_p=0.5), layout)[0, :, :, 0]
    assert len({tuple(head) for head in out.T.tolist()}) == H  # no two drop alike


def check_a_compiled_rank_without_tokens_takes_part(rank: int) -> None:
    """Its gradients are zeros, and equal ones are one to a compiler: each exchange must be there nevertheless."""
    layout = SequenceLayout(dist.group.WORLD, 1)
    position, sinks = Alibi(torch.ones(H, requires_grad=True)), torch.ones(H, requires_grad=True)
    whole, mine = (x.requires_grad_() for x in (_draw(1, 1, H, D), shard_sequence(_draw(1, 1, H, D), layout)))
    keywords: dict[str, Any] = {"position": position, "sinks": sinks, "impl": "reference"}

    def attend(x: Tensor, y: Tensor) -> Tensor:
        out = [
            context_parallel_attention(q, y, y, layout=layout, method="gather", sum_gradients=True, **keywords)
            for q in (x, 2 * x)
        ]
        return out[0] + out[1]

    expected = sum(attention(q, whole + 1, whole + 1, **keywords) for q in (whole, 2 * whole))
    expected_grads = torch.autograd.grad(expected.square().sum(), (whole, position.slopes, sinks))
    for backend in ("eager", "aot_eager", "aot_eager_decomp_partition"):
        out = torch.compile(attend, fullgraph=True, backend=backend)(mine, mine + 1)
        grads = torch.autograd.grad(out.square().sum(), (mine, position.slopes, sinks))
        _close(unshard_sequence(grads[0], layout), expected_grads[0])
        for grad, other in zip(grads[1:], expected_grads[1:], strict=True):
            _close(grad, other)


def check_an_empty_batch(rank: int) -> None:
    for bounds in (None, torch.tensor([0, 5, T])):
        layout = _layout(cu_seqlens=bounds)
        for method in ("gather", "ulysses", "ring"):
            x = torch.zeros(0, layout.n_local, H, D, requires_grad=True)
            out = context_parallel_attention(x, x, x, layout=layout, method=method, causal=True)
            assert out.shape == x.shape
            out.sum().backward()


def check_packed_rows_have_slopes_of_their_own(rank: int) -> None:
    layout = _layout(cu_seqlens=torch.tensor([0, 9, 9, T - 2]))
    x, slopes = _draw(2, T, H, D), torch.linspace(0.1, 2.0, 2 * H, dtype=torch.float64).view(2, H).requires_grad_()
    mine = shard_sequence(x, layout)
    keywords: dict[str, Any] = {"layout": layout, "causal": True, "sum_gradients": True}
    for method in ("gather", "ulysses", "ring"):
        out = context_parallel_attention(mine, mine, mine, method=method, position=Alibi(slopes), **keywords)
        (grad,) = torch.autograd.grad(out.sum(), slopes)
        for row in range(2):
            of_row = slopes.detach()[row].clone().requires_grad_()
            y = mine[row : row + 1]
            expected = context_parallel_attention(y, y, y, method=method, position=Alibi(of_row), **keywords)
            _close(out[row : row + 1], expected)
            _close(grad[row], *torch.autograd.grad(expected.sum(), of_row))


def check_scores_of_thousands(rank: int) -> None:
    layout = _layout("contiguous")
    x = _draw(1, T, H, D)
    mine = shard_sequence(x, layout)
    for method in ("gather", "ring", "ulysses"):
        out = context_parallel_attention(mine, mine, mine, layout=layout, method=method, scale=4000.0)
        _close(unshard_sequence(out, layout), attention(x, x, x, scale=4000.0))


def check_dropout_differs_by_rank(rank: int) -> None:
    layout = _layout("contiguous")
    x = torch.ones(1, layout.n_local, H, D)
    torch.manual_seed(0)
    out = context_parallel_attention(x, x, x, layout=layout, dropout_p=0.5)
    heads = unshard_sequence(out, layout)[0, :, :, 0]
    assert not torch.equal(heads[:, 0], heads[:, H // layout.size])  # each the first head of a rank
    # A row sums T numbers that are 0 or 2 / T: its deviation is √(1 / T), and there are T · H rows.
    assert abs(float(heads.mean()) - 1) < 5 * (T * T * H) ** -0.5


def check_layouts_of_tensors(rank: int) -> None:
    layout = _layout()
    x, gate = (shard_sequence(_draw(*shape), layout) for shape in ((2, T, H, D), (2, T, H)))
    keywords: dict[str, Any] = {"layout": layout, "position": Rope(), "causal": True, "return_lse": True}
    out, lse = context_parallel_attention(x, x, x, gate=gate, **keywords)
    y = x.transpose(1, 2)
    other, lse_of_other = context_parallel_attention(
        y, y, y, gate=gate.transpose(1, 2), layout_of_tensors="bhtd", **keywords
    )
    assert torch.equal(other, out.transpose(1, 2))
    assert torch.equal(lse_of_other, lse)
    row, lse_of_row = context_parallel_attention(*(x[0],) * 3, gate=gate[0], layout_of_tensors="thd", **keywords)
    _close(row, out[0])
    _close(lse_of_row, lse[0])


def check_bytes(rank: int) -> None:
    """Gather moves each other shard once, or what documents reach; halo what the window does. No key is repeated."""
    from torch.distributed.tensor.debug import CommDebugMode

    layout = _layout("contiguous")
    q, k = (shard_sequence(_draw(1, T, heads, D), layout) for heads in (H, 2))
    mode = CommDebugMode()
    with mode:
        context_parallel_attention(q, k, k, layout=layout, causal=True, method="gather")
    assert mode.get_total_counts() <= 3  # keys, values, and the ranks' agreement
    counts = []
    for return_lse in (False, True):
        with mode:
            context_parallel_attention(q, k, k, layout=layout, causal=True, method="ulysses", return_lse=return_lse)
        counts.append(mode.get_total_counts())
    assert counts[1] == counts[0] + 1  # the log-sum-exp is exchanged if it is asked for
    choice = explain_context_parallel(q, k, k, layout=layout, causal=True, method="gather")
    assert choice.bytes_received == 2 * k.numel() * k.element_size() * (layout.size - 1)
    windowed = explain_context_parallel(q, k, k, layout=layout, causal=True, window=4)
    assert windowed.method == "halo"
    assert windowed.bytes_received == 2 * 3 * 2 * D * k.element_size()
    layout = SequenceLayout(dist.group.WORLD, 4096, "contiguous", torch.tensor([*range(0, 4096, 96), 4096]))
    q, k = (torch.zeros(1, layout.n_local, heads, D) for heads in (H, 2))
    packed = explain_context_parallel(q, k, k, layout=layout, causal=True, method="gather")
    cut = max(edge % 96 for edge in range(0, 4096, layout.n_local))  # tokens before a cut in the same document
    assert packed.bytes_received == 2 * cut * 2 * D * k.element_size()
    assert set(windowed.others) == {"gather", "ulysses", "ring"}
    assert "not gather: 'halo' is taken: of those that run the call, it leaves the least exposed" in str(windowed)


def check_methods_that_are_taken(rank: int) -> None:
    def taken(kind: str = "zigzag", heads: int = H, **keywords: Any) -> str:
        x = torch.ones(1, _layout(kind).n_local, heads, D)
        return explain_context_parallel(x, x, x, layout=_layout(kind), **keywords).method

    # The host bounds short calls: gather's copies from each rank take more of its time than Ulysses' exchanges do, from
    # five ranks on.
    assert taken() == "gather"
    assert taken(window=(1, 1)) == "halo"
    assert taken("striped") == "ulysses"
    assert taken("striped", heads=1) == "ring"
    assert taken(dropout_p=0.1) == "ulysses"
    assert taken(method="ring") == "ring"
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1, but must be 0: q has 1 heads"):
        taken(heads=1, dropout_p=0.1)


def check_a_rings_gradients_are_summed_in_float32(rank: int) -> None:
    """Parts in bfloat16 would be rounded as often as there are ranks."""
    layout = _layout("contiguous")
    xs = [_draw(1, T, H, D + i)[..., :D].bfloat16() for i in range(3)]
    whole = [x.double().requires_grad_() for x in xs]
    weights = _draw(1, T, H, D)
    expected = torch.autograd.grad(attention(*whole, impl="reference"), whole, weights)
    for method in ("gather", "ring"):
        mine = [shard_sequence(x, layout).requires_grad_() for x in xs]
        out = context_parallel_attention(*mine, layout=layout, method=method, impl="reference")
        grads = torch.autograd.grad(out, mine, shard_sequence(weights, layout).bfloat16())
        for grad, other in zip(grads, expected, strict=True):
            error = (unshard_sequence(grad, layout).double() - other).pow(2).mean().sqrt()
            # The project's budget: twice one rounding.
            assert error < 2.0 * 2**-9 * other.pow(2).mean().sqrt()


def check_compiled(rank: int) -> None:
    layout = _layout()
    mine = shard_sequence(_draw(2, T, H, D), layout).requires_grad_()
    for method in ("gather", "ulysses", None):  # None: not halo, which is not traced
        keywords: dict[str, Any] = {"layout": layout, "position": Rope(), "causal": True, "window": 3, "method": method}

        def attend(x: Tensor, keywords: dict[str, Any] = keywords) -> Tensor:
            out: Tensor = context_parallel_attention(x, x, x, **keywords)
            return out

        out, expected = torch.compile(attend, fullgraph=True, backend="aot_eager")(mine), attend(mine)
        _close(out, expected)
        _close(*(torch.autograd.grad(y.sum(), mine)[0] for y in (out, expected)))


def check_the_calls_within_are_not_sharded_again(rank: int) -> None:
    """A backward that attends again, within the context or after it."""
    layout = _layout("contiguous")
    x = shard_sequence(_draw(1, T, H, D), layout).requires_grad_()
    expected = None
    for is_within in (True, False):
        with context_parallel(layout):
            out = context_parallel_attention(x, x, x, layout=layout, method="ring", causal=True)
            if is_within:
                (grad,) = torch.autograd.grad(out.sum(), x)
        if not is_within:
            (grad,) = torch.autograd.grad(out.sum(), x)
        expected = grad if expected is None else expected
        assert torch.equal(grad, expected)
    with pytest.raises(RuntimeError, match="stop"), context_parallel(layout):
        raise RuntimeError("stop")
    assert not takes_shards()


def run_all(rank: int) -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            torch.manual_seed(0)
            check(rank)
