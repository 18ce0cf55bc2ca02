"""Calls with DTensors beside the same calls of one process; each rank compares. `run_all` runs every `check_…`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ropewalk import (
    Alibi,
    ALiBiBERTAttention,
    ExpoSB,
    NoPosition,
    PositionScheme,
    QKNorm,
    ReRope,
    Rope,
    RoPEAttention,
    RoPEBERTAttention,
    T5Bias,
    apply_rope,
    attention,
    inverse_frequencies,
    rope_table,
)
from ropewalk.parallel import (
    SequenceLayout,
    context_parallel,
    context_parallel_attention,
    shard_sequence,
    unshard_sequence,
)

B, T, H, K, D = 4, 12, 4, 2, 16


def _draw(*shape: int) -> Tensor:
    """The same numbers on each rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _close(x: Tensor | None, y: Tensor) -> None:
    assert x is not None
    torch.testing.assert_close(_whole(x), y, rtol=0, atol=1e-11 * max(1.0, float(y.detach().abs().max())))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _weights(name: str) -> list[Tensor]:
    """What a scheme learns."""
    shapes = {"alibi, learned": (H,), "t5": (8, H), "exposb": (H,)}
    return [_draw(*shapes[name]).abs()] if name in shapes else []


def _scheme(name: str, weights: list[Tensor]) -> Any:
    if name == "t5":
        return T5Bias(weights[0], max_distance=20)
    if name == "exposb":
        return ExpoSB(distance_decay=True, band_weights=weights[0])
    if name == "alibi, learned":
        return Alibi(weights[0])
    return {"none": NoPosition, "rope": Rope, "alibi": Alibi, "rerope": lambda: ReRope(5)}[name]()


def _attend(name: str, xs: list[Tensor], learned: list[Tensor], **keywords: Any) -> tuple[Tensor, Tensor]:
    q, k, v, gate = xs
    *weights, sinks, norm = learned
    of_call = {"sinks": sinks, "norm": QKNorm(norm), "gate": gate, "causal": True, "return_lse": True}
    out, lse = attention(q, k, v, position=_scheme(name, weights), impl="reference", **of_call, **keywords)
    return out, lse


def check_attention(rank: int) -> None:
    """All schemes by heads and by batch rows: results, placements, and gradients of what ranks share."""
    mesh = _mesh()
    lengths = torch.tensor([12, 7, 3, 9])
    for name in ("none", "rope", "alibi", "alibi, learned", "t5", "exposb", "rerope"):
        for layout, heads in (("bthd", 2), ("bhtd", 1)):
            shapes = [(B, T, n, D) if layout == "bthd" else (B, n, T, D) for n in (H, K, K, H)]
            learned = [*_weights(name), _draw(H), _draw(D)]
            xs = [_draw(*shape).requires_grad_() for shape in shapes]
            shared = [x.clone().requires_grad_() for x in learned]
            out, lse = _attend(name, xs, shared, key_lengths=lengths, layout=layout)
            grads = _draw(*out.shape), _draw(*lse.shape)
            expected = torch.autograd.grad((out, lse), [*xs, *shared], grads)
            for placement in (Shard(heads), Shard(0), Replicate()):
                sharded = [distribute_tensor(x.detach(), mesh, [placement]).requires_grad_() for x in xs]
                of_ranks = [x.clone().requires_grad_() for x in learned]
                mine, lse_of_mine = _attend(name, sharded, of_ranks, key_lengths=lengths, layout=layout)
                assert mine.placements == (placement,)
                of_lse = Shard(1) if placement == Shard(heads) else placement
                assert lse_of_mine.placements == (of_lse,)
                _close(mine, out)
                _close(lse_of_mine, lse)
                of_results = [
                    distribute_tensor(x, mesh, y.placements) for x, y in zip(grads, (mine, lse_of_mine), strict=True)
                ]
                found = torch.autograd.grad((mine, lse_of_mine), [*sharded, *of_ranks], of_results)
                for x, y in zip(found, expected, strict=True):
                    _close(x, y)


