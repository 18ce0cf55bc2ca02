"""Every bad call of attention raises an error that says what is wrong, and masks are read as they are meant."""

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest
import torch

from ropewalk import attention, explain_choice
from ropewalk.ops.attention import api
from ropewalk.ops.attention.call import AttentionCall, as_bhtd, from_bhtd, token_indices, token_positions
from ropewalk.ops.attention.validate import DTYPES, MAX_PAGE_SIZE, Arguments, validate
from ropewalk.schemes import Alibi, NoPosition, Rope
from ropewalk.testing import unchanged

B, TQ, TK, H, K, D = 2, 5, 7, 4, 2, 8


def check_call(q, k, v, **keywords):
    """The call, its scheme not resolved."""
    return validate(q, k, v, Arguments(**keywords))


def f(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def b(*shape):
    """A random mask."""
    return torch.rand(*shape) < 0.5


def i(*shape, dtype=torch.int64):
    return torch.zeros(*shape, dtype=dtype)


def good():
    """A good call in the default layout, with every optional tensor."""
    return {
        "q": f(B, TQ, H, D),
        "k": f(B, TK, K, D),
        "v": f(B, TK, K, D),
        "mask": b(B, H, TQ, TK),
        "key_lengths": torch.tensor([0, TK]),
        "positions_q": i(B, TQ),
        "positions_k": i(1, TK),
        "key_starts": torch.tensor([0, TK]),
        "query_starts": torch.tensor([0, TK - TQ]),
        "sinks": f(H),
    }


def good_packed():
    """A good call of packed sequences: the last two rows of k and v belong to none."""
    return {
        "q": f(TQ, H, D),
        "k": f(TK, K, D),
        "v": f(TK, K, 2 * D),
        "cu_seqlens_q": torch.tensor([0, 0, 3, TQ]),
        "cu_seqlens_k": torch.tensor([0, 1, 1, TK - 2], dtype=torch.int32),
        "positions_q": i(TQ),
        "positions_k": i(TK),
        "layout": "thd",
    }


def good_paged():
    """A good call with pages: what the table holds past the lengths is no page."""
    return {
        "q": f(B, TQ, H, D),
        "k": f(4, 16, K, D),
        "v": f(4, 16, K, D),
        "key_lengths": torch.tensor([16, 33]),
        "block_table": torch.tensor([[3, -1, 99], [0, 2, 3]], dtype=torch.int32),
        "positions_k": i(1, 48),
    }


def call_with(changes, device, base=good):
    """The arguments of a good call, changed, on the device under test; what is on meta stays there."""
    arguments = base() | changes
    return {name: x.to(device) if isinstance(x, torch.Tensor) and not x.is_meta else x for name, x in arguments.items()}


class Impostor:
    """Looks like a scheme, but is none."""

    rotation = Rope.rotation

    def __repr__(self):
        return "Impostor()"


FLOATS = "float16, bfloat16, float32, float64"
SHARED = rf"q, k and v must share one of {FLOATS}"
INDEX = "must be a tensor of int32 or int64"
MASK = r"mask is {}, but must be a bool tensor, True where a query attends"
SHAPES = r"must be \(Tq, Tk\), \(B, Tq, Tk\) or .* with B = 2, H = 4, Tq = 5 and Tk = 7"

# What is wrong: the change to the good call, and what the message must say.
WRONG_TYPES = {
    "position-name": ({"position": "rope"}, "position is 'rope', but must be a scheme of ropewalk.schemes"),
    "position-class": ({"position": Rope}, "position is <class .*Rope'>, but must be a scheme"),
    "position-impostor": ({"position": Impostor()}, r"position is Impostor\(\), but must be a scheme"),
    "position-false": ({"position": False}, "position is False, but must be a scheme"),
    "q-list": ({"q": [1.0]}, "q is list, but must be a tensor"),
    "k-none": ({"k": None}, "k is NoneType, but must be a tensor"),
    "v-number": ({"v": 1.0}, "v is float, but must be a tensor"),
    "q-int": ({"q": i(B, TQ, H, D)}, f"q has dtype torch.int64, but {SHARED}"),
    "q-complex": ({"q": f(B, TQ, H, D).cfloat()}, f"q has dtype torch.complex64, but {SHARED}"),
    "q-fp8": ({"q": f(B, TQ, H, D, dtype=torch.float8_e4m3fn)}, f"q has dtype torch.float8_e4m3fn, but {SHARED}"),
    "k-other": ({"k": f(B, TK, K, D, dtype=torch.float64)}, f"k has dtype torch.float64, but {SHARED}"),
    "v-other": ({"v": f(B, TK, K, D, dtype=torch.bfloat16)}, f"v has dtype torch.bfloat16, but {SHARED}"),
    "mask-list": ({"mask": [[True]]}, MASK.format("list")),
    "mask-float": ({"mask": f(TQ, TK)}, MASK.format("torch.float32")),
    "mask-int": ({"mask": i(TQ, TK)}, MASK.format("torch.int64")),
    "mask-uint8": ({"mask": i(TQ, TK, dtype=torch.uint8)}, MASK.format("torch.uint8")),
    "key_lengths-list": ({"key_lengths": [1, 2]}, f"key_lengths .*{INDEX}"),
    "key_lengths-float": ({"key_lengths": f(B)}, f"key_lengths .*{INDEX}"),
    "key_lengths-int16": ({"key_lengths": i(B, dtype=torch.int16)}, f"key_lengths .*{INDEX}"),
    "positions_q-int": ({"positions_q": 3}, f"positions_q .*{INDEX}"),
    "positions_q-float": ({"positions_q": f(B, TQ)}, f"positions_q .*{INDEX}"),
    "positions_k-list": ({"positions_k": [[0]]}, f"positions_k .*{INDEX}"),
    "positions_k-bool": ({"positions_k": b(B, TK)}, f"positions_k .*{INDEX}"),
    "key_starts-list": ({"key_starts": [1, 2]}, f"key_starts is list, but {INDEX}"),
    "key_starts-float": ({"key_starts": f(B)}, f"key_starts is a tensor of torch.float32, but {INDEX}"),
    "query_starts-int": ({"query_starts": 3}, f"query_starts is int, but {INDEX}"),
    "query_starts-int16": ({"query_starts": i(B, dtype=torch.int16)}, f"query_starts .*torch.int16, but {INDEX}"),
    "sinks-list": ({"sinks": [0.0] * H}, "sinks is list, but must be a floating-point tensor"),
    "sinks-int": ({"sinks": i(H)}, "sinks is torch.int64, but must be a floating-point tensor"),
    "sinks-complex": ({"sinks": f(H).cfloat()}, "sinks is torch.complex64, but must be a floating-point tensor"),
}
META = torch.device("meta")
MISFITS = {
    "layout-unknown": ({"layout": "sbhd"}, "layout is 'sbhd', but must be one of 'bthd', 'bhtd', 'thd'"),
    "layout-upper": ({"layout": "BTHD"}, "layout is 'BTHD', but must be one of 'bthd', 'bhtd'"),
    "layout-none": ({"layout": None}, "layout is None, but must be one of 'bthd', 'bhtd'"),
    "q-3d": ({"q": f(TQ, H, D)}, r"q has shape \(5, 4, 8\), but must be \(B, T, H, D\)"),
    "k-5d": ({"k": f(1, B, TK, K, D)}, r"k has shape \(1, 2, 7, 2, 8\), but must be \(B, T, H, D\)"),
    "v-2d-bhtd": ({"v": f(TK, D), "layout": "bhtd"}, r"v has shape \(7, 8\), but must be \(B, H, T, D\)"),
    "k-elsewhere": ({"k": f(B, TK, K, D).to(META)}, r"k is on meta, but must be on q's device, \w+"),
    "v-elsewhere": ({"v": f(B, TK, K, D).to(META)}, r"v is on meta, but must be on q's device, \w+"),
    "mask-elsewhere": ({"mask": b(TQ, TK).to(META)}, r"mask is on meta, but must be on q's device, \w+"),
    "key_lengths-elsewhere": ({"key_lengths": i(B).to(META)}, r"key_lengths is on meta, but must be on q's device"),
    "positions_q-elsewhere": ({"positions_q": i(B, TQ).to(META)}, r"positions_q is on meta, but must be on q's"),
    "positions_k-elsewhere": ({"positions_k": i(B, TK).to(META)}, r"positions_k is on meta, but must be on q's"),
    "v-fewer-heads": ({"v": f(B, TK, 1, D)}, r"v has shape \(2, 7, 1, 8\), but must have k's, \(2, 7, 2, 8\)"),
    "v-fewer-tokens": ({"v": f(B, 6, K, D)}, r"v has shape \(2, 6, 2, 8\), but must have k's, \(2, 7, 2, 8\)"),
    "v-head-dim-0": ({"v": f(B, TK, K, 0)}, "v's head dim is 0, but must be at least 1"),
    "k-other-batch": (
        {"k": f(1, TK, K, D), "v": f(1, TK, K, D)},
        "k has batch 1 and head dim 8, but must have q's, 2 and 8",
    ),
    "k-other-dim": (
        {"k": f(B, TK, K, 16), "v": f(B, TK, K, 16)},
        "k has batch 2 and head dim 16, but must have q's, 2 and 8",
    ),
    "heads-3": ({"k": f(B, TK, 3, D), "v": f(B, TK, 3, D)}, "q has 4 heads, but they must be a multiple of k's 3"),
    "heads-8": ({"k": f(B, TK, 8, D), "v": f(B, TK, 8, D)}, "q has 4 heads, but they must be a multiple of k's 8"),
    "heads-0": ({"k": f(B, TK, 0, D), "v": f(B, TK, 0, D)}, "q has 4 heads, but they must be a multiple of k's 0"),
    "head-dim-0": (
        {"q": f(B, TQ, H, 0), "k": f(B, TK, K, 0), "v": f(B, TK, K, 0)},
        "the head dim is 0, but must be at least 1",
    ),
    "window-0": ({"window": 0}, "window is 0, but must be None, an int of at least 1, or a pair"),
    "window-negative": ({"window": -3}, "window is -3, but must be None, an int of at least 1, or a pair"),
    "window-true": ({"window": True}, "window is True, but must be None, an int of at least 1, or a pair"),
    "window-float": ({"window": 2.0}, "window is 2.0, but must be None, an int of at least 1, or a pair"),
    "window-pair-below": ({"window": (1, -2)}, r"window is \(1, -2\), but must be .* a pair \(left, right\) of ints"),
    "window-pair-floats": ({"window": (1.0, 2)}, r"window is \(1.0, 2\), but must be .* a pair \(left, right\)"),
    "window-of-three": ({"window": (1, 2, 3)}, r"window is \(1, 2, 3\), but must be .* a pair \(left, right\)"),
    "scale-nan": ({"scale": math.nan}, "scale is nan, but must be a finite number"),
    "scale-infinite": ({"scale": -math.inf}, "scale is -inf, but must be a finite number"),
    "mask-1d": ({"mask": b(TK)}, rf"mask has shape \(7,\), but {SHAPES}"),
    "mask-of-keys": ({"mask": b(B, TK)}, rf"mask has shape \(2, 7\), but {SHAPES}"),
    "mask-transposed": ({"mask": b(TK, TQ)}, rf"mask has shape \(7, 5\), but {SHAPES}"),
    "mask-per-head": ({"mask": b(H, TQ, TK)}, rf"mask has shape \(4, 5, 7\), but {SHAPES}"),
    "mask-of-1-batch": ({"mask": b(1, TQ, TK)}, rf"mask has shape \(1, 5, 7\), but {SHAPES}"),
    "mask-of-3-batches": ({"mask": b(3, 1, TQ, TK)}, rf"mask has shape \(3, 1, 5, 7\), but {SHAPES}"),
    "mask-of-key-heads": ({"mask": b(B, K, TQ, TK)}, rf"mask has shape \(2, 2, 5, 7\), but {SHAPES}"),
    "mask-heads-first": ({"mask": b(H, B, TQ, TK)}, rf"mask has shape \(4, 2, 5, 7\), but {SHAPES}"),
    "mask-rows": ({"mask": b(B, H, 2, TK)}, rf"mask has shape \(2, 4, 2, 7\), but {SHAPES}"),
    "mask-columns": ({"mask": b(B, H, TQ, 6)}, rf"mask has shape \(2, 4, 5, 6\), but {SHAPES}"),
    "mask-5d": ({"mask": b(1, B, H, TQ, TK)}, rf"mask has shape \(1, 2, 4, 5, 7\), but {SHAPES}"),
    "key_lengths-one": ({"key_lengths": i(1)}, r"key_lengths has shape \(1,\), but must be \(B,\) with B = 2"),
    "key_lengths-2d": ({"key_lengths": i(B, 1)}, r"key_lengths has shape \(2, 1\), but must be \(B,\) with B = 2"),
    "positions_q-1d": (
        {"positions_q": i(TQ)},
        r"positions_q has shape \(5,\), but must be \(B, T\) or \(1, T\) with B = 2 and T = 5",
    ),
    "positions_q-of-keys": (
        {"positions_q": i(B, TK)},
        r"positions_q has shape \(2, 7\), but must be \(B, T\) or \(1, T\) with B = 2 and T = 5",
    ),
    "positions_k-batch": (
        {"positions_k": i(3, TK)},
        r"positions_k has shape \(3, 7\), but must be \(B, T\) or \(1, T\) with B = 2 and T = 7",
    ),
    "positions_k-3d": (
        {"positions_k": i(B, TK, 1)},
        r"positions_k has shape \(2, 7, 1\), but must be \(B, T\) or \(1, T\) with B = 2 and T = 7",
    ),
    "key_starts-one": ({"key_starts": i(1)}, r"key_starts has shape \(1,\), but must be \(B,\) with B = 2"),
    "key_starts-elsewhere": ({"key_starts": i(B).to(META)}, r"key_starts is on meta, but must be on q's device"),
    "query_starts-2d": ({"query_starts": i(B, 1)}, r"query_starts has shape \(2, 1\), but must be \(B,\) with B = 2"),
    "query_starts-elsewhere": ({"query_starts": i(B).to(META)}, r"query_starts is on meta, but must be on q's device"),
    "cu_seqlens_q-dense": (
        {"cu_seqlens_q": i(3)},
        "cu_seqlens_q was given with layout 'bthd', but must come with layout 'thd'",
    ),
    "cu_seqlens_k-dense": (
        {"cu_seqlens_k": i(3)},
        "cu_seqlens_k was given with layout 'bthd', but must come with layout 'thd'",
    ),
    "softcap-0": ({"softcap": 0.0}, "softcap is 0.0, but must be None or a finite number above 0"),
    "softcap-negative": ({"softcap": -5}, "softcap is -5, but must be None or a finite number above 0"),
    "softcap-infinite": ({"softcap": math.inf}, "softcap is inf, but must be None or a finite number above 0"),
    "softcap-nan": ({"softcap": math.nan}, "softcap is nan, but must be None or a finite number above 0"),
    "softcap-true": ({"softcap": True}, "softcap is True, but must be None or a finite number above 0"),
    "softcap-text": ({"softcap": "50"}, "softcap is '50', but must be None or a finite number above 0"),
    "sinks-of-key-heads": ({"sinks": f(K)}, r"sinks has shape \(2,\), but must be \(H,\) with H = 4"),
    "sinks-2d": ({"sinks": f(1, H)}, r"sinks has shape \(1, 4\), but must be \(H,\) with H = 4"),
    "sinks-elsewhere": ({"sinks": f(H).to(META)}, r"sinks is on meta, but must be on q's device"),
    "dropout-1": ({"dropout_p": 1.0}, "dropout_p is 1.0, but must be a number from 0 to below 1"),
    "dropout-negative": ({"dropout_p": -0.1}, "dropout_p is -0.1, but must be a number from 0 to below 1"),
    "dropout-nan": ({"dropout_p": math.nan}, "dropout_p is nan, but must be a number from 0 to below 1"),
    "dropout-none": ({"dropout_p": None}, "dropout_p is None, but must be a number from 0 to below 1"),
}
THD = "layout 'thd' takes none"
PACKED_WRONG_TYPES = {
    "cu_seqlens_q-list": ({"cu_seqlens_q": [0, 5]}, f"cu_seqlens_q is list, but {INDEX}"),
    "cu_seqlens_k-float": ({"cu_seqlens_k": f(4)}, f"cu_seqlens_k is a tensor of torch.float32, but {INDEX}"),
    "positions_k-float": ({"positions_k": f(TK)}, f"positions_k is a tensor of torch.float32, but {INDEX}"),
}
PACKED_MISFITS = {
    "q-4d": ({"q": f(1, TQ, H, D)}, r"q has shape \(1, 5, 4, 8\), but must be \(total, H, D\)"),
    "no-cu_seqlens": ({"cu_seqlens_q": None, "cu_seqlens_k": None}, "cu_seqlens_q is None, but layout 'thd' needs it"),
    "no-cu_seqlens_q": ({"cu_seqlens_q": None}, "cu_seqlens_q is None, but layout 'thd' needs it"),
    "cu_seqlens_q-2d": ({"cu_seqlens_q": i(1, 4)}, r"cu_seqlens_q has shape \(1, 4\), but must be \(S \+ 1,\)"),
    "cu_seqlens_q-empty": ({"cu_seqlens_q": i(0)}, r"cu_seqlens_q has shape \(0,\), but must be \(S \+ 1,\)"),
    "cu_seqlens_q-elsewhere": ({"cu_seqlens_q": i(4).to(META)}, "cu_seqlens_q is on meta, but must be on q's device"),
    "cu_seqlens_k-elsewhere": ({"cu_seqlens_k": i(4).to(META)}, "cu_seqlens_k is on meta, but must be on q's device"),
    "cu_seqlens_k-fewer": (
        {"cu_seqlens_k": torch.tensor([0, 3, TK])},
        r"cu_seqlens_k has shape \(3,\), but must have cu_seqlens_q's, \(4,\)",
    ),
    "mask": ({"mask": b(TQ, TK)}, f"mask was given beside cu_seqlens_q, but {THD}"),
    "key_lengths": ({"key_lengths": i(1)}, f"key_lengths was given beside cu_seqlens_q, but {THD}"),
    "key_starts": ({"key_starts": i(1)}, f"key_starts was given beside cu_seqlens_q, but {THD}"),
    "query_starts": ({"query_starts": i(1)}, f"query_starts was given beside cu_seqlens_q, but {THD}"),
    "block_table": ({"block_table": i(1, 1)}, f"block_table was given beside cu_seqlens_q, but {THD}"),
    "positions_q-2d": (
        {"positions_q": i(1, TQ)},
        r"positions_q has shape \(1, 5\), but must be \(total,\) with total = 5",
    ),
    "positions_k-of-queries": (
        {"positions_k": i(TQ)},
        r"positions_k has shape \(5,\), but must be \(total,\) with total = 7",
    ),
    "v-fewer-tokens": (
        {"v": f(6, K, D)},
        r"v has shape \(6, 2, 8\), but must have k's, \(7, 2, 8\), all but the head dim",
    ),
    "k-other-dim": ({"k": f(TK, K, 16)}, "k has batch 1 and head dim 16, but must have q's, 1 and 8"),
    "heads-3": ({"k": f(TK, 3, D), "v": f(TK, 3, D)}, "q has 4 heads, but they must be a multiple of k's 3"),
}
PAGED_WRONG_TYPES = {
    "table-list": ({"block_table": [[0, 1, 2], [0, 1, 2]]}, f"block_table is list, but {INDEX}"),
    "table-float": ({"block_table": f(B, 3)}, f"block_table is a tensor of torch.float32, but {INDEX}"),
}
PAGED_MISFITS = {
    "table-1d": ({"block_table": i(B)}, r"block_table has shape \(2,\), but must be \(B, number of pages\) with B = 2"),
    "table-batch": ({"block_table": i(3, 3)}, r"block_table has shape \(3, 3\), but must be .* with B = 2"),
    "table-elsewhere": ({"block_table": i(B, 3).to(META)}, "block_table is on meta, but must be on q's device"),
    "no-lengths": ({"key_lengths": None}, "key_lengths is None, but block_table needs it"),
    "pages-of-513": (
        {"k": f(4, 513, K, D), "v": f(4, 513, K, D)},
        "k has pages of 513 keys, but with block_table they must be of 1 to 512",
    ),
    "v-other-pages": ({"v": f(4, 32, K, D)}, r"v has shape \(4, 32, 2, 8\), but must have k's, \(4, 16, 2, 8\)"),
    "positions-of-a-page": ({"positions_k": i(1, 16)}, r"positions_k has shape \(1, 16\), .* with B = 2 and T = 48"),
    "mask-of-a-page": ({"mask": b(TQ, 16)}, r"mask has shape \(5, 16\), .* Tq = 5 and Tk = 48"),
    "q-grad": ({"q": f(B, TQ, H, D).requires_grad_()}, "q requires grad, but with block_table there is no backward"),
    "k-grad": ({"k": f(4, 16, K, D).requires_grad_()}, "k requires grad, but with block_table there is no backward"),
    "v-grad": ({"v": f(4, 16, K, D).requires_grad_()}, "v requires grad, but with block_table there is no backward"),
    "sinks-grad": ({"sinks": f(H).requires_grad_()}, "sinks requires grad, but with block_table there is no backward"),
}


@pytest.mark.parametrize("case", WRONG_TYPES | MISFITS)
def test_a_bad_call_is_refused(case, device):
    changes, pattern = (WRONG_TYPES | MISFITS)[case]
    error = TypeError if case in WRONG_TYPES else ValueError
    with pytest.raises(error, match=pattern):
        check_call(**call_with(changes, device))


@pytest.mark.parametrize("case", PACKED_WRONG_TYPES | PACKED_MISFITS)
def test_a_bad_call_of_packed_sequences_is_refused(case, device):
    changes, pattern = (PACKED_WRONG_TYPES | PACKED_MISFITS)[case]
    error = TypeError if case in PACKED_WRONG_TYPES else ValueError
    with pytest.raises(error, match=pattern):
        check_call(**call_with(changes, device, good_packed))


@pytest.mark.parametrize("case", PAGED_WRONG_TYPES | PAGED_MISFITS)
def test_a_bad_call_with_pages_is_refused(case, device):
    changes, pattern = (PAGED_WRONG_TYPES | PAGED_MISFITS)[case]
    error = TypeError if case in PAGED_WRONG_TYPES else ValueError
    with pytest.raises(error, match=pattern):
        check_call(**call_with(changes, device, good_paged))


def test_pages_may_require_grad_where_none_is_recorded(device):
    arguments = call_with({name: good_paged()[name].requires_grad_() for name in "qkv"}, device, good_paged)
    with torch.no_grad():
        check_call(**arguments)


# What only values can tell: the good call, the change, and what the message must say.
FAULTS = {
    "key_starts-beyond": (good, {"key_starts": [0, TK + 1]}, "key_starts holds 8, but must be from 0 to Tk = 7"),
    "key_starts-below": (good, {"key_starts": [-1, 0]}, "key_starts holds -1, but must be from 0 to Tk = 7"),
    "query_starts-beyond": (
        good,
        {"query_starts": [3, 0]},
        r"query_starts holds 3, but must be from −Tq = -\d to Tk − Tq = 2",
    ),
    "query_starts-below": (
        good,
        {"query_starts": [0, -9]},
        r"query_starts holds -9, but must be from −Tq = -\d to Tk − Tq = 2",
    ),
    "cu_seqlens_q-start": (
        good_packed,
        {"cu_seqlens_q": [1, 2, 3, 5]},
        "cu_seqlens_q starts at 1, but must start at 0",
    ),
    "cu_seqlens_k-falls": (
        good_packed,
        {"cu_seqlens_k": [0, 4, 3, 5]},
        "cu_seqlens_k falls from 4 to 3 at index 2, but must not decrease",
    ),
    "cu_seqlens_q-end": (
        good_packed,
        {"cu_seqlens_q": [0, 2, 4, 6]},
        "cu_seqlens_q ends at 6, but must end within q's 5 tokens",
    ),
    "cu_seqlens_k-end": (
        good_packed,
        {"cu_seqlens_k": [0, 2, 4, 8]},
        "cu_seqlens_k ends at 8, but must end within k's 7 tokens",
    ),
    "cu_seqlens_k-left-out": (
        good_packed,
        {"q": f(9, H, D), "cu_seqlens_q": [0, 9], "cu_seqlens_k": None, "positions_q": None},
        "cu_seqlens_k ends at 9, but must end within k's 7 tokens",
    ),
    "table-beyond": (
        good_paged,
        {"block_table": [[4, -1, 99], [0, 2, 3]]},
        "block_table holds 4 below key_lengths, but must be from 0 to below 4 pages",
    ),
    "table-below": (good_paged, {"block_table": [[3, -1, 99], [0, 2, -1]]}, "block_table holds -1 below key_lengths"),
    "paged-lengths": (good_paged, {"key_lengths": [0, 49]}, "key_lengths holds 49, but must be from 0 to Tk = 48"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", FAULTS)
def test_values_that_cannot_be_are_refused_on_the_cpu(case, dtype):
    base, changes, pattern = FAULTS[case]
    changes = {name: torch.tensor(x, dtype=dtype) if isinstance(x, list) else x for name, x in changes.items()}
    with pytest.raises(ValueError, match=pattern):
        check_call(**call_with(changes, "cpu", base))


def test_pages_before_the_first_key_may_be_none(device):
    changes = {"block_table": torch.tensor([[3, -1, 99], [-1, 2, 3]]), "key_starts": torch.tensor([0, 16])}
    check_call(**call_with(changes, device, good_paged))
    if torch.device(device).type == "cpu":
        changes["key_starts"][1] = 15
        with pytest.raises(ValueError, match="block_table holds -1"):
            check_call(**call_with(changes, device, good_paged))


# Names that the messages must give for what was passed.
WHAT_IT_WAS = {
    "key_lengths": [([1, 2], "list"), (torch.ones(B), "float32"), (i(B, dtype=torch.int16), "int16")],
    "positions_q": [(3, "int"), (torch.ones(B, TQ), "float32")],
    "positions_k": [([[0]], "list"), (i(B, TK).bool(), "bool")],
}


@pytest.mark.parametrize(
    ("name", "value", "what"), [(name, *case) for name, cases in WHAT_IT_WAS.items() for case in cases]
)
def test_a_wrong_type_is_named(name, value, what, device):
    with pytest.raises(TypeError, match=rf"{name} (is|has dtype) .*({what}).*, but must be"):
        check_call(**call_with({name: value}, device))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("values", "outside"), [([0, TK + 1], TK + 1), ([-1, 3], -1), ([3, -(2**31)], -(2**31))])
def test_key_lengths_beyond_the_keys_are_refused_on_the_cpu(values, outside, dtype):
    changes = {"key_lengths": torch.tensor(values, dtype=dtype)}
    with pytest.raises(ValueError, match=rf"key_lengths holds {outside}, but must be from 0 to Tk = 7"):
        check_call(**call_with(changes, "cpu"))


def test_a_good_call_comes_back_as_it_went_in(device):
    options = {"softcap": 50, "dropout_p": 0.25, "keys_rotated": True}
    call = call_with({"position": Alibi(), "causal": True, "window": 3, "scale": 0.5, **options}, device)
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    with unchanged(tensors):
        checked = check_call(**call)
    assert checked.scheme is call["position"]
    assert (checked.causal, checked.window_left, checked.window_right, checked.scale) == (True, 2, None, 0.5)
    assert (checked.softcap, checked.dropout_p, checked.keys_rotated, checked.seed) == (50.0, 0.25, True, None)
    for name in ("key_lengths", "positions_q", "positions_k", "key_starts", "query_starts", "sinks"):
        assert getattr(checked, name) is call[name]


def test_a_good_call_of_packed_sequences_gets_its_batch_dimension(device):
    call = call_with({}, device, good_packed)
    checked = check_call(**call)
    assert checked.cu_seqlens_q is call["cu_seqlens_q"]
    assert checked.cu_seqlens_k is call["cu_seqlens_k"]
    assert checked.positions_q.shape == (1, TQ)
    assert checked.positions_k.shape == (1, TK)
    alone = check_call(call["q"], call["q"], call["q"], cu_seqlens_q=call["cu_seqlens_q"], layout="thd")
    assert alone.cu_seqlens_k is alone.cu_seqlens_q


@pytest.mark.parametrize("page_size", [1, 16, 24, 256, MAX_PAGE_SIZE])
def test_pages_of_every_size_are_taken_in_both_layouts(page_size, device):
    k = torch.ones(4, page_size, K, D, device=device)
    lengths = torch.tensor([page_size, 2 * page_size + 1])
    changes = {"k": k, "v": k[..., :3], "positions_k": None, "key_lengths": lengths}
    arguments = call_with(changes, device, good_paged)
    assert check_call(**arguments).block_table is arguments["block_table"]
    for name in "qkv":
        arguments[name] = arguments[name].transpose(1, 2)
    check_call(**arguments, layout="bhtd")


def test_layouts_are_views_and_come_back(device):
    for layout, shape in (("bthd", (B, TQ, H, D)), ("bhtd", (B, H, TQ, D)), ("thd", (TQ, H, D))):
        x = torch.randn(shape, device=device)
        view = as_bhtd(x, layout)
        assert view.shape == (1 if layout == "thd" else B, H, TQ, D)
        back = from_bhtd(view, layout)
        assert (back.shape, back.stride(), back.data_ptr()) == (x.shape, x.stride(), x.data_ptr())


def placed(device, base=good_packed, **changes):
    """TokenIndices and positions of a call, as lists."""
    arguments = call_with({"positions_q": None, "positions_k": None, **changes}, device, base)
    call = check_call(**arguments)
    return [None if x is None else x.tolist() for x in (*token_indices(call), *token_positions(call))]


def test_packed_tokens_stand_where_their_sequence_has_them(device):
    # Queries: none, three, two; keys: one, none, four, and two of no sequence.
    queries, keys = [[-3, -2, -1, 2, 3]], [[0, 0, 1, 2, 3, 0, 0]]
    expected = [queries, keys, [[1, 1, 1, 2, 2]], [[0, 2, 2, 2, 2, -1, -1]], queries, keys]
    assert placed(device) == expected


def test_no_sequences_hold_no_tokens(device):
    nothing = torch.zeros(1, dtype=torch.int32)
    expected = [[[0] * TQ], [[0] * TK], [[-1] * TQ], [[-1] * TK], [[0] * TQ], [[0] * TK]]
    assert placed(device, cu_seqlens_q=nothing, cu_seqlens_k=nothing) == expected


def test_bounds_of_sequences_are_clamped_to_the_tokens(device):
    call = check_call(**call_with({"positions_q": None, "positions_k": None}, device, good_packed))
    wild = torch.tensor([-5, 2, 99, 3], device=device)
    places = token_indices(call._replace(cu_seqlens_q=wild, cu_seqlens_k=wild))
    assert places.sequences_q[0, :2].tolist() == [0, 0]
    assert set(places.sequences_q[0].tolist()) <= {0, 1, 2}
    assert set(places.keys[0].tolist()) <= set(range(TK))
    beyond = [torch.tensor(x, device=device) for x in ([-5, 2, 99], [-1, 3, 2**40])]
    within = [torch.tensor(x, device=device) for x in ([0, 2, TQ], [0, 3, TK])]
    places, clamped = (token_indices(call._replace(cu_seqlens_q=x[0], cu_seqlens_k=x[1])) for x in (beyond, within))
    assert all(torch.equal(x, y) for x, y in zip(places, clamped, strict=True))
    late = torch.tensor([2, 4, 4, 5], device=device)
    places = token_indices(call._replace(cu_seqlens_q=late, cu_seqlens_k=late))
    assert places.sequences_q.tolist() == [[-1, -1, 0, 0, 2]]


def test_dense_tokens_stand_by_index_and_count_from_the_first_key(device):
    plain = {"key_starts": None, "query_starts": None}
    rows, columns = [2, 3, 4, 5, 6], list(range(TK))
    assert placed(device, good, **plain) == [[rows], [columns], None, None, [rows], [columns]]
    positions_q, positions_k = ([[n - start for n in x] for start in (0, 3)] for x in (rows, columns))
    starts = torch.tensor([0, 3], dtype=torch.int32)
    expected = [[rows], [columns], None, None, positions_q, positions_k]
    assert placed(device, good, **plain | {"key_starts": starts}) == expected
    rows = [[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]]
    positions_q = [rows[0], [n - 3 for n in rows[1]]]
    expected = [rows, [columns], None, None, positions_q, positions_k]
    assert placed(device, good, key_starts=starts, query_starts=torch.tensor([0, 2])) == expected


def test_keys_of_pages_count_through_the_table(device):
    rows, columns = [[7, 8, 9, 10, 11], [28, 29, 30, 31, 32]], [list(range(48))]
    expected = [rows, columns, None, None, rows, columns]
    assert placed(device, good_paged, query_starts=torch.tensor([7, 28])) == expected


def test_given_positions_override_the_defaults(device):
    arguments = call_with({"key_starts": torch.tensor([1, 2])}, device)
    positions = token_positions(check_call(**arguments))
    assert positions[0] is arguments["positions_q"]
    assert positions[1] is arguments["positions_k"]


@pytest.mark.parametrize("head_dim", [1, 40, 256])
def test_what_is_left_out_gets_its_default(head_dim, device):
    q, k = torch.randn(B, TQ, H, head_dim, device=device), torch.randn(B, TK, K, head_dim, device=device)
    call = check_call(q, k, k)
    given = {"scheme": NoPosition(), "scale": 1 / math.sqrt(head_dim), "causal": False, "dropout_p": 0.0}
    defaults = {**dict.fromkeys(AttentionCall._fields[3:21]), **given, "keys_rotated": False}
    assert {name: getattr(call, name) for name in defaults} == defaults
    assert isinstance(call.scale, float)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_both_layouts_are_taken(dtype, device):
    q, k = torch.ones(B, TQ, H, D, dtype=dtype, device=device), torch.ones(B, TK, K, D, dtype=dtype, device=device)
    mask = torch.ones(B, H, TQ, TK, dtype=torch.bool, device=device)
    assert check_call(q, k, k, mask=mask).mask.shape == (B, H, TQ, TK)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert check_call(q, k, k, mask=mask, layout="bhtd").mask.shape == (B, H, TQ, TK)
    assert as_bhtd(q, "bhtd") is q
    with pytest.raises(ValueError, match="q has 5 heads"):
        check_call(q, k, k, mask=mask)


LEGAL = {
    "one-key-head": {"k": f(B, TK, 1, D), "v": f(B, TK, 1, D)},
    "as-many-key-heads": {"k": f(B, TK, H, D), "v": f(B, TK, H, D)},
    "no-queries": {"q": f(B, 0, H, D), "mask": b(B, H, 0, TK), "positions_q": i(1, 0), "query_starts": i(B) + TK},
    "no-keys": {
        "k": f(B, 0, K, D),
        "v": f(B, 0, K, D),
        "mask": b(TQ, 0),
        "key_lengths": i(B),
        "positions_k": i(B, 0),
        "key_starts": i(B),
        "query_starts": None,
    },
    "dropout-nearly-0": {"dropout_p": 1e-9},
    "dropout-0-as-int": {"dropout_p": 0},
    "softcap-int": {"softcap": 50},
    "sinks-half": {"sinks": f(H, dtype=torch.bfloat16)},
    "starts-past-the-lengths": {"key_starts": i(B) + TK, "key_lengths": i(B)},
    "values-of-another-head-dim": {"v": f(B, TK, K, 3)},
    "window-1": {"window": 1},
    "scale-0": {"scale": 0},
    "scale-negative": {"scale": -1.5},
    "int32": {
        "positions_q": i(1, TQ, dtype=torch.int32),
        "positions_k": i(B, TK, dtype=torch.int32),
        "key_lengths": i(B, dtype=torch.int32),
    },
    "positions-below-0": {"positions_q": i(B, TQ) - 5},
    "positions-expanded": {"positions_q": i(1, 1).expand(B, TQ)},
}


@pytest.mark.parametrize("case", LEGAL)
def test_what_is_nearly_wrong_is_right(case, device):
    check_call(**call_with(LEGAL[case], device))


def bhtd(batch, heads, device):
    """q, k and v of one head dim, with as many key heads as query heads."""
    return [torch.randn(batch, heads, tokens, D, device=device) for tokens in (TQ, TK, TK)]


# The shape given; then the strides that its view of 4 dimensions has in each of them: the given dimension's, or 0.
VIEWS = {
    "square": ((TQ, TK), (None, None, 0, 1)),
    "batches": ((B, TQ, TK), (0, None, 1, 2)),
    "full": ((B, H, TQ, TK), (0, 1, 2, 3)),
    "padding": ((B, 1, 1, TK), (0, None, None, 3)),
    "rows": ((1, H, TQ, 1), (None, 1, 2, None)),
    "heads": ((1, H, TQ, TK), (None, 1, 2, 3)),
    "scalar": ((1, 1, 1, 1), (None, None, None, None)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_masks_become_views_of_four_dimensions_without_a_copy(case, device):
    shape, sources = VIEWS[case]
    given = (torch.rand(*shape, 2, device=device) < 0.5)[..., 0]  # not contiguous: its own strides are kept
    mask = check_call(*bhtd(B, H, device), mask=given, layout="bhtd").mask
    assert mask.shape[0] in (1, B)
    assert mask.shape[1] in (1, H)
    assert mask.shape[2:] == (TQ, TK)
    assert mask.data_ptr() == given.data_ptr()
    for axis, (size, source) in enumerate(zip((B, H, TQ, TK), sources, strict=True)):
        if source is None:
            assert mask.shape[axis] == 1 or mask.stride(axis) == 0
        else:
            assert mask.shape[axis] == size
            assert mask.stride(axis) == given.stride(source)


@pytest.mark.parametrize("n", [2, 3, TQ, TK])
def test_a_mask_of_three_dimensions_is_per_batch_even_where_there_are_as_many_heads(n, device):
    given = torch.rand(n, TQ, TK, device=device) < 0.5
    mask = check_call(*bhtd(n, n, device), mask=given, layout="bhtd").mask
    assert mask.shape == (n, 1, TQ, TK)
    for batch in range(n):
        assert torch.equal(mask[batch, 0], given[batch])


def test_a_mask_per_head_has_four_dimensions_where_there_are_as_many_batches(device):
    given = torch.rand(1, 3, TQ, TK, device=device) < 0.5
    mask = check_call(*bhtd(3, 3, device), mask=given, layout="bhtd").mask
    assert mask.shape == (1, 3, TQ, TK)
    assert torch.equal(mask, given)


# What is ambiguous


def test_a_mask_that_may_be_one_of_keys_is_refused(device):
    n = 5
    q, k, _ = bhtd(n, H, device)
    assert q.shape[2] == n
    mask = torch.ones(n, TK, dtype=torch.bool, device=device)
    with pytest.raises(
        ValueError, match=r"mask has shape \(5, 7\), .*both \(Tq, Tk\) and \(B, Tk\), .* key_lengths, or a mask"
    ):
        check_call(q, k, k, mask=mask, layout="bhtd")
    for clear in (mask[None, None], mask[:, None, None], mask.expand(n, n, TK)):
        check_call(q, k, k, mask=clear, layout="bhtd")
    one = (x[:1] for x in (q[:, :, :1], k, k))
    assert check_call(*one, mask=mask[:1], layout="bhtd").mask.shape == (1, 1, 1, TK)  # both readings are the same


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "key_lengths", "positions_q", "sinks"])
@pytest.mark.parametrize("kind", ["sparse", "nested"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_strides_are_refused(device, kind, name):
    call = call_with({}, device)
    x, said = call[name], "a tensor of layout torch.sparse_coo, but must be dense, of torch.strided"
    if kind == "sparse":
        call[name] = x.to_sparse()
    elif x.ndim == 1:
        pytest.skip("nested tensors have two dimensions or more")
    else:
        said = "a nested tensor, but must be dense: pass .*"
        call[name] = torch.nested.nested_tensor(list(x), layout=torch.jagged if name in "qkv" else torch.strided)
    with pytest.raises(TypeError, match=f"{name} is {said}"):
        check_call(**call)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("window", value) for value in (torch.tensor(4), np.float32(4), "4", np.int64(0), True)),
        *(("scale", value) for value in (torch.tensor(0.1), "0.1", np.float32("nan"))),
        *(("softcap", value) for value in ("3", np.float32(0), True)),
        *(("dropout_p", value) for value in (np.float32(1), None)),
    ],
)
def test_what_is_no_number_is_refused(device, name, value):
    call = call_with({name: value}, device)  # tensors are on the device there
    with pytest.raises(ValueError, match=f"{name} is {re.escape(repr(call[name]))}, but must be"):
        check_call(**call)


def test_numbers_of_numpy_become_plain_ones(device):
    call = call_with({"window": np.int32(3), "scale": np.float32(0.5), "softcap": np.int64(2)}, device)
    call = check_call(**call, dropout_p=np.float16(0.25))
    numbers = (call.window_left, call.scale, call.softcap, call.dropout_p)
    assert numbers == (2, 0.5, 2.0, 0.25)
    assert [type(x) for x in numbers] == [int, float, float, float]


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, (False, None, None)),
        (4, False, (False, 3, 3)),
        (4, True, (True, 3, None)),
        ((3, 5), False, (False, 3, 5)),
        ([3, 5], True, (True, 3, None)),
        ((-1, 5), False, (False, None, 5)),
        ((3, -1), False, (False, 3, None)),
        ((-1, -1), False, (False, None, None)),
        ((-1, -1), True, (True, None, None)),
        ((3, 0), False, (True, 3, None)),  # causal by another name
        ((np.int64(3), np.int32(5)), False, (False, 3, 5)),
    ],
    ids=str,
)
def test_a_window_has_two_sides(device, window, causal, expected):
    call = check_call(**call_with({"window": window, "causal": causal}, device))
    assert (call.causal, call.window_left, call.window_right) == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("is_causal", "did you mean causal?"),
        ("softmax_scale", "did you mean scale?"),
        ("sm_scale", "did you mean scale?"),
        ("window_size", "did you mean window?"),
        ("attn_mask", "did you mean mask?"),
        ("cu_seqlens", "did you mean cu_seqlens_q?"),
        ("enable_gqa", "grouped heads need no argument"),
        ("alibi_slopes", "pass position=Alibi(slopes)"),
        ("casual", "did you mean causal?"),
        ("zzz", "it takes position, causal, window,"),
    ],
)
@pytest.mark.parametrize("function", [attention, explain_choice])
def test_names_of_other_libraries_are_told_apart(device, function, name, hint):
    q = torch.randn(1, 4, 2, 8, device=device)
    message = f"{function.__name__}() got an unexpected keyword argument '{name}': {hint}"
    with pytest.raises(TypeError, match=re.escape(message)):
        function(q, q, q, **{name: None})


def test_the_signature_is_the_true_one():
    parameters = inspect.signature(attention).parameters
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert set(list(parameters)[3:]) == set(api._KEYWORDS)
    assert {name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY} == set(api._KEYWORDS)
    assert all(name in api._KEYWORDS for name in api._ELSEWHERE.values() if " " not in name)
    assert not set(api._KEYWORDS) & set(api._ELSEWHERE)


def test_far_more_heads_than_keys_are_hinted_at(device):
    q = torch.randn(2, 4, 16, 8, device=device)  # meant as (B, H, T, D)
    choice = explain_choice(q, q, q)
    assert choice.hint == "k has 16 heads and 4 keys in layout 'bthd': if it is (B, H, T, D), pass layout='bhtd'"
    assert str(choice).endswith(f"hint: {choice.hint}")
    for tensors, keywords in (([q] * 3, {"layout": "bhtd"}), ([q[:, :1], *[q.transpose(1, 2)[:, :, :2]] * 2], {})):
        choice = explain_choice(*tensors, **keywords)
        assert choice.hint is None
        assert "hint" not in str(choice)
