"""Attention by PyTorch's scaled_dot_product_attention after our rotation: cuDNN's kernels on NVIDIA GPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Refusal
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.libraries.common import HALF, refuse_dtype, refuse_values, why_misaligned, why_no_library
from ropewalk.ops.attention.tables import map_features


class Sdpa:
    """The backend "sdpa"."""

    name = "sdpa"

    def why_not(self, call: AttentionCall) -> Refusal | None:
        """Say why PyTorch's kernels do not run a call; None if they do."""
        q, k, v = call.q, call.k, call.v
        if call.window is not None:
            return Refusal("window", "window is not supported")
        if call.far is not None:
            return Refusal("far", "a two-range encoding is not supported: no log-sum-exp to merge its ranges by")
        refusal = why_no_library(call)
        if refusal is not None:
            return refusal
        if call.causal and q.shape[2] != k.shape[2]:
            return Refusal("causal_lengths", "causal attention is aligned at the top left")
        if q.device.type != "cpu" and v.shape[3] != q.shape[3]:
            return refuse_values(call)
        if not gpu.is_nvidia(q.device):
            return None
        if not may_use_cudnn():
            return Refusal("cudnn", "cuDNN's attention is missing or switched off")
        if gpu.capability(q.device) < (8, 0):
            return Refusal("capability", "cuDNN's attention needs compute capability 8.0")
        if q.dtype not in HALF:
            return refuse_dtype("cuDNN's attention", q)
        if q.shape[3] % 8 or q.shape[3] > 128:
            return Refusal(
                "head_dim", f"head dim {q.shape[3]} is not supported: cuDNN's needs a multiple of 8 up to 128"
            )
        if k.shape[2] == 1:
            return Refusal("one_key", "cuDNN's attention needs more than one key")
        if max(q.shape[:2]) > 65535:
            return Refusal("grid", "cuDNN's attention takes up to 65535 batch rows and heads")
        return why_misaligned(call)

    def attend(self, call: AttentionCall) -> tuple[Tensor, None]:
        """Attend by cuDNN on NVIDIA GPUs, by whatever PyTorch chooses elsewhere."""
        q, k = map_features(call)
        v = call.v
        if gpu.is_nvidia(q.device):
            # The operator itself: choosing a backend through torch.nn.attention.sdpa_kernel costs the host more.
            out: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, call.needs_backward, 0.0, call.causal, False, scale=call.scale
            )[0]
            return out, None
        grouped = bool(q.shape[1] != k.shape[1])
        out = F.scaled_dot_product_attention(q, k, v, is_causal=call.causal, scale=call.scale, enable_gqa=grouped)
        return out, None


@gpu.assume_constant
def may_use_cudnn() -> bool:
    """Say whether cuDNN's attention is there, and not switched off; torch.compile calls it once, while it traces."""
    return bool(torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled())
