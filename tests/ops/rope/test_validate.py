"""Every bad call of `apply_rope` raises an error that says what is wrong, before anything is written."""

import inspect
import re
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk import apply_rope
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.ops.rope import api
from ropewalk.testing import unchanged

B, T, HQ, HK, D, R, ROWS = 2, 6, 4, 2, 16, 8, 10
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PassThrough(TorchDispatchMode):
    """A mode that only looks on, so that a call goes through PyTorch's dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WAYS = {"eager": nullcontext, "dispatched": PassThrough, "forward-ad": forward_ad.dual_level}


@pytest.fixture(params=WAYS)
def way(request):
    """How the call comes: plainly, through the dispatcher, or under a transform. Each checks for itself."""
    return WAYS[request.param]


def padded():
    """A good call in the default layout."""
    return {"q": f(B, T, HQ, D), "k": f(B, T, HK, D), "cos": f(ROWS, R // 2), "sin": f(ROWS, R // 2)}


def packed():
    """A good call in the packed layout."""
    return padded() | {"q": f(T, HQ, D), "k": f(T, HK, D), "layout": "thd", "cu_seqlens": i([0, 2, 2, T])}


def per_token():
    """A good call with a table row for each token."""
    return padded() | {"cos": f(B, T, R // 2), "sin": f(B, T, R // 2)}


def axial():
    """A good call with positions on three axes."""
    return padded() | {"positions": torch.randint(0, ROWS, (3, B, T)), "axes": i([0, 2, 1, 1])}


def f(*shape, dtype=torch.float32):
    """Random numbers, cast."""
    return torch.randn(*shape).to(dtype)


def i(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def indices(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def meta(*shape, dtype=torch.float32):
    """A tensor on a device that is not the others'."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def moved(x, device):
    """A tensor on a device, with its strides and whether it requires grad; all else as it is."""
    if not isinstance(x, torch.Tensor) or x.is_meta:
        return x
    there = x.detach().to(device)
    return (
        there.as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad)
        if 0 in x.stride()
        else there.requires_grad_(x.requires_grad)
    )


def call_with(good, device, changes):
    """The arguments of a good call, changed, on the device under test."""
    return {name: moved(value, device) for name, value in (good() | changes).items()}


def comparable(call):
    """The tensors of a call whose values can be looked at."""
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor) and not x.is_meta]
    return [x for x in tensors if x.dtype in (*FLOATS, torch.int32, torch.int64)]


def refused(call, error, pattern, way=nullcontext):
    """The call raises `error` with a message that matches, and leaves its tensors alone."""
    with unchanged(comparable(call)), pytest.raises(error, match=pattern), way():
        apply_rope(**call)


MULTIMODAL = r"positions has shape {}, 3 axes for each token \(multimodal RoPE.*so axes must be given.*mrope_axes"
DTYPE = "float16, bfloat16, float32 or float64"
OFFSET = r"positions start at {} for 6 tokens, but .*rows 0 … 9: the start must be at least 0 and at most {}"

