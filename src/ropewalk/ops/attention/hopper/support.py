"""The backend "gluon": which calls the kernels for Hopper run. It loads Triton when they do."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Gradients, Refusal, Saved, Wanted, why_unread
from ropewalk.ops.attention.call import SCORE_CHANGES, SOFTMAX, AttentionCall
from ropewalk.ops.attention.pages import describe, is_copied
from ropewalk.ops.attention.triton.support import Triton, score_mod_has
from ropewalk.ops.launch.steps import AT_ONCE, Steps

TRIED = ("3.6", "3.7", "3.8", "3.9")  # versions of Triton whose Gluon the kernels compile with
DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 256  # features of a row
MAX_PAGED_ROWS, PAGED_DIMS, PAGE_MULTIPLE = 16, (64, 128), 16  # of calls over pages that are read in place
WIDEST_LEARNED = 128  # features of a row whose score mod's parameters have a gradient
WIDEST_ORDERED = 128  # features of a row of a deterministic backward
LISTED, WIDEST_LISTED = 128, 128  # tokens of a listed block, and features of a row beside lists

# What both directions read. Keys that are rotated have no table.
_IN_BOTH = (
    *("q", "k", "v", "causal", "window_left", "window_right", "mask", "key_lengths", "key_starts", "query_starts"),
    *("cu_seqlens_q", "cu_seqlens_k", "positions_q", "positions_k", "blocks", *SOFTMAX, *SCORE_CHANGES, "gate"),
    *("dropout_p", "seed", "keys_rotated", "tables", "far", "deterministic"),
)
# What the kernels read that decode from pages in place; tables are of q alone.
DECODE_READS = (
    *("q", "k", "v", "scheme", "causal", "window_left", "window_right", "key_lengths", "key_starts", "query_starts"),
    *("block_table", "positions_q", "positions_k", *SOFTMAX, "k_scale", "v_scale", "gate", "keys_rotated"),
    *("tables", "return_lse", "deterministic", "needs_backward"),
)
_NOT_DECODED = {
    "mask": "masks are not supported",
    "blocks": "lists of blocks are not supported",
    "score_mod": "score mods and softcap are not supported",
    "softcap": "score mods and softcap are not supported",
    "far": "two-range encodings are not supported",
    "cu_seqlens_q": "packed queries are not supported",
}


class Gluon:
    """The backend "gluon"."""

    name = "gluon"
    reads: tuple[str, ...] = (
        *(*_IN_BOTH, "block_table", "k_scale", "v_scale"),
        *("scheme", "return_lse", "needs_backward", "return_max_logits", "row_logits", "precision"),
    )
    backward_reads: tuple[str, ...] = _IN_BOTH

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why the kernels for Hopper do not run a call; None if they do."""
        reason = why_not_on(call.q.device)
        if reason is not None:
            return Refusal("device", reason)
        refusal = Triton().why_not(call)
        if refusal is not None:
            return refusal
        if call.block_table is not None:
            if not is_copied(call):
                return _why_not_paged(call)
            call = describe(call)
        scheme = type(call.scheme).__name__
        if call.q.dtype not in DTYPES:
            dtype = str(call.q.dtype).removeprefix("torch.")
            return Refusal("dtype", f"{dtype} is not supported: its kernels need float16 or bfloat16")
        for name, x in (("q", call.q), ("v", call.v)):
            if x.shape[3] % 8 or x.shape[3] > WIDEST:
                needed = f"must be a multiple of 8 up to {WIDEST}"
                return Refusal("head_dim", f"{name}'s head dim is {x.shape[3]}, but {needed}")
        refusal = _why_no_lists(call)
        if refusal is not None:
            return refusal
        refusal = _why_no_ranges(call)
        if refusal is not None:
            return refusal
        if call.score_mod is not None and not score_mod_has(call.score_mod, "runs_on_hopper"):
            return Refusal("score_mod", f"{scheme}'s score mod, {call.score_mod}, is not supported")
        return None

    def why_no_backward(self, call: AttentionCall, wanted: Wanted) -> Refusal | None:
        """Say why its backward does not run where its forward did; None if it does."""
        refusal = _why_not_ordered(call)
        if refusal is None and wanted.score_mod_params:
            refusal = _why_no_param_grad(call)
        if refusal is not None:
            return refusal
        if call.q.numel() == 0 or call.k.shape[2] == 0:
            return Refusal("empty", "empty tensors are not supported")
        return None

    def forward(self, call: AttentionCall, save: bool, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
        """Launch the forward, or the decode kernels for pages that are read in place."""
        from ropewalk.ops.attention.hopper import decode_launch, launch, launch_8bit

        if call.precision is not None:
            return launch_8bit.forward(call, save, on)
        if call.block_table is not None and not is_copied(call):
            out, lse = decode_launch.forward(call, on)
            return out, Saved(call.q, call.k, lse)
        return launch.forward(call, on)

    def backward(
        self,
        call: AttentionCall,
        out: Tensor,
        saved: Saved,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        wanted: Wanted,
        on: Steps = AT_ONCE,
    ) -> Gradients:
        """Launch the backward."""
        from ropewalk.ops.attention.hopper import launch

        return launch.backward(call, out, saved, grad_out, grad_lse, wanted, on)


def _why_not_paged(call: AttentionCall) -> Refusal | None:
    """Say why the decode kernels do not run a call of pages; None if they do. Reads no values."""
    q, k, table = call.q, call.k, call.block_table
    dims = call.q.shape[3], call.value_dim
    page_size, rows = k.shape[2], q.shape[2] * (q.shape[1] // k.shape[1])
    refusal = why_unread(call, DECODE_READS, _NOT_DECODED)
    reason = None
    if refusal is not None:
        reason = refusal.reason
    elif call.tables.k is not None:
        reason = "keys that are not rotated yet are not supported"
    elif k.shape[0] == 0 or table is None or table.shape[1] == 0:
        reason = "empty caches are not supported"
    elif q.dtype not in DTYPES or (call.k_scale is None and not q.dtype == k.dtype == call.v.dtype):
        reason = "q must be of float16 or bfloat16"
    elif dims[0] != dims[1] or dims[0] not in PAGED_DIMS:
        reason = f"head dims of q and v are {dims[0]} and {dims[1]}, but must be {' or '.join(map(str, PAGED_DIMS))}"
    elif page_size % PAGE_MULTIPLE:
        reason = f"pages of {page_size} keys are not supported: the size must be a multiple of {PAGE_MULTIPLE}"
    elif not all(map(_may_be_copied, (k, call.v))) or not all(map(_may_be_read, (call.k_scale, call.v_scale))):
        reason = "strides of pages must be multiples of 16 bytes, and of their scales those of a token"
    # Keep last: torch.compile guards on this length.
    elif rows > MAX_PAGED_ROWS:
        reason = f"{rows} queries of heads that share a key are too many: the limit is {MAX_PAGED_ROWS}"
    if reason is None:
        return None
    return Refusal("block_table", f"paged keys (block_table) that are read in place: {reason}")


def _may_be_copied(pages: Tensor) -> bool:
    """Say whether rows of pages are copied 16 bytes at a time."""
    offsets = (pages.storage_offset(), *pages.stride()[:3])
    are_near = all(size * stride < 2**31 for size, stride in zip(pages.shape[1:3], pages.stride()[1:3], strict=True))
    is_aligned = all(offset * pages.element_size() % 16 == 0 for offset in offsets)
    return pages.stride(3) == 1 and pages.stride(0) < 2**31 and are_near and is_aligned


def _may_be_read(scale: Tensor | None) -> bool:
    """Say whether the scales of a token's head lie together, if there are several."""
    if scale is None or scale.ndim < 4:
        return True
    offsets = (scale.storage_offset(), *scale.stride()[:3])
    return scale.stride(3) == 1 and all(offset % scale.shape[3] == 0 for offset in offsets)


def _why_no_lists(call: AttentionCall) -> Refusal | None:
    """Say why the kernels do not walk a call's lists of blocks, or those of its mask; None if they do."""
    if call.blocks is not None:
        if call.mask is not None:
            return Refusal("mask", "mask is not supported beside lists of blocks")
        rows, columns = call.blocks.block_q, call.blocks.block_k
        if (rows, columns) != (LISTED, LISTED):
            needed = f"its kernels need {LISTED} × {LISTED}"
            return Refusal("blocks", f"lists of blocks of {rows} × {columns} are not supported: {needed}")
    elif call.mask is None:
        return None
    code, feature = ("blocks", "lists of blocks") if call.mask is None else ("mask", "a mask")
    for name, x in (("q", call.q), ("v", call.v)):
        if x.shape[3] > WIDEST_LISTED:
            return Refusal(code, f"{name}'s head dim is {x.shape[3]}, but with {feature} must be up to {WIDEST_LISTED}")
    return None


def _why_no_ranges(call: AttentionCall) -> Refusal | None:
    """Say why the kernels do not tell far pairs by positions, by lists of blocks of each range; None if they do."""
    if call.far is None or call.goes_by_index:
        return None
    feature = "positions_q and positions_k with a two-range encoding"
    if call.mask is not None or call.blocks is not None:
        beside = "a mask" if call.blocks is None else "lists of blocks"
        return Refusal("positions", f"{feature} are not supported beside {beside}")
    for name, x in (("q", call.q), ("v", call.v)):
        if x.shape[3] > WIDEST_LISTED:
            needed = f"with positions and a two-range encoding must be up to {WIDEST_LISTED}"
            return Refusal("positions", f"{name}'s head dim is {x.shape[3]}, but {needed}")
    return None


def _why_no_param_grad(call: AttentionCall) -> Refusal | None:
    """Say why the backward does not differentiate the score mod's parameters; None if it does."""
    is_factor, has_bias, is_slope = (score_mod_has(call.score_mod, x) for x in ("is_factor", "bias", "is_slope"))
    if not (is_factor or has_bias or is_slope):
        return Refusal("score_mod_params", f"gradients of the parameters of {call.score_mod} are not supported")
    beside = {"softcap": call.softcap is not None, "a two-range encoding": call.far is not None}
    if is_factor:
        # It is taken from dS times the factor, in the inputs' dtype: small factors underflow there.
        beside["float16"] = call.q.dtype == torch.float16
    else:
        beside["positions"] = not call.goes_by_index
        beside[f"head dims of more than {WIDEST_LEARNED}"] = max(call.q.shape[3], call.v.shape[3]) > WIDEST_LEARNED
    if has_bias:
        beside["lists"] = call.mask is not None or call.blocks is not None
        beside["dropout"] = call.dropout_p > 0
    feature = next((name for name, is_set in beside.items() if is_set), None)
    if feature is None:
        return None
    return Refusal("score_mod_params", f"gradients of a score mod's parameters are not supported beside {feature}")


def _why_not_ordered(call: AttentionCall) -> Refusal | None:
    """Say why programs do not add a deterministic call's gradient of q in one order; None if they do, or need not."""
    if not call.deterministic:
        return None
    order = "it adds the gradient of q in an order that differs from run to run"
    for name, x in (("q", call.q), ("v", call.v)):
        if x.shape[3] > WIDEST_ORDERED:
            needed = f"with deterministic must be up to {WIDEST_ORDERED}"
            return Refusal("deterministic", f"{name}'s head dim is {x.shape[3]}, but {needed}: {order}")
    for name in ("mask", "blocks"):
        if getattr(call, name) is not None:
            return Refusal("deterministic", f"{name} is not supported with deterministic: {order}")
    if call.far is not None and not call.goes_by_index:
        feature = "positions of a two-range encoding are"
        return Refusal("deterministic", f"{feature} not supported with deterministic: {order}")
    return None


@gpu.assume_constant
def why_not_on(device: torch.device) -> str | None:
    """Say why the kernels for Hopper cannot run on a device; None if they can."""
    reason = gpu.why_no_triton(device)
    if reason is not None:
        return reason
    needed = "its kernels need an NVIDIA GPU of compute capability 9.0"
    if device.type != "cuda":  # Triton's interpreter, which has no Gluon
        return f"{needed}, and the tensors are on {device.type}"
    if gpu.is_rocm():
        return f"{needed}, and this one is AMD's"
    major, minor = gpu.capability(device)
    if (major, minor) != (9, 0):
        return f"{needed}, and this one has {major}.{minor}"
    return why_missing()


@functools.cache
def why_missing() -> str | None:
    """Say why the kernels cannot be compiled with the installed Triton; None if they can."""
    import triton

    if ".".join(triton.__version__.split(".")[:2]) not in TRIED:
        return f"its kernels were tried with Triton {', '.join(TRIED)}, and {triton.__version__} is installed"
    try:
        from ropewalk.ops.attention.hopper import launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"Triton {triton.__version__} lacks something of Gluon that its kernels use: {error}"
    return None
