"""docs/support.md says what is so: it is what its generator writes, and the implementations do what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import support
import torch
from helpers.modes import INTERPRETED, needs_kernels

from ropewalk import apply_rope, attention, inverse_frequencies, rope_table
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import BACKENDS
from ropewalk.ops.attention.call import AttentionCall

pytest.importorskip("triton")


CASES = {case.name: case for cases in support.SECTIONS.values() for case in cases}


def test_it_is_current():
    current = support.PAGE.read_text(encoding="utf-8")
    assert support.render() == current, "python tools/support.py writes it anew"


def test_what_was_imagined_is_gone():
    before = [getattr(place, name) for place, name in PATCHED]
    with support.imagined_gpu():
        assert all(getattr(place, name) is not old for (place, name), old in zip(PATCHED, before, strict=True))
    assert [getattr(place, name) for place, name in PATCHED] == before


PATCHED = [(gpu, "capability"), (support.flash, "flash_version"), (gpu, "is_fake")]


def test_names_are_used_once():
    assert len(CASES) == sum(len(cases) for cases in support.SECTIONS.values()) > 30


def test_each_field_of_a_call_has_a_row():
    assert support.fields_without_a_row() == []
    assert support.fields_without_a_row((*AttentionCall._fields, "logit_bias")) == ["logit_bias"]


def test_a_field_without_a_row_is_an_error(monkeypatch):
    rest = [case for case in support.SECTIONS["Everything else"] if "softcap" not in case.name]
    monkeypatch.setitem(support.SECTIONS, "Everything else", rest)
    with pytest.raises(SystemExit, match="no row of SECTIONS sets softcap of AttentionCall"):
        support.render()


@pytest.mark.parametrize("name", [name for name in CASES if "your own" in name])
def test_what_is_your_own_is_not_the_librarys(device, name):
    given = CASES[name].given(device)
    if "position" in given:
        assert not type(given["position"]).__module__.startswith("ropewalk")
    with torch.no_grad():
        call = make_call(*CASES[name].tensors(device), **given)
    assert call.score_mod is None or not call.score_mod.startswith("ropewalk")


def learned_by(keywords):
    """The tensors of a call, beside q, k and v, that are to be learned."""
    values = [*vars(keywords.get("position", object)).values(), keywords.get("sinks")]
    return [x for x in values if isinstance(x, torch.Tensor) and x.requires_grad]


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=needs_kernels), "reference"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_so(device, name, impl):
    case = CASES[name]
    if impl == "triton" and INTERPRETED and case.dtype == torch.bfloat16:
        case = replace(case, dtype=torch.float16)  # the interpreter's products of bfloat16 are wrong
    for training in (False, True):
        keywords = case.given(device)
        tensors = case.tensors(device, learned=training)
        with torch.set_grad_enabled(training):
            if support.why_not(case, impl, training=training) is not None:
                with pytest.raises(ValueError, match=r"cannot run this call|no backward"):
                    attention(*tensors, impl=impl, **keywords)
                continue
            out = attention(*tensors, impl=impl, **keywords)
            if not training:
                continue
            out = out[0] if isinstance(out, tuple) else out
            leaves = [*tensors, *learned_by(keywords)]
            grads = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
            assert all(grad is not None and grad.isfinite().all() for grad in grads)
            assert len(leaves) == 3 + ("learned" in name or name == "`sinks`")


def test_a_refusal_is_in_the_table():
    packed = CASES["packed: `cu_seqlens_q`"]
    assert support.why_not(packed, "flash", training=False) == "packed sequences (cu_seqlens_q) are not supported"


@needs_kernels
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the products of bfloat16 are right")
def test_bfloat16_is_refused_in_the_interpreter(device):
    q = torch.randn(1, 16, 2, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"impl is 'triton', .* Triton's interpreter .* of bfloat16 wrongly"):
        attention(q, q, q, impl="triton")
    call = make_call(q, q, q)
    assert BACKENDS["triton"].why_not(call).code == "interpreter_bfloat16"
    assert BACKENDS["triton"].why_not(call._replace(q=q.half(), k=q.half(), v=q.half())) is None
    cos, sin = rope_table(16, inverse_frequencies("default", 32, 10000.0)[0])
    assert apply_rope(q, None, cos, sin, impl="triton").dtype == torch.bfloat16  # it has no products
