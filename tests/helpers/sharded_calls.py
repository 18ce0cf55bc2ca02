"""Sharded calls beside the same call of one process, in float64. Each rank compares its shards."""

from __future__ import annotations

import functools
import gc
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers import interpreter
from ropewalk import Alibi, ExpoSB, NoPosition, PositionScheme, QKNorm, ReRope, Rope, SelfExtend, T5Bias, attention
from ropewalk.parallel import SequenceLayout, context_parallel_attention, gathered, shard_sequence, transport
from ropewalk.parallel.transport import SymmetricMemory

B, T, H, K, D, DV = 2, 46, 8, 4, 16, 24  # 46 tokens divide into 2 shards, but not into 4 pieces, nor into 4 shards
DOCUMENTS = (0, 3, 20, 20, 41)  # one is empty, and a tail belongs to none
RTOL = 1e-11
METHODS = ("gather", "halo", "ulysses", "ring", None)


def _numbers(low: float, high: float, count: int = H) -> Tensor:
    return torch.linspace(low, high, count, dtype=torch.float64).requires_grad_()


def _table() -> Tensor:
    return (torch.arange(8.0 * H, dtype=torch.float64).view(8, H) / 50).sin().requires_grad_()


SCHEMES: dict[str, Callable[[], PositionScheme]] = {
    "none": NoPosition,
    "rope": lambda: Rope(500000.0),
    "rope of a part": lambda: Rope(rotary_dim=8, rotary_offset=4, interleaved=True),
    "alibi": Alibi,
    "alibi, learned": lambda: Alibi(_numbers(0.05, 0.9)),
    "t5": lambda: T5Bias(_table(), max_distance=20),
    "rerope": lambda: ReRope(9),
    "rerope, leaky": lambda: ReRope(9, leak=3, log_n=16),
    "self-extend": lambda: SelfExtend(9, group=3, log_n=20, rope=Rope(rotary_dim=8)),
    "exposb": lambda: ExpoSB(distance_decay=True, band_weights=_numbers(0.5, 1.5)),
}


class Case(NamedTuple):
    """What a call has beside its scheme and its layout."""

    causal: bool = True
    window: Any = None
    packed: bool = False
    sinks: bool = False
    norm: bool = False
    gate: bool = False
    softcap: float | None = None


CASES = (
    Case(),
    Case(window=7),
    Case(causal=False),
    Case(causal=False, window=(5, 3)),
    Case(softcap=3.0, norm=True, gate=True),
    Case(packed=True),
    Case(packed=True, window=6, sinks=True),
    Case(causal=False, packed=True),
    Case(causal=False, packed=True, window=4),
)


