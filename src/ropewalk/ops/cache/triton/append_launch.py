"""The launch of `append_kv`, in as little host time as possible.

`prepare` computes what depends on shapes, strides and flags alone. The `Launch` that it returns reads addresses and
launches a compiled kernel that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.triton.bind import bind, join
from ropewalk.ops.cache.call import AppendCall, stand_in
from ropewalk.ops.cache.formats import Format, format_of
from ropewalk.ops.cache.triton.append_kernel import (
    N_POINTERS,
    AppendSpecialisation,
    append_kernel,
    compile_kernel,
    kernel_constants,
)
from ropewalk.ops.cache.written import WrittenPair, check_written, find_written

_LETTERS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}
_WIDEST_ACCESS = 16  # bytes
_address_of = Tensor.data_ptr
*_fields, _ = AppendCall._fields  # the last one is no tensor
_ADDRESSES = (*_fields, "out")
_FEW_TOKENS = 256  # latency limits calls of so many, bandwidth those of more
# A thread may have as many then. Left to itself, ptxas saves registers and loads cos and sin after the norm's sum.
_FEW_TOKENS_REGISTERS = 128


class Tiles(NamedTuple):
    """The work of a program: `block_heads` heads of `block_tokens` tokens, by so many threads."""

    block_tokens: int
    block_heads: int
    threads: int


def choose_tiles(tokens: int, most_heads: int, head_dim: int, itemsize: int, *, across_heads: bool) -> Tiles:
    """Return the tiles of a call."""
    # A row is read in 16-byte accesses by so many threads.
    per_row = max(1, triton.next_power_of_2(head_dim) * itemsize // _WIDEST_ACCESS)
    heads = triton.next_power_of_2(most_heads)
    if across_heads:
        return Tiles(1, heads, min(1024, max(32, heads * per_row)))
    if tokens <= _FEW_TOKENS:
        block_heads = min(heads, max(1, 128 // per_row))
        return Tiles(1, block_heads, min(128, max(32, block_heads * per_row)))
    rows = max(1, 128 // per_row)
    block_heads = min(rows, heads)
    return Tiles(max(1, rows // block_heads), block_heads, 64)  # note 063


class Launch:
    """A prepared call, for tensors of the metadata that it was prepared for."""

    def __init__(
        self,
        spec: AppendSpecialisation,
        n_programs: int,
        device: int,
        numbers: tuple[int, ...],
        written: tuple[WrittenPair, WrittenPair | None],
    ) -> None:
        self.spec, self.n_programs, self.device = spec, n_programs, device
        self.caches, self.scales = written
        self.constants = (*numbers, *kernel_constants(spec).values())
        self._by_alignment: dict[int, Callable[[list[int], int], None]] = {}

    def __call__(self, call: AppendCall, q_out: Tensor | None) -> None:
        """Append as `run` does."""
        self.run(stand_in(call), call.flags, q_out)

    def run(self, tensors: Sequence[Tensor], flags: object, q_out: Tensor | None) -> None:
        """Append on the current stream of the tensors' device, those of a call without its flags."""
        addresses = [*map(_address_of, tensors), 0 if q_out is None else q_out.data_ptr()]
        k, v, k_cache, v_cache, _, cos, sin, q, _, _, q_weight, k_weight, k_scale, v_scale, out = addresses
        if v_cache - k_cache not in self.caches.distances:
            self.caches.check(k_cache, v_cache)
        if self.scales is not None and v_scale - k_scale not in self.scales.distances:
            self.scales.check(k_scale, v_scale)
        if not self.n_programs:
            return
        union = k | v | k_cache | v_cache | cos | sin | q | q_weight | k_weight | out | _WIDEST_ACCESS
        alignment = union & -union
        launch = self._by_alignment.get(alignment)
        if launch is None:
            launch = self._by_alignment[alignment] = self._bind(replace(self.spec, pointer_alignment=alignment))
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if torch._C._cuda_getDevice() == self.device:
            launch(addresses, stream)
        else:
            with torch.cuda.device(self.device):
                launch(addresses, stream)

    def _bind(self, spec: AppendSpecialisation) -> Callable[[list[int], int], None]:
        """Return the launch of a binary, which reads addresses from a list."""
        with torch.cuda.device(self.device):
            compiled = _compile(spec, self.device)
            if gpu.is_rocm():
                return self._launch_of(compiled)
            twins = [torch.empty(0, device="meta") for _ in range(N_POINTERS)]
            slots = {id(x): slot for x, slot in zip(twins, self._pointers(), strict=True)}
            kinds = compiled.src.signature.values()
            pointers = [None if kind == "constexpr" else x for x, kind in zip(twins, kinds, strict=False)]
            bound = bind(compiled, self.n_programs, (*pointers, *self.constants), lambda x: (slots[id(x)], 0))
            return join([bound])[0]

    def _launch_of(self, compiled: Any) -> Callable[[list[int], int], None]:
        """Return the launch of a binary by Triton's own launcher."""
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        pick = itemgetter(*self._pointers())

        def launch(addresses: list[int], stream: int) -> None:
            arguments = (*pick(addresses), *self.constants)
            run(self.n_programs, 1, 1, stream, function, metadata, None, None, None, *arguments)

        return launch

    def _pointers(self) -> tuple[int, ...]:
        """Return the index of each of the kernel's pointers among the addresses; k's are q's where there is none."""
        features = ("q", "k", "v", "out") if self.spec.n_q_heads else ("k", "k", "v", "k")
        rest = ("k_cache", "v_cache", "cos", "sin", "q_weight", "k_weight", "k_scale", "v_scale")
        return tuple(map(_ADDRESSES.index, (*features, *rest, "axes", "positions", "slots")))


