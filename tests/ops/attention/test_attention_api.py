"""What `attention` promises, whoever serves it: results, layouts, errors, and who is chosen."""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from attention_calls import (
    HAS_KERNELS,
    ROUNDINGS,
    SCHEMES,
    TK,
    TQ,
    B,
    D,
    H,
    K,
    assert_correct,
    draw,
    needs_kernels,
    plainly,
    value_and_grads,
)
from torch import nn

from ropewalk import Alibi, ExpoSB, NoPosition, PositionScheme, Rope, attention, explain_choice
from ropewalk.ops.attention import choice
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

IMPLS = ["triton", "flash", "sdpa", "reference", None]


@pytest.fixture(params=IMPLS, ids=str)
def impl(request, device):
    """An implementation that this run has."""
    reason = None if request.param is None else choice.why_missing(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def serves(impl, *tensors, **call):
    """Whether an implementation serves a call; None always does."""
    if impl in (None, "reference"):
        return True
    return explain_choice(*tensors, impl="reference", **call).others[impl] == "'reference' was asked for"


def assert_refused(impl, *tensors, **call):
    """Our own kernels have no excuse; a library that cannot serve a call says so."""
    assert impl in ("flash", "sdpa")
    with pytest.raises(ValueError, match=f"impl is '{impl}', but it cannot serve this call: "):
        attention(*tensors, impl=impl, **call)


def half_or_float(impl, device):
    """A dtype that every implementation takes where it runs."""
    return torch.bfloat16 if device.type == "cuda" and impl != "reference" else torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_implementation_computes_the_same(device, impl, scheme, causal):
    call = {"position": SCHEMES[scheme], "causal": causal}
    tensors = draw(device, half_or_float(impl, device))
    if not serves(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    with unchanged(tensors), poisoned_memory():
        assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


SIZES = [{"queries": 1}, {"queries": 9}, {"keys": 3}, {"heads": 2}, {"key_heads": 1}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scheme", ["none", "rope", "exposb"])
def test_lengths_and_heads_may_differ(device, impl, scheme, sizes):
    tensors, call = draw(device, half_or_float(impl, device), **sizes), {"position": SCHEMES[scheme]}
    if not serves(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


MASKED = {
    "window": lambda device: {"window": 5},
    "causal window": lambda device: {"window": 5, "causal": True},
    "lengths": lambda device: {"key_lengths": torch.tensor([TK, 3], device=device)},
    "mask": lambda device: {"mask": torch.rand(TQ, TK, device=device) > 0.5},
    "positions": lambda device: {"positions_q": torch.arange(TQ, device=device)[None] * 3},
}


@pytest.mark.parametrize("kind", MASKED)
def test_what_some_alone_can_do_they_do(device, impl, kind):
    tensors = draw(device, half_or_float(impl, device))
    call = {"position": Rope(), **MASKED[kind](device)}
    if not serves(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


def test_layouts_differ_in_nothing_but_strides(device, impl):
    tensors = draw(device, half_or_float(impl, device))
    mask = None if impl in ("sdpa", "flash") else torch.rand(B, TQ, TK, device=device) > 0.3
    expected = attention(*tensors, position=Rope(), mask=mask, impl=impl)
    assert expected.shape == (B, TQ, H, D)
    turned = [x.transpose(1, 2) for x in tensors]
    for views in (turned, [x.contiguous() for x in turned]):
        out = attention(*views, position=Rope(), mask=mask, layout="bhtd", impl=impl)
        assert out.shape == (B, H, TQ, D)
        torch.testing.assert_close(out.transpose(1, 2), expected)


def test_slices_of_one_projection(device, impl):
    fused = torch.randn(B, TQ, H + 2 * K, D, device=device).to(half_or_float(impl, device))
    q, k, v = fused.split([H, K, K], dim=2)
    with unchanged([fused]):
        out = attention(q, k, v, position=Rope(), causal=True, impl=impl)
    dense = attention(*(x.contiguous() for x in (q, k, v)), position=Rope(), causal=True, impl=impl)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("sizes", [{"queries": 0}, {"keys": 0}, {"queries": 0, "keys": 0}, {"batch": 0}], ids=str)
def test_nothing_to_attend_or_to_attend_from(device, sizes):
    for name in ("triton", "reference") if HAS_KERNELS else ("reference",):
        tensors = [x.requires_grad_() for x in draw(device, **sizes)]
        out = attention(*tensors, position=Rope(), causal=True, impl=name)
        assert out.shape == tensors[0].shape
        assert not out.any()
        for grad in torch.autograd.grad(out.sum(), tensors):
            assert not grad.any()


# The log-sum-exp


@pytest.mark.parametrize("name", [pytest.param("triton", marks=needs_kernels), "reference"])
def test_the_log_sum_exp_is_natural_and_differentiable(device, name):
    tensors = draw(device)
    call = {"position": Rope(), "window": 7}
    weights = torch.randn(B, H, TQ, device=device, dtype=torch.float64)

    def function(*leaves, attend, **keywords):
        out, lse = attend(*leaves, return_lse=True, **keywords)
        assert lse.shape == (B, H, TQ)
        assert lse.dtype == (torch.float64 if leaves[0].dtype == torch.float64 else torch.float32)
        return torch.cat([out.transpose(1, 2), lse[..., None]], dim=-1)

    weights = torch.randn(B, H, TQ, D + 1, device=device, dtype=torch.float64)
    actual = value_and_grads(function, tensors, weights, attend=attention, impl=name, **call)
    doubles = [x.double() for x in tensors]
    truth = value_and_grads(function, doubles, weights, attend=plainly(torch.float64), **call)
    baseline = value_and_grads(function, tensors, weights, attend=plainly(torch.float32), **call)
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert_close_to_truth(mine, exact, plain, ROUNDINGS)


@pytest.mark.parametrize("name", [pytest.param("triton", marks=needs_kernels), "reference"])
def test_the_log_sum_exp_may_be_all_that_is_used(device, name):
    tensors = [x.requires_grad_() for x in draw(device)]
    _, lse = attention(*tensors, return_lse=True, impl=name)
    grad_q, grad_k, grad_v = torch.autograd.grad(lse.sum(), tensors, materialize_grads=True)
    assert grad_q.any()
    assert grad_k.any()
    assert not grad_v.any()


@pytest.mark.parametrize("name", [pytest.param("triton", marks=needs_kernels), "reference", None])
def test_rows_that_attend_nothing(device, name):
    tensors = [x.requires_grad_() for x in draw(device)]
    mask = torch.rand(B, H, TQ, TK, device=device) > 0.5
    mask[0, 1, 3], mask[1] = False, False
    empty = ~mask.any(-1)
    out, lse = attention(*tensors, mask=mask, return_lse=True, impl=name)
    assert torch.equal(lse == -math.inf, empty)
    assert not out.transpose(1, 2)[empty].any()
    total = (out * torch.randn_like(out)).sum() + lse[~empty].sum()
    grads = torch.autograd.grad(total, tensors)
    assert all(bool(x.isfinite().all()) for x in grads)
    assert not grads[0].transpose(1, 2)[empty].any()
    assert not any(bool(x[1].any()) for x in grads)


# Autocast, modes and transforms


def test_autocast_casts_as_for_pytorchs_own(device, impl):
    dtype = torch.bfloat16
    if impl == "triton" and device.type == "cpu":
        dtype = torch.float16  # the interpreter does not round to bfloat16
    tensors = [x.requires_grad_() for x in draw(device)]
    call = {"position": Rope(), "causal": True, "impl": impl}
    with torch.autocast(device.type, dtype):
        out = attention(*tensors, **call)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(grad.dtype == torch.float32 for grad in grads)
    torch.testing.assert_close(out, attention(*(x.to(dtype) for x in tensors), **call))


def test_autocast_leaves_float64_alone_and_the_reference_in_float32(device):
    with torch.autocast(device.type, torch.bfloat16):
        assert attention(*draw(device, torch.float64)).dtype == torch.float64
        tensors = draw(device, torch.bfloat16)
        out, lse = attention(*tensors, impl="reference", return_lse=True)
    expected = attention(*tensors, impl="reference", return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_transforms_are_served_by_the_reference(device):
    q, k, v = draw(device)
    expected = attention(q, k, v, position=Rope(), impl="reference")
    mapped = torch.vmap(lambda q, k, v: attention(q[None], k[None], v[None], position=Rope())[0])(q, k, v)
    torch.testing.assert_close(mapped, expected)
    grad = torch.func.grad(lambda q: attention(q, k, v, position=Rope()).sin().sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(attention(leaf, k, v, position=Rope()).sin().sum(), leaf)[0])
    _, tangent = torch.func.jvp(lambda v: attention(q, k, v, position=Rope()), (v,), (torch.ones_like(v),))
    torch.testing.assert_close(tangent, torch.ones_like(expected))
    for name in ("triton", "sdpa"):
        with pytest.raises(ValueError, match=r"under torch\.func transforms .* only the reference serves|needs a GPU"):
            torch.func.grad(lambda q, name=name: attention(q, k, v, impl=name).sum())(q)


def test_the_reference_is_differentiable_twice(device):
    tensors = [x.requires_grad_() for x in draw(device, torch.float64, batch=1, queries=3, keys=3, heads=2, head_dim=4)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention(q, k, v, position=Rope(), causal=True, impl="reference"), tensors
    )


@needs_kernels
def test_the_kernels_are_differentiable_once(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    out = attention(*tensors, impl="triton")
    grads = torch.autograd.grad(out.sin().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiat"):
        torch.autograd.grad(sum(grad.sum() for grad in grads), tensors)


def test_inference_mode_leaves_training_alone(device, impl):
    """What is remembered of a call in inference mode serves one that is differentiated."""
    tensors = [x.to(half_or_float(impl, device)) for x in draw(device)]
    position = Rope(base=777.0)
    with torch.inference_mode():
        expected = attention(*tensors, position=position, impl=impl)
    leaves = [x.requires_grad_() for x in tensors]
    out = attention(*leaves, position=position, impl=impl)
    torch.testing.assert_close(out, expected.clone())
    torch.autograd.grad(out.sum(), leaves)


# Errors


UNSERVED = {
    "cu_seqlens_q": torch.tensor([0, TQ]),
    "cu_seqlens_k": torch.tensor([0, TK]),
    "key_starts": torch.zeros(B, dtype=torch.long),
    "query_starts": torch.zeros(B, dtype=torch.long),
    "block_table": torch.zeros(B, 1, dtype=torch.int32),
    "dropout_p": 0.1,
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_yet_is_refused(device, name):
    with pytest.raises(NotImplementedError, match=f"^{name} is not served yet"):
        attention(*draw(device), **{name: UNSERVED[name]})
    with pytest.raises(NotImplementedError, match=f"^{name} is not served yet"):
        explain_choice(*draw(device), **{name: UNSERVED[name]})


def test_packed_sequences_are_not_served_yet(device):
    with pytest.raises(NotImplementedError, match="layout 'thd' is not served yet"):
        attention(*(x[0] for x in draw(device)), layout="thd")


@pytest.mark.parametrize("position", [None, "rope", 3, Rope, torch.ones(3)], ids=str)
def test_a_position_that_is_no_scheme_is_refused(device, position):
    with pytest.raises(TypeError, match=r"position is .*, but must be a scheme of ropewalk\.positions"):
        attention(*draw(device), position=position)


def test_bad_arguments_are_refused_by_name(device):
    q, k, v = draw(device)
    with pytest.raises(ValueError, match="impl is 'cudnn', but must be None or one of 'triton', 'flash', 'sdpa'"):
        attention(q, k, v, impl="cudnn")
    with pytest.raises(ValueError, match="layout is 'hbtd'"):
        attention(q, k, v, layout="hbtd")
    with pytest.raises(TypeError, match="deterministic is 1, but must be None, True or False"):
        attention(q, k, v, deterministic=1)
    with pytest.raises(TypeError, match="q is list"):
        attention([1.0], k, v)
    with pytest.raises(ValueError, match="q has 4 heads, but they must be a multiple of k's 3"):
        attention(q, *draw(device, key_heads=3)[1:])
    with pytest.raises(TypeError, match="windows"):
        explain_choice(q, k, v, windows=3)


REFUSED = {
    "sdpa": [
        ({"position": Alibi()}, "Alibi changes scores"),
        ({"position": ExpoSB(distance_decay=True)}, "ExpoSB changes scores"),
        ({"window": 3}, "it knows no window"),
        ({"key_lengths": torch.tensor([1, 2])}, "it takes no key_lengths"),
        ({"mask": torch.ones(TQ, TK, dtype=torch.bool)}, "it takes no mask"),
        ({"return_lse": True}, "log-sum-exp is not differentiated"),
        ({"scale": -1.0}, "the scale is -1.0"),
    ],
    "triton": [({}, "take float16, bfloat16 and float32, not float64")],
}


@pytest.mark.parametrize(("name", "call", "reason"), [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_an_implementation_that_cannot_serve_says_why(device, name, call, reason):
    tensors = draw(device, torch.float64 if name == "triton" else torch.float16)
    call = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    with pytest.raises(ValueError, match=f"impl is '{name}', but it cannot serve this call: .*{reason}"):
        attention(*tensors, impl=name, **call)
    assert reason in explain_choice(*tensors, **call).others[name]


def test_causal_attention_of_other_lengths_is_not_pytorchs(device):
    with pytest.raises(ValueError, match="aligns causal attention at the top left"):
        attention(*draw(device, torch.float16, queries=3), causal=True, impl="sdpa")


@pytest.mark.skipif(HAS_KERNELS, reason="there are kernels")
def test_triton_needs_a_gpu(device):
    with pytest.raises(ValueError, match="Triton kernels need a GPU, and the tensors are on cpu"):
        attention(*draw(device), impl="triton")


# Schemes of one's own


@dataclass(frozen=True, eq=False)
class Fading(PositionScheme):
    """A scheme with a reference form alone."""

    def change_scores(self, scores, distance):
        return scores - 0.1 * distance.abs()


def test_a_scheme_without_score_functions_is_the_references(device):
    tensors = draw(device)
    assert explain_choice(*tensors, position=Fading()).name == "reference"
    for name in ("triton", "sdpa"):
        with pytest.raises(ValueError, match="Fading changes scores"):
            attention(*tensors, position=Fading(), impl=name)
    slopes = torch.full((H,), 0.1, device=device)
    torch.testing.assert_close(
        attention(*tensors, position=Fading()), attention(*tensors, position=Alibi(slopes), impl="reference")
    )


def test_what_a_scheme_has_to_learn_is_learned(device):
    tensors = draw(device)
    slopes = nn.Parameter(torch.rand(H, device=device))
    scheme = Alibi(slopes)
    assert explain_choice(*tensors, position=scheme).name == "reference"
    (grad,) = torch.autograd.grad(attention(*tensors, position=scheme).sin().sum(), slopes)
    assert grad.any()
    with pytest.raises(ValueError, match="tables or parameters are to be learned"):
        attention(*tensors, position=scheme, impl="triton")
    if HAS_KERNELS:
        with torch.no_grad():
            out = attention(*tensors, position=scheme, impl="triton")
        torch.testing.assert_close(out, attention(*tensors, position=scheme))


# Who is chosen


def test_a_choice_is_explained(device):
    tensors = draw(device, torch.bfloat16)
    explained = explain_choice(*tensors, position=Rope(), causal=True)
    assert explained.name in choice.IMPLEMENTATIONS
    assert {explained.name, *explained.others} == set(choice.IMPLEMENTATIONS)
    text = str(explained)
    assert text.startswith(f"{explained.name} serves\n")
    assert all(f"not {name}: {reason}" in text for name, reason in explained.others.items())
    forced = explain_choice(*tensors, impl="reference")
    assert forced.name == "reference"
    with pytest.raises(ValueError, match="impl is 'sdpa', but"):
        explain_choice(*tensors, window=3, impl="sdpa")


def test_explaining_computes_nothing(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    with unchanged([x.detach() for x in tensors]):
        explain_choice(*tensors, position=Rope(), return_lse=True, layout="bthd")


def imagined(monkeypatch, capability=(9, 0), queries=4096, keys=4096, hip=None, device="cuda"):
    """A request from a GPU that this machine may lack."""
    monkeypatch.setattr(choice, "capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    q = SimpleNamespace(device=torch.device(device), shape=(1, 8, queries, 128))
    return SimpleNamespace(q=q, k=SimpleNamespace(shape=(1, 8, keys, 128)), backward=True)


def test_orders_name_every_implementation_that_a_device_may_have(monkeypatch):
    for rows in choice.MEASURED.values():
        assert rows[-1] == choice.Row(rows[-1].order)  # it fits every call
        for row in rows:
            assert set(row.order) == set(choice.IMPLEMENTATIONS)
            assert row.order[-1] == "reference"
    for capability in ((8, 0), (9, 0), (12, 0)):
        for tokens in (1, 512, 4096):
            order = choice.preference(imagined(monkeypatch, capability, queries=tokens))
            assert set(order) == set(choice.IMPLEMENTATIONS)
    assert choice.preference(imagined(monkeypatch, (8, 6))) == choice.FLASH_FIRST
    assert choice.preference(imagined(monkeypatch, hip="7.0")) == choice.FLASH_FIRST
    assert choice.preference(imagined(monkeypatch, device="cpu")) == ("sdpa", "reference")


def test_rows_of_the_table_fit_what_they_say(monkeypatch):
    request = imagined(monkeypatch, queries=100, keys=4096)
    order = ("reference",)
    assert choice.Row(order).fits(request)
    assert choice.Row(order, tokens=100, backward=True).fits(request)
    assert not choice.Row(order, tokens=101).fits(request)
    request.backward = False
    assert choice.Row(order, tokens=100).fits(request)
    assert not choice.Row(order, backward=True).fits(request)


def test_determinism_excludes_what_is_not(device):
    tensors = [x.requires_grad_() for x in draw(device, torch.bfloat16, queries=64, keys=64)]
    if device.type == "cuda":
        reason = "its backward is not deterministic"
        assert explain_choice(*tensors, deterministic=True).others["sdpa"] == reason
        with torch.no_grad():
            assert explain_choice(*tensors, deterministic=True).others.get("sdpa") != reason
        torch.use_deterministic_algorithms(True)
        try:
            assert explain_choice(*tensors).others["sdpa"] == reason
            assert explain_choice(*tensors, deterministic=False).others.get("sdpa") != reason
        finally:
            torch.use_deterministic_algorithms(False)
    out, again = (attention(*tensors, position=Rope(), deterministic=True) for _ in range(2))
    assert torch.equal(out, again)
    grads, more = (torch.autograd.grad(x.sin().sum(), tensors) for x in (out, again))
    assert all(torch.equal(a, b) for a, b in zip(grads, more, strict=True))


def test_schemes_can_be_copied(device):
    tensors = draw(device)
    for scheme in (NoPosition(), *SCHEMES.values(), Rope(inv_freq=torch.rand(4, device=device))):
        twin = copy.deepcopy(scheme)
        assert torch.equal(attention(*tensors, position=twin), attention(*tensors, position=scheme))
