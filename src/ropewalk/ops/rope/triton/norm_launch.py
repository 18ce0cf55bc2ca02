"""The launches of RMS norm and rotation: one forward; one backward, and a sum of the weights' gradients.

As `launch.py` does, `prepare` computes what depends on shapes, strides and flags alone, and the launches that it
returns read addresses and launch compiled kernels that they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.rope.norm import NormCall, is_per_head, split_parameters
from ropewalk.ops.rope.triton.launch import (
    _LETTERS,
    _WIDEST_ACCESS,
    Tiles,
    _division,
    _strides,
    _unit,
    block_of_pairs,
    describe_positions,
)
from ropewalk.ops.rope.triton.norm_kernel import (
    SUM_BLOCK_D,
    NormSpecialisation,
    compile_kernel,
    kernel_constants,
    norm_backward_kernel,
    norm_kernel,
    row_pairs,
    weight_sum_kernel,
)
from ropewalk.ops.rope.validate import as_bthd

# A thread of the backward may have as many. With fewer, ptxas loads x only after it has used dy (note 054).
BACKWARD_REGISTERS = 128
_SM_REGISTERS = 65536
_FEW_TOKENS = 256  # latency limits calls of so many, bandwidth those of more


def choose_tiles(
    batch: int,
    tokens: int,
    n_heads: Sequence[int],
    pairs: int,
    itemsize: int,
    *,
    across_heads: bool,
    heads_are_near: bool,
    backward: bool,
) -> Tiles:
    """Return tiles of 64 accesses of 16 bytes to each half of its rows, with which a GPU was fastest (note 054).

    n_heads is of q and of k; heads_are_near says that a token's heads lie nearer to each
    other in memory than a head's tokens do.
    """
    per_row = max(1, pairs * itemsize // _WIDEST_ACCESS)
    most_heads = triton.next_power_of_2(max(n_heads))
    if across_heads:
        return Tiles(1, most_heads, min(1024, max(32, most_heads * per_row)))
    rows = max(1, 64 // per_row)
    block_heads = min(rows, most_heads)
    common = math.gcd(*n_heads)
    if backward and (whole := common & -common) >= 4:  # groups of so many heads leave no row of a tile without one
        block_heads = min(block_heads, whole)
    if not heads_are_near:
        block_heads = min(block_heads, 4)
    block_tokens = min(max(1, rows // block_heads), triton.next_power_of_2(max(1, tokens)))
    if batch * tokens <= _FEW_TOKENS and not backward:
        # One row of each head: narrower accesses, by more threads, take less time.
        return Tiles(1, block_heads, max(32, 2 * block_heads * per_row))
    threads = max(per_row, 32 if heads_are_near and not backward else 64)
    return Tiles(block_tokens, block_heads, min(threads, max(32, block_tokens * block_heads * per_row)))


@cache
def _binary(kernel: Any, spec: NormSpecialisation, device: int) -> Callable[..., None]:
    """Compile a kernel for `device`; call the result with the grid, the stream and the kernel's arguments."""
    with torch.cuda.device(device):
        compiled = compile_kernel(kernel, spec)
        run = compiled.run  # loads the binary onto the device
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(n_programs: int, n_units: int, stream: int, *arguments: Any) -> None:
        run(n_programs, n_units, 1, stream, function, metadata, None, None, None, *arguments)

    return launch


@dataclass
class KernelLaunch:
    """One prepared launch of a kernel."""

    kernel: Any
    spec: NormSpecialisation
    grid: tuple[int, int]
    device: int
    constants: tuple[Any, ...]  # the numbers that stay the same from call to call, in the kernel's order

    def __post_init__(self) -> None:
        self.constants += tuple(kernel_constants(self.kernel, self.spec).values())
        self._by_alignment: dict[int, Callable[..., None]] = {}

    def __call__(self, tensors: Sequence[Tensor | None], indices: Sequence[Tensor | None], *numbers: int) -> None:
        """Launch on the current stream: tensors, then positions and bounds of sequences, then numbers."""
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        union = _WIDEST_ACCESS
        for pointer in pointers:
            union |= pointer
        alignment = union & -union
        launch = self._by_alignment.get(alignment)
        if launch is None:
            spec = replace(self.spec, pointer_alignment=alignment)
            launch = self._by_alignment[alignment] = _binary(self.kernel, spec, self.device)
        pointers += [0 if x is None else x.data_ptr() for x in indices]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        if torch._C._cuda_getDevice() == self.device:
            launch(*self.grid, stream, *pointers, *numbers, *self.constants)
        else:
            with torch.cuda.device(self.device):
                launch(*self.grid, stream, *pointers, *numbers, *self.constants)