class InterpretedLaunch:
    """The same by Triton's interpreter, on CPU tensors."""

    def __init__(self, spec: AppendSpecialisation, n_programs: int, numbers: tuple[int, ...]) -> None:
        self.spec, self.n_programs = spec, n_programs
        self.constants = (*numbers, *kernel_constants(spec).values())

    def __call__(self, call: AppendCall, q_out: Tensor | None) -> None:
        """Append in the interpreter."""
        check_written(call)
        k_cache, v_cache = call.k_cache, call.v_cache
        if not self.n_programs:
            return
        if k_cache.dtype == torch.float8_e4m3fn:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        q = call.k if call.q is None else call.q
        tensors = (q, call.k, call.v, q if q_out is None else q_out, k_cache, v_cache, call.cos, call.sin)
        others = (call.q_weight, call.k_weight, call.k_scale, call.v_scale, call.axes, call.positions, call.slots)
        values = (*tensors, *others, *self.constants)
        append_kernel[(self.n_programs,)](**dict(zip(append_kernel.arg_names, values, strict=True)))


@cache
def _compile(spec: AppendSpecialisation, device: int) -> Any:
    """Compile the kernel for `device`, and load it."""
    compiled = compile_kernel(spec)
    _ = compiled.run  # loads the binary onto the device
    return compiled


