"""The backend "triton": which calls its kernels run. It loads Triton when they do."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Gradients, Refusal, Saved, Wanted
from ropewalk.ops.attention.call import SCORE_CHANGES, SOFTMAX, AttentionCall, rope_tables
from ropewalk.ops.launch.steps import AT_ONCE, Steps

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
MAX_HEAD_DIM_OF_QUANTISED = 256  # as `ops.cache` writes them
MAX_HEAD_DIM_OF_8_BITS = 256
MULTIPLE_OF_8_BITS = 16  # bytes that rows of 8-bit operands begin at a multiple of
MIN_QUERIES_OF_8_BITS = 16  # of a dense call
FLOAT8_CAPABILITY = (8, 9)  # from which on NVIDIA's GPUs multiply e4m3
MAX_HEAD_DIM_OF_FLOAT32 = 256  # on GPUs: products without tensor cores hold whole rows in registers

# What both directions read. Keys that are rotated have no table.
_IN_BOTH = (
    *("q", "k", "v", "causal", "window_left", "window_right", "mask", "key_lengths", "key_starts", "query_starts"),
    *("cu_seqlens_q", "cu_seqlens_k", "positions_q", "positions_k", "blocks", *SOFTMAX, *SCORE_CHANGES, "gate"),
    *("dropout_p", "seed", "keys_rotated", "tables", "far", "deterministic"),
)
_CACHE_FIELDS = ("block_table", "k_scale", "v_scale")
_RESULT_FIELDS = ("return_lse", "needs_backward", "return_max_logits", "row_logits")


class Triton:
    """The backend "triton"."""

    name = "triton"
    reads: tuple[str, ...] = (*_IN_BOTH, *_CACHE_FIELDS, *_RESULT_FIELDS, "scheme", "precision")
    backward_reads: tuple[str, ...] = _IN_BOTH

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why the Triton kernels do not run a call; None if they do."""
        q, scheme = call.q, type(call.scheme).__name__
        if q.dtype not in DTYPES:
            dtype = str(q.dtype).removeprefix("torch.")
            return Refusal("dtype", f"{dtype} is not supported: its kernels need float16, bfloat16 or float32")
        for name, dim in (("q", q.shape[3]), ("v", call.value_dim)):
            if dim > MAX_HEAD_DIM:
                return Refusal("head_dim", f"{name}'s head dim is {dim}, but must be up to {MAX_HEAD_DIM}")
            if dim > MAX_HEAD_DIM_OF_FLOAT32 and q.dtype == torch.float32 and q.device.type != "cpu":
                most = MAX_HEAD_DIM_OF_FLOAT32
                return Refusal("head_dim", f"{name}'s head dim is {dim}, but must be up to {most} in float32")
        if call.score_mod is None and call.scheme is not None and call.scheme.has_score_mod():
            return Refusal("score_mod", f"{scheme} has a score_mod, but names no kernel_score_mod")
        if torch.is_grad_enabled() and any(x.requires_grad for x in rope_tables(call)):
            return Refusal("learned_tables", "gradients of the scheme's tables are not supported")
        refusal = _why_no_far(call)
        if refusal is not None:
            return refusal
        if call.k_scale is not None and max(q.shape[3], call.value_dim) > MAX_HEAD_DIM_OF_QUANTISED:
            most = MAX_HEAD_DIM_OF_QUANTISED
            return Refusal("pages_quantised", f"quantised pages (k_scale) are not supported above head dim {most}")
        if call.k_scale is not None and gpu.is_rocm():
            return Refusal(
                "pages_quantised", "quantised pages (k_scale) are not supported on AMD's GPUs: none has checked them"
            )
        reason = gpu.why_no_triton(q.device)
        if reason is not None:
            return Refusal("device", reason)
        if q.device.type == "cpu" and q.dtype == torch.bfloat16:
            return Refusal(
                "interpreter_bfloat16",
                "Triton's interpreter computes products (tl.dot) of bfloat16 wrongly: use float16 or float32 there",
            )
        refusal = why_no_8_bits(call)
        if refusal is not None:
            return refusal
        params = call.score_mod_params
        learns = params is not None and torch.is_grad_enabled() and params.requires_grad
        if call.score_mod is not None and learns and not score_mod_has(call.score_mod, "param_grad"):
            return Refusal("param_grad", f"{scheme}'s parameters require grad, but {call.score_mod} has no param_grad")
        return None

    def why_no_backward(self, call: AttentionCall, wanted: Wanted) -> Refusal | None:
        """Its backward runs whatever its forward ran."""
        return None

    def forward(self, call: AttentionCall, save: bool, on: Steps = AT_ONCE) -> tuple[Tensor, Saved]:
        """Launch the forward, or the decode kernels for few queries and many keys; some pages are copied first."""
        from ropewalk.ops.attention.triton import launch

        return launch.forward(call, save, on)

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
        """Launch both backward kernels. Their sums have one order: the gradients are the same bits every time."""
        from ropewalk.ops.attention.triton import launch

        return launch.backward(call, out, saved, grad_out, grad_lse, wanted, on)


