"""The launcher of the forward by 8-bit products for Hopper.

Shape letters: B batch, T tokens (Tq of queries, Tk of keys), H query heads, K key heads, D head dim (Dv of v), N
blocks.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Saved
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper.config import choose_8bit, heads_per_l2_section
from ropewalk.ops.attention.hopper.forward_8bit import forward_8bit_kernel
from ropewalk.ops.attention.hopper.launch import (
    describe,
    has_partial_tiles,
    hopper_lists_args,
    hopper_scores_args,
    score_mod_of,
    shared_layout,
    with_lists_of_mask,
)
from ropewalk.ops.attention.hopper.ranges import goes_by_ranges
from ropewalk.ops.attention.hopper.tiles import WG_ROWS
from ropewalk.ops.attention.quantise.call import Quantized
from ropewalk.ops.attention.quantise.launch import quantise
from ropewalk.ops.attention.triton.arguments import Schedule
from ropewalk.ops.attention.triton.launch_common import (
    begin_forward,
    bounds_args,
    counter_of,
    far_window_arg,
    first_logits,
    gate_args,
    on_its_device,
    row_target,
    schedule_tiles,
    units_args,
    window_args,
    windowed_arg,
)
from ropewalk.ops.launch.steps import AT_ONCE, Steps


@on_its_device
def forward(call: AttentionCall, save: bool, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
    """Attend by 8-bit products. What is saved is of 16 bits; without `save` its q and k are undefined."""
    out, v, saved, is_empty = begin_forward(call, on, maps=save)
    if is_empty:
        return out, saved
    attend(call, quantise(call, on, permuted=True), v, out, saved.lse, on)
    return out, saved


def attend(call: AttentionCall, operands: Quantized, v: Tensor, out: Tensor, lse: Tensor, on: Steps) -> None:
    """Launch the kernel: of quantised operands, and of v where it stays in 16 bits."""
    call = with_lists_of_mask(call, "rows", on)
    batch, heads, queries, head_dim = operands.q.x.shape
    key_heads, keys = call.k.shape[1:3]
    score_mod, values = score_mod_of(call), operands.v
    precision = call.quantised
    assert precision is not None, "the call has no precision"
    config = choose_8bit(max(head_dim, v.shape[3]), precision, call.blocks is not None or goes_by_ranges(call))
    block_d, block_dv, block_n = config.block_d, config.block_d, config.constants.BLOCK_N
    packed, n_tiles = schedule_tiles(call, "q", batch, queries, config.block_m, on)
    n_work = n_tiles * heads
    read = (operands.k.x, v if values is None else values.x)
    schedule = Schedule(
        n_tiles=n_tiles // batch if packed is None else n_tiles,
        n_rows=batch * heads,
        n_heads=heads,
        heads_per_key=heads // key_heads,
        heads_per_l2_section=heads_per_l2_section(heads, *read, None if operands.k_far is None else operands.k_far.x),
    )
    rows = {"q": operands.q, "q_far_past": operands.q_past, "q_far_future": operands.q_future}
    columns = {"k": operands.k, "k_far": operands.k_far}
    on.launch(
        forward_8bit_kernel,
        min(n_work, gpu.num_sms(on.device_of(out))),
        **{name: None if x is None else describe(x.x, WG_ROWS.value, block_d) for name, x in rows.items()},
        **{name: None if x is None else describe(x.x, block_n, block_d) for name, x in columns.items()},
        v=describe(v, block_n, block_dv) if values is None else _describe_transposed(values.x, block_dv, block_n),
        units=units_args(operands),
        out=describe(out, WG_ROWS.value, block_dv) if packed is None else row_target(out),
        lse_ptr=lse,
        row_logits_ptr=call.row_logits,
        counter_ptr=on.per_stream(counter_of, out),
        packed=packed,
        bounds=bounds_args(call),
        lists=hopper_lists_args(call, "rows", packed, on),
        gate=gate_args(call.gate, v.shape[3]),
        first_logits_ptr=first_logits(call),
        scores=hopper_scores_args(call, packed, on),
        **window_args(call),
        far_window=far_window_arg(call),
        **schedule._asdict(),
        n_queries=queries,
        n_keys=keys,
        n_work=n_work,
        BLOCK_DV=block_dv,
        CAUSAL=call.causal,
        WINDOWED=windowed_arg(call),
        HAS_PARTIAL_TILES=has_partial_tiles(call, block_n),
        MOD=None if score_mod is None else score_mod.forward,
        CAPPED=call.is_capped,
        **config.constants._asdict(),
        num_warps=4,
    )


def _describe_transposed(x: Tensor, features: int, keys: int) -> TensorDescriptor:
    """Return a descriptor of values (B, K, Dv, T), for tiles of all features of some keys."""
    shape = [1, 1, features, keys]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), shape, shared_layout(features, keys, x.dtype))