def _check_two_dimensions(rank: int) -> None:
    """Rows by one dimension of a mesh, heads by the other; a learned DTensor that is sharded itself."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2)) if size > 2 else init_device_mesh("cpu", (size, 1))
    xs = [_draw(B, T, n, D) for n in (H, K, K)]
    slopes = _draw(H).abs()
    whole = [x.clone().requires_grad_() for x in (*xs, slopes)]
    out = attention(*whole[:3], position=Alibi(whole[3]))
    expected = torch.autograd.grad(out.sum(), whole)
    sharded = [distribute_tensor(x, mesh, [Shard(0), Shard(2)]).requires_grad_() for x in xs]
    sharded.append(distribute_tensor(slopes, mesh, [Replicate(), Shard(0)]).requires_grad_())
    mine = attention(*sharded[:3], position=Alibi(sharded[3]))
    _close(mine, out)
    found = torch.autograd.grad(mine.sum(), sharded)
    for x, y in zip(found, expected, strict=True):
        _close(x, y)


def check_meshes(rank: int) -> None:
    _check_two_dimensions(rank)
    if dist.get_world_size() == 4:
        _check_heads_and_the_sequence(rank)
        check_shards_of_a_sequence(rank)


def check_packed_and_masks(rank: int) -> None:
    mesh = _mesh()
    xs = [_draw(T, n, D) for n in (H, K, K)]
    bounds = torch.tensor([0, 5, 12])
    whole = attention(*xs, cu_seqlens_q=bounds, layout="thd", position=Alibi())
    mine = attention(
        *(distribute_tensor(x, mesh, [Shard(1)]) for x in xs), cu_seqlens_q=bounds, layout="thd", position=Alibi()
    )
    _close(mine, whole)
    xs = [_draw(B, T, n, D) for n in (H, K, K)]
    mask = _draw(B, H, T, T) > 0
    positions = torch.arange(B * T).view(B, T)
    keywords = {"mask": mask, "positions_q": positions, "positions_k": positions, "position": Rope()}
    out, most = attention(*xs, return_max_logits=True, **keywords)
    for placement in (Shard(0), Shard(2)):
        sharded = [distribute_tensor(x, mesh, [placement]) for x in xs]
        of_mine = attention(*sharded, return_max_logits=True, **keywords)
        _close(of_mine[0], out)
        _close(of_mine[1], most)
    _check_scales_of_pages(mesh)


def _check_scales_of_pages(mesh: DeviceMesh) -> None:
    """Scales of each token and of each head, beside pages that are sharded by heads."""
    q, table, lengths = _draw(1, 2, H, D).float(), torch.tensor([[2, 0, 1]]), torch.tensor([T])
    for dtype, shape in ((torch.int8, (3, 4, K)), (torch.float8_e4m3fn, (K,)), (torch.float8_e4m3fn, ())):
        k, v = ((8 * _draw(3, 4, K, D) + shift).to(dtype) for shift in (0, 3))
        scales = {name: _draw(1, *shape)[0].float().abs() for name in ("k_scale", "v_scale")}
        keywords = {"block_table": table, "key_lengths": lengths, "causal": True, **scales}
        parts = (x.chunk(mesh.size(), 2)[mesh.get_local_rank()] for x in (q, k, v))  # gloo sends no float8
        mine = attention(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in parts), **keywords)
        torch.testing.assert_close(mine.full_tensor(), attention(q, k, v, **keywords))


def check_apply_rope(rank: int) -> None:
    mesh = _mesh()
    cos, sin = rope_table(64, inverse_frequencies("default", D, 10000.0)[0])
    xs, weight = [_draw(B, T, n, D) for n in (H, K)], _draw(D)
    for keywords in ({}, {"positions": torch.arange(B * T).view(B, T)}, {"offsets": torch.tensor([3, 0, 9, 1])}):
        leaves = [x.clone().requires_grad_() for x in (*xs, weight)]
        whole = apply_rope(*leaves[:2], cos, sin, norm=QKNorm(leaves[2]), **keywords)
        grads = [_draw(*x.shape) for x in whole]
        expected = torch.autograd.grad(whole, leaves, grads)
        for placement in (Shard(0), Shard(2)):
            sharded = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in xs]
            shared = weight.clone().requires_grad_()
            mine = apply_rope(*sharded, cos, sin, norm=QKNorm(shared), **keywords)
            of_results = [distribute_tensor(x, mesh, [placement]) for x in grads]
            found = torch.autograd.grad(mine, [*sharded, shared], of_results)
            for x, y in zip((*mine, *found), (*whole, *expected), strict=True):
                _close(x, y)
        alone = apply_rope(distribute_tensor(xs[0], mesh, [Shard(2)]), None, cos, sin, **keywords)
        _close(alone, apply_rope(xs[0], None, cos, sin, **keywords))
    _check_tables_per_head(mesh)


def _check_tables_per_head(mesh: Any) -> None:
    """Learned tables get the sum of all ranks' gradients."""
    xs = [_draw(B, T, H, D) for _ in range(2)]
    positions = torch.arange(B * T).view(B, T) % 9
    for shape, keywords in (((B, T, H), {}), ((1, T, H), {}), ((9, H), {"positions": positions})):
        leaves = [x.clone().requires_grad_() for x in (*xs, _draw(*shape, D // 2), _draw(*shape, D // 2))]
        whole = apply_rope(*leaves, **keywords)
        grads = [_draw(*x.shape) for x in whole]
        expected = torch.autograd.grad(whole, leaves, grads)
        for placement in (Shard(0), Shard(2)):
            sharded = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in xs]
            shared = [x.detach().clone().requires_grad_() for x in leaves[2:]]
            mine = apply_rope(*sharded, *shared, **keywords)
            of_results = [distribute_tensor(x, mesh, [placement]) for x in grads]
            found = torch.autograd.grad(mine, [*sharded, *shared], of_results)
            for x, y in zip((*mine, *found), (*whole, *expected), strict=True):
                _close(x, y)


def check_parallelized_modules(rank: int) -> None:
    mesh = _mesh()
    x = _draw(B, T, H * D)

    def compare(make: Any, call: Any, names: tuple[str, ...], out: str | None, local: bool) -> None:
        torch.manual_seed(3)
        whole = make().double().eval()
        torch.manual_seed(3)
        model = make().double().eval()
        plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=local) for name in names}
        if out is not None:
            plan[out] = RowwiseParallel()
        parallelize_module(model, mesh, plan)
        expected, mine = call(whole, x), call(model, x)
        if out is None and local:
            mine = DTensor.from_local(mine, mesh, [Shard(2)])
        _close(mine, expected)
        _whole(mine).square().sum().backward()
        expected.square().sum().backward()
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            _close(parameter.grad, other.grad)

    for local in (True, False):
        names = ("q_proj", "k_proj", "v_proj")
        compare(lambda: RoPEAttention(H * D, H), lambda model, x: model(x, causal=True), names, "out_proj", local)
        names = ("query", "key", "value")
        compare(lambda: RoPEBERTAttention(H * D, H), lambda model, x: model(x)[0], names, None, local)
    compare(lambda: ALiBiBERTAttention(H * D, H), lambda model, x: model(x)[0], names, None, False)
    with pytest.raises(ValueError, match=r"query has 2 heads of 4|query has 1 heads of 4"):
        compare(lambda: ALiBiBERTAttention(H * D, H), lambda model, x: model(x)[0], names, None, True)


