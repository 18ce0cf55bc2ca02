"""Every bad call of attention raises an error that says what is wrong, and masks are read as they are meant."""

from __future__ import annotations

import math
import os

import pytest
import torch

from ropewalk.ops.attention.checks import DTYPES, Call, as_bhtd, check_call
from ropewalk.positions import Alibi, NoPosition, Rope
from ropewalk.testing import unchanged

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="a run without Triton's interpreter tests what needs no Triton"
)


B, TQ, TK, H, K, D = 2, 5, 7, 4, 2, 8


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
    }


def call_with(changes, device):
    """The arguments of the good call, changed, on the device under test; what is on meta stays there."""
    arguments = good() | changes
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
    "position-name": ({"position": "rope"}, "position is 'rope', but must be a scheme of ropewalk.positions"),
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
}
META = torch.device("meta")
MISFITS = {
    "layout-unknown": ({"layout": "sbhd"}, "layout is 'sbhd', but must be one of 'bthd', 'bhtd'"),
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
    "v-other-dim": ({"v": f(B, TK, K, 16)}, r"v has shape \(2, 7, 2, 16\), but must have k's, \(2, 7, 2, 8\)"),
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
        "head dim is 0, but must be from 1 to 256",
    ),
    "head-dim-257": (
        {"q": f(B, TQ, H, 257), "k": f(B, TK, K, 257), "v": f(B, TK, K, 257)},
        "head dim is 257, but must be from 1 to 256",
    ),
    "window-0": ({"window": 0}, "window is 0, but must be None or an int of at least 1"),
    "window-negative": ({"window": -3}, "window is -3, but must be None or an int of at least 1"),
    "window-true": ({"window": True}, "window is True, but must be None or an int of at least 1"),
    "window-float": ({"window": 2.0}, "window is 2.0, but must be None or an int of at least 1"),
    "window-pair": ({"window": (1, 1)}, r"window is \(1, 1\), but must be None or an int of at least 1"),
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
}


@pytest.mark.parametrize("case", WRONG_TYPES | MISFITS)
def test_a_bad_call_is_refused(case, device):
    changes, pattern = (WRONG_TYPES | MISFITS)[case]
    error = TypeError if case in WRONG_TYPES else ValueError
    with pytest.raises(error, match=pattern):
        check_call(**call_with(changes, device))


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
    call = call_with({"position": Alibi(), "causal": True, "window": 3, "scale": 0.5}, device)
    tensors = [x for x in call.values() if isinstance(x, torch.Tensor)]
    with unchanged(tensors):
        checked = check_call(**call)
    assert checked.position is call["position"]
    assert (checked.causal, checked.window, checked.scale) == (True, 3, 0.5)
    for name in ("key_lengths", "positions_q", "positions_k"):
        assert getattr(checked, name) is call[name]


@pytest.mark.parametrize("head_dim", [1, 40, 256])
def test_what_is_left_out_gets_its_default(head_dim, device):
    q, k = torch.randn(B, TQ, H, head_dim, device=device), torch.randn(B, TK, K, head_dim, device=device)
    call = check_call(q, k, k)
    assert call == Call(NoPosition(), False, None, 1 / math.sqrt(head_dim), None, None, None, None)
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
    "no-queries": {"q": f(B, 0, H, D), "mask": b(B, H, 0, TK), "positions_q": i(1, 0)},
    "no-keys": {
        "k": f(B, 0, K, D),
        "v": f(B, 0, K, D),
        "mask": b(TQ, 0),
        "key_lengths": i(B),
        "positions_k": i(B, 0),
    },
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