def prepare(call: AppendCall, tiles: Tiles | None = None) -> Callable[[AppendCall, Tensor | None], None]:
    """Make the launch for tensors like those of a call, which is checked."""
    q_out = None if call.q is None else torch.empty_like(call.q, device="meta")
    rows = (call.k, call.v, call.q, q_out, call.cos, call.sin, call.axes)
    weights = (call.q_weight, call.k_weight)
    if not (all(x is None or _is_dense(x) for x in rows) and all(x is None or x.is_contiguous() for x in weights)):
        return _append_dense
    k, v, k_cache, v_cache, slots, cos, sin, q, positions, axes, q_weight, k_weight, k_scale, v_scale, flags = call
    kind = format_of(k_cache, k)
    assert kind is not None
    tokens, n_kv_heads, head_dim = k.shape
    n_q_heads = 0 if q is None else q.shape[1]
    strides: list[int] = []
    for x in (q, k, v, q_out):
        strides += (0, 0) if x is None else _strides(x)[:2]
    unit = _unit(strides)
    cache_strides = [*_strides(k_cache)[:3], *_strides(v_cache)[:3]]
    cache_unit = _unit(cache_strides)
    scale_strides: list[int] = []
    for scale in (k_scale, v_scale):
        scale_strides += _scale_strides(scale, kind)
    table_strides = [_strides(cos)[0], _strides(sin)[0]]
    table_unit = _unit(table_strides)
    of_positions = (0, 0) if positions is None else (*reversed(_strides(positions)), 0)[:2]
    all_strides = (
        *(stride // unit for stride in strides),
        *(stride // cache_unit for stride in cache_strides),
        *scale_strides,
        *(stride // table_unit for stride in table_strides),
        *of_positions,
        *_strides(slots),
    )
    across_heads = flags.has_norm and flags.across_heads
    if tiles is None:
        tiles = choose_tiles(
            tokens,
            max(n_q_heads, n_kv_heads),
            max(head_dim, v.shape[2]),
            k.element_size(),
            across_heads=across_heads,
        )
    q_weight = None if q is None else q_weight
    spec = AppendSpecialisation(
        dtype=_LETTERS[k.dtype],
        table_dtype=_LETTERS[cos.dtype],
        slots_dtype=_LETTERS[slots.dtype],
        positions_dtype=None if positions is None else _LETTERS[positions.dtype],
        axes_dtype=None if axes is None else _LETTERS[axes.dtype],
        q_weight_dtype=None if q_weight is None else _LETTERS[q_weight.dtype],
        k_weight_dtype=None if k_weight is None else _LETTERS[k_weight.dtype],
        q_per_head=q_weight is not None and q_weight.numel() != head_dim,
        k_per_head=k_weight is not None and k_weight.numel() != head_dim,
        format=int(kind),
        n_q_heads=n_q_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        value_dim=v.shape[2],
        half=cos.shape[1],
        rotary_offset=flags.rotary_offset,
        interleaved=flags.interleaved,
        n_axes=0 if axes is None or positions is None else positions.shape[0],
        has_norm=flags.has_norm,
        eps=float(flags.eps),
        weight_offset=float(flags.weight_offset),
        after=flags.after,
        across_heads=flags.across_heads,
        page_size=k_cache.shape[1],
        k_feature_stride=k_cache.stride(3) if k_cache.shape[3] > 1 else 1,
        v_feature_stride=v_cache.stride(3) if v_cache.shape[3] > 1 else 1,
        pointer_alignment=_WIDEST_ACCESS,
        stride_unit=unit,
        cache_stride_unit=cache_unit,
        table_stride_unit=table_unit,
        stride_dtype="i32" if max(all_strides) < 2**31 else "i64",
        block_tokens=tiles.block_tokens,
        block_heads=tiles.block_heads,
        threads=tiles.threads,
        native_fp8=_rounds_to_fp8(k),
        registers=_FEW_TOKENS_REGISTERS if tokens <= _FEW_TOKENS and not across_heads else 0,
    )
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + 2 * math.ceil(n_kv_heads / tiles.block_heads)
    numbers = (
        tokens,
        slots.shape[0],
        k_cache.shape[0] * k_cache.shape[1],
        cos.shape[0],
        *all_strides,
    )
    n_programs = math.ceil(tokens / tiles.block_tokens) * n_groups
    if gpu.is_interpreted():
        return InterpretedLaunch(spec, n_programs, numbers)
    return Launch(spec, n_programs, k.get_device(), numbers, find_written(call))


def _append_dense(call: AppendCall, q_out: Tensor | None) -> None:
    """Append dense copies of what the kernel cannot read."""
    fields = ("k", "v", "q", "cos", "sin", "axes", "q_weight", "k_weight")
    copies: dict[str, Any] = {name: x.contiguous() for name in fields if (x := getattr(call, name)) is not None}
    dense = call._replace(**copies)
    out = None if q_out is None else torch.empty_like(dense.q)  # type: ignore[arg-type]
    prepare(dense)(dense, out)
    if q_out is not None and out is not None:
        q_out.copy_(out)


def _rounds_to_fp8(k: Tensor) -> bool:
    """Say whether the GPU rounds to float8 by an instruction."""
    return gpu.is_nvidia(k.device) and not gpu.is_interpreted() and gpu.capability(k.device) >= (8, 9)


def _is_dense(x: Tensor) -> bool:
    """Say whether the last dimension is dense in memory."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return strides in elements, 0 for a dimension of one element."""
    return tuple(stride if size > 1 else 0 for stride, size in zip(x.stride(), x.shape, strict=True))


def _scale_strides(scale: Tensor | None, kind: Format) -> tuple[int, int, int, int]:
    """Return the strides of page, offset, head and group."""
    if scale is None or scale.ndim == 0:
        return 0, 0, 0, 0
    strides = _strides(scale)
    if kind is Format.FP8:
        return 0, 0, strides[0], 0
    page, offset, head, group = (*strides, 0)[:4]
    return page, offset, head, group


def _unit(strides: Iterable[int]) -> int:
    """Return the largest power of two, up to 16, that divides every stride."""
    union = _WIDEST_ACCESS
    for stride in strides:
        union |= stride
    return union & -union