def _check_heads_and_the_sequence(rank: int) -> None:
    """A module whose heads one dimension of a mesh shares, and whose sequence the other."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("sequence", "heads"))
    x = _draw(B, T, H * D)
    torch.manual_seed(3)
    whole = RoPEAttention(H * D, H).double().eval()
    torch.manual_seed(3)
    model = RoPEAttention(H * D, H).double().eval()
    plan: dict[str, Any] = {f"{name}_proj": ColwiseParallel() for name in "qkv"}
    parallelize_module(model, mesh["heads"], {**plan, "out_proj": RowwiseParallel()})
    layout = SequenceLayout(mesh["sequence"], T)
    expected = whole(x, causal=True)
    expected.square().sum().backward()
    with context_parallel(layout):
        mine = model(shard_sequence(x, layout), causal=True)
    _close(unshard_sequence(mine.detach(), layout), expected.detach())
    mine.square().sum().backward()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None
        total = _whole(parameter.grad).clone()
        dist.all_reduce(total, group=mesh["sequence"].get_group())
        _close(total, other.grad)


def check_shards_of_a_sequence(rank: int) -> None:
    """Tokens are sharded by a layout, and heads beside them by the same mesh or by another one."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("heads", "sequence"))
    if dist.get_world_size() > 2:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("heads", "sequence"))
    layout, part = SequenceLayout(mesh["sequence"], T), mesh.get_local_rank("heads")
    learned = [torch.linspace(low, 1.0, H, dtype=torch.float64).requires_grad_() for low in (0.1, -1.0)]
    keywords: dict[str, Any] = {"position": Alibi(learned[0]), "sinks": learned[1], "causal": True, "return_lse": True}
    whole = [_draw(B, T, n, D).requires_grad_() for n in (H, K, K)]
    out, lse = attention(*whole, **keywords)
    expected = torch.autograd.grad((out.square().sum() + lse.sum()), [*whole, *learned])
    for given, placements in ((mesh, [Shard(2), Shard(1)]), (mesh["heads"], [Shard(2)])):
        leaves = [
            shard_sequence(x.detach(), layout).chunk(mesh.size(0), 2)[part].clone().requires_grad_() for x in whole
        ]
        xs = [DTensor.from_local(x, given, placements) for x in leaves]
        with context_parallel(layout):
            results = attention(*xs, **keywords)
        for mine, lse_of_mine in (results, context_parallel_attention(*xs, layout=layout, **keywords)):
            assert mine.placements == xs[0].placements
            assert lse_of_mine.placements == (Shard(1), Shard(2))[: given.ndim]
            valid = layout.valid
            of_out, of_lse = mine.to_local()[:, valid], lse_of_mine.to_local()[..., valid]
            _close(of_out, shard_sequence(out, layout).chunk(mesh.size(0), 2)[part][:, valid])
            _close(of_lse, shard_sequence(lse, layout, 2).chunk(mesh.size(0), 1)[part][..., valid])
            grads = torch.autograd.grad(of_out.square().sum() + of_lse.sum(), [*leaves, *learned])
            for grad, other in zip(grads[:3], expected, strict=False):
                _close(grad, shard_sequence(other, layout).chunk(mesh.size(0), 2)[part])
            for grad, other in zip(grads[3:], expected[3:], strict=True):
                total = grad.clone()
                dist.all_reduce(total, group=mesh["sequence"].get_group())
                _close(total, other)
    xs = [DTensor.from_local(x.detach(), mesh["heads"], [Shard(1)]) for x in leaves]
    with pytest.raises(ValueError, match="but its tokens must be sharded over the ranks of the layout"):
        context_parallel_attention(*xs, layout=layout)
    with pytest.raises(TypeError, match="x is a DTensor, but must be a plain tensor"):
        shard_sequence(xs[0], layout)


