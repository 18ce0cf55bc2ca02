"""docs/support.md says what is so: it is what its generator writes, and the implementations do what it says."""

from __future__ import annotations

from datetime import date

import pytest
import support
import torch
from helpers.modes import INTERPRETED, needs_kernels
from products import calls
from products.cover import refusal
from products.imagined import imagined_gpu
from products.table import FEATURES, Feature

from ropewalk import Alibi, Rope, apply_rope, attention, inverse_frequencies, rope_table
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import BACKENDS
from ropewalk.ops.attention.libraries import flash

pytest.importorskip("triton")


COMBINATIONS = {case.label: case for cases in support.COMBINATIONS.values() for case in cases}
CASES = {case.label: case for cases in support.cases().values() for case in cases}
PARTS = 8  # of the pairs, one of which is found anew on a day


def test_it_is_current():
    current = support.PAGE.read_text(encoding="utf-8")
    assert support.render(support.read_refused()) == current, "python tools/support.py writes it anew"


def test_what_was_imagined_is_gone():
    before = [getattr(place, name) for place, name in PATCHED]
    with imagined_gpu():
        assert all(getattr(place, name) is not old for (place, name), old in zip(PATCHED, before, strict=True))
    assert [getattr(place, name) for place, name in PATCHED] == before


PATCHED = [(gpu, "capability"), (flash, "flash_version"), (gpu, "is_fake")]


def test_each_backend_has_a_column():
    assert set(support.COLUMNS) == set(BACKENDS)


def test_labels_are_used_once():
    assert len(CASES) == sum(len(cases) for cases in support.cases().values())
    assert {(name, value) for name, feature in FEATURES.items() for value in feature.values} >= support.LABELS.keys()


def test_a_value_without_a_label_is_an_error(monkeypatch):
    monkeypatch.setitem(FEATURES, "softcap", FEATURES["softcap"]._replace(values=("none", "given", "huge")))
    with pytest.raises(SystemExit, match="no label for it"):
        support.render([])


def test_a_feature_without_a_section_is_an_error(monkeypatch):
    monkeypatch.setitem(FEATURES, "logit bias", Feature(("logit_bias",), ("none", "given")))
    with pytest.raises(SystemExit, match="logit bias is in 0 of SECTIONS"):
        support.render([])


def check_pairs(pairs):
    """Compare what is refused of some pairs with what the file keeps."""
    kept = [refused for refused in support.read_refused() if refused.pair in set(pairs)]
    assert set(support.refused_of(pairs)) == set(kept), "python tools/support.py writes it anew"


def test_pairs_are_current():
    some = {(impl, reason): pair for impl, pair, reason in support.read_refused()}
    check_pairs([*some.values(), *support.pairs()[::400]])


@pytest.mark.slow
def test_a_part_of_all_pairs_is_current():
    check_pairs(support.pairs()[date.today().toordinal() % PARTS :: PARTS])


def own_scheme(case, device):
    """The scheme of a row."""
    call = calls.build(case.row(), 0, device, calls.CPU)
    return case.position or call.keywords(call.leaves)["position"]


@pytest.mark.parametrize("label", [label for label in CASES if "your own:" in label])
def test_what_is_your_own_is_not_the_librarys(device, label):
    scheme = own_scheme(CASES[label], device)
    assert not type(scheme).__module__.startswith("ropewalk")
    if "subclass" in label:
        assert isinstance(scheme, (Rope, Alibi))
    else:
        assert not (scheme.kernel_score_mod() or "").startswith("ropewalk")


@pytest.mark.parametrize("impl", [pytest.param("triton", marks=needs_kernels), "reference"])
@pytest.mark.parametrize("label", COMBINATIONS)
def test_it_is_so(device, label, impl):
    case = COMBINATIONS[label]
    for training in (False, True):
        row = {**case.row(), "gradients": "all" if training else "none"}
        refused = refusal(row, impl, calls.CPU, case.position) is not None
        if impl == "triton" and INTERPRETED and row["dtype"] == "bfloat16":
            row["dtype"] = "float16"  # the interpreter's products of bfloat16 are wrong
        call = calls.build(row, 0, device, calls.CPU)
        leaves = {name: x.requires_grad_(name in call.learned) for name, x in call.leaves.items()}
        given = call.keywords(leaves)
        if case.position is not None:
            given["position"] = case.position
        with torch.set_grad_enabled(training):
            if refused:
                with pytest.raises(ValueError, match=r"cannot run this call|no backward"):
                    attention(**given, impl=impl)
                continue
            out = attention(**given, impl=impl)
            if not training:
                continue
            learned = [leaves[name] for name in call.learned]
            learned += [x for x in vars(case.position or object).values() if getattr(x, "requires_grad", False)]
            assert len(learned) == 3 + ("learned" in label)
            grads = torch.autograd.grad(out.float().square().sum(), learned)
            assert all(grad.isfinite().all() for grad in grads)


def test_a_refusal_is_in_the_table():
    packed = CASES["packed: `cu_seqlens_q`"]
    assert support.why_not(packed, training=False)["flash"] == "packed sequences (cu_seqlens_q) are not supported"


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