# What is wrong: the good call that it spoils, the change, and what the message must say.
WRONG_TYPES = {
    "q-list": (padded, {"q": [1.0]}, "q is list, but must be a tensor"),
    "q-none": (padded, {"q": None}, "q is NoneType, but must be a tensor"),
    "k-number": (padded, {"k": 1.0}, "k is float, but must be a tensor"),
    "cos-list": (padded, {"cos": [1.0]}, "cos is list, but must be a tensor"),
    "sin-none": (padded, {"sin": None}, "sin is NoneType, but must be a tensor"),
    "positions-list": (padded, {"positions": [0, 1]}, r"positions is .*must be .*int32 or int64"),
    "positions-float": (padded, {"positions": 1.5}, r"positions is .*must be .*int32 or int64"),
    "positions-string": (padded, {"positions": "3"}, r"positions is .*must be .*int32 or int64"),
    "positions-true": (padded, {"positions": True}, r"positions is .*must be .*int32 or int64"),
    "cu_seqlens-list": (packed, {"cu_seqlens": [0, T]}, "cu_seqlens is .*must be .*int32 or int64"),
    "q-int": (padded, {"q": indices(B, T, HQ, D)}, f"q has dtype torch.int64, but must be {DTYPE}"),
    "q-bool": (padded, {"q": indices(B, T, HQ, D).bool()}, f"q has dtype torch.bool, but must be {DTYPE}"),
    "q-complex": (padded, {"q": f(B, T, HQ, D).cfloat()}, f"q has dtype torch.complex64, .* be {DTYPE}"),
    "k-complex": (padded, {"k": f(B, T, HK, D).cfloat()}, f"k has dtype torch.complex64, .* be {DTYPE}"),
    "q-fp8": (
        padded,
        {"q": f(B, T, HQ, D, dtype=torch.float8_e4m3fn)},
        f"q has dtype torch.float8_e4m3fn, but must be {DTYPE}",
    ),
    "cos-int": (padded, {"cos": indices(ROWS, R // 2)}, f"cos has dtype torch.int64, but must be {DTYPE}"),
    "sin-fp8": (
        padded,
        {"sin": f(ROWS, R // 2, dtype=torch.float8_e5m2)},
        f"sin has dtype torch.float8_e5m2, but must be {DTYPE}",
    ),
    "positions-float-tensor": (
        padded,
        {"positions": f(B, T)},
        "positions has dtype torch.float32, but must be int32 or int64",
    ),
    "positions-bool-tensor": (
        padded,
        {"positions": indices(B, T, dtype=torch.bool)},
        "positions has dtype torch.bool, but must be int32 or int64",
    ),
    "positions-int16": (
        padded,
        {"positions": indices(B, T, dtype=torch.int16)},
        "positions has dtype torch.int16, but must be int32 or int64",
    ),
    "offsets-int": (padded, {"offsets": 3}, r"offsets is int, but must be a tensor \(B,\).*positions=3"),
    "offsets-list": (padded, {"offsets": [1, 2]}, "offsets is list, but must be a tensor .* int32 or int64"),
    "offsets-float": (padded, {"offsets": f(B)}, "offsets has dtype torch.float32, but must be int32 or int64"),
    "cu_seqlens-float": (
        packed,
        {"cu_seqlens": torch.tensor([0.0, T])},
        "cu_seqlens has dtype torch.float32, but must be int32 or int64",
    ),
    "pair_block-float": (padded, {"pair_block": 8.0}, "pair_block is 8.0, but must be an int or None"),
    "pair_block-bool": (padded, {"pair_block": True}, "pair_block is True, but must be an int or None"),
    "axes-list": (padded, {"axes": [0, 0, 1, 1]}, "axes is list, but must be a tensor of int32 or int64"),
    "axes-float": (axial, {"axes": f(4)}, "axes has dtype torch.float32, but must be int32 or int64"),
    "axes-and-floats": (
        axial,
        {"positions": f(3, B, T)},
        "positions has dtype torch.float32, but must be int32 or int64",
    ),
}
MISFITS = {
    "k-other-dtype": (
        padded,
        {"k": f(B, T, HK, D, dtype=torch.float64)},
        "k.dtype is torch.float64, but must be q.dtype, torch.float32",
    ),
    "sin-other-dtype": (
        padded,
        {"sin": f(ROWS, R // 2, dtype=torch.bfloat16)},
        "sin.dtype is torch.bfloat16, but must be cos.dtype, torch.float32",
    ),
    "k-elsewhere": (padded, {"k": meta(B, T, HK, D)}, r"k.device is meta, but must be q.device, \w+"),
    "cos-elsewhere": (padded, {"cos": meta(ROWS, R // 2)}, "cos.device is meta, but must be q.device"),
    "sin-elsewhere": (padded, {"sin": meta(ROWS, R // 2)}, "sin.device is meta, but must be q.device"),
    "positions-elsewhere": (
        padded,
        {"positions": meta(B, T, dtype=torch.int64)},
        "positions.device is meta, but must be q.device",
    ),
    "cu_seqlens-elsewhere": (
        packed,
        {"cu_seqlens": meta(3, dtype=torch.int32)},
        "cu_seqlens.device is meta, but must be q.device",
    ),
    "q-3d": (padded, {"q": f(T, HQ, D)}, r"q has shape \(6, 4, 16\), but must have 4 dim.*B, T, H"),
    "k-3d": (padded, {"k": f(T, HK, D)}, r"k has shape \(6, 2, 16\), but must have 4 dim"),
    "packed-4d": (packed, {"q": f(1, T, HQ, D)}, r"q has shape \(1, 6, 4, 16\), but must have 3 dim"),
    "k-other-batch": (padded, {"k": f(1, T, HK, D)}, r"k has shape \(1, .*must agree with q's.*differ on 'b'"),
    "k-other-tokens": (padded, {"k": f(B, 5, HK, D)}, r"k has shape \(2, 5, .*must agree with.*differ on 't'"),
    "k-other-dim": (padded, {"k": f(B, T, HK, 32)}, r"k has shape .*32\), but must agree with.*differ on 'd'"),
    "k-transposed": (padded, {"layout": "bhtd"}, r"k has shape .*must agree with q's.*'bhtd'.*differ on 't'"),
    "head-dim-514": (padded, {"q": f(B, T, 1, 514), "k": None}, "q has head dim 514, but .* at most 512"),
    "table-1d": (padded, {"cos": f(4), "sin": f(4)}, r"cos has shape \(4,\), but must be \(n, R/2\)"),
    "table-4d": (
        padded,
        {"cos": f(1, 1, T, 4), "sin": f(1, 1, T, 4)},
        r"cos has shape \(1, 1, 6, 4\), but per token it must be \(B or 1, T, H, R/2\)",
    ),
    "table-5d": (
        padded,
        {"cos": f(1, 1, 1, T, 4), "sin": f(1, 1, 1, T, 4)},
        r"cos has shape \(1, 1, 1, 6, 4\), but must be \(n, R/2\), .* per head \(n, H, R/2\), or \(B, T, H, R/2\)",
    ),
    "heads-short-of-rows": (
        padded,
        {"cos": f(ROWS, HQ, 4), "sin": f(ROWS, HQ, 4), "k": None, "positions": 5},
        r"positions is 5, but the 6 tokens from there must lie in the 10 rows of cos, which has shape \(10, 4, 4\)",
    ),
    "heads-by-int": (
        padded,
        {"cos": f(1, T, HQ, 4), "sin": f(1, T, HQ, 4), "k": None, "positions": 1},
        "positions is 1, but must be None where cos and sin are per token .they have 4 dim",
    ),
    "heads-of-k": (
        padded,
        {"cos": f(ROWS, HK, 4), "sin": f(ROWS, HK, 4), "positions": indices(1, T)},
        r"cos has shape \(10, 2, 4\), but per head it must be \(n, H, R/2\) with H = 4, the heads of q",
    ),
    "heads-per-token-other": (
        padded,
        {"cos": f(B, T, 3, 4), "sin": f(B, T, 3, 4)},
        r"cos has shape \(2, 6, 3, 4\), but per head it must be \(B or 1, T, H, R/2\) with H = 4",
    ),
    "heads-fewer-of-k": (
        padded,
        {"cos": f(ROWS, HQ, 4), "sin": f(ROWS, HQ, 4), "positions": indices(1, T)},
        "k has 2 heads, but must have 4, as many as q, where cos and sin are per head",
    ),
    "heads-and-positions": (
        padded,
        {"cos": f(B, T, HQ, 4), "sin": f(B, T, HQ, 4), "k": None, "positions": indices(B, T)},
        "positions must be None where cos and sin are per token .they have 4 dim",
    ),
    "heads-and-axes": (
        axial,
        {"cos": f(ROWS, HQ, 4), "sin": f(ROWS, HQ, 4), "k": None},
        "axes must be None where cos and sin are per",
    ),
    "heads-outside-of-rows": (
        padded,
        {"cos": f(ROWS, HQ, 4), "sin": f(ROWS, HQ, 4), "k": None, "positions": indices(1, T + 1)},
        r"positions has shape \(1, 7\), but must be \(1, T\) or \(B, T\)",
    ),
    "sin-fewer-rows": (padded, {"sin": f(9, 4)}, r"sin.shape is \(9, 4\), but must be cos.shape, \(10, 4\)"),
    "sin-narrower": (padded, {"sin": f(ROWS, 3)}, r"sin.shape is \(10, 3\), but must be cos.shape"),
    "per-token-batch": (
        padded,
        {"cos": f(3, T, 4), "sin": f(3, T, 4)},
        r"cos has shape \(3, 6, 4\), but per token it must be \(B or 1, T, R/2\) with B = 2 and T = 6",
    ),
    "per-token-tokens": (
        padded,
        {"cos": f(1, 5, 4), "sin": f(1, 5, 4)},
        r"cos has shape \(1, 5, 4\), but per token .*T = 6",
    ),
    "cos-learned": (padded, {"cos": leaf(ROWS, 4)}, r"cos .*requires grad.*differentiated.*cos.detach"),
    "sin-learned": (padded, {"sin": leaf(ROWS, 4)}, r"sin .*requires grad.*differentiated.*sin.detach"),
    "rotary-odd": (padded, {"rotary_dim": 7}, "rotary_dim is 7, but must be even"),
    "rotary-zero": (padded, {"rotary_dim": 0}, "rotary_dim is 0, but must be twice the width of cos, 8"),
    "rotary-other": (padded, {"rotary_dim": 16}, "rotary_dim is 16, but must be twice the width of cos, 8"),
    "table-duplicated": (
        padded,
        {"cos": f(ROWS, R), "sin": f(ROWS, R), "rotary_dim": R},
        "rotary_dim is 8, but must be twice the width of cos, 16 .*every angle once, not twice",
    ),
    "table-too-wide": (padded, {"cos": f(ROWS, 9), "sin": f(ROWS, 9)}, "rotary dim 18 .* must .*head dim, 16"),
    "offset-too-large": (padded, {"rotary_offset": 9}, "rotary_offset 9 and the rotary dim 8 .* must .*16"),
    "offset-negative": (padded, {"rotary_offset": -2}, "rotary_offset -2 .* must lie within the head dim, 16"),
    "positions-bare": (
        padded,
        {"positions": torch.arange(T)},
        r"positions has shape \(6,\), but in layout 'bthd' it must be \(1, T\) or \(B, T\): .*offsets=, \(B,\)",
    ),
    "positions-0d": (padded, {"positions": i(3)}, r"positions has shape \(\), but must be \(1, T\) or"),
    "positions-3d": (padded, {"positions": indices(B, T, 1)}, r"positions has shape \(2, 6, 1\), but must be"),
    "positions-batch": (padded, {"positions": indices(4, T)}, r"positions has shape \(4, 6\).*B = 2, T = 6"),
    "positions-multimodal": (padded, {"positions": indices(3, T)}, MULTIMODAL.format(r"\(3, 6\)")),
    "positions-multimodal-3d": (padded, {"positions": indices(3, B, T)}, MULTIMODAL.format(r"\(3, 2, 6\)")),
    "positions-two-axes": (padded, {"positions": indices(2, B, T)}, r"\(2, 2, 6\), 2 axes for .*so axes must be given"),
    "axes-elsewhere": (axial, {"axes": meta(4, dtype=torch.int64)}, "axes.device is meta, but must be q.device"),
    "axes-longer": (axial, {"axes": indices(5)}, r"axes has shape \(5,\), but must be \(R/2,\), \(4,\)"),
    "axes-2d": (axial, {"axes": indices(1, 4)}, r"axes has shape \(1, 4\), but must be \(R/2,\), \(4,\)"),
    "axes-alone": (axial, {"positions": None}, r"axes was given, so positions must be a tensor, \(A, 1, T\) or"),
    "axes-and-int": (axial, {"positions": 3}, r"axes was given, so positions must be a tensor, \(A, 1, T\) or"),
    "axes-and-offsets": (
        axial,
        {"positions": None, "offsets": indices(B)},
        "offsets must be None where axes is given: positions has a row for each axis",
    ),
    "axes-and-1d": (
        axial,
        {"positions": indices(T)},
        r"positions has shape \(6,\), but with axes it must be \(A, 1, T\)",
    ),
    "axes-and-2d": (axial, {"positions": indices(B, T)}, r"positions has shape \(2, 6\), but with axes it must be"),
    "axes-and-no-axis": (axial, {"positions": indices(0, B, T)}, r"shape \(0, 2, 6\), but with .* and A at least 1"),
    "axes-and-other-batch": (axial, {"positions": indices(3, 3, T)}, r"\(3, 3, 6\), but with axes .* B = 2, T = 6"),
    "axes-and-other-tokens": (axial, {"positions": indices(3, B, 5)}, r"\(3, 2, 5\), but with axes .* B = 2, T = 6"),
    "axes-and-per-token": (
        axial,
        {"cos": f(B, T, 4), "sin": f(B, T, 4), "positions": None},
        "axes must be None where cos and sin are per token",
    ),
    "packed-axes-and-3d": (
        packed,
        {"axes": indices(4), "positions": indices(3, 1, T)},
        r"positions has shape \(3, 1, 6\), but with axes it must be \(A, total\) with total = 6",
    ),
    "packed-axes-alone": (packed, {"axes": indices(4)}, r"so positions must be a tensor, \(A, total\)"),
    "packed-positions-multimodal": (packed, {"positions": indices(3, T)}, MULTIMODAL.format(r"\(3, 6\)")),
    "positions-tokens": (padded, {"positions": indices(B, 5)}, r"positions has shape \(2, 5\).*B = 2, T = 6"),
    "positions-of-rows": (
        padded,
        {"positions": indices(B)},
        r"positions has shape \(2,\).*must be \(1, T\) or .*offsets=",
    ),
    "offsets-3": (padded, {"offsets": indices(3)}, r"offsets has shape \(3,\), but must be \(B,\), \(2,\)"),
    "offsets-2d": (padded, {"offsets": indices(B, T)}, r"offsets has shape \(2, 6\), but must be \(B,\).*is positions"),
    "offsets-0d": (padded, {"offsets": i(3)}, r"offsets has shape \(\), but must be \(B,\)"),
    "offsets-elsewhere": (
        padded,
        {"offsets": meta(B, dtype=torch.int64)},
        "offsets.device is meta, but must be q.device",
    ),
    "offsets-and-positions": (
        padded,
        {"offsets": indices(B), "positions": indices(B, T)},
        "offsets and positions were both given, but one of them must be None",
    ),
    "offsets-and-an-int": (padded, {"offsets": indices(B), "positions": 3}, "offsets and positions were both given"),
    "offsets-and-0": (padded, {"offsets": indices(B), "positions": 0}, "offsets and positions were both given"),
    "offsets-packed": (
        packed,
        {"offsets": indices(2)},
        r"offsets was given with layout 'thd', but must .*'bthd' or 'bhtd'.*\(total,\)",
    ),
    "offsets-and-cu_seqlens": (
        padded,
        {"offsets": indices(B), "cu_seqlens": i([0, T])},
        "cu_seqlens was given with layout 'bthd', but must",
    ),
    "per-token-offsets": (per_token, {"offsets": indices(B)}, "offsets must be None where cos and sin"),
    "packed-positions-2d": (
        packed,
        {"positions": indices(1, T), "cu_seqlens": None},
        r"positions has shape \(1, 6\), but in layout 'thd' it must be \(total,\), \(6,\)",
    ),
    "packed-positions-short": (packed, {"positions": indices(5)}, r"positions has shape \(5,\).*\(total,\)"),
    "per-token-positions": (per_token, {"positions": indices(B, T)}, "positions must be None where cos and sin"),
    "per-token-int": (per_token, {"positions": 1}, "positions is 1, but must be None where cos and sin are per"),
    "int-past-table": (padded, {"positions": 5}, OFFSET.format(5, 4)),
    "int-negative": (padded, {"positions": -1}, OFFSET.format(-1, 4)),
    "int-past-packed-table": (packed, {"positions": 10}, OFFSET.format(10, 9)),
    "int-2-to-31": (padded, {"positions": 2**31}, OFFSET.format(2**31, 4)),
    "table-too-short": (padded, {"cos": f(5, 4), "sin": f(5, 4)}, "positions start at 0 for 6 tokens, but .*0 … 4"),
    "layout-unknown": (padded, {"layout": "sbhd"}, "layout is 'sbhd', but must be one of 'bthd', 'bhtd', 'thd'"),
    "layout-upper": (padded, {"layout": "BTHD"}, "layout is 'BTHD', but must be one of 'bthd'"),
    "layout-none": (padded, {"layout": None}, "layout is None, but must be one of 'bthd'"),
    "packed-without-either": (
        packed,
        {"cu_seqlens": None},
        r"so cu_seqlens or positions of shape \(total",
    ),
    "packed-int-alone": (packed, {"cu_seqlens": None, "positions": 2}, "layout is 'thd', so cu_seqlens or positions"),
    "cu_seqlens-in-bthd": (padded, {"cu_seqlens": i([0, T])}, "cu_seqlens .*layout 'bthd', but .* 'thd' alone"),
    "cu_seqlens-2d": (packed, {"cu_seqlens": i([[0, T]])}, r"cu_seqlens has shape \(1, 2\), but must be \(number"),
    "cu_seqlens-empty": (packed, {"cu_seqlens": indices(0)}, r"cu_seqlens has shape \(0,\), but must be \(number"),
    "pair_block-odd": (padded, {"pair_block": 3}, "pair_block is 3, but must be even and at least 2"),
    "pair_block-zero": (padded, {"pair_block": 0}, "pair_block is 0, but must be even and at least 2"),
    "pair_block-wide": (padded, {"pair_block": 16}, "pair_block is 16, but must divide the number of rotated .*, 8"),
    "pair_block-rest": (padded, {"pair_block": 6}, "pair_block is 6, but must divide the number of rotated .*, 8"),
    "pair_block-interleaved": (
        padded,
        {"pair_block": 4, "interleaved": True},
        "pair_block is 4, but must be None where interleaved is True",
    ),
    "impl-unknown": (padded, {"impl": "cuda"}, "impl is 'cuda', but .*must be None or .*'reference'"),
    "q-expanded": (
        padded,
        {"q": f(B, 1, HQ, D).expand(B, T, HQ, D), "inplace": True},
        r"q has strides \(64, 0, 16, 1\) at shape .*share memory.*inplace must be False",
    ),
    "k-expanded": (
        padded,
        {"k": f(B, T, 1, D).expand(B, T, HK, D), "inplace": True},
        r"k has strides .*share memory.*inplace must be False",
    ),
}
METADATA = WRONG_TYPES | MISFITS

# What only values can tell: looked at on CPU tensors alone.
VALUES = {
    "falls": ([0, 4, 3, T], "cu_seqlens falls from 4 to 3 at index 2, but must not decrease"),
    "starts-late": ([1, T], "cu_seqlens starts at 1, but must start at 0"),
    "starts-below": ([-1, T], "cu_seqlens starts at -1, but must start at 0"),
    "ends-early": ([0, 5], "cu_seqlens ends at 5, but must end at the number of tokens, 6"),
    "ends-late": ([0, 7], "cu_seqlens ends at 7, but must end at the number of tokens, 6"),
    "single": ([0], "cu_seqlens ends at 0, but must end at the number of tokens, 6"),
}


# Each out of place and in place, but for those that are wrong in place alone.
BAD_CALLS = [
    pytest.param(case, inplace, id=f"{case}-{'inplace' if inplace else 'out'}")
    for case, (_, changes, _) in METADATA.items()
    for inplace in (False, True)
    if changes.get("inplace", inplace) == inplace
]


@pytest.mark.parametrize(("case", "inplace"), BAD_CALLS)
def test_a_bad_call_is_refused_before_anything_is_written(case, inplace, way, device):
    good, changes, pattern = METADATA[case]
    error = TypeError if case in WRONG_TYPES else ValueError
    call = call_with(good, device, changes) | {"inplace": inplace}
    refused(call, error, pattern, way)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", VALUES)
def test_cu_seqlens_that_do_not_cut_the_tokens_are_refused(case, dtype, way):
    values, pattern = VALUES[case]
    refused(call_with(packed, "cpu", {"cu_seqlens": i(values, dtype), "inplace": True}), ValueError, pattern, way)


@pytest.mark.parametrize(("values", "pair"), [([0, 3, 1, 1], 1), ([0, 0, 0, -1], 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_axes_that_positions_lack_are_refused(values, pair, dtype, way):
    call = call_with(axial, "cpu", {"axes": i(values, dtype), "inplace": True})
    pattern = f"axes is {values[pair]} for pair {pair}, but must be from 0 to 2: positions has 3 rows"
    refused(call, ValueError, pattern, way)


@pytest.mark.parametrize("good", [padded, packed, per_token, axial])
def test_the_good_calls_are_good(good, way, device):
    with way():
        q, k = apply_rope(**call_with(good, device, {}))
    assert not q.isnan().any()
    assert not k.isnan().any()


LEGAL = {
    "last-offset": {"positions": 4},
    "one-row": {"positions": indices(1, T)},
    "int32": {"offsets": indices(B, dtype=torch.int32)},
    "last-features": {"rotary_dim": R, "rotary_offset": D - R},
    "q-alone": {"k": None},
    "table-shorter-than-tokens": {"cos": f(5, R // 2), "sin": f(5, R // 2), "offsets": indices(B)},
}


@pytest.mark.parametrize("case", LEGAL)
def test_what_is_nearly_wrong_is_right(case, way, device):
    with way():
        apply_rope(**call_with(padded, device, LEGAL[case]))


def test_triton_on_cpu_tensors_says_why_it_cannot():
    from ropewalk.ops.rope.backends import why_not

    if why_not("triton", torch.device("cpu")) is None:
        pytest.skip("Triton's interpreter takes CPU tensors")
    call = call_with(padded, "cpu", {"impl": "triton", "inplace": True})
    refused(call, ValueError, "impl is 'triton', but it cannot run this call: .*(need a GPU.*on cpu|not installed)")


def test_a_leaf_that_requires_grad_is_not_overwritten(device):
    for name, heads in (("q", HQ), ("k", HK)):
        call = call_with(padded, device, {name: leaf(B, T, heads, D), "inplace": True})
        refused(call, RuntimeError, f"{name} is a leaf that requires grad, so inplace must be False")
        base = torch.randn(B, T, 2 * heads, D, device=device, requires_grad=True)
        call = call_with(padded, device, {"inplace": True}) | {name: base[:, :, :heads]}
        refused(call, RuntimeError, f"{name} is a view of a leaf that requires grad, so inplace must be False")


def test_neither_is_written_where_only_k_is_a_leaf(way, device):
    call = call_with(padded, device, {"k": leaf(B, T, HK, D), "inplace": True})
    call["q"] = call["q"].requires_grad_() * 1
    refused(call, RuntimeError, "leaf", way)


def test_views_that_autograd_cannot_follow_are_not_overwritten(device):
    x = torch.randn(B, T, HQ + HK, D, device=device, requires_grad=True) * 1
    q, k = x.split([HQ, HK], dim=2)
    call = call_with(padded, device, {"inplace": True}) | {"q": q, "k": k}
    refused(call, RuntimeError, "q is a view whose overwriting autograd cannot record .*inplace must be False")


def test_q_and_k_that_share_memory_are_not_overwritten(way, device):
    call = call_with(padded, device, {"inplace": True})
    x = torch.randn(B, T, HQ + HK, D, device=device)
    for q, k in (
        (x, x),
        (x[:, :, :HQ], x[:, :, HQ - 1 :]),
        (x[:, :, ::2], x[:, :, 2::2]),
        (x[:, : T - 1], x[:, 1:]),
    ):
        refused(call | {"q": q, "k": k}, ValueError, "q and k share memory, so inplace must be False", way)


# A call like an earlier one is looked up: what is not in its key has to be checked again.
LATER = {
    "offset": (padded, lambda call: {"positions": 5}, ValueError, "positions start at 5"),
    "offset-negative": (padded, lambda call: {"positions": -3}, ValueError, "positions start at -3"),
    "packed-offset": (packed, lambda call: {"positions": ROWS}, ValueError, "positions start at 10"),
    "per-token-offset": (per_token, lambda call: {"positions": 2}, ValueError, "positions is 2, but must be None"),
    "cu_seqlens": (packed, lambda call: {"cu_seqlens": i([0, 3, 2, T])}, ValueError, "cu_seqlens falls from 3 to 2"),
    "shared": (padded, lambda call: {"k": call["q"][:, :, :HK]}, ValueError, "q and k share memory"),
    "leaf": (padded, lambda call: {"q": leaf(B, T, HQ, D)}, RuntimeError, "q is a leaf"),
    "learned": (padded, lambda call: {"cos": leaf(ROWS, R // 2)}, ValueError, "cos .*requires grad"),
    "dtype": (padded, lambda call: {"k": call["k"].double()}, ValueError, "k.dtype is torch.float64"),
    "device": (padded, lambda call: {"k": meta(B, T, HK, D)}, ValueError, "k.device is meta"),
    "expanded": (padded, lambda call: {"q": call["q"][:, :1].expand(B, T, HQ, D)}, ValueError, "q has strides"),
    "rotary_dim": (padded, lambda call: {"rotary_dim": D}, ValueError, "rotary_dim is 16"),
    "layout": (padded, lambda call: {"layout": "bhtd"}, ValueError, "must agree with q's"),
    "true-is-not-1": (padded, lambda call: {"positions": True}, TypeError, "positions is"),
}


@pytest.mark.parametrize("case", LATER)
def test_a_bad_call_after_a_good_one_like_it_is_refused(case):
    good, change, error, pattern = LATER[case]
    call = call_with(good, "cpu", {"inplace": True})
    if case == "shared":  # the good call has the same strides
        call["q"], call["k"] = f(B, T, HQ, D), f(B, T, HQ, D)[:, :, :HK]
    for _ in range(2):
        apply_rope(**call)
        refused(call | change(call), error, pattern)


def test_positions_and_offset_are_told_apart_after_a_good_call(device):
    call = call_with(padded, device, {"k": None})
    at_0, at_4 = apply_rope(**call), apply_rope(**call | {"positions": 4})
    assert not torch.equal(at_0, at_4)
    assert torch.equal(at_4, apply_rope(**call | {"offsets": 4 + indices(B).to(device)}))
    assert torch.equal(at_0, apply_rope(**call))


@pytest.fixture
def forgotten():
    """No kinds of calls are known."""
    KINDS.clear()
    yield KINDS
    KINDS.clear()


def test_what_is_remembered_of_calls_is_bounded(monkeypatch, forgotten, device):
    monkeypatch.setattr(kinds, "MAX_PLANS", 4)
    # The CUDA extension remembers nothing.
    call = call_with(padded, device, {"k": None, "impl": "triton" if device.type == "cuda" else None})
    expected = apply_rope(**call)
    sizes = []
    for tokens in range(1, T + 1):
        for interleaved in (False, True):
            for _ in range(2):
                apply_rope(**call | {"q": call["q"][:, :tokens], "interleaved": interleaved})
            sizes.append(len(forgotten.found))
    assert max(sizes) == 4
    assert torch.equal(apply_rope(**call), expected)


def test_calls_that_differ_in_offset_values_or_addresses_are_remembered_once(forgotten):
    for offset in (0, 0, *range(4)):
        apply_rope(**call_with(padded, "cpu", {"positions": offset}))
    assert len(forgotten.found) == 2  # with an offset, which plans take anew, and without
    for middle in range(T):
        apply_rope(**call_with(packed, "cpu", {"cu_seqlens": i([0, middle, T])}))
    assert len(forgotten.found) == 3


def test_a_refused_call_is_not_remembered(forgotten):
    for _ in range(3):
        refused(call_with(padded, "cpu", {"rotary_dim": 7}), ValueError, "rotary_dim")
    assert not forgotten.found


def test_every_message_says_what_must_be():
    for case, (good, changes, _) in METADATA.items():
        call = call_with(good, "cpu", {"inplace": True} | changes)
        with pytest.raises((TypeError, ValueError)) as raised:
            apply_rope(**call)
        assert re.search("must|pass", str(raised.value)), f"{case}: {raised.value}"


@pytest.mark.parametrize("name", ["q", "k", "cos", "positions"])
@pytest.mark.parametrize("kind", ["sparse", "oneDNN", "jagged", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_are_refused(device, kind, name):
    call = {name: moved(x, device) for name, x in padded().items()}
    call["positions"] = torch.zeros(B, T, dtype=torch.int64, device=device)
    apply_rope(**call)  # a plan for calls like it is found from now on
    x = call[name]
    if kind == "sparse":
        x, said = x.to_sparse(), "a tensor of layout torch.sparse_coo, but must be dense, of torch.strided"
    elif kind == "oneDNN":
        if not x.is_floating_point() or device.type != "cpu":
            pytest.skip("oneDNN's tensors are floating-point numbers on a CPU")
        x, said = x.to_mkldnn(), "a tensor of layout torch._mkldnn, but must be dense"
    else:
        layout = torch.jagged if kind == "jagged" else torch.strided
        x, said = (
            torch.nested.nested_tensor(list(x), layout=layout),
            r"a nested tensor, but must be dense: pass .*'thd'",
        )
    for inplace in (False, True):
        with pytest.raises(TypeError, match=f"{name} is {said}"):
            apply_rope(**call | {name: x}, inplace=inplace)


def test_sparse_tensors_are_told_from_expanded_ones(device):
    """Both have strides of zero: the plan of one is not the other's."""
    call = {name: moved(x, device) for name, x in padded().items()}
    call["q"] = torch.zeros((), device=device).expand(call["q"].shape)
    apply_rope(**call)
    with pytest.raises(TypeError, match=r"q is a tensor of layout torch.sparse_coo"):
        apply_rope(**call | {"q": call["q"].to_sparse()})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("position_ids", "did you mean positions?"),
        ("conjugate", "did you mean inverse?"),
        ("is_neox_style", "it is the opposite of interleaved"),
        ("in_place", "did you mean inplace?"),
        ("xyz", "it takes positions, offsets, axes, cu_seqlens, layout,"),
    ],
)
def test_names_of_other_libraries_are_told_apart(device, name, hint):
    call = {name: moved(x, device) for name, x in padded().items()}
    message = f"apply_rope() got an unexpected keyword argument '{name}': {hint}"
    with pytest.raises(TypeError, match=re.escape(message)):
        apply_rope(**call, **{name: None})


def test_the_signature_is_the_true_one():
    names = list(inspect.signature(apply_rope).parameters)
    assert names == ["q", "k", "cos", "sin", *api._KEYWORDS]
    assert all(name in api._KEYWORDS for name in api._ELSEWHERE.values() if " " not in name)