class InterpretedKernelLaunch(KernelLaunch):
    """The same by Triton's interpreter, on CPU tensors."""

    def __call__(self, tensors: Sequence[Tensor | None], indices: Sequence[Tensor | None], *numbers: int) -> None:
        """Launch in the interpreter."""
        values: list[Any] = []
        for x in (*tensors, *indices):  # without k, its arguments have the types of q's
            values.append(values[-1] if x is None else x)
        arguments = (*values, *numbers, *self.constants)
        self.kernel[self.grid](**dict(zip(self.kernel.arg_names, arguments, strict=True)))


def _make_launch(kernel: Any, spec: NormSpecialisation, grid: tuple[int, int], x: Tensor, *constants: Any) -> Any:
    launch_class = InterpretedKernelLaunch if gpu.is_interpreted() else KernelLaunch
    return launch_class(kernel, spec, grid, x.device.index, constants)


@dataclass(frozen=True)
class Geometry:
    """Token blocks and strides of a call, as both kernels read them."""

    spec: NormSpecialisation
    n_groups: int
    n_blocks: int
    constants: tuple[int | None, ...]


def describe(
    roles: Sequence[Sequence[Tensor]],
    weight: Tensor | None,
    call: NormCall,
    *,
    bias: Tensor | None = None,
    needs: Sequence[bool] = (False, False, False),
    tiles: Tiles | None = None,
) -> Geometry:
    """Describe a launch: `roles` are q, or q and k; then their results, or results' gradients and gradients.

    `needs` are the gradients to compute: of features, weights and biases.
    """
    xs = roles[0]
    q = xs[0]
    cos, sin, positions, cu_seqlens, _, rope, axes = call.rope
    batch, tokens, n_q_heads, head_dim = as_bthd(q, rope.layout).shape
    n_k_heads = as_bthd(xs[1], rope.layout).shape[2] if len(xs) == 2 else 0
    half = cos.shape[-1]
    pairs = row_pairs(head_dim, half, rope.rotary_offset, rope.interleaved)

    # (batch, token, head) of each.
    strides: list[int] = []
    for tensors in roles:
        for x in tensors:
            strides += _strides(as_bthd(x, rope.layout))[:3]
        strides += [0, 0, 0] * (2 - len(tensors))
    stride_unit = _unit(strides)
    # (batch, row) of each; one table for all batch rows is a stride of 0 between them.
    table_strides = [stride for table in (cos, sin) for stride in (0, *_strides(table))[-3:-1]]
    table_stride_unit = _unit(table_strides)
    kind, positions_strides = describe_positions(call.rope)
    index = positions if positions is not None else cu_seqlens
    n_sequences = cu_seqlens.numel() - 1 if cu_seqlens is not None else 0

    if tiles is None:
        tiles = choose_tiles(
            batch,
            tokens,
            (n_q_heads, n_k_heads),
            pairs,
            q.element_size(),
            across_heads=call.flags.across_heads,
            heads_are_near=tokens <= 1 or n_q_heads <= 1 or strides[2] <= strides[1],
            backward=any(needs),
        )
    all_strides = (
        *(stride // stride_unit for stride in strides),
        *(stride // table_stride_unit for stride in table_strides),
        *positions_strides,
    )
    spec = NormSpecialisation(
        dtype=_LETTERS[q.dtype],
        weight_dtype=None if weight is None else _LETTERS[weight.dtype],
        table_dtype=_LETTERS[cos.dtype],
        index_dtype="i64" if index is None else _LETTERS[index.dtype],
        positions=kind,
        n_q_heads=n_q_heads,
        n_k_heads=n_k_heads,
        head_dim=head_dim,
        half=half,
        rotary_offset=rope.rotary_offset,
        interleaved=rope.interleaved,
        eps=float(call.flags.eps),
        weight_offset=float(call.flags.offset),
        per_head=weight is not None and is_per_head(weight, call.flags),
        after=call.flags.after,
        across_heads=call.flags.across_heads,
        needs_dx=needs[0],
        needs_dw=needs[1],
        needs_db=needs[2],
        bias_dtype=None if bias is None else _LETTERS[bias.dtype],
        pointer_alignment=_WIDEST_ACCESS,
        stride_unit=stride_unit,
        table_stride_unit=table_stride_unit,
        stride_dtype="i32" if max(all_strides) < 2**31 else "i64",
        block_tokens=tiles.block_tokens,
        block_heads=tiles.block_heads,
        threads=tiles.threads,
        n_axes=0 if axes is None or positions is None else positions.shape[0],
        axes_dtype="i32" if axes is None else _LETTERS[axes.dtype],
        pair_block=block_of_pairs(rope.pair_block, half),
        registers=BACKWARD_REGISTERS if any(needs) and not call.flags.across_heads else 0,
    )
    row_blocks = math.ceil(tokens / tiles.block_tokens)
    n_groups = math.ceil(n_q_heads / tiles.block_heads) + math.ceil(n_k_heads / tiles.block_heads)
    constants = (
        row_blocks,
        *_division(row_blocks),
        tokens,
        cos.shape[-2],  # tables per token have T, and positions 0 … T - 1
        n_sequences,
        n_sequences.bit_length(),
        *all_strides,
        *(() if axes is not None else (None,)),  # the stride between axes
    )
    return Geometry(spec, n_groups, batch * row_blocks, constants)


def _group(kinds: Sequence[Any]) -> list[list[int]]:
    """Return the indices of q and k in one group if one launch can do both, or in one each."""
    return [list(range(len(kinds)))] if len(set(kinds)) == 1 else [[i] for i in range(len(kinds))]


def _pair(tensors: Sequence[Any], slots: Sequence[int]) -> tuple[Any, Any]:
    """Return the tensors of a launch's two arguments, the second of them None if it has one tensor."""
    return tensors[slots[0]], tensors[slots[1]] if len(slots) == 2 else None


def _kind(weight: Tensor | None) -> Any:
    """Return all that a kernel is compiled for of a weight."""
    return None if weight is None else (weight.dtype, weight.ndim)


def _is_dense(x: Tensor) -> bool:
    """Say whether the last dimension is dense in memory."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def _dense(x: Any) -> Any:
    return x if x is None or _is_dense(x) else x.contiguous()


def _dense_call(call: NormCall) -> NormCall:
    rope = call.rope
    tensors = {name: _dense(getattr(rope, name)) for name in ("cos", "sin", "cu_seqlens", "axes")}
    return call._replace(rope=rope._replace(**tensors))


def _are_read_by_kernels(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> bool:
    """Say whether the kernels can read tensors without copies of them."""
    rope = call.rope
    indices = [x for x in (rope.cu_seqlens, rope.axes) if x is not None]
    return all(map(_is_dense, (*xs, rope.cos, rope.sin, *indices))) and all(
        x is None or x.is_contiguous() for x in parameters
    )


def prepare_forward(
    xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the function of the same arguments, for tensors with the same metadata, that normalises and rotates.

    q and k share a launch if their weights and biases have one dtype and one number of dimensions.
    """
    outs = [torch.empty_like(x, device="meta") for x in xs]
    if not _are_read_by_kernels((*xs, *outs), parameters, call):
        return _forward_dense
    launches = []
    weights, biases = split_parameters(parameters)
    for slots in _group([(_kind(weight), _kind(bias)) for weight, bias in zip(weights, biases, strict=True)]):
        roles = [[tensors[i] for i in slots] for tensors in (xs, outs)]
        geometry = describe(roles, weights[slots[0]], call, bias=biases[slots[0]])
        if (n_programs := geometry.n_blocks * geometry.n_groups) and xs[0].shape[-1]:
            launch = _make_launch(norm_kernel, geometry.spec, (n_programs, 1), xs[0], *geometry.constants)
            launches.append((slots, launch))

    def run(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
        outs = tuple([torch.empty_like(x) for x in xs])
        weights, biases = split_parameters(parameters)
        cos, sin, positions, cu_seqlens, offset, _, axes = call.rope
        for slots, launch in launches:
            tensors = (
                *_pair(xs, slots),
                *_pair(outs, slots),
                *_pair(weights, slots),
                *_pair(biases, slots),
                cos,
                sin,
                axes,
            )
            launch(tensors, (positions, cu_seqlens), offset)
        return outs

    return run


def _forward_dense(xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall) -> tuple[Tensor, ...]:
    """Normalise and rotate dense copies, for tensors that the kernels cannot read."""
    arguments = (
        [x.contiguous() for x in xs],
        [None if x is None else x.contiguous() for x in parameters],
        _dense_call(call),
    )
    outs = tuple(torch.empty_like(x) for x in xs)
    for out, dense in zip(outs, prepare_forward(*arguments)(*arguments), strict=True):
        out.copy_(dense)
    return outs


def prepare_backward(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    call: NormCall,
) -> Callable[..., list[Tensor | None]]:
    """Return the function of (grads, xs, parameters, call) that gives the needed gradients of (*xs, *parameters).

    `grads` are those of the results, all given. q and k share a launch as in the forward, if both need the same.
    """
    dxs = [torch.empty_like(x, device="meta") for x in xs]
    if not _are_read_by_kernels((*grads, *xs, *dxs), parameters, call):
        return lambda *arguments: _backward_dense(*arguments, needed=needed)
    n = len(xs)
    weights, biases = split_parameters(parameters)
    kinds = [(_kind(weights[i]), _kind(biases[i]), needed[i], needed[n + i], needed[2 * n + i]) for i in range(n)]
    launches = []
    for slots in _group(kinds):
        roles = [[tensors[i] for i in slots] for tensors in (xs, grads, dxs)]
        first = slots[0]
        needs = needed[first::n]
        if any(needs) and xs[0].shape[-1]:
            geometry = describe(roles, weights[first], call, bias=biases[first], needs=needs)
            launches.append((slots, _BackwardLaunch(geometry, xs[0])))

    def run(
        grads: Sequence[Tensor], xs: Sequence[Tensor], parameters: Sequence[Tensor | None], call: NormCall
    ) -> list[Tensor | None]:
        found = [None if x is None or not needed[i] else torch.empty_like(x) for i, x in enumerate((*xs, *parameters))]
        roles = (xs, grads, found[:n], *split_parameters(parameters), *split_parameters(found[n:]))
        for slots, launch in launches:
            launch([_pair(tensors, slots) for tensors in roles], call)
        return found

    return run


def _backward_dense(
    grads: Sequence[Tensor],
    xs: Sequence[Tensor],
    parameters: Sequence[Tensor | None],
    call: NormCall,
    *,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Compute gradients from dense copies, for tensors that the kernels cannot read."""
    grads, xs = [x.contiguous() for x in grads], [x.contiguous() for x in xs]
    parameters = [None if x is None else x.contiguous() for x in parameters]
    call = _dense_call(call)
    return prepare_backward(grads, xs, parameters, needed, call)(grads, xs, parameters, call)


class _BackwardLaunch:
    """The launches of the gradients of q, or of q and k, and of their weights and biases."""

    def __init__(self, geometry: Geometry, x: Tensor) -> None:
        spec, n_blocks, n_groups = geometry.spec, geometry.n_blocks, geometry.n_groups
        # All programs run at a time: one more would run alone, after them.
        programs_per_sm = max(1, _SM_REGISTERS // (BACKWARD_REGISTERS * spec.threads))
        n_slots = min(n_blocks, max(1, gpu.num_sms(x.device) * programs_per_sm // max(1, n_groups)))
        self._kernel = None
        if n_blocks * n_groups:
            grid = n_slots * n_groups, 1
            self._kernel = _make_launch(norm_backward_kernel, spec, grid, x, n_blocks, n_slots, *geometry.constants)
        self._sum_weights = _Sum(spec, n_slots, n_groups, x) if spec.needs_dw else None
        # Each head has a bias of its own.
        of_bias = replace(spec, weight_dtype=spec.bias_dtype, per_head=True)
        self._sum_biases = _Sum(of_bias, n_slots, n_groups, x) if spec.needs_db else None

    def __call__(self, pairs: Sequence[tuple[Any, Any]], call: NormCall) -> None:
        xs, grads, dxs, weights, biases, dws, dbs = pairs
        cos, sin, positions, cu_seqlens, offset, _, axes = call.rope
        sums = self._sum_weights, self._sum_biases
        partials = [None if of_sum is None else of_sum.empty_partial(xs[0]) for of_sum in sums]
        if self._kernel is not None:
            tensors = (*xs, *grads, *dxs, *weights, *biases, *partials, cos, sin, axes)
            self._kernel(tensors, (positions, cu_seqlens), offset)
        for of_sum, partial, results in zip(sums, partials, (dws, dbs), strict=True):
            if of_sum is not None:
                of_sum.launch((partial, *results), ())


class _Sum:
    """The launch that sums the programs' parts of the gradients of weights, or of biases."""

    def __init__(self, spec: NormSpecialisation, n_slots: int, n_groups: int, x: Tensor) -> None:
        rows = n_slots * n_groups * (spec.block_heads if spec.per_head else 1)
        self._partial_shape = rows, spec.head_dim
        n_units = spec.n_q_heads + spec.n_k_heads if spec.per_head else 1 + (spec.n_k_heads > 0)
        grid = math.ceil(spec.head_dim / SUM_BLOCK_D), n_units
        has_dependent_launches = gpu.is_nvidia(x.device) and gpu.capability(x.device) >= (9, 0)
        self.launch = _make_launch(weight_sum_kernel, replace(spec, overlaps=has_dependent_launches), grid, x, n_slots)

    def empty_partial(self, x: Tensor) -> Tensor:
        """Make room for the parts."""
        return torch.empty(self._partial_shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
