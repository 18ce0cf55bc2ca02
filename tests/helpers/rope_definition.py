"""The rotation a second time, for the tests alone: complex numbers in float64, positions in plain Python.

Nothing here shares a line with the implementations that it judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk import apply_rope
from ropewalk.testing import assert_close_to_truth, error_budget, poisoned_memory, unchanged

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_interpreted(impl: str | None, device: torch.device) -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return impl == "triton" and device.type == "cpu"


def skip_bfloat16_in_interpreter(impl: str, device: torch.device, dtype: torch.dtype) -> None:
    """Skip what the interpreter cannot do: it cuts to bfloat16 rather than rounding."""
    if dtype == torch.bfloat16 and is_interpreted(impl, device):
        pytest.skip("Triton's interpreter does not round to bfloat16")


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Normal numbers, the same ones on every device."""
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype)


def random_tables(
    *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Cos and sin of angles that differ in every row and column, so that no row passes for another."""
    angles = torch.rand(*shape, dtype=torch.float64) * 2 * torch.pi
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def token_positions(
    batch: int,
    tokens: int,
    positions: Tensor | int | None,
    offsets: Tensor | None,
    cu_seqlens: Tensor | None,
    layout: str,
    axes: Tensor | None = None,
) -> list[list[int]] | list[list[tuple[int, ...]]]:
    """Work out the position of every token, or with axes of each of its pairs, one after the other."""
    if axes is not None:
        by_axis = [token_positions(batch, tokens, axis, None, None, layout) for axis in positions]
        return [[tuple(by_axis[a][b][t] for a in axes.tolist()) for t in range(tokens)] for b in range(len(by_axis[0]))]
    if offsets is not None:
        return [[start + t for t in range(tokens)] for start in offsets.tolist()]
    if isinstance(positions, Tensor):
        values = positions.tolist()
        if layout == "thd":
            return [values]
        return [values[b if len(values) > 1 else 0] for b in range(batch)]
    offset = positions or 0
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()[:-1]
        return [[offset + t - max(start for start in starts if start <= t) for t in range(tokens)]]
    return [[offset + t for t in range(tokens)] for _ in range(batch)]


def table_rows(table: Tensor, positions: list[list[int]], is_looked_up: bool = False) -> Tensor:
    """Look up each token's row, (B, T, 1 or H, R/2) in float64; NaN for a position outside the table.

    is_looked_up: a table of 3 dimensions has rows for positions, which are given, rather than for tokens.
    """
    table = table.cpu().double()
    if table.ndim == 4:
        return table.expand(len(positions), -1, -1, -1)
    if table.ndim == 3 and not is_looked_up:
        return table.expand(len(positions), -1, -1)[:, :, None]
    outside = torch.full(table.shape[1:], torch.nan, dtype=torch.float64)

    def look_up(p):
        if isinstance(p, int):
            return table[p] if 0 <= p < len(table) else outside
        inside = all(0 <= n < len(table) for n in p)
        return torch.stack([table[n, pair] for pair, n in enumerate(p)]) if inside else outside

    rows = [look_up(p) for row in positions for p in row]
    return torch.stack(rows).view(len(positions), len(positions[0]), -1, table.shape[-1])


def _to_bthd(x: Tensor, layout: str) -> Tensor:
    """(B, T, H, D); the same call turns it back, but for the packed layout."""
    return {"bthd": lambda: x, "bhtd": lambda: x.transpose(1, 2), "thd": lambda: x[None]}[layout]()


def pair_features(n_pairs: int, interleaved: bool, pair_block: int | None = None) -> tuple[list[int], list[int]]:
    """The first and the second feature of each pair, counted from the first rotated one."""
    if interleaved:
        return list(range(0, 2 * n_pairs, 2)), list(range(1, 2 * n_pairs, 2))
    width = pair_block or 2 * n_pairs
    first = [start + j for start in range(0, 2 * n_pairs, width) for j in range(width // 2)]
    return first, [feature + width // 2 for feature in first]


def definition(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | int | None = None,
    offsets: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    axes: Tensor | None = None,
    layout: str = "bthd",
    interleaved: bool = False,
    pair_block: int | None = None,
    inverse: bool = False,
    rotary_dim: int | None = None,
    rotary_offset: int = 0,
) -> Tensor:
    """Rotate x in float64, as complex numbers: z · (cos + i·sin). On the CPU, and differentiable."""
    x = _to_bthd(x.cpu().double(), layout)
    if x.numel() == 0:
        return x[0] if layout == "thd" else _to_bthd(x, layout)
    where = token_positions(x.shape[0], x.shape[1], positions, offsets, cu_seqlens, layout, axes)
    is_looked_up = positions is not None or offsets is not None
    cos, sin = (table_rows(table, where, is_looked_up) for table in (cos, sin))
    half = cos.shape[-1]
    before, turned, after = x.tensor_split((rotary_offset, rotary_offset + 2 * half), dim=-1)
    first, second = pair_features(half, interleaved, pair_block)
    z = torch.complex(turned[..., first], turned[..., second]) * torch.complex(cos, -sin if inverse else sin)
    back = torch.tensor([*first, *second], dtype=torch.long).argsort()
    turned = torch.cat((z.real, z.imag), dim=-1)[..., back]
    result = torch.cat((before, turned, after), dim=-1)
    outside = cos.isnan().any(dim=-1, keepdim=True)
    result = torch.where(outside, torch.nan, result)
    return result[0] if layout == "thd" else _to_bthd(result, layout)


def plain(x: Tensor, cos: Tensor, sin: Tensor, **arguments: Any) -> Tensor:
    """What plain PyTorch computes in x's dtype: arithmetic in at least float32, rounded once."""
    if x.numel() == 0:
        return x.detach().cpu()
    dtype = torch.promote_types(x.dtype, torch.float32)
    layout, interleaved = arguments.get("layout", "bthd"), arguments.get("interleaved", False)
    x = _to_bthd(x.detach().cpu(), layout)
    given = [arguments.get(name) for name in ("positions", "offsets", "cu_seqlens")]
    where = token_positions(x.shape[0], x.shape[1], *given, layout, arguments.get("axes"))
    is_looked_up = given[0] is not None or given[1] is not None
    cos, sin = (table_rows(table.detach(), where, is_looked_up).to(dtype) for table in (cos, sin))
    sin = -sin if arguments.get("inverse", False) else sin
    start, half = arguments.get("rotary_offset", 0), cos.shape[-1]
    result = x.clone(memory_format=torch.contiguous_format)
    turned = result[..., start : start + 2 * half]
    first, second = pair_features(half, interleaved, arguments.get("pair_block"))
    a, b = turned[..., first].to(dtype), turned[..., second].to(dtype)
    turned[..., first], turned[..., second] = ((a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype))
    return result[0] if layout == "thd" else _to_bthd(result, layout)


def assert_rotated(actual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, **arguments: Any) -> None:
    """Raise AssertionError unless `actual` is x rotated, and the features that are not to be rotated are x's own."""
    truth, baseline = definition(x, cos, sin, **arguments), plain(x, cos, sin, **arguments)
    actual, x = actual.detach().cpu(), x.detach().cpu()
    assert_close_to_truth(actual, truth, baseline)
    start = arguments.get("rotary_offset", 0)
    for features in (slice(None, start), slice(start + 2 * cos.shape[-1], None)):
        kept = ~truth[..., features].isnan()
        assert torch.equal(actual[..., features][kept], x[..., features][kept]), "a feature that passes through changed"


def assert_rounded_once(actual: Tensor, x: Tensor, cos: Tensor, sin: Tensor, **arguments: Any) -> None:
    """Raise AssertionError unless each element is the rounding of what float32 arithmetic may give."""
    truth = definition(x, cos, sin, **arguments)
    budget = error_budget(truth, plain(x.float(), cos, sin, **arguments))
    lowest, highest = (truth - budget).to(actual.dtype), (truth + budget).to(actual.dtype)
    actual = actual.detach().cpu()
    assert bool(((lowest <= actual) & (actual <= highest)).all()), "rounded more than once"


def clone_memory(xs: Sequence[Tensor]) -> list[Tensor]:
    """Clone tensors with all of the memory that they view: they keep offsets, strides and neighbours."""
    storages: dict[int, Any] = {}
    clones = []
    for x in xs:
        storage = x.untyped_storage()
        copy = storages.setdefault(storage.data_ptr(), storage.clone())
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        clones.append(empty.set_(copy, x.storage_offset(), x.size(), x.stride()))
    return clones


def whole_memory(x: Tensor) -> Tensor:
    """All elements of the memory that x is a view of, whatever is between its own."""
    storage = x.untyped_storage()
    n = storage.nbytes() // x.element_size()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (n,), (1,))


def elements_of(x: Tensor) -> Tensor:
    """Where in `whole_memory(x)` its elements are, as a mask."""
    mask = torch.zeros(whole_memory(x).numel(), dtype=torch.bool)
    mask.as_strided(x.size(), x.stride(), x.storage_offset()).fill_(True)
    return mask


def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
    """`apply_rope`, which always gives a tuple."""
    results = apply_rope(q, k, cos, sin, **arguments)
    return (results,) if k is None else results


def check_out_of_place(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, impl: str, **arguments: Any) -> None:
    """Rotate out of place: results are right, have memory and strides of their own, and the inputs are untouched."""
    xs = [x for x in (q, k) if x is not None]
    inputs = [x for x in (*xs, cos, sin, *arguments.values()) if isinstance(x, Tensor)]
    with poisoned_memory(), unchanged(inputs):
        results = rotate(q, k, cos, sin, impl=impl, **arguments)
    for x, result in zip(xs, results, strict=True):
        assert result.stride() == torch.empty_like(x).stride()
        assert x.numel() == 0 or result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert_rotated(result, x, cos, sin, **arguments)


def check_in_place(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, impl: str, **arguments: Any) -> None:
    """Rotate copies in place: they are what comes back, they are right, and the memory around them is untouched."""
    originals = [x for x in (q, k) if x is not None]
    xs = clone_memory(originals)
    before = [whole_memory(x).cpu().clone() for x in xs]
    versions = [x._version for x in xs]
    others = [x for x in (cos, sin, *arguments.values()) if isinstance(x, Tensor)]
    with poisoned_memory(), unchanged(others):
        results = rotate(xs[0], xs[1] if k is not None else None, cos, sin, impl=impl, inplace=True, **arguments)
    for x, result, original, version in zip(xs, results, originals, versions, strict=True):
        assert result is x
        assert x._version > version
        assert_rotated(result, original, cos, sin, **arguments)
    for x, memory in zip(xs, before, strict=True):
        around = ~elements_of(x)
        for other in xs:
            if other.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                around &= ~elements_of(other)
        after = whole_memory(x).cpu()
        assert torch.equal(after[around].nan_to_num(), memory[around].nan_to_num()), "the memory around was written to"


def check_rotation(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, impl: str, **arguments: Any) -> None:
    """Both of `check_out_of_place` and `check_in_place`."""
    check_out_of_place(q, k, cos, sin, impl=impl, **arguments)
    check_in_place(q, k, cos, sin, impl=impl, **arguments)