class _Leaves(NamedTuple):
    """All that a call reads and that gets a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None
    learned: list[Tensor]
    keywords: dict[str, Any]

    def every(self) -> list[Tensor]:
        return [*self[:3], *([] if self.gate is None else [self.gate]), *self.learned]


def _leaves(case: Case, name: str, *xs: Tensor) -> _Leaves:
    q, k, v, gate = (x.detach().clone().requires_grad_() for x in xs)
    scheme = SCHEMES[name]()
    learned = [x for x in vars(scheme).values() if isinstance(x, Tensor)]
    keywords: dict[str, Any] = {"position": scheme, "causal": case.causal, "window": case.window}
    keywords |= {"softcap": case.softcap, "return_lse": True, "impl": "reference"}
    if case.sinks:
        learned.append(_numbers(-1, 1))
        keywords["sinks"] = learned[-1]
    if case.norm:
        learned.append(_numbers(0.5, 1.5, D))
        keywords["norm"] = QKNorm(learned[-1], None)
    if case.gate:
        keywords["gate"] = gate
    return _Leaves(q, k, v, gate if case.gate else None, learned, keywords)


def _attend_whole(leaves: _Leaves, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = leaves[:3]
    if bounds is None:
        out, lse = attention(q, k, v, **leaves.keywords)
        return out, lse
    rows = [attention(q[b], k[b], v[b], cu_seqlens_q=bounds, layout="thd", **leaves.keywords) for b in range(B)]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def _kinds(case: Case) -> tuple[str, ...]:
    return ("contiguous", "zigzag", "striped", *(("balanced",) if case.packed else ()))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), 0)


def _compare(
    name: str, case: Case, tensors: tuple[Tensor, ...], grads: tuple[Tensor, Tensor], group: Any, methods: Any
) -> Iterator[str]:
    """Compare all layouts and methods with one process; yield what was refused."""
    bounds = torch.tensor(DOCUMENTS) if case.packed else None
    whole = _leaves(case, name, *tensors)
    out, lse = _attend_whole(whole, bounds)
    grads_of_whole = torch.autograd.grad((out, _finite(lse)), whole.every(), grads)
    n_sharded = len(whole.every()) - len(whole.learned)
    for kind in _kinds(case):
        layout = SequenceLayout(group, T, kind, bounds)
        missing = ~layout.valid[:, None, None]

        def shard(x: Tensor, dim: int = 1, layout: SequenceLayout = layout) -> Tensor:
            return shard_sequence(x, layout, dim)

        expected = [shard(out), shard(lse, 2), *map(shard, grads_of_whole[:n_sharded]), *grads_of_whole[n_sharded:]]
        for method in methods:
            mine = _leaves(case, name, *(shard(x).masked_fill(missing, torch.nan) for x in tensors))
            keywords = {"layout": layout, "method": method, "sum_gradients": True, **mine.keywords}
            try:
                result = context_parallel_attention(*mine[:3], **keywords)
            except NotImplementedError as error:
                assert method is not None
                yield f"{kind} {method}: {error}"
                continue
            of_mine = torch.autograd.grad(
                (result[0], _finite(result[1])), mine.every(), (shard(grads[0]), shard(grads[1], 2))
            )
            for x, y in zip((*result, *of_mine), expected, strict=True):
                size = float(y[y.isfinite()].abs().max())
                label = f"{name} {case} {layout} {method}"
                torch.testing.assert_close(x, y, rtol=0, atol=RTOL * size, msg=lambda text, label=label: label + text)


class SharedFiles(SymmetricMemory):
    """Symmetric memory in files that all processes map: copies are done where they begin."""

    def _meet(self) -> None:
        dist.barrier(self.group)

    def _copy(self, copies: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        for target, source in copies:
            target.copy_(source)
        return lambda: None

    def _allocate(self, n_bytes: int) -> list[Tensor]:
        dist.barrier(self.group)
        folder = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, 0)
        paths = [f"{folder[0]}/{rank}" for rank in range(self.size)]
        peers = [torch.from_file(path, shared=True, size=n_bytes, dtype=torch.uint8) for path in paths]
        peers[self.rank].fill_(255)  # not a number in any dtype
        dist.barrier(self.group)
        if self.rank == 0:
            shutil.rmtree(str(folder[0]))
        return peers


def compare(
    rank: int,
    names: tuple[str, ...],
    cases: tuple[Case, ...],
    n_refused: int,
    setting: str = "",
    methods: Any = METHODS,
) -> None:
    """Compare sharded calls with one process, and count what was refused.

    setting: "groups" (of one key head each), "shared files" (the same, by symmetric memory), "kept" (that, too, where
    keys of some ranks alone are few enough to be kept), or "nodes" (two of them).
    """
    group: Any = dist.group.WORLD
    if setting == "nodes":
        group = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("between", "within"))
    if setting in ("groups", "shared files"):
        gathered.operations_of_group = gathered.cached_bytes = 0
    if setting == "kept":
        gathered.cached_bytes = 40 * B * K * (D + DV) * 8  # of 46 tokens the first of two ranks reads all, the other 36
    if setting in ("shared files", "kept"):
        transport.transport_of = gathered.transport_of = functools.cache(
            lambda _: SharedFiles(SequenceLayout(group, T))
        )
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    refused: list[str] = []
    for name in names:
        for case in cases:
            tensors = draw(B, T, H, D), draw(B, T, K, D), draw(B, T, K, DV), draw(B, T, H, DV)
            refused += _compare(name, case, tensors, (draw(B, T, H, DV), draw(B, H, T)), group, methods)
    assert len(refused) == n_refused, refused


def compare_kernels(rank: int) -> None:
    """Compare a ring and a gather by Triton's kernels with one process, in float32."""
    interpreter.make_faster()
    gathered.operations_of_group = gathered.cached_bytes = 0
    generator = torch.Generator().manual_seed(1)
    layout = SequenceLayout(dist.group.WORLD, T)
    shapes = (1, T, H, D), (1, T, K, D), (1, T, K, D), (1, T, H, D), (1, H, T)
    q, k, v, grad, grad_lse = (torch.randn(*shape, generator=generator) for shape in shapes)
    for name, scheme in (("rope", Rope()), ("alibi", Alibi(_numbers(0.05, 0.9).detach().float().requires_grad_()))):
        learned = [x for x in vars(scheme).values() if isinstance(x, Tensor)]
        keywords: dict[str, Any] = {"position": scheme, "causal": True, "window": 30, "return_lse": True}
        whole = [x.double().requires_grad_() for x in (q, k, v)]
        expected = attention(*whole, impl="reference", **keywords)
        of_whole = torch.autograd.grad(expected, (*whole, *learned), (grad.double(), grad_lse.double()))
        for method in ("gather", "ring"):
            mine = [shard_sequence(x, layout).requires_grad_() for x in (q, k, v)]
            result = context_parallel_attention(
                *mine, layout=layout, method=method, impl="triton", sum_gradients=True, **keywords
            )
            of_mine = torch.autograd.grad(
                result, (*mine, *learned), (shard_sequence(grad, layout), shard_sequence(grad_lse, layout, 2))
            )
            _close(result[0] * layout.valid[:, None, None], shard_sequence(expected[0], layout), name + method)
            for x, y in zip(of_mine, of_whole, strict=True):
                _close(x, shard_sequence(y, layout) if y.ndim == 4 else y, name + method)


def _close(x: Tensor, y: Tensor, name: str) -> None:
    assert (x.double() - y).abs().max() < 1e-5 * y.abs().max(), name


def check_a_destroyed_group_ends(rank: int) -> None:
    """Nothing of a call keeps its group: one that outlives its destruction may abort the process at its end."""
    group = dist.new_group()
    found = weakref.ref(group)
    layout = SequenceLayout(group, 16)
    q = torch.randn(1, layout.n_local, 2, 8, requires_grad=True)
    context_parallel_attention(q, q, q, layout=layout, causal=True, method="gather").sum().backward()
    dist.destroy_process_group(group)
    del group, layout
    gc.collect()
    assert found() is None