def why_no_8_bits(call: AttentionCall) -> Refusal | None:
    """Say why kernels do not run a call of 8-bit products; None if they do, or its products are of its dtype."""
    precision, q = call.quantised, call.q
    if precision is None:
        return None
    reason = None
    if q.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(q.dtype).removeprefix("torch.")
        reason = f"{dtype} is not supported: q, k and v must be float16 or bfloat16"
    for name, dim in (("q", q.shape[3]), ("v", call.value_dim)):
        if dim % MULTIPLE_OF_8_BITS or dim > MAX_HEAD_DIM_OF_8_BITS:
            needed = f"must be a multiple of {MULTIPLE_OF_8_BITS} up to {MAX_HEAD_DIM_OF_8_BITS}"
            reason = reason or f"{name}'s head dim is {dim}, but {needed}"
    if reason is None and precision.float8_values:
        reason = _why_no_float8(q.device)
    # Keep last: torch.compile guards on this length.
    if reason is None and call.cu_seqlens_q is None and q.shape[2] < MIN_QUERIES_OF_8_BITS:
        reason = f"q has {q.shape[2]} tokens, but must have at least {MIN_QUERIES_OF_8_BITS}"
    return None if reason is None else Refusal("precision", f"precision is set: {reason}")


def _why_no_float8(device: torch.device) -> str | None:
    """Say why a device does not multiply values and probabilities in e4m3; None if it does."""
    if device.type == "cpu":
        return "Triton's interpreter rounds to float8 values (e4m3) wrongly"
    if gpu.is_rocm():
        return "float8 values (e4m3) are not supported on AMD's GPUs"
    if gpu.capability(device) < FLOAT8_CAPABILITY:
        needed = ".".join(map(str, FLOAT8_CAPABILITY))
        return f"float8 values (e4m3) need compute capability {needed}"
    return None


def _why_no_far(call: AttentionCall) -> Refusal | None:
    """Say why the kernels do not run a call's two-range encoding; None if they do, or there is none."""
    far, scheme = call.far, type(call.scheme).__name__
    if far is None:
        return None
    if call.score_mod is not None:
        return Refusal("far_score_mod", f"{scheme} has a two-range encoding and a score mod: not supported together")
    if far.given is None and (far.tables is None or far.tables.q_past is None or call.tables.q is None):
        return Refusal("far_tables", f"{scheme} leaves queries as they are in near pairs or in far ones: not supported")
    return None


@gpu.assume_constant
def score_mod_has(score_mod: str | None, field: str) -> bool:
    """Say whether a `ScoreMod`, “module:NAME”, says something of itself; without Triton it cannot be asked."""
    if score_mod is None or importlib.util.find_spec("triton") is None:
        return False
    module, _, name = score_mod.partition(":")
    return getattr(getattr(importlib.import_module(module), name), field, None) not in (None, False)