def check_compiled(rank: int) -> None:
    mesh = _mesh()
    xs = [distribute_tensor(_draw(B, T, n, D), mesh, [Shard(2)]).requires_grad_() for n in (H, K, K)]
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, position=Alibi(), causal=True), fullgraph=True, backend="aot_eager"
    )
    out, expected = run(*xs), attention(*xs, position=Alibi(), causal=True)
    _close(out, expected.full_tensor())
    for x, y in zip(torch.autograd.grad(out.sum(), xs), torch.autograd.grad(expected.sum(), xs), strict=True):
        _close(x, y.full_tensor())


def check_refusals(rank: int) -> None:
    mesh = _mesh()
    q, k = _draw(B, T, H, D), _draw(B, T, K, D)

    def split(x: Tensor, placement: Any = Shard(2)) -> DTensor:  # noqa: B008
        return distribute_tensor(x, mesh, [placement])

    with pytest.raises(ValueError, match=r"q has the placement .*, but must be replicated or sharded by heads"):
        attention(split(q, Shard(1)), split(k, Shard(1)), split(k, Shard(1)))
    with pytest.raises(ValueError, match="q has the placement"):
        attention(DTensor.from_local(q, mesh, [Partial()]), split(k), split(k))
    with pytest.raises(ValueError, match="k is Tensor, but must be a DTensor with q's mesh and placements"):
        attention(split(q), k, split(k))
    with pytest.raises(ValueError, match=r"v has placements .*, but must be a DTensor"):
        attention(split(q), split(k), split(k, Replicate()))
    with pytest.raises(ValueError, match="k is a DTensor, but must be a plain tensor, as q is"):
        attention(q, split(k), split(k))

    class Learned(PositionScheme):
        def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
            return torch.ones(n_heads, 1, requires_grad=True)

        def has_score_mod(self) -> bool:
            return True

    with pytest.raises(ValueError, match="position is Learned, but for DTensors must hold what it learns in fields"):
        attention(split(q), split(k), split(k), position=Learned())
    with pytest.raises(ValueError, match=r"q has 3 heads, but they must be a multiple of \d ranks"):
        attention(*(split(_draw(B, T, 3, D)) for _ in range(3)))
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5, but must be 0 for DTensors"):
        attention(split(q), split(k), split(k), dropout_p=0.5)
    with pytest.raises(ValueError, match=r"norm\.across_heads is True"):
        attention(split(q), split(k), split(k), norm=QKNorm(across_heads=True))
    cos, sin = rope_table(64, inverse_frequencies("default", D, 10000.0)[0])
    with pytest.raises(ValueError, match="inplace is True, but must be False for DTensors"):
        apply_rope(split(q), None, cos, sin, inplace=True)


def compare_kernels(rank: int) -> None:
    """Triton's kernels on each rank's heads, in float32, beside the definition on one process."""
    mesh = _mesh()
    for name in ("rope", "alibi", "t5", "exposb", "rerope"):
        weights = [x.float() for x in _weights(name)]
        xs = [_draw(2, 40, n, D).float().requires_grad_() for n in (H, K, K)]
        out = attention(*xs, position=_scheme(name, weights), causal=True, impl="reference")
        grad = _draw(*out.shape).float()
        expected = torch.autograd.grad(out, xs, grad)
        sharded = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in xs]
        mine = attention(*sharded, position=_scheme(name, weights), causal=True, impl="triton")
        found = torch.autograd.grad(mine, sharded, distribute_tensor(grad, mesh, [Shard(2)]))
        for x, y in zip((mine, *found), (out, *expected), strict=True):
            # 40 keys, and as many roundings in float32 on the way to a sum of terms near the largest one.
            atol = 40 * torch.finfo(torch.float32).eps * float(y.detach().abs().max())
            torch.testing.assert_close(_whole(x), y, rtol=0, atol=atol)


def run_all(rank: int) -> None:
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            torch.manual_seed(0)
            check(rank)
