"""Calls with a norm that are refused: each error names the argument, its value and the requirement."""

from __future__ import annotations

import pytest
import torch
from helpers.rope_definition import random_tables

from ropewalk import QKNorm, apply_rope
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.norm import reference
from ropewalk.testing import unchanged

D, HQ, HK = 16, 4, 2


def call(norm, *, k=True, **keywords):
    q = torch.randn(2, 3, HQ, D)
    with unchanged([q]):
        return apply_rope(q, torch.randn(2, 3, HK, D) if k else None, *random_tables(8, D // 2), norm=norm, **keywords)


ONES = torch.ones(D)
REFUSED = {
    "a bias of another shape": (
        QKNorm(),
        {"q_bias": ONES},
        ValueError,
        r"q_bias has shape \(16,\), but must be \(heads, D\) or \(heads \* D,\), \(4, 16\) or \(64,\)",
    ),
    "k's bias": (QKNorm(), {"k_bias": torch.ones(HQ, D)}, ValueError, r"k_bias has shape \(4, 16\)"),
    "a bias of ints": (QKNorm(), {"k_bias": torch.ones(HK, D).int()}, TypeError, "k_bias has dtype torch.int32"),
    "a bias that is a list": (QKNorm(), {"q_bias": [0.0]}, TypeError, "q_bias is list, but must be a tensor or None"),
    "a bias elsewhere": (
        QKNorm(),
        {"q_bias": torch.ones(HQ, D, device="meta")},
        ValueError,
        "q_bias.device is meta, but must be q.device, cpu",
    ),
    "q_bias without a norm": (None, {"q_bias": torch.ones(HQ, D)}, ValueError, "q_bias was given without norm"),
    "k_bias without a norm": (None, {"k_bias": torch.ones(HK, D)}, ValueError, "k_bias was given without norm"),
    "no norm": (1e-6, {}, TypeError, "norm is float, but must be a ropewalk.QKNorm"),
    "list": (QKNorm([1.0] * D), {}, TypeError, "norm.q_weight is list, but must be a tensor or None"),
    "ints": (QKNorm(None, ONES.int()), {}, TypeError, "norm.k_weight has dtype torch.int32"),
    "sparse": (QKNorm(ONES.to_sparse()), {}, TypeError, "norm.q_weight is a tensor of layout torch.sparse_coo"),
    "device": (QKNorm(ONES.to("meta")), {}, ValueError, "norm.q_weight.device is meta, but must be q.device, cpu"),
    "shape": (QKNorm(torch.ones(8)), {}, ValueError, r"norm.q_weight has shape \(8,\), but must be \(D,\) or"),
    "k's heads": (QKNorm(None, torch.ones(HQ, D)), {}, ValueError, r"norm.k_weight has shape \(4, 16\)"),
    "flat": (QKNorm(torch.ones(HQ * D)), {}, ValueError, r"norm.q_weight has shape \(64,\), but must be \(D,\) or"),
    "across, one head": (
        QKNorm(ONES, across_heads=True),
        {},
        ValueError,
        r"norm.q_weight has shape \(16,\), but with across_heads it must be \(heads \* D,\), \(64,\)",
    ),
    "eps < 0": (QKNorm(eps=-1e-6), {}, ValueError, "norm.eps is -1e-06, but must be at least 0"),
    "eps inf": (QKNorm(eps=float("inf")), {}, ValueError, "norm.eps is inf, but must be finite"),
    "eps a tensor": (QKNorm(eps=torch.tensor(1e-6)), {}, TypeError, "norm.eps is tensor"),
    "eps a bool": (QKNorm(eps=True), {}, TypeError, "norm.eps is True, but must be a float"),
    "offset nan": (QKNorm(ONES, ONES, offset=float("nan")), {}, ValueError, "norm.offset is nan, but must be finite"),
    "offset alone": (QKNorm(offset=1.0), {}, ValueError, "norm.offset is 1.0, but must be 0.0 where norm.q_weight is"),
    "offset, k": (QKNorm(ONES, offset=1.0), {}, ValueError, "norm.offset is 1.0, but must be 0.0 where norm.k_weight"),
    "after": (QKNorm(after=1), {}, TypeError, "norm.after is 1, but must be a bool"),
    "across": (QKNorm(across_heads="yes"), {}, TypeError, "norm.across_heads is 'yes', but must be a bool"),
    "inverse": (QKNorm(), {"inverse": True}, ValueError, "inverse is True, but must be False with a norm"),
    "inplace": (QKNorm(), {"inplace": True}, ValueError, "inplace is True, but must be False with a norm"),
    "axes without positions": (
        QKNorm(),
        {"axes": torch.zeros(D // 2, dtype=torch.int64)},
        ValueError,
        "axes was given, so positions must be a tensor",
    ),
    "an axis that positions lack": (
        QKNorm(),
        {"axes": torch.full((D // 2,), 3), "positions": torch.zeros(3, 2, 3, dtype=torch.int64)},
        ValueError,
        "axes is 3 for pair 0, but must be from 0 to 2",
    ),
    "pair_block": (QKNorm(), {"pair_block": 6}, ValueError, "pair_block is 6, but must divide the number of rotated"),
    "native": (QKNorm(), {"impl": "native"}, ValueError, "impl is 'native', but it cannot run this call: a norm is"),
    "offset of positions": (QKNorm(), {"positions": 6}, ValueError, "positions start at 6 for 3 tokens"),
    "rotary dim": (QKNorm(), {"rotary_dim": 8}, ValueError, "rotary_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    norm, keywords, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(norm, **keywords)


def test_a_refusal_holds_after_a_call_of_the_same_shapes():
    call(QKNorm(ONES, ONES))
    with pytest.raises(ValueError, match=r"norm\.eps is -1"):
        call(QKNorm(ONES, ONES, eps=-1.0))
    call(QKNorm(), positions=5)
    with pytest.raises(ValueError, match="positions start at 6"):
        call(QKNorm(), positions=6)


def test_fields_of_k_are_not_read_without_k():
    call(QKNorm(ONES, torch.ones(3), offset=1.0), k=False)
    call(QKNorm(ONES, None, offset=1.0), k=False)


def test_tables_that_require_grad_are_refused():
    q = torch.randn(2, 3, HQ, D)
    cos, sin = random_tables(8, D // 2)
    with pytest.raises(ValueError, match="cos or sin requires grad"):
        apply_rope(q, None, cos.requires_grad_(), sin, norm=QKNorm())


def test_the_native_backend_is_passed_over():
    device = torch.device("cpu")
    assert backends.why_not("native", device, has_norm=True) == "a norm is not supported"
    assert backends.choose_norm(None, device) is reference
